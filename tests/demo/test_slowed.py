"""Whether a slowed rank was named, read from events as a run writes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from written_events import written

from outlast.demo.outcome import Slowed, find_slowed, named_ranks, unkept_of_slowed
from outlast.demo.plan import Deed
from outlast.incidents import Event, EventKind, Incident, IncidentKind


def event(kind: EventKind, at_s: float, **data: Any) -> Event:
    return written(kind, at_s, on="node-1", proc="rank-0", rank=0, **data)


def report(at_s: float, iteration: int, *named: int, cycle: int = 0) -> Event:
    return event(EventKind.STRAGGLER_REPORT, at_s, cycle=cycle, iteration=iteration, named=list(named))


def run(since: int = 2) -> list[Event]:
    """Return a cycle in which rank 3 is slow and is named in the third report, and the cycle after it."""
    evidence = {"summary": "Rank=3 takes 6 times as long", "ratio": 6.0}
    found = Incident(kind=IncidentKind.STRAGGLER, node="node-1", rank=3, section="forward", evidence=evidence)
    struck = event(EventKind.FAULT_SIMULATED, 1, iteration=since, fault=str(Deed.SLOW), target="rank 3")
    return [
        msgspec.structs.replace(struck, rank=3),
        report(2, 8),
        report(3, 13),
        report(4, 18, 3),
        event(EventKind.INCIDENT, 4, iteration=18, incident=msgspec.to_builtins(found)),
        report(5, 23, 3),
        event(EventKind.CYCLE_ENDED, 6, iterations={"2": 24, "3": 24}),
        report(9, 33, cycle=1),
    ]


def found(events: list[Event]) -> Slowed:
    slowed = find_slowed(events)
    assert slowed is not None
    return slowed


def test_the_report_that_names_it_is_counted() -> None:
    """From the first on when it was slow from the start; with when, where and by how much."""
    slowed = found(run())
    assert (slowed.rank, slowed.node, slowed.since, slowed.until) == (3, "node-1", 2, 24)
    assert (slowed.num_reports, slowed.noticed_after_s) == (3, pytest.approx(3.0))
    assert (slowed.section, slowed.ratio, slowed.evidence) == ("forward", 6.0, "Rank=3 takes 6 times as long")
    assert (slowed.others_named, slowed.restarts) == ((), 0)
    assert unkept_of_slowed(slowed) == ()


def test_a_window_in_which_it_became_slow_does_not_count() -> None:
    """Only those in which it was slow all the time."""
    assert found(run(since=10)).num_reports == 1


def test_somebody_else_in_any_report_is_told() -> None:
    """In the same report, in one before it, or in another cycle, where the slow rank itself is somebody else, too."""
    assert named_ranks(run()) == (3,)
    for other in (report(2.5, 10, 1), report(4.5, 20, 3, 1), report(9.5, 35, 1, cycle=1)):
        slowed = found([*run(), other])
        assert slowed.others_named == (1,)
        assert any("rank 1 was named, too" in line for line in unkept_of_slowed(slowed))
    assert found([*run(), report(9.5, 35, 3, cycle=1)]).others_named == (3,)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_reports": None}, "it was never named"),
        ({"num_reports": 4}, "it was named in report 4 only, and should be within 3"),
        ({"restarts": 1}, "it was restarted for being slow"),
    ],
)
def test_what_was_not_kept_is_told(changes: dict[str, Any], part: str) -> None:
    """Each promise by itself."""
    (line,) = unkept_of_slowed(dataclasses.replace(found(run()), **changes))
    assert line == f"slow forward of a rank, rank 3: {part}"


def test_a_restart_for_it_is_counted() -> None:
    """With ``stop_if_detected`` all ranks would leave with 18."""
    left = Incident(kind=IncidentKind.WORKER_FAILED, node="node-1", rank=3, exit_code=18)
    verdict = event(EventKind.VERDICT, 5.5, incident=msgspec.to_builtins(left), verdict={})
    assert found([*run(), verdict]).restarts == 1


def test_a_run_in_which_nobody_was_slow_is_told() -> None:
    """The demo must have come to it; without a name nothing is made up."""
    assert find_slowed([]) is None
    assert unkept_of_slowed(None) == ("no rank was slowed down",)
    slowed = found(run()[:3])
    assert (slowed.num_reports, slowed.noticed_after_s, slowed.section, slowed.until) == (None, None, None, None)
