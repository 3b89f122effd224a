"""The duration of a soak's training, and its checks of journals and results."""

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


def test_a_training_that_is_too_short_is_repeated_longer() -> None:
    """A training that ends too early is repeated with twice the length, a limited number of times and only for this
    reason."""
    early = ["faults[0] was not injected"]
    assert next_iterations(100, 1, problems=[], missing=early) == 200
    assert next_iterations(200, 2, problems=[], missing=early) == 400
    assert next_iterations(400, MAX_ATTEMPTS, problems=[], missing=early) is None
    assert next_iterations(100, 1, problems=["the results differ"], missing=early) is None
    assert next_iterations(100, 1, problems=[], missing=[]) is None


def test_restarting_faults_reduce_the_iterations() -> None:
    """A plan without restarts trains for more iterations; steps that take twice as long halve their number."""
    gentle, harsh = (
        FaultPlan(faults=tuple(Fault(kind=kind, at_s=5.0, **more) for _ in range(4)))
        for kind, more in ((FaultKind.CORRUPT_COPY, {"tier": "local"}), (FaultKind.KILL, {}))
    )
    assert count_iterations(gentle, 1, 0.1) > count_iterations(harsh, 1, 0.1) > 0
    assert count_iterations(harsh, 1, 0.2) == pytest.approx(count_iterations(harsh, 1, 0.1) / 2, abs=1)


def test_step_duration_counts_from_the_first_step_to_the_end() -> None:
    """A training that did not end is an error that names the location of its output."""
    events = [event(EventKind.PROGRESS, 10, rank=0, iteration=1), event(EventKind.SESSION_ENDED, 14, rank=0)]
    assert measure_step_s(events) == pytest.approx(4 / (CALIBRATION - 1))
    with pytest.raises(OutlastError, match="did not end"):
        measure_step_s(events[:1])


def test_an_incomplete_journal_is_reported() -> None:
    """A complete journal has the end of each job and of each cycle that had workers, and no lost events."""
    complete = [event(EventKind.CYCLE_STARTED), event(EventKind.CYCLE_ENDED), event(EventKind.JOB_ENDED)]
    assert find_gaps(complete) == []
    assert find_gaps(complete[:2]) == ["the journal has no end of job j"]
    assert find_gaps([*complete, event(EventKind.CYCLE_STARTED, cycle=1)]) == [
        "the journal has no end of cycle 1 of job j"
    ]
    assert find_gaps([*complete, event(EventKind.EVENTS_LOST, num=3)]) == ["3 events of the journal are lost"]


def test_missing_or_unequal_digests_are_differences() -> None:
    """Each digest must be present in both results, and equal."""
    result = {"weights": "a", "optimizer": "b", "losses": "c"}
    assert find_differences(result, dict(result)) == []
    assert find_differences(result, {**result, "losses": "d"}) == ["losses"]
    assert find_differences(result, {"weights": "a", "more": 1}) == ["optimizer", "losses", "more"]


def test_the_soak_trains_the_published_example() -> None:
    """The script is the one in examples/, not a copy."""
    assert find_example().parts[-2:] == ("examples", "train_gpt.py")
