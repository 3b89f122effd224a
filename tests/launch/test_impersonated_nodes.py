"""Another process with the run key joins under the name of a living agent: the agent continues training, or ends its
workers and exits with one line; the job never waits for the other process."""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from test_control_connection import connect, hello

from outlast.errors import ExitReason
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.control import JobIdentity, ask
from outlast.runtime.addresses import Endpoint, parse_endpoints
from outlast.runtime.run_key import KeySource, RunKey
from outlast.runtime.wire import MessageChannel
from outlast.testing import Agent, Cluster

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.extended]
LIMIT_S = 300.0
TIMEOUT_S = 5.0
KEY = RunKey(hashlib.sha256(b"the run's secret").digest(), KeySource.VARIABLE)
SCRIPT = """
import pathlib, sys, time
deadline = time.monotonic() + 900
while not pathlib.Path(sys.argv[1]).exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""
Channel = MessageChannel[m.OnAgent]
PLACE = m.SlotPlace(term=1, cycle=50, slot=1, num_slots=2)


class Run:
    """A run of two nodes, `host` and `victim`, with the coordinator on the first."""

    def __init__(self, folder: Path) -> None:
        self._go = folder / "go"
        script = folder / "train.py"
        script.write_text(SCRIPT)
        self.cluster = Cluster(
            script,
            str(self._go),
            run_dir=folder / "run",
            num_nodes=2,
            num_started=0,
            nproc_per_node=1,
            options=["--no-health-check", f"--ft-node-heartbeat-timeout={TIMEOUT_S}"],
            environment={"OUTLAST_RUN_KEY": KEY.as_variable()},
        )

    @property
    def _endpoint(self) -> Endpoint:
        (endpoint,) = parse_endpoints(self.cluster.endpoint)
        return endpoint

    def add_host(self) -> None:
        self.cluster.add_node("host")
        self.cluster.wait_for(lambda event: event.kind == EventKind.NODE_JOINED, LIMIT_S)

    def add_victim(self) -> Agent:
        """Start the agent that is impersonated."""
        return self.cluster.add_node("victim")

    def status(self) -> m.LiveStatus:
        status = ask(self._endpoint, m.AskStatus(), run_id=self.cluster.run_id, key=KEY, timeout_s=LIMIT_S)
        assert isinstance(status, m.LiveStatus)
        return status

    def wait_for_cycle(self, cycle: int, *nodes: str) -> None:
        for node in nodes:
            self.cluster.wait_for(
                lambda event: (event.kind, event.cycle, event.node) == (EventKind.CYCLE_STARTED, cycle, node),  # noqa: B023
                LIMIT_S,
            )

    @contextlib.contextmanager
    def impersonator(self, *, is_member: bool) -> Iterator[Channel]:
        """Connect as another agent of the victim's name; ``is_member``: it claims to be in the job already."""
        job = self.status().job if is_member else None
        with connect(self._endpoint.port, JobIdentity(run_id=self.cluster.run_id, key=KEY)) as channel:
            answer = hello(channel, node="victim", epoch="other", run_id=self.cluster.run_id, command="", job=job)
            assert isinstance(answer, m.Welcome)
            yield channel

    def finish(self) -> None:
        self._go.touch()
        for name in ("host", "victim"):
            assert self.cluster.agent(name).wait(LIMIT_S) == 0, self.cluster.tails()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    with run.cluster:
        yield run


def send_nothing(run: Run, channel: Channel) -> None:
    """Wait until an agent without heartbeats would be lost."""
    with pytest.raises(TimeoutError):
        channel.receive(within_s=3 * TIMEOUT_S)


def register(run: Run, channel: Channel) -> None:
    channel.send(m.Register(addr="127.0.0.1", nproc=1, place=PLACE, ran=PLACE, running=True))
    assert is_rejected(channel)


def join(run: Run, channel: Channel) -> None:
    channel.send(m.JoinRequest(addr="127.0.0.1", nproc=1))
    assert is_rejected(channel)


def report_unhealthy(run: Run, channel: Channel) -> None:
    incident = Incident(kind=IncidentKind.NODE_UNHEALTHY, node="victim")
    channel.send(m.Unhealthy(incident=incident, stays=True))
    join(run, channel)  # the response comes after it was handled


def send_end_of_job(run: Run, channel: Channel) -> None:
    channel.send(m.Leave(signal=15))
    channel.send(m.Bye())
    join(run, channel)


def is_rejected(channel: Channel) -> bool:
    while (answer := channel.receive(within_s=LIMIT_S)) is not None:
        if isinstance(answer, m.Stop):
            return answer.is_replaced
    return False


@pytest.mark.extended
@pytest.mark.parametrize("action", [None, send_nothing, register, join, report_unhealthy, send_end_of_job])
def test_a_training_agent_keeps_its_name(run: Run, action: Callable[[Run, Channel], None] | None) -> None:
    """Whatever a second agent of its name sends, the agent continues training, and no node is lost or quarantined."""
    run.add_host()
    run.add_victim()
    run.wait_for_cycle(0, "host", "victim")
    with run.impersonator(is_member=True) as channel:
        if action is not None:
            action(run, channel)
    status = run.status()
    assert (status.phase, status.cycle, status.quarantined) == ("running", 0, ())
    run.finish()
    assert not [event for event in run.cluster.events() if event.kind == EventKind.INCIDENT]


def test_an_idle_impersonator_loses_the_name(run: Run) -> None:
    """An agent whose name was taken before it started joins once the other agent is lost, and trains."""
    run.add_host()
    with run.impersonator(is_member=False) as channel:
        channel.send(m.JoinRequest(addr="127.0.0.1", nproc=1, wish=1))
        run.add_victim()
        run.cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED and event.node == "victim", LIMIT_S)
    run.finish()


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_replaced_agent_exits_and_the_job_continues(run: Run, hangs_up: bool) -> None:
    """A stopped agent whose place was taken ends its workers and exits with one line. The impersonator starts no
    workers and is lost, and a new agent of the name trains."""
    run.add_host()
    victim = run.add_victim()
    run.wait_for_cycle(0, "host", "victim")
    worker = psutil.Process(run.cluster.worker_pid(1))
    with run.impersonator(is_member=True) as channel:
        victim.signal(signal.SIGSTOP)
        channel.send(m.JoinRequest(addr="127.0.0.1", nproc=1))
        while not isinstance(answer := channel.receive(within_s=LIMIT_S), m.Start):
            assert answer is not None
            if isinstance(answer, m.Stop):  # the agent's last heartbeat arrived after the request
                channel.send(m.JoinRequest(addr="127.0.0.1", nproc=1))
        victim.signal(signal.SIGCONT)
        assert victim.wait(LIMIT_S) == ExitReason.FAILED
        (line,) = (line for line in victim.output().splitlines() if "another agent has taken the place" in line)
        assert "'victim'" in line
        psutil.wait_procs([worker], timeout=LIMIT_S)
        assert not worker.is_running()
        if not hangs_up:
            run.add_victim()
            run.cluster.wait_for("node victim is lost", LIMIT_S)
    if hangs_up:
        run.add_victim()
    run.cluster.wait_for(
        lambda event: event.kind == EventKind.CYCLE_STARTED and event.node == "victim" and event.cycle > answer.cycle,
        LIMIT_S,
    )
    run.finish()
