"""The simulated fault is the same on all ranks, is injected at its moment, and occurs once per run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from outlast.chaos import ArmedFaults, FaultPlan
from outlast.chaos.armed import arm_here, simulated_fault
from outlast.config import FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.runtime.journal import Journal
from outlast.testing import FakeClock


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the signals that this process would receive."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number) if pid == os.getpid() else None)
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
    return sent


def _armed(
    rank: int, run_dir: Path, *, cycle: int = 0, clock: FakeClock | None = None, **settings: object
) -> ArmedFaults:
    config = FaultToleranceConfig(simulate_fault=True, **settings)  # type: ignore[arg-type]
    place = WorkerEnv(global_rank=rank, world_size=4, run_id="run-1", cycle=cycle, run_dir=str(run_dir))
    journal = Journal(run_dir, run_id="run-1", job="job", node="node", proc=f"rank-{rank}")
    plan = FaultPlan(faults=[simulated_fault(config, place)])
    return arm_here(plan, place, journal, device="cpu", now_ns=(clock or FakeClock()).now_ns)


def test_all_ranks_draw_the_same_fault(tmp_path: Path, signals: list[int]) -> None:
    """The run's name decides the kind and the rank; exactly one rank is affected."""
    for rank in range(4):
        _armed(rank, tmp_path).after_step(3, {})
    (event,) = [event for event in read(tmp_path) if event.kind == EventKind.FAULT_SIMULATED]
    assert signals == [{"rank_hung": signal.SIGSTOP, "rank_killed": signal.SIGKILL}[event.data["fault"]]]


def test_the_simulated_fault_occurs_once_per_run(tmp_path: Path, signals: list[int]) -> None:
    """Neither a later iteration nor a later cycle is affected again, and the journal has the fault once."""
    for cycle in range(3):
        fault = _armed(2, tmp_path, cycle=cycle, simulated_fault_rank=2, simulated_fault_type="rank_killed")
        fault.after_step(10 + cycle, {})
        fault.before_step(10 + cycle, {})
        fault.after_step(11 + cycle, {})
    assert signals == [signal.SIGKILL]
    (event,) = [event for event in read(tmp_path) if event.kind == EventKind.FAULT_SIMULATED]
    assert (event.rank, event.iteration, event.data["fault"]) == (2, 10, "rank_killed")


def test_the_fault_waits_for_its_delay_and_a_checkpoint(tmp_path: Path, signals: list[int]) -> None:
    """Before the delay has passed, or before a checkpoint is durable, no fault is injected."""
    clock = FakeClock()
    fault = _armed(1, tmp_path, clock=clock, simulated_fault_rank=1, simulated_fault_base_delay=5.0)
    fault.after_step(1, {})
    clock.advance(5.0)
    fault.after_step(2, {}, has_durable=False)
    assert signals == []
    fault.after_step(3, {})
    assert len(signals) == 1


def test_a_missing_rank_is_rejected(tmp_path: Path) -> None:
    """The error names the last rank."""
    with pytest.raises(ConfigError, match="ranks end at 3"):
        _armed(0, tmp_path, simulated_fault_rank=4)
