"""The workers of one node: late events, lost workers, the death of their fork server, and in-process restarts."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from outlast.incidents import Incident, IncidentKind
from outlast.launch.cycle import Cycle
from outlast.launch.in_process_recovery import InProcessRecovery
from outlast.launch.node_agent import AgentState, NodeAgent
from outlast.launch.workers import NodeWorkers, WorkerProcess
from outlast.policy.inprocess_protocol import InProcessState
from outlast.policy.root_cause import find_root_cause
from outlast.runtime.board import Board, InProcessFault, InProcessMark, MarkChanged, agent_address
from outlast.runtime.event_loop import Timers
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


@pytest.mark.parametrize("state", [AgentState.JOINING, AgentState.RUNNING])
def test_fork_server_death_counts_as_workers_cleared(state: AgentState) -> None:
    """Workers of a dead fork server are gone: GPU checks and the wait for their device memory start at once."""
    agent: Any = Mock(_state=state)
    NodeAgent._on_workers_lost(agent)
    assert agent._end_cycle.called is (state == AgentState.RUNNING)
    agent._health.note_cleared.assert_called_once_with()


def exit_worker(state: AgentState, timers: Timers, *, all_ended: bool) -> Any:
    """Return an agent in ``state`` after a worker of its cycle exited without having saved."""
    cycle = Mock(over=state == AgentState.JOINING, all_ended=all_ended, lacks_a_rank=True)
    cycle.continues_without.return_value = False
    agent: Any = Mock(_state=state, _cycle=cycle, _timers=timers)
    NodeAgent._on_exited(agent, Exited(key=0, pid=1, exit_code=1, mono_ns=1))
    return agent


@pytest.mark.parametrize("all_ended", [True, False])
def test_grace_period_ends_with_the_last_worker(all_ended: bool) -> None:
    """The next cycle waits for the survivors of a failed cycle until the last of them has exited, and no longer."""
    timers = Timers()
    timers.set("grace", 600.0, Mock())
    agent = exit_worker(AgentState.JOINING, timers, all_ended=all_ended)
    assert agent._clear.called is all_ended
    assert timers.is_set("grace") is not all_ended


def test_successive_exits_do_not_prolong_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first exit without a save the other workers get a few seconds, and never more than before; later
    exits do not extend that deadline."""
    now_s, timers = 1000.0, Timers()
    monkeypatch.setattr("outlast.clock.now_s", lambda: now_s)
    timers.set("grace", 600.0, killing := Mock())
    exit_worker(AgentState.LEAVING, timers, all_ended=False)
    first_s = timers.until_next_s()
    assert first_s is not None
    assert first_s < 600.0
    now_s += 1.0
    exit_worker(AgentState.LEAVING, timers, all_ended=False)
    assert timers.until_next_s() == first_s - 1.0
    now_s += 600.0
    timers.fire()
    killing.assert_called_once_with()


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
