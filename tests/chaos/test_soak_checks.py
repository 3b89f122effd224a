"""How long a soak trains, and its checks of journals and results."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.chaos import Fault, FaultKind, FaultPlan
from outlast.chaos.soak import (
    CALIBRATION,
    MAX_ATTEMPTS,
    count_iterations,
    find_differences,
    find_example,
    find_gaps,
    measure_step_s,
    next_iterations,
)
from outlast.errors import OutlastError
from outlast.incidents import Event, EventKind


def event(kind: EventKind, at_s: float = 0, *, cycle: int = 0, **fields: Any) -> Event:
    ns = round(at_s * 1e9)
    given = {name: fields.pop(name) for name in ("rank", "iteration") if name in fields}
    names: dict[str, Any] = {"run_id": "r", "job": "j", "node": "n", "proc": "p"}
    return Event(kind=kind, wall_ns=ns, mono_ns=ns, cycle=cycle, data=fields, **names, **given)


def test_a_training_that_ends_too_early_is_repeated_twice_as_long() -> None:
    """But not for ever, and not where something else is wrong."""
    early = ["faults[0] was not injected"]
    assert next_iterations(100, 1, problems=[], missing=early) == 200
    assert next_iterations(200, 2, problems=[], missing=early) == 400
    assert next_iterations(400, MAX_ATTEMPTS, problems=[], missing=early) is None
    assert next_iterations(100, 1, problems=["the results differ"], missing=early) is None
    assert next_iterations(100, 1, problems=[], missing=[]) is None


def test_faults_that_cost_a_restart_leave_less_time_to_train() -> None:
    """A plan of gentle faults trains for more iterations; steps that take twice as long halve their number."""
    gentle, harsh = (
        FaultPlan(faults=tuple(Fault(kind=kind, at_s=5.0, **more) for _ in range(4)))
        for kind, more in ((FaultKind.CORRUPT_COPY, {"tier": "local"}), (FaultKind.KILL, {}))
    )
    assert count_iterations(gentle, 1, 0.1) > count_iterations(harsh, 1, 0.1) > 0
    assert count_iterations(harsh, 1, 0.2) == pytest.approx(count_iterations(harsh, 1, 0.1) / 2, abs=1)


def test_the_duration_of_a_step_is_that_between_the_first_one_and_the_end() -> None:
    """A training that did not end is an error that names where its output is."""
    events = [event(EventKind.PROGRESS, 10, rank=0, iteration=1), event(EventKind.SESSION_ENDED, 14, rank=0)]
    assert measure_step_s(events) == pytest.approx(4 / (CALIBRATION - 1))
    with pytest.raises(OutlastError, match="did not end"):
        measure_step_s(events[:1])


def test_a_journal_without_an_end_or_with_lost_events_is_not_whole() -> None:
    """The ends of each job and of each cycle that had workers."""
    whole = [event(EventKind.CYCLE_STARTED), event(EventKind.CYCLE_ENDED), event(EventKind.JOB_ENDED)]
    assert find_gaps(whole) == []
    assert find_gaps(whole[:2]) == ["the journal has no end of job j"]
    assert find_gaps([*whole, event(EventKind.CYCLE_STARTED, cycle=1)]) == [
        "the journal has no end of cycle 1 of job j"
    ]
    assert find_gaps([*whole, event(EventKind.EVENTS_LOST, num=3)]) == ["3 events of the journal are lost"]


def test_results_differ_in_what_is_not_equal_or_missing() -> None:
    """The digests must be in both."""
    result = {"weights": "a", "optimizer": "b", "losses": "c"}
    assert find_differences(result, dict(result)) == []
    assert find_differences(result, {**result, "losses": "d"}) == ["losses"]
    assert find_differences(result, {"weights": "a", "more": 1}) == ["optimizer", "losses", "more"]


def test_it_trains_the_example_that_users_copy() -> None:
    """The script is the one in examples/, not a copy of it."""
    assert find_example().parts[-2:] == ("examples", "train_gpt.py")
