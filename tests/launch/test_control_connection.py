"""The connection between agents and the coordinator: authentication, silence, hung agents, many agents."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outlast import clock
from outlast.config.sources import LayeredSettings
from outlast.errors import ExitReason, RendezvousError
from outlast.launch import control
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity, Occupant, WrongRun, ask, join_handshake, probe
from outlast.launch.control_link import ControlLink, LinkDown, LinkEvent, LinkFailed, LinkUp
from outlast.launch.job_settings import JobSettings
from outlast.runtime.addresses import Endpoint
from outlast.runtime.run_key import KeySource, RunKey
from outlast.runtime.wire import MessageChannel
from outlast.testing.ranks import free_port
from outlast.version import __version__

LIMIT_S = 120.0
KEY = RunKey(hashlib.sha256(b"the run's secret").digest(), KeySource.FILE)
IDENTITY = JobIdentity(run_id="run", key=KEY, command="aa", command_text="train.py --lr 1")


class LinkedAgent:
    """An agent's link and the events that it delivered."""

    def __init__(self, node: str, *ports: int, identity: JobIdentity = IDENTITY, **job: Any) -> None:
        self.events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        settings_of_job = {"num_slots": 1, "node_timeout_s": 60.0, "join_timeout_s": LIMIT_S, **job}
        self.link = ControlLink(
            [Endpoint("127.0.0.1", port) for port in ports],
            JobSettings(job="job", heartbeat_interval_s=0.05, host=node, **settings_of_job),
            identity,
            deliver=self.events.put,
            layers=LayeredSettings(),
            has_loop=False,
        )

    def start(self) -> LinkedAgent:
        self.link.start()
        self.wait_for(LinkUp)
        return self

    def join(self, wish: int = 0) -> None:
        self.link.send(m.JoinRequest(addr="127.0.0.1", nproc=1, wish=wish))

    def wait_for(self, kind: type[Any]) -> Any:
        end_s = clock.now_s() + LIMIT_S
        while True:
            events = self.events.get(timeout=max(0.1, end_s - clock.now_s()))
            if isinstance(events, kind):
                return events


@pytest.fixture
def make() -> Iterator[Callable[..., LinkedAgent]]:
    with contextlib.ExitStack() as stack:

        def make_one(node: str, *ports: int, **options: Any) -> LinkedAgent:
            agent = LinkedAgent(node, *ports, **options)
            stack.callback(agent.link.close, goodbye_timeout_s=0.0)
            return agent

        yield make_one


def train(agent: LinkedAgent) -> m.Start:
    agent.join()
    prepare = agent.wait_for(m.Prepare)
    agent.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
    start: m.Start = agent.wait_for(m.Start)
    agent.link.send(m.Running(cycle=start.cycle))
    assert agent.wait_for(m.Ran).cycle == start.cycle
    return start


def finish(agent: LinkedAgent, start: m.Start) -> None:
    agent.link.send(m.Finished(facts=m.CycleFacts(cycle=start.cycle)))
    assert agent.wait_for(m.Stop).exit_code == ExitReason.FINISHED


def test_one_agent_hosts_and_trains(make: Callable[..., LinkedAgent]) -> None:
    """The first agent hosts the coordinator, joins it like any other agent, trains and finishes."""
    agent = make("a", free_port()).start()
    finish(agent, train(agent))


def test_a_closed_connection_is_a_lost_node(make: Callable[..., LinkedAgent]) -> None:
    """When an agent's connection ends and is not restored, its node is lost long before heartbeats are missed."""
    port = free_port()
    host = make("a", port, num_slots=2).start()
    with connect(port) as channel:
        hello(channel, node="b")
        channel.send(m.JoinRequest(addr="b", nproc=1, wish=1))
        host.join()
        prepare = host.wait_for(m.Prepare)
        host.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
        assert host.wait_for(m.Start).num_nodes == 2
    over = host.wait_for(m.CycleOver)
    assert "node b is lost" in over.reason


