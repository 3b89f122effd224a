"""Determinism reports: two runs of every step are compared, and their differences counted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rerun_training import Training, assert_same

from outlast.config import RerunStateMachineConfig
from outlast.env import WorkerEnv
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.numerics import RerunStateMachine
from outlast.numerics.rerun_machine import RerunMachine
from outlast.numerics.validation import DifferenceCounts, describe_differences
from outlast.runtime.journal import Journal

TWICE = RerunStateMachineConfig(rerun_mode="report_determinism_stats")


def test_deterministic_training_has_no_differences() -> None:
    """Dropout, BatchNorm and random data are equal in both runs, weights too."""
    training = Training(TWICE).steps(6)
    (loss,) = training.machine.report().values()
    assert (loss.num_compared, loss.num_different, loss.maximum) == (12, 0, 0.0)
    assert_same(Training().steps(6), training)


def test_nondeterministic_operation_is_reported() -> None:
    """An operation with a different result each time is reported with the name of the validation and the difference."""
    noise = iter(range(1, 1000))

    def disturb(iteration: int, run: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * (1 + 1e-4 * next(noise)) if iteration % 2 else loss

    training = Training(TWICE, disturb=disturb).steps(8)
    report = training.machine.report()
    assert report.keys() == {"loss"}
    assert (report["loss"].num_compared, report["loss"].num_different) == (16, 8)
    assert report["loss"].p50 == 0.0
    assert report["loss"].maximum == pytest.approx(2e-4, rel=0.01)


def test_determinism_mode_rejects_no_result() -> None:
    """A NaN in both runs is not a difference, and does not end the process."""
    machine = RerunStateMachine(TWICE)
    machine.begin_step(0)
    runs = 0
    while machine.should_run():
        runs += 1
        machine.validate(math.nan)
        machine.validate_result(torch.tensor(math.nan), torch.isnan, "other")
    assert runs == 2
    assert machine.decision.exit_code is None
    assert [one.num_different for one in machine.report().values()] == [0, 0]


def test_validations_of_one_run_only_are_counted() -> None:
    """A validation that only one of the runs reached is reported."""
    machine = RerunStateMachine(TWICE)
    machine.begin_step(0)
    number = iter([2, 1])
    while machine.should_run():
        for call in range(next(number)):
            machine.validate(1.0, f"value {call}")
    report = machine.report()
    assert report["value 1"].num_unreached == 1
    assert "(1 were reached by one run only)" in describe_differences(report)


def test_report_is_written_to_the_journal(tmp_path: Path) -> None:
    """The report is an event, including infinite differences."""
    journal = Journal(tmp_path, run_id="r", job="j", node="n", proc="rank-0")
    machine = RerunMachine(WorkerEnv(), journal, config=TWICE)
    machine.begin_step(0)
    values = iter([1.0, math.nan])
    while machine.should_run():
        machine.validate(next(values))
    machine.report()
    journal.close()
    (event,) = [event for event in read(tmp_path) if event.kind is EventKind.DETERMINISM_REPORT]
    assert event.data["report"]["loss"]["maximum"] == "inf"


@given(st.lists(st.sampled_from([0.0, 0.0, 1e-7, 1e-3, 0.5]), min_size=1, max_size=300))
def test_percentiles_are_of_all_comparisons(differences: list[float]) -> None:
    """Each percentile is the smallest difference that its share of all comparisons does not exceed."""
    counts = DifferenceCounts()
    for difference in differences:
        counts.add(difference)
    one = counts.summary()
    ordered = sorted(differences)
    for share, value in ((0.5, one.p50), (0.9, one.p90), (0.99, one.p99), (0.999, one.p99_9)):
        assert value == ordered[math.ceil(share * len(ordered)) - 1]
    assert one.maximum == ordered[-1]
    assert one.mean == pytest.approx(sum(ordered) / len(ordered))


def test_memory_for_differences_is_bounded() -> None:
    """For any number of differences, percentiles stay accurate and the stored data stays bounded."""
    counts = DifferenceCounts()
    for number in range(300_000):
        counts.add((number % 1000 + 1) / 1000)
    one = counts.summary()
    assert one.num_different == 300_000
    assert one.p50 == pytest.approx(0.5, abs=0.02)
    assert one.p99 == pytest.approx(0.99, abs=0.02)
