"""The connection between agents and the coordinator: strangers, other runs, silence, stuck agents, many agents."""

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
from outlast.launch.control_link import ControlLink, LinkDown, LinkFailed, LinkUp, News
from outlast.launch.job_settings import JobSettings
from outlast.runtime.addresses import Endpoint
from outlast.runtime.run_key import KeySource, RunKey
from outlast.runtime.wire import MessageChannel
from outlast.testing.ranks import free_port
from outlast.version import __version__

LIMIT_S = 120.0
KEY = RunKey(hashlib.sha256(b"the run's secret").digest(), KeySource.FILE)
IDENTITY = JobIdentity(run_id="run", key=KEY, command="aa", command_text="train.py --lr 1")


class SomeAgent:
    """An agent's link, and what it delivered."""

    def __init__(self, node: str, *ports: int, identity: JobIdentity = IDENTITY, **job: Any) -> None:
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        given = {"num_slots": 1, "node_timeout_s": 60.0, "join_timeout_s": LIMIT_S, **job}
        self.link = ControlLink(
            [Endpoint("127.0.0.1", port) for port in ports],
            JobSettings(job="job", beat_interval_s=0.05, host=node, **given),
            identity,
            deliver=self.news.put,
            layers=LayeredSettings(),
            has_loop=False,
        )

    def start(self) -> SomeAgent:
        self.link.start()
        self.wait_for(LinkUp)
        return self

    def join(self, wish: int = 0) -> None:
        self.link.send(m.JoinRequest(addr="127.0.0.1", nproc=1, wish=wish))

    def wait_for(self, kind: type[Any]) -> Any:
        end_s = clock.now_s() + LIMIT_S
        while True:
            news = self.news.get(timeout=max(0.1, end_s - clock.now_s()))
            if isinstance(news, kind):
                return news


@pytest.fixture
def make() -> Iterator[Callable[..., SomeAgent]]:
    with contextlib.ExitStack() as stack:

        def make_one(node: str, *ports: int, **options: Any) -> SomeAgent:
            agent = SomeAgent(node, *ports, **options)
            stack.callback(agent.link.close, goodbye_timeout_s=0.0)
            return agent

        yield make_one


def train(agent: SomeAgent) -> m.Start:
    agent.join()
    prepare = agent.wait_for(m.Prepare)
    agent.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
    start: m.Start = agent.wait_for(m.Start)
    agent.link.send(m.Running(cycle=start.cycle))
    assert agent.wait_for(m.Ran).cycle == start.cycle
    return start


def finish(agent: SomeAgent, start: m.Start) -> None:
    agent.link.send(m.Finished(facts=m.CycleFacts(cycle=start.cycle)))
    assert agent.wait_for(m.Stop).exit_code == ExitReason.FINISHED


def test_one_agent_hosts_and_trains(make: Callable[..., SomeAgent]) -> None:
    """The first agent hosts the coordinator, joins it like any other, trains and finishes."""
    agent = make("a", free_port()).start()
    finish(agent, train(agent))


def test_closed_connection_is_a_death(make: Callable[..., SomeAgent]) -> None:
    """When an agent's connection ends and does not come back, its node is lost, long before its beats are missed."""
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


def test_a_node_that_flaps_while_cycles_form_costs_no_restart(make: Callable[..., SomeAgent]) -> None:
    """An agent that dies three times after it was placed, before its workers have started, leaves the restarts of the
    job as they were."""
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