def test_losses_before_the_workers_start_cost_no_restart(make: Callable[..., LinkedAgent]) -> None:
    """An agent that dies three times after it was placed and before its workers start costs no restart of the job."""
    port = free_port()
    host = make("a", port, num_slots=2).start()
    for life in range(3):
        host.join()
        with connect(port) as channel:
            hello(channel, node="b", epoch=str(life))
            channel.send(m.JoinRequest(addr="b", nproc=1, wish=1))
            prepare = host.wait_for(m.Prepare)
            host.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
            host.wait_for(m.Start)
        assert "node b is lost" in host.wait_for(m.CycleOver).reason
    host.join()
    assert host.wait_for(m.NodesMissing)
    status = ask(Endpoint("127.0.0.1", port), m.AskStatus(), run_id="run", key=KEY, timeout_s=LIMIT_S)
    assert isinstance(status, m.LiveStatus)
    assert (status.cycle, status.budgets.restarts_without_progress) == (3, 0)


def test_a_free_port_shows_a_dead_host(make: Callable[..., LinkedAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is just ending may still accept a connection and reset it; another agent on its machine that can
    listen on its port shows that it has ended."""
    port = free_port()
    host, next_host = make("a", port).start(), make("b", port).start()
    assert host.link.server is not None
    join, is_reset = next_host.link.join_at, threading.Event()

    def join_late(endpoint: Endpoint, answer_s: float) -> Any:
        if not is_reset.is_set():
            is_reset.set()
            raise ConnectionResetError
        return join(endpoint, answer_s)

    monkeypatch.setattr(next_host.link, "join_at", join_late)
    host.link.close(goodbye_timeout_s=0.0)
    assert next_host.wait_for(LinkUp).is_host
    assert next_host.link.server is not None
    assert (next_host.link.server.settings.former_host, next_host.link.server.settings.host_is_dead) == ("a", True)


def test_a_broken_connection_is_restored(make: Callable[..., LinkedAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose connection breaks connects again, and its node is not lost."""
    monkeypatch.setattr("outlast.launch.coordinator_server.PATIENCE_S", LIMIT_S)
    port = free_port()
    make("a", port, num_slots=2).start()
    with connect(port) as channel:
        hello(channel, node="b")
        channel.send(m.JoinRequest(addr="b", nproc=1, wish=1))
    with connect(port) as channel:
        assert isinstance(hello(channel, node="b"), m.Welcome)
        channel.send(m.Register(addr="b", nproc=1))
        channel.send(m.AskStatus())  # not a valid message of an agent: ends the connection once all before it was read
        assert drain(channel) == []
    status = ask(Endpoint("127.0.0.1", port), m.AskStatus(), run_id="run", key=KEY, timeout_s=LIMIT_S)
    assert isinstance(status, m.LiveStatus)
    assert [node.name for node in status.nodes] == ["b"]


def test_an_ending_agent_does_not_take_over(make: Callable[..., LinkedAgent]) -> None:
    """When the coordinator ends, an agent that is ending as well does not host another one, which would wait for
    nodes."""
    port = free_port()
    host, ending = make("a", port).start(), make("b", port).start()
    ending.link.stop_taking_over()
    host.link.close(goodbye_timeout_s=0.0)
    ending.wait_for(LinkDown)
    other = make("c", port).start()
    assert other.link.server is not None
    assert ending.link.server is None


def test_a_hung_main_loop_is_a_lost_node(make: Callable[..., LinkedAgent]) -> None:
    """The node of an agent whose heartbeat count does not advance is lost, with the hung main loop as the reason."""
    port = free_port()
    host = make("a", port, num_slots=2, node_timeout_s=2.0, loop_timeout_factor=2).start()
    with connect(port) as channel:
        hello(channel, node="b")
        channel.send(m.JoinRequest(addr="b", nproc=1, wish=1))
        host.join()
        stop = threading.Event()

        def heartbeat() -> None:
            while not stop.wait(0.02):
                try:
                    channel.send(m.AgentHeartbeat(count=7))
                except OSError:
                    return

        beating = threading.Thread(target=heartbeat)
        beating.start()
        try:
            prepare = host.wait_for(m.Prepare)
            host.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
            assert "main loop has not run" in host.wait_for(m.CycleOver).reason
        finally:
            stop.set()
            beating.join(LIMIT_S)


def test_an_agent_leaves_a_silent_coordinator(make: Callable[..., LinkedAgent]) -> None:
    """An agent whose heartbeats get no response reports that to the coordinator, and looks for another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        agent = make("b", port, node_timeout_s=0.3)
        agent.link.start()
        connection, _ = listener.accept()
        with MessageChannel[m.OnControl](connection, m.OnControl) as channel:
            assert channel.authenticate(control.serve_handshake(IDENTITY), within_s=LIMIT_S)
            greeting = channel.receive(within_s=LIMIT_S)
            assert isinstance(greeting, m.Hello)
            assert (greeting.node, greeting.run_id, greeting.command) == ("b", "run", "aa")
            channel.send(m.Welcome(job="job", host="a", leader="x", term=4, version=__version__))
            agent.wait_for(LinkUp)
            assert "did not respond" in agent.wait_for(LinkDown).error
            kinds = {type(message) for message in drain(channel)}
            assert m.Moving in kinds
        reconnection, _ = listener.accept()
        reconnection.close()


def test_a_coordinator_that_yields_is_not_dead(make: Callable[..., LinkedAgent]) -> None:
    """An agent that cannot reach the coordinator that its own one yields to is rejected with the successor's endpoint;
    it hosts a coordinator that does not count the living host as dead."""
    port, own_port, rival = free_port(), free_port(), free_port()
    host = make("a", port, rival, num_slots=2).start()
    agent = make("b", port, own_port, num_slots=2, node_timeout_s=1.0).start()
    with socket.create_server(("127.0.0.1", rival)) as listener:
        # The host looks for other coordinators; one leads.
        connection, _ = listener.accept()
        with MessageChannel[m.OnControl](connection, m.OnControl) as channel:
            assert channel.authenticate(control.serve_handshake(IDENTITY), within_s=LIMIT_S)
            assert isinstance(channel.receive(within_s=LIMIT_S), m.AskLeadership)
            channel.send(m.Leads(job="job", term=9, leads=True, order=1))
            host.wait_for(LinkDown)
        # The other one sends nothing from now on.
        end_s, refused = clock.now_s() + LIMIT_S, None
        while refused is None and clock.now_s() < end_s:  # a connection before the host has yielded is closed
            with contextlib.suppress(OSError), connect(port) as channel:
                refused = hello(channel, node="c")
        assert isinstance(refused, m.Refused)
        assert refused.successor == f"127.0.0.1:{rival}"
        with pytest.raises(RendezvousError, match=f"has yielded to the coordinator at 127.0.0.1:{rival}"):
            ask(Endpoint("127.0.0.1", port), m.AskStatus(), run_id="run", key=KEY, timeout_s=LIMIT_S)
        assert agent.wait_for(LinkUp).is_host
    assert agent.link.server is not None
    assert (agent.link.server.settings.former_host, agent.link.server.settings.host_is_dead) == ("a", False)


# -- authentication -----------------------------------------------------------------------------------------------


def connect(port: int, identity: JobIdentity = IDENTITY) -> MessageChannel[m.OnAgent]:
    """Return an authenticated connection."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    channel: MessageChannel[m.OnAgent] = MessageChannel(connection, m.OnAgent | m.Answer)
    try:
        assert channel.authenticate(join_handshake(identity.run_id, identity.key), within_s=LIMIT_S)
    except BaseException:
        channel.close()
        raise
    return channel


def hello(channel: MessageChannel[m.OnAgent], **fields: Any) -> m.OnAgent | None:
    greeting = {
        **{"run_id": "run", "node": "n", "epoch": "1", "command": "aa", "command_text": "train.py --lr 1"},
        **{"version": __version__, **fields},
    }
    channel.send(m.Hello(**greeting))
    return channel.receive(within_s=LIMIT_S)


def drain(channel: MessageChannel[Any]) -> list[Any]:
    """Return all messages until the connection ends."""
    messages = []
    with contextlib.suppress(ConnectionError):
        while (message := channel.receive(within_s=LIMIT_S)) is not None:
            messages.append(message)
    return messages


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"run_id": "other"}, ["'run'", "'other'", "--rdzv-id"]),
        ({"job": "older"}, ["job job", "job older"]),
        ({"command": "bb", "command_text": "train.py --lr 2"}, ["'train.py --lr 1'", "'train.py --lr 2'"]),
        ({"version": "0.1.7"}, ["the agent has outlast 0.1.7", f"outlast {__version__}", "OUTLAST_ANY_VERSION=1"]),
        ({"version": ""}, ["an earlier version", f"outlast {__version__}"]),
    ],
)
def test_an_agent_of_another_run_is_rejected(
    make: Callable[..., LinkedAgent], fields: dict[str, str], names: list[str]
) -> None:
    """An agent of another run, job or command is rejected with a line that contains the difference."""
    port = free_port()
    make("a", port).start()
    with connect(port) as channel:
        answer = hello(channel, **fields)
    assert isinstance(answer, m.Refused)
    assert all(name in answer.reason for name in names)


