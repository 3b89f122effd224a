"""The workers of one node: late events, lost workers, the death of their fork server, and in-process restarts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from simulated_agent import SimulatedAgent, simulated_cycle

from outlast import clock
from outlast.incidents import Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.agent_events import SignalReceived
from outlast.launch.checkups import CheckedUp, Occasion
from outlast.launch.cycle import ALONE_S, Cycle
from outlast.launch.in_process_recovery import InProcessRecovery
from outlast.launch.node_agent import AgentState
from outlast.launch.workers import NodeWorkers, WorkerProcess
from outlast.policy.inprocess_protocol import InProcessState
from outlast.policy.root_cause import find_root_cause
from outlast.runtime.board import Board, InProcessFault, InProcessMark, MarkChanged, agent_address
from outlast.runtime.fork_server import Clear, Cleared, Exited, Started
from outlast.runtime.postmortem import Postmortem


def make_cycle(*, over: bool, num_workers: int = 1) -> Any:
    parts: Any = dict.fromkeys(("logs", "spawns", "in_process", "postmortem"))
    parts["workers"] = {key: WorkerProcess(local_rank=key, global_rank=key) for key in range(num_workers)}
    start, options = SimpleNamespace(cycle=3), SimpleNamespace(layers=None)
    return Cycle(**parts, start=start, options=options, board=Mock(), job="j", node="n", over=over)  # type: ignore[arg-type]


def test_late_start_of_a_worker_is_ignored() -> None:
    """The heartbeat memory of a finished cycle is closed; a late start event does not access it and does not end the
    agent."""
    cycle = make_cycle(over=True)
    assert not cycle.note_started(Started(key=0, pid=4711))
    cycle.board.assign.assert_not_called()


@pytest.mark.parametrize("key", [1, 7])
def test_cycle_runs_once_all_workers_have_started(key: int) -> None:
    """The start of the last worker makes the cycle run; a start event with an unknown key does not."""
    cycle = make_cycle(over=False, num_workers=2)
    assert not cycle.note_started(Started(key=0, pid=1))
    assert cycle.note_started(Started(key=key, pid=2)) is (key == 1)


@pytest.mark.process
def test_lost_worker_is_not_examined_in_a_later_hang(tmp_path: Path) -> None:
    """A lost worker is excluded from the analysis of a later hang: it did not finish before the others, and a spare
    may have its rank."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    board, postmortem = Board.create(num_ranks=3), Postmortem(3)
    try:
        workers = {key: WorkerProcess(local_rank=key, global_rank=key, pid=processes[key].pid) for key in range(3)}
        for worker in workers.values():
            board.assign(worker.local_rank, pid=worker.pid, global_rank=worker.global_rank, cycle=0)
        parts: Any = dict.fromkeys(("logs", "spawns", "in_process"))
        start: Any = SimpleNamespace(cycle=0)
        options: Any = SimpleNamespace(layers=None, run_dir=tmp_path)
        parts |= {"board": board, "workers": workers, "postmortem": postmortem}
        cycle = Cycle(**parts, start=start, options=options, job="j", node="n")
        assert [one.global_rank for one in cycle.examine(None)] == [0, 1, 2]
        processes[1].kill()
        processes[1].wait()
        workers[1].lost = Incident(kind=IncidentKind.WORKER_DIED, rank=1)
        board.retire(1)
        positions = cycle.examine(None)
        assert [one.global_rank for one in positions] == [0, 2]
        assert "finished" not in find_root_cause(positions).reason
    finally:
        postmortem.close()
        board.close()
        for process in processes:
            process.kill()
            process.wait()


def test_no_clearing_after_the_fork_server_died() -> None:
    """Workers die with their fork server: the end of their grace period kills no worker of the new fork server, and
    the next cycle can start."""
    first, second = Mock(pid=1, **{"receive.return_value": None}), Mock(**{"receive.return_value": Cleared()})
    workers = NodeWorkers(first, lambda: second)
    workers.begin_clearing(gently=True)
    assert not workers.are_cleared
    assert workers.receive() is None
    workers.clear()
    second.send.assert_not_called()
    assert workers.are_cleared
    workers.begin_clearing(gently=False)
    second.send.assert_called_once_with(Clear())
    workers.receive()
    assert workers.are_cleared


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Callable[..., SimulatedAgent]]:
    """Return a function that creates an agent of a node that checks its GPUs from the second fault on."""
    agents: list[SimulatedAgent] = []

    def make(*arguments: str) -> SimulatedAgent:
        agents.append(SimulatedAgent(tmp_path, "--nnodes=2", *arguments))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


def exited(key: int) -> Exited:
    """Return the event that a worker exited without having saved."""
    return Exited(key=key, pid=key + 1, exit_code=1, mono_ns=1)