def test_whose_place_can_be_taken_is_dead(make: Callable[..., SomeAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is just ending may still take a connection and reset it, which tells nothing. That another one on
    its machine can listen where it did tells that it is gone."""
    port = free_port()
    host, heir = make("a", port).start(), make("b", port).start()
    assert host.link.server is not None
    join, is_reset = heir.link._join_at, threading.Event()

    def join_late(endpoint: Endpoint, answer_s: float) -> Any:
        if not is_reset.is_set():
            is_reset.set()
            raise ConnectionResetError
        return join(endpoint, answer_s)

    monkeypatch.setattr(heir.link, "_join_at", join_late)
    host.link._closing.set()  # it does not come back
    host.link.server.close()
    assert heir.wait_for(LinkUp).is_host
    assert heir.link.server is not None
    assert (heir.link.server.settings.former_host, heir.link.server.settings.host_is_dead) == ("a", True)


def test_broken_connection_is_not_a_death(make: Callable[..., SomeAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose connection breaks connects again, and gets what it may have missed."""
    monkeypatch.setattr("outlast.launch.coordinator_server.PATIENCE_S", LIMIT_S)
    port = free_port()
    make("a", port, num_slots=2).start()
    with connect(port) as channel:
        hello(channel, node="b")
        channel.send(m.JoinRequest(addr="b", nproc=1, wish=1))
    with connect(port) as channel:
        assert isinstance(hello(channel, node="b"), m.Welcome)
        channel.send(m.Register(addr="b", nproc=1))
        channel.send(m.AskStatus())  # not a question of an agent's: ends the connection once all before it was taken
        assert drain(channel) == []
    status = ask(Endpoint("127.0.0.1", port), m.AskStatus(), run_id="run", key=KEY, timeout_s=LIMIT_S)
    assert isinstance(status, m.LiveStatus)
    assert [node.name for node in status.nodes] == ["b"]


def test_an_agent_whose_job_is_over_takes_nothing_over(make: Callable[..., SomeAgent]) -> None:
    """When the coordinator ends, an agent that is ending as well hosts no other one; it would wait there for nodes."""
    port = free_port()
    host, ending = make("a", port).start(), make("b", port).start()
    ending.link.stop_taking_over()
    host.link.close(goodbye_timeout_s=0.0)
    ending.wait_for(LinkDown)
    other = make("c", port).start()
    assert other.link.server is not None
    assert ending.link.server is None


def test_stuck_main_loop_is_a_lost_node(make: Callable[..., SomeAgent]) -> None:
    """Beats whose count does not advance show an agent whose main loop hangs: its node is lost, and it is said why."""
    port = free_port()
    host = make("a", port, num_slots=2, node_timeout_s=2.0, loop_timeout_factor=2).start()
    with connect(port) as channel:
        hello(channel, node="b")
        channel.send(m.JoinRequest(addr="b", nproc=1, wish=1))
        host.join()
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(0.02):
                try:
                    channel.send(m.AgentBeat(count=7))
                except OSError:
                    return

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            prepare = host.wait_for(m.Prepare)
            host.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
            assert "main loop has not run" in host.wait_for(m.CycleOver).reason
        finally:
            stop.set()
            beating.join(LIMIT_S)


def test_silent_coordinator_is_left(make: Callable[..., SomeAgent]) -> None:
    """An agent whose beats are not answered says so, and looks for another coordinator."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        agent = make("b", port, node_timeout_s=0.3)
        agent.link.start()
        connection, _ = listener.accept()
        with MessageChannel[m.OnControl](connection, m.OnControl) as channel:
            assert channel.authenticate(control.serve_handshake(IDENTITY), within_s=LIMIT_S)
            said = channel.receive(within_s=LIMIT_S)
            assert isinstance(said, m.Hello)
            assert (said.node, said.run_id, said.command) == ("b", "run", "aa")
            channel.send(m.Welcome(job="job", host="a", leader="x", term=4, version=__version__))
            agent.wait_for(LinkUp)
            assert "did not respond" in agent.wait_for(LinkDown).error
            kinds = {type(message) for message in drain(channel)}
            assert m.Moving in kinds
        again, _ = listener.accept()
        again.close()


def test_coordinator_that_yields_is_not_taken_for_dead(make: Callable[..., SomeAgent]) -> None:
    """A coordinator yields to another one, which one of its agents does not reach: that agent is refused with the
    successor's endpoint, and hosts a coordinator that does not count the living host among the dead."""
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
        # The other one is silent from now on.
        end_s, refused = clock.now_s() + LIMIT_S, None
        while refused is None and clock.now_s() < end_s:  # a connection that comes before it has yielded is closed
            with contextlib.suppress(OSError), connect(port) as channel:
                refused = hello(channel, node="c")
        assert isinstance(refused, m.Refused)
        assert refused.successor == f"127.0.0.1:{rival}"
        with pytest.raises(RendezvousError, match=f"has yielded to the coordinator at 127.0.0.1:{rival}"):
            ask(Endpoint("127.0.0.1", port), m.AskStatus(), run_id="run", key=KEY, timeout_s=LIMIT_S)
        assert agent.wait_for(LinkUp).is_host
    assert agent.link.server is not None
    assert (agent.link.server.settings.former_host, agent.link.server.settings.host_is_dead) == ("a", False)


# -- strangers -------------------------------------------------------------------------------------------------


def connect(port: int, identity: JobIdentity = IDENTITY) -> MessageChannel[m.OnAgent]:
    """Return a connection on which both have proved the run key."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    channel: MessageChannel[m.OnAgent] = MessageChannel(connection, m.OnAgent | m.Answer)
    try:
        assert channel.authenticate(join_handshake(identity.run_id, identity.key), within_s=LIMIT_S)
    except BaseException:
        channel.close()
        raise
    return channel


def hello(channel: MessageChannel[m.OnAgent], **fields: Any) -> m.OnAgent | None:
    said = {
        **{"run_id": "run", "node": "n", "epoch": "1", "command": "aa", "command_text": "train.py --lr 1"},
        **{"version": __version__, **fields},
    }
    channel.send(m.Hello(**said))
    return channel.receive(within_s=LIMIT_S)


def drain(channel: MessageChannel[Any]) -> list[Any]:
    """Return what comes until the connection ends."""
    came = []
    with contextlib.suppress(ConnectionError):
        while (message := channel.receive(within_s=LIMIT_S)) is not None:
            came.append(message)
    return came


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
def test_agent_of_something_else_is_refused(
    make: Callable[..., SomeAgent], fields: dict[str, str], names: list[str]
) -> None:
    """Another run, job or command is refused with a line that names what differs."""
    port = free_port()
    make("a", port).start()
    with connect(port) as channel:
        answer = hello(channel, **fields)
    assert isinstance(answer, m.Refused)
    assert all(name in answer.reason for name in names)


def test_other_versions_join_where_that_is_allowed(
    make: Callable[..., SomeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With OUTLAST_ANY_VERSION=1 an agent of another version of the package is welcome."""
    monkeypatch.setenv("OUTLAST_ANY_VERSION", "1")
    port = free_port()
    make("a", port).start()
    with connect(port) as channel:
        assert isinstance(hello(channel, version="0.1.7"), m.Welcome)


def test_coordinator_of_another_version_ends_the_link_with_two(make: Callable[..., SomeAgent]) -> None:
    """An agent does not join a coordinator that reports another version of the package, or none."""
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


def test_another_run_at_the_endpoint_ends_the_link_with_two(make: Callable[..., SomeAgent]) -> None:
    """An agent that finds another run, another key or another command at its endpoint gives up at once, code 2."""
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


def test_endpoint_is_looked_at_before_the_start(make: Callable[..., SomeAgent]) -> None:
    """What is at an endpoint is told apart: nobody, a coordinator of this run, another run's, another program."""
    port = free_port()
    endpoint = Endpoint("127.0.0.1", port)
    assert probe(endpoint, "run", KEY)[0] is Occupant.NO_LISTENER
    make("a", port).start()
    assert probe(endpoint, "run", KEY)[0] is Occupant.COORDINATOR
    with pytest.raises(WrongRun, match="belongs to run 'run'"):
        probe(endpoint, "other", KEY)
    with pytest.raises(WrongRun, match="run key is another one"):
        probe(endpoint, "run", RunKey.of_run_id("run"))


def test_coordinator_that_dies_while_it_is_asked_is_no_other_program() -> None:
    """One that ends a connection without a word and listens no more is gone; what does so each time is foreign."""
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
        stranger = threading.Thread(target=hang_up, args=(3,))
        stranger.start()
        assert probe(endpoint, "run", KEY)[0] is Occupant.FOREIGN
        stranger.join()


@pytest.mark.parametrize(("times", "found"), [(1, Occupant.NO_LISTENER), (3, Occupant.LEAVING)])
def test_coordinator_that_ends_within_a_handshake_is_no_other_program(times: int, found: Occupant) -> None:
    """One that has named the run and its key and hangs up then, as one whose heir leads, ends no agent that starts."""
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


def test_strangers_change_nothing(make: Callable[..., SomeAgent]) -> None:
    """Garbage, half a greeting, a wrong key and a recorded session are refused; the run ends as without them."""
    port = free_port()
    agent = make("a", port).start()
    start = train(agent)
    recorded = record(port)
    slow = [socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) for _ in range(50)]
    try:
        for number, stranger in enumerate(slow):
            stranger.sendall(b"OLw1\0\1"[: number % 7])
        for data in (b"GET / HTTP/1.0\r\n\r\n" * 20, secrets.token_bytes(4096), b"\0" * 70_000, recorded):
            connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
            with connection as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(data)
                while stranger.recv(1 << 16):
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
        for stranger in slow:
            stranger.close()


def record(port: int, identity: JobIdentity = IDENTITY) -> bytes:
    """Return what a member sends that asks for the job's end."""
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


def test_many_strangers_keep_nobody_out(make: Callable[..., SomeAgent]) -> None:
    """While two thousand silent connections are open and more come, an agent joins, trains and finishes."""
    port = free_port()
    host = make("a", port, num_slots=2).start()
    before = len(os.listdir("/proc/self/fd"))
    crowd: list[socket.socket] = []
    try:
        for _ in range(2000):
            crowd.append(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
        other = make("b", port, num_slots=2).start()
        host.join()
        other.join(wish=1)
        prepare = host.wait_for(m.Prepare)
        host.link.send(m.Master(cycle=prepare.cycle, addr="127.0.0.1", port=1))
        assert {host.wait_for(m.Start).node_rank, other.wait_for(m.Start).node_rank} == {0, 1}
        assert len(os.listdir("/proc/self/fd")) - before - len(crowd) < 1200
    finally:
        for one in crowd:
            one.close()


def test_status_needs_no_key_where_the_run_has_none(make: Callable[..., SomeAgent]) -> None:
    """Where the run key is derived from the run's id, whoever reads the introduction can ask; otherwise it is said."""
    port = free_port()
    make("a", port, identity=JobIdentity(run_id="open", key=RunKey.of_run_id("open"))).start()
    status = ask(Endpoint("127.0.0.1", port), m.AskStatus(), run_id=None, key=None, timeout_s=LIMIT_S)
    assert isinstance(status, m.LiveStatus)
    assert status.run_id == "open"
    closed = free_port()
    make("b", closed).start()
    with pytest.raises(RendezvousError, match="--run-key-file"):
        ask(Endpoint("127.0.0.1", closed), m.AskStatus(), run_id=None, key=None, timeout_s=LIMIT_S)
