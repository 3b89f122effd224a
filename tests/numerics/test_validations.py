"""Outcomes of the validations of two runs, for all results."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from outlast.config import RerunStateMachineConfig
from outlast.env import WorkerEnv
from outlast.numerics.validation import StepValidation
from outlast.policy.rerun import Action, RunOutcome, StepRun, advance

RUNS = st.lists(st.tuples(st.sampled_from([1.0, 2.0, math.nan, math.inf]), st.booleans()), max_size=4)
"""Results of a run, each with whether its validation is fatal; results that are not finite are rejected."""


def run(validation: StepValidation, results: list[tuple[float, bool]]) -> RunOutcome:
    for value, fatal in results:
        validation.take_result(value, lambda result: not math.isfinite(result), "value", fatal=fatal)
    judged = validation.judge()
    return RunOutcome.VALID if judged is None else judged.outcome


@given(RUNS, RUNS)
def test_no_rejected_result_is_trained_on(first: list[tuple[float, bool]], second: list[tuple[float, bool]]) -> None:
    """Training continues only with a run that has no fatal rejection, that reached each fatal validation that had
    failed, and in which none of these had the same result."""
    validation = StepValidation(RerunStateMachineConfig(), WorkerEnv(), "cpu")
    validation.begin_step(0)
    transition = advance(StepRun.FIRST_RUN, run(validation, first))
    if transition.action is Action.GO_ON:
        assert all(math.isfinite(value) for value, _ in first)
        return
    validation.begin_second_run()
    transition = advance(transition.state, run(validation, second))
    if transition.action is Action.GO_ON:
        assert not any(fatal and not math.isfinite(value) for value, fatal in second)
        for call, (value, fatal) in enumerate(first):
            if fatal and not math.isfinite(value):
                assert call < len(second)
                assert math.isfinite(second[call][0])


@given(RUNS)
def test_run_without_a_rejection_is_valid(results: list[tuple[float, bool]]) -> None:
    """A run without a rejection is valid, and one with any is not."""
    validation = StepValidation(RerunStateMachineConfig(), WorkerEnv(), "cpu")
    validation.begin_step(0)
    bad = any(not math.isfinite(value) for value, _ in results)
    assert run(validation, results) is (RunOutcome.NEW if bad else RunOutcome.VALID)
