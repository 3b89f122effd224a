"""What two runs' validations amount to, whatever they gave."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from outlast.numerics.validations import Validations
from outlast.policy.rerun_table import Action, Outcome, RunState, advance

RUNS = st.lists(st.tuples(st.sampled_from([1.0, 2.0, math.nan, math.inf]), st.booleans()), max_size=4)
"""Results of a run with whether each of their validations is fatal; those that are not finite are rejected."""


def run(validations: Validations, results: list[tuple[float, bool]]) -> Outcome:
    for value, fatal in results:
        call = validations.next_call()
        validations.take(call, "value", value, None if math.isfinite(value) else "bad", fatal=fatal)
    judged = validations.judge()
    return Outcome.VALID if judged is None else judged.outcome


@given(RUNS, RUNS)
def test_no_rejected_result_is_trained_on(first: list[tuple[float, bool]], second: list[tuple[float, bool]]) -> None:
    """Training goes on only with a run without a fatal rejection, that reached each fatal validation that had failed,
    and in which none of these came out the same.
    """
    validations = Validations()
    validations.begin_step(RunState.FIRST_RUN)
    transition = advance(RunState.FIRST_RUN, run(validations, first))
    if transition.action is Action.GO_ON:
        assert all(math.isfinite(value) for value, _ in first)
        return
    validations.begin_second_run()
    transition = advance(transition.state, run(validations, second))
    if transition.action is Action.GO_ON:
        assert not any(fatal and not math.isfinite(value) for value, fatal in second)
        for call, (value, fatal) in enumerate(first):
            if fatal and not math.isfinite(value):
                assert call < len(second)
                assert math.isfinite(second[call][0])


@given(RUNS)
def test_valid_runs_say_nothing(results: list[tuple[float, bool]]) -> None:
    """A run without a rejection is valid, and one with any is not."""
    validations = Validations()
    validations.begin_step(RunState.FIRST_RUN)
    bad = any(not math.isfinite(value) for value, _ in results)
    assert run(validations, results) is (Outcome.NEW if bad else Outcome.VALID)