def test_another_version_can_be_allowed(make: Callable[..., LinkedAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """With OUTLAST_ANY_VERSION=1 an agent of another version of the package is accepted."""
    monkeypatch.setenv("OUTLAST_ANY_VERSION", "1")
    port = free_port()
    make("a", port).start()
    with connect(port) as channel:
        assert isinstance(hello(channel, version="0.1.7"), m.Welcome)


def test_a_coordinator_of_another_version_is_an_error(make: Callable[..., LinkedAgent]) -> None:
    """An agent exits with 2 if the coordinator reports another version of the package, or none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = make("b", listener.getsockname()[1])
        agent.link.start()
        connection, _ = listener.accept()
        with MessageChannel[m.OnControl](connection, m.OnControl) as channel:
            assert channel.authenticate(control.serve_handshake(IDENTITY), within_s=LIMIT_S)
            assert isinstance(channel.receive(within_s=LIMIT_S), m.Hello)
            channel.send(m.Welcome(job="job", host="a", leader="x", term=4))
            failed = agent.wait_for(LinkFailed)
    assert failed.exit_code == 2
    assert "an earlier version" in failed.error


def test_another_run_at_the_endpoint_is_an_error(make: Callable[..., LinkedAgent]) -> None:
    """An agent that finds another run, key or command at its endpoint exits with 2 at once."""
    port = free_port()
    make("a", port).start()
    others = (
        (JobIdentity(run_id="other", key=RunKey.of_run_id("other")), "run 'run'"),
        (JobIdentity(run_id="run", key=RunKey.of_run_id("run")), "run key"),
        (JobIdentity(run_id="run", key=KEY, command="bb", command_text="other.py"), "'other.py'"),
    )
    for number, (identity, named) in enumerate(others):
        agent = make(f"b{number}", port, identity=identity)
        agent.link.start()
        failed = agent.wait_for(LinkFailed)
        assert failed.exit_code == ExitReason.BAD_INPUT
        assert named in failed.error


def test_an_endpoint_is_probed_before_the_start(make: Callable[..., LinkedAgent]) -> None:
    """A probe distinguishes a free endpoint, a coordinator of this run, another run's coordinator and another
    program."""
    port = free_port()
    endpoint = Endpoint("127.0.0.1", port)
    assert probe(endpoint, "run", KEY)[0] is Occupant.NO_LISTENER
    make("a", port).start()
    assert probe(endpoint, "run", KEY)[0] is Occupant.COORDINATOR
    with pytest.raises(WrongRun, match="belongs to run 'run'"):
        probe(endpoint, "other", KEY)
    with pytest.raises(WrongRun, match="run key is another one"):
        probe(endpoint, "run", RunKey.of_run_id("run"))


def test_a_coordinator_that_dies_during_a_probe_is_gone() -> None:
    """An endpoint that closes one connection and listens no more is free; one that closes every connection is another
    program."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])

        def hang_up(times: int) -> None:
            accepted = [listener.accept()[0]]
            for _ in range(times - 1):
                accepted.pop().close()
                accepted.append(listener.accept()[0])
            listener.close()
            accepted.pop().close()

        dying = threading.Thread(target=hang_up, args=(1,))
        dying.start()
        assert probe(endpoint, "run", KEY)[0] is Occupant.NO_LISTENER
        dying.join()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        foreign = threading.Thread(target=hang_up, args=(3,))
        foreign.start()
        assert probe(endpoint, "run", KEY)[0] is Occupant.FOREIGN
        foreign.join()


@pytest.mark.parametrize(("times", "found"), [(1, Occupant.NO_LISTENER), (3, Occupant.LEAVING)])
def test_a_coordinator_that_ends_in_a_handshake_is_gone(times: int, found: Occupant) -> None:
    """A coordinator that identified itself and then closes the connection does not end an agent that starts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])

        def greet() -> None:
            for number in range(times):
                accepted = listener.accept()[0]
                handshake = control.serve_handshake(JobIdentity(run_id="run", key=KEY))
                accepted.sendall(handshake.outgoing)
                accepted.recv(handshake.num_wanted, socket.MSG_WAITALL)
                if number + 1 == times:
                    listener.close()
                accepted.close()

        ending = threading.Thread(target=greet)
        ending.start()
        assert probe(endpoint, "run", KEY)[0] is found
        ending.join()


def test_unauthenticated_connections_are_rejected(make: Callable[..., LinkedAgent]) -> None:
    """Garbage, a partial greeting, a wrong key and a replayed session are rejected; the run finishes unaffected."""
    port = free_port()
    agent = make("a", port).start()
    start = train(agent)
    recorded = record(port)
    slow = [socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) for _ in range(50)]
    try:
        for number, foreign in enumerate(slow):
            foreign.sendall(b"OLw1\0\1"[: number % 7])
        for data in (b"GET / HTTP/1.0\r\n\r\n" * 20, secrets.token_bytes(4096), b"\0" * 70_000, recorded):
            connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
            with connection as foreign, contextlib.suppress(ConnectionError):
                foreign.sendall(data)
                while foreign.recv(1 << 16):
                    pass
        with pytest.raises(RendezvousError, match="run key is another one"):
            ask(
                Endpoint("127.0.0.1", port), m.AskStatus(), run_id="run", key=RunKey.of_run_id("run"), timeout_s=LIMIT_S
            )
        status = ask(Endpoint("127.0.0.1", port), m.AskStatus(), run_id="run", key=KEY, timeout_s=LIMIT_S)
        assert isinstance(status, m.LiveStatus)
        assert [node.name for node in status.nodes] == ["a"]
        assert status.phase == m.JobPhase.RUNNING
        finish(agent, start)
    finally:
        for foreign in slow:
            foreign.close()


def record(port: int, identity: JobIdentity = IDENTITY) -> bytes:
    """Return the bytes that a member sends to request the end of the job."""
    sent = bytearray()
    near, far = socket.socketpair()
    with near, far, socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as to_server:

        def forward() -> None:
            while data := far.recv(1 << 16):
                sent.extend(data)
                to_server.sendall(data)

        def back() -> None:
            with contextlib.suppress(OSError):
                while data := to_server.recv(1 << 16):
                    far.sendall(data)

        threads = [threading.Thread(target=one, daemon=True) for one in (forward, back)]
        for thread in threads:
            thread.start()
        channel: MessageChannel[m.OnAgent] = MessageChannel(near, m.OnAgent | m.Answer)
        assert channel.authenticate(join_handshake(identity.run_id, identity.key), within_s=LIMIT_S)
        assert isinstance(hello(channel, node="spy", run_id=identity.run_id, command=identity.command), m.Welcome)
        channel.send(m.Leave(whole_job=True, signal=15))
        near.shutdown(socket.SHUT_WR)
        threads[0].join(LIMIT_S)
    assert len(sent) > 100
    return bytes(sent)


def test_silent_connections_do_not_keep_agents_out(make: Callable[..., LinkedAgent]) -> None:
    """While two thousand silent connections are open and more come, an agent joins, trains and finishes."""
    port = free_port()
    host = make("a", port, num_slots=2).start()
    before = len(os.listdir("/proc/self/fd"))
    silent_connections: list[socket.socket] = []
    try:
        for _ in range(2000):
            silent_connections.append(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
        other = make("b", port, num_slots=2).start()
        host.join()
        other.join(wish=1)
        prepare = host.wait_for(m.Prepare)
        host.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
        assert {host.wait_for(m.Start).node_rank, other.wait_for(m.Start).node_rank} == {0, 1}
        assert len(os.listdir("/proc/self/fd")) - before - len(silent_connections) < 1200
    finally:
        for one in silent_connections:
            one.close()


def test_status_needs_a_key_only_where_the_run_has_one(make: Callable[..., LinkedAgent]) -> None:
    """Where the run key is derived from the run's id, status needs no key; otherwise the error contains the option for
    it."""
    port = free_port()
    make("a", port, identity=JobIdentity(run_id="open", key=RunKey.of_run_id("open"))).start()
    status = ask(Endpoint("127.0.0.1", port), m.AskStatus(), run_id=None, key=None, timeout_s=LIMIT_S)
    assert isinstance(status, m.LiveStatus)
    assert status.run_id == "open"
    closed = free_port()
    make("b", closed).start()
    with pytest.raises(RendezvousError, match="--run-key-file"):
        ask(Endpoint("127.0.0.1", closed), m.AskStatus(), run_id=None, key=None, timeout_s=LIMIT_S)
