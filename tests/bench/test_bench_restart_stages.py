"""The stages of a restart are read from the journal and the ranks' own marks."""

from __future__ import annotations

from outlast.bench.restart import stages_of
from outlast.incidents import Event, EventKind


def event(kind: EventKind, mono_ns: int, cycle: int, rank: int | None = None) -> Event:
    return Event(
        kind=kind, wall_ns=0, mono_ns=mono_ns, run_id="r", job="j", node="n", proc="agent", cycle=cycle, rank=rank
    )


MARKS = {
    0: {"pid": 5, "begun_ns": 40_000_000, "joined_ns": 60_000_000, "reduced_ns": 70_000_000},
    1: {"pid": 6, "begun_ns": 45_000_000, "joined_ns": 55_000_000, "reduced_ns": 71_000_000},
}


def test_each_stage_ends_with_its_last_rank() -> None:
    """A stage is over when it is over for the last rank; the death is noticed when the killed rank's end is."""
    events = [
        event(EventKind.CYCLE_STARTED, 1_000_000, 0),
        event(EventKind.WORKER_EXITED, 16_000_000, 0, rank=1),
        event(EventKind.WORKER_EXITED, 20_000_000, 0, rank=0),
        event(EventKind.CYCLE_STARTED, 30_000_000, 1),
        event(EventKind.WORKER_EXITED, 99_000_000, 1, rank=1),
    ]
    assert stages_of(10_000_000, MARKS, events) == {
        "noticed": 0.006,
        "all ended": 0.010,
        "started": 0.020,
        "script begun": 0.035,
        "group joined": 0.050,
        "all-reduced": 0.061,
    }


def test_a_launcher_without_a_journal_has_the_ranks_stages_alone() -> None:
    """Of torchrun only what the script itself says is told; nothing is made up for the rest."""
    assert list(stages_of(10_000_000, MARKS, [])) == ["script begun", "group joined", "all-reduced"]
