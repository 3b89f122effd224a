"""How all ranks left when one was told to, read from events as a run writes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from written_events import written

from outlast.demo.outcome import Leaving, find_leaving, find_strikes, read_ledger, unkept_of_leaving
from outlast.demo.plan import Deed
from outlast.incidents import Event, EventKind

RANKS = (0, 1, 2, 3)


def event(kind: EventKind, at_s: float, *, job: str = "first", rank: int | None = None, **data: Any) -> Event:
    node, cycle = f"node-{(rank or 0) // 2}", 3 if job == "first" else 0
    proc = "demo" if kind == EventKind.FAULT_SIMULATED else "agent" if rank is None else f"rank-{rank}"
    return written(kind, at_s, job=job, on=node, proc=proc, cycle=cycle, rank=rank, **data)


def saved(at_s: float, iteration: int, *tiers: str) -> list[Event]:
    return [event(EventKind.SAVE_COMMITTED, at_s, rank=rank, iteration=iteration, tiers=list(tiers)) for rank in RANKS]


def run() -> list[Event]:
    """Return the end of a job in which rank 2 is preempted, and the next job."""
    fault: dict[str, Any] = {"fault": str(Deed.LEAVE), "target": "rank 2 (pid 7)", "expected": None, "node": "node-1"}
    following: list[Event] = [event(EventKind.CYCLE_STARTED, 13, job="second", ranks=[0, 1, 2, 3], world_size=4)]
    for rank in RANKS:
        tier: dict[str, Any] = {"tier": "local", "bytes_read": {"local": 100}}
        following += [
            event(EventKind.RESTORED, 14, job="second", rank=rank, iteration=87, **tier),
            event(EventKind.PROGRESS, 14.1 + rank / 10, job="second", rank=rank, iteration=88),
        ]
    return [
        *saved(8, 80, "global"),
        event(EventKind.FAULT_SIMULATED, 10, rank=2, iteration=86, **fault),
        event(EventKind.NOTICE, 10.002, rank=2, reason="signal 15"),
        *saved(10.2, 87, "local"),
        *saved(10.3, 87, "global"),
        *(event(EventKind.SESSION_ENDED, 10.4 + rank / 10, rank=rank, iteration=87, exit_code=75) for rank in RANKS),
        *(event(EventKind.JOB_ENDED, 11, exit_code=75) for _ in range(2)),
        *following,
        event(EventKind.JOB_ENDED, 16, job="second", exit_code=0),
    ]


def found(events: list[Event]) -> Leaving:
    leaving = find_leaving(read_ledger(events), events)
    assert leaving is not None
    return leaving


def test_what_was_kept_is_read_from_both_jobs() -> None:
    """From the signal to the notice, to the last rank's end, and to the last rank's first iteration of the next job."""
    leaving = found(run())
    assert (leaving.rank, leaving.node, leaving.struck_at) == (2, "node-1", 86)
    assert leaving.noticed_after_s == pytest.approx(0.002)
    assert leaving.left_after_s == pytest.approx(0.7)
    assert leaving.going_on_after_s == pytest.approx(4.4)
    assert (leaving.iteration, leaving.saved_by, leaving.lost_iterations) == (87, {87: 4}, 0)
    assert (leaving.run_exit_codes, leaving.next_exit_codes) == ((75,), (0,))
    assert leaving.sources is not None
    assert leaving.sources.num_ranks == {"local": 4}
    assert unkept_of_leaving(leaving, world_size=4) == ()


def test_a_notice_is_no_incident_that_a_verdict_must_name() -> None:
    """It is accounted for here alone."""
    assert find_strikes(run()) == []


def test_a_periodic_save_on_the_way_is_none_too_many() -> None:
    """The generation of the iteration after which all left is the newest one."""
    events = run()
    events[5:5] = saved(10.1, 86, "global")
    assert unkept_of_leaving(found(events), world_size=4) == ()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"noticed_after_s": None}, "rank 2 did not notice it"),
        ({"left_at": {0: 87, 1: 87, 2: 87, 3: 88}}, "not all ranks left after the same iteration"),
        ({"left_at": {0: 87}}, "not all ranks left after the same iteration: rank 0: 87"),
        ({"exit_codes": {0: 75, 1: 1, 2: 75, 3: 75}}, "rank 1: 1"),
        ({"run_exit_codes": (75, 143)}, "the run's exit code was 75 or 143"),
        ({"saved_by": {87: 3}}, "iteration 87 should be committed by 4 ranks: iteration 87 by 3"),
        ({"saved_by": {}}, "nothing was"),
        ({"resumed_at": {0: 80, 1: 80, 2: 80, 3: 80}}, "instead of 87"),
        ({"resumed_at": {}, "next_exit_codes": ()}, "went on from nowhere instead of 87"),
        ({"next_exit_codes": (1,)}, "the next job's exit code was 1"),
    ],
)
def test_what_was_not_kept_is_told(changes: dict[str, Any], part: str) -> None:
    """Each promise by itself."""
    told = unkept_of_leaving(dataclasses.replace(found(run()), **changes), world_size=4)
    assert any(part in line for line in told)
    assert all(line.startswith("SIGTERM of a rank at iteration 86: ") for line in told)


def test_a_run_that_nobody_was_told_to_leave_is_told() -> None:
    """The demo must have come to it."""
    others = [event for event in run() if event.kind != EventKind.FAULT_SIMULATED]
    assert find_leaving(read_ledger(others), others) is None
    assert unkept_of_leaving(None, world_size=4) == ("no rank was preempted",)


def test_without_a_next_job_nothing_is_made_up() -> None:
    """What did not happen is missing."""
    leaving = found([event for event in run() if event.job == "first"])
    assert (leaving.resumed_at, leaving.sources, leaving.going_on_after_s, leaving.lost_iterations) == (
        {},
        None,
        None,
        None,
    )
