"""Timings after a fault, from the journal and from the marks of the ranks."""

from __future__ import annotations

import pytest

from benchmarks.inprocess import fault_timings
from benchmarks.measuring import Mark
from benchmarks.restart import stages_of
from outlast.incidents import Event, EventKind

pytestmark = pytest.mark.extended


def event(kind: EventKind, mono_ns: int, cycle: int, rank: int | None = None) -> Event:
    return Event(
        kind=kind, wall_ns=0, mono_ns=mono_ns, run_id="r", job="j", node="n", proc="agent", cycle=cycle, rank=rank
    )


MARKS = {
    0: {"pid": 5, "begun_ns": 40_000_000, "joined_ns": 60_000_000, "reduced_ns": 70_000_000},
    1: {"pid": 6, "begun_ns": 45_000_000, "joined_ns": 55_000_000, "reduced_ns": 71_000_000},
}


def test_each_stage_ends_with_its_last_rank() -> None:
    """A stage is over when it is over for the last rank; the death is detected with the exit event of the killed
    rank."""
    events = [
        event(EventKind.CYCLE_STARTED, 1_000_000, 0),
        event(EventKind.WORKER_EXITED, 16_000_000, 0, rank=1),
        event(EventKind.WORKER_EXITED, 20_000_000, 0, rank=0),
        event(EventKind.CYCLE_STARTED, 30_000_000, 1),
        event(EventKind.WORKER_EXITED, 99_000_000, 1, rank=1),
    ]
    assert stages_of(10_000_000, MARKS, events) == {
        "detected": 0.006,
        "all ended": 0.010,
        "started": 0.020,
        "script begun": 0.035,
        "group joined": 0.050,
        "all-reduced": 0.061,
    }


def test_without_a_journal_only_rank_stages_are_reported() -> None:
    """For torchrun only the stages that the script reports are known; the others are omitted."""
    assert list(stages_of(10_000_000, MARKS, [])) == ["script begun", "group joined", "all-reduced"]


def marks(*, last_step_ns: int = 2_400_000_000) -> list[Mark]:
    """Return the marks of four ranks of which rank 1 sleeps; a fifth process replaces it."""

    def mark(name: str, iteration: int, initial_rank: int, at_ns: int) -> Mark:
        return Mark(name=name, rank=initial_rank, iteration=iteration, at_ns=at_ns, pid=100 + initial_rank)

    first = [mark("entered", 0, rank, 0) for rank in range(4)]
    second = [mark("entered", 1, rank, 2_200_000_000 + rank) for rank in (0, 2, 3, 4)]
    steps = [mark("stepped", 1, rank, last_step_ns - 4 + rank) for rank in (0, 2, 3, 4)]
    return [*first, mark("fault", 0, 1, 100_000_000), *second, *steps]


def test_a_fault_ends_with_the_last_rank() -> None:
    """Times run from the fault to the last active rank; a process that is replaced counts as lost."""
    (found,) = fault_timings(marks(), [("sleep", 1)]) or []
    assert (found.entered_s, found.stepped_s) == pytest.approx((2.1, 2.3))
    assert found.beyond_s == pytest.approx(0.3)
    assert found.num_lost == 1
    assert found.name == "sleep"


def test_an_incomplete_recovery_has_no_result() -> None:
    """Until every rank has finished an iteration, and every fault has been injected, there is no result."""
    assert fault_timings(marks()[:-1], [("sleep", 1)]) is None
    assert fault_timings(marks(), [("sleep", 1), ("kill", 0)]) is None