@pytest.mark.parametrize("state", [AgentState.JOINING, AgentState.RUNNING])
def test_fork_server_death_counts_as_workers_cleared(
    make_agent: Callable[..., SimulatedAgent], tmp_path: Path, state: AgentState
) -> None:
    """Workers of a dead fork server are gone: the cycle is over, and GPU checks and the wait for their device memory
    start at once."""
    agent = make_agent()
    for number in range(2):
        agent.run(simulated_cycle(tmp_path, number))
        if state == AgentState.JOINING:
            agent.report(exited(0))
            agent.report(exited(1))
            assert agent.state == state
        begun = agent.memory.begin.call_count
        assert agent.gpu_checks == [False] * (number or state == AgentState.JOINING)
        agent.report(None)
        assert agent.gpu_checks == [False, True][: number + 1]
        (ended, *_) = [one.ended for one in agent.sent_of(m.JoinRequest) if one.ended is not None][number:]
        assert ended.incident.kind == (
            IncidentKind.WORKER_DIED if state == AgentState.RUNNING else IncidentKind.WORKER_FAILED
        )
        agent.receive(CheckedUp(Occasion.FAULT, ()))
        assert agent.memory.begin.call_count > begun


def test_grace_period_ends_with_the_last_worker(make_agent: Callable[..., SimulatedAgent], tmp_path: Path) -> None:
    """The next cycle waits for the survivors of a failed cycle until the last of them has exited, and no longer."""
    agent = make_agent("--restart-grace=600")
    agent.run(simulated_cycle(tmp_path))
    agent.end_cycle()
    assert agent.fork_server.signals == [signal.SIGTERM]
    agent.report(exited(0))
    assert agent.fork_server.num_clears == 0
    agent.report(exited(1))
    assert agent.fork_server.num_clears == 1


@pytest.mark.parametrize("grace_s", [600.0, 3.0])
def test_successive_exits_do_not_prolong_a_shutdown(
    make_agent: Callable[..., SimulatedAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    """After the first exit without a save the other workers get a few seconds, and never more than before; later
    exits do not extend that deadline."""
    now_s = clock.now_s()
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    agent = make_agent()
    agent.run(simulated_cycle(tmp_path, num_workers=3, options={"shutdown_grace": grace_s}))
    for key in range(3):
        agent.report(Started(key=key, pid=key + 1))
    agent.receive(SignalReceived(signal.SIGTERM))
    assert agent.state == AgentState.LEAVING
    deadline_s = now_s + min(grace_s, ALONE_S)
    agent.report(exited(0))
    now_s += 1.0
    agent.report(exited(1))
    now_s = deadline_s - 0.01
    agent.receive(m.Remark(text="a moment before the deadline"))
    assert signal.SIGKILL not in agent.fork_server.signals
    now_s = deadline_s
    agent.handle_next()
    assert agent.fork_server.signals[-1] == signal.SIGKILL


@pytest.mark.process
def test_invalid_datagrams_do_not_harm_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    """Nested MessagePack and garbage on the agent's socket cost one log line, a report from another user is dropped,
    and a worker's own report is received."""
    board = Board.create(num_ranks=1)
    workers = {0: WorkerProcess(local_rank=0, global_rank=0)}
    recovery = InProcessRecovery(board=board, workers=workers, is_alone=True, job="j", cycle=0, node="n")
    mark = InProcessMark(board.path, 0)
    try:
        payloads = (b"\x81\xa1a" * 3000, b"\x91" * 4000, b"\xff" * 9, b"\x91" * 60_000)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            for number in range(200):
                stranger.sendto(payloads[number % len(payloads)], agent_address(board.token))
                recovery.take_recovered()
        mark.arm(0, patience_s=1.0)
        if os.getuid() == 0:
            forged = InProcessFault(rank=0, kind=IncidentKind.WORKER_FAILED, summary="forged")
            change = MarkChanged(local_rank=0, call=0, restart_count=1, state=InProcessState.ACTIVE, faults=(forged,))
            if not (child := os.fork()):
                try:
                    os.setresuid(65534, 65534, 65534)
                    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                    stranger.sendto(msgspec.msgpack.encode(change), agent_address(board.token))
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        fault = InProcessFault(rank=0, kind=IncidentKind.WORKER_FAILED, summary="it failed")
        mark.set(InProcessState.ACTIVE, 1, [fault])
        recovered = recovery.take_recovered()
        assert recovered is not None
        assert (recovered.restart_count, recovered.fault) == (1, fault)
        assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1
    finally:
        mark.close()
        recovery.close()
        board.close()


def test_in_process_restart_is_reported_after_its_load() -> None:
    """The newest restart of workers that save is reported only after they have loaded, since a save may be committed
    after the fault. Earlier restarts are reported at once; none is skipped, so that each is counted."""
    board = Board.create(num_ranks=1)
    workers = {0: WorkerProcess(local_rank=0, global_rank=0)}
    recovery = InProcessRecovery(board=board, workers=workers, is_alone=True, job="j", cycle=0, node="n")
    page, mark = board.rank(0), InProcessMark(board.path, 0)
    try:
        page.attach(pid=os.getpid(), global_rank=0, cycle=0)
        page.report_progress()
        mark.arm(0, patience_s=1.0)
        mark.set(InProcessState.ACTIVE, 1)
        assert recovery.take_recovered() is None
        assert recovery.awaits_report
        page.heartbeat()
        assert (first := recovery.take_recovered()) is not None
        assert first.restart_count == 1
        assert not recovery.awaits_report
        mark.set(InProcessState.ACTIVE, 2)
        mark.set(InProcessState.ACTIVE, 3)
        assert (second := recovery.take_recovered()) is not None
        assert second.restart_count == 2
        assert recovery.take_recovered() is None
        assert (third := recovery.take_recovered(waits=False)) is not None
        assert third.restart_count == 3
    finally:
        mark.close()
        recovery.close()
        board.close()
