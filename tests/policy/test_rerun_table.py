"""Properties of the rerun state machine's transition table, for all reports of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.rerun import TABLE, Action, Finding, RunOutcome, StepRun, advance, replay_state

OUTCOMES = st.lists(st.sampled_from(RunOutcome), min_size=1, max_size=40)
STATES = st.sampled_from(list(TABLE))
MAY_CONTINUE = {RunOutcome.VALID, RunOutcome.CLEARED, RunOutcome.TOLERATED}


def walk(state: StepRun, outcomes: list[RunOutcome]) -> Iterator[tuple[StepRun, RunOutcome, Action]]:
    """Yield the actions run by run, until the process ends."""
    for outcome in outcomes:
        transition = advance(state, outcome)
        yield state, outcome, transition.action
        if transition.state is StepRun.LEFT:
            return
        state = transition.state


@given(STATES, OUTCOMES)
def test_rejected_results_are_never_trained_on(start: StepRun, outcomes: list[RunOutcome]) -> None:
    """A step continues only after a run in which no fatal validation was rejected or undecided."""
    for state, outcome, action in walk(start, outcomes):
        if action is Action.GO_ON:
            assert outcome in MAY_CONTINUE
            assert outcome is not RunOutcome.VALID or state is StepRun.FIRST_RUN


@given(STATES, OUTCOMES)
def test_step_is_rerun_at_most_once(start: StepRun, outcomes: list[RunOutcome]) -> None:
    """No two consecutive runs end in another in-place run."""
    actions = [action for _, _, action in walk(start, outcomes)]
    assert (Action.RUN_AGAIN, Action.RUN_AGAIN) not in set(pairwise(actions))


@given(STATES, OUTCOMES)
def test_every_step_ends_within_two_runs(start: StepRun, outcomes: list[RunOutcome]) -> None:
    """Every step ends within two runs, by continuing or exiting; a replay is never followed by an in-place run."""
    num_runs = 0
    for state, _, action in walk(start, outcomes):
        num_runs = num_runs + 1
        assert num_runs <= 2
        if state not in (StepRun.FIRST_RUN, StepRun.SECOND_RUN):
            assert num_runs == 1
            assert action is not Action.RUN_AGAIN
        if action is not Action.RUN_AGAIN:
            num_runs = 0


def test_valid_step_leaves_the_state_unchanged() -> None:
    """A step without a rejection leaves the state unchanged and has no finding."""
    transition = advance(StepRun.FIRST_RUN, RunOutcome.VALID)
    assert transition == (StepRun.FIRST_RUN, Action.GO_ON, None)


@pytest.mark.parametrize("state", list(TABLE))
@pytest.mark.parametrize("outcome", list(RunOutcome))
def test_table_is_complete(state: StepRun, outcome: RunOutcome) -> None:
    """Every outcome has an action; each exit has a finding and an exit code and ends the process."""
    transition = advance(state, outcome)
    exits = transition.state is StepRun.LEFT
    assert exits == (transition.action.exit_code is not None)
    assert not exits or transition.finding is not None
    assert transition.action is not Action.SAVE_AND_EXIT or state is StepRun.SECOND_RUN


def test_step_after_the_end_is_stopped() -> None:
    """A process that runs another step after it was to exit is stopped."""
    with pytest.raises(ValueError, match="no step follows"):
        advance(StepRun.LEFT, RunOutcome.VALID)


@given(st.integers(0, 5), st.integers(0, 20))
def test_replays_on_the_same_device_are_bounded(max_tries: int, tries: int) -> None:
    """Reproduced results are replayed on the device up to the limit."""
    state = replay_state(same_device=True, tries=tries, max_tries=max_tries)
    code = advance(state, RunOutcome.REPRODUCED).action.exit_code
    assert code == (16 if tries + 1 < max_tries else 17)


def test_replay_on_another_device_decides() -> None:
    """Valid on another device: the first device is at fault. Invalid there too: the result is correct. Neither restarts
    again."""
    state = replay_state(same_device=False, tries=0, max_tries=2)
    found = {outcome: advance(state, outcome) for outcome in RunOutcome}
    assert {transition.action for transition in found.values()} == {Action.STOP}
    assert found[RunOutcome.CLEARED].finding is Finding.PERSISTENT
    assert found[RunOutcome.REPRODUCED].finding is found[RunOutcome.CHANGED].finding is Finding.CORRECT
    assert found[RunOutcome.NEW].finding is Finding.UNDECIDED
    assert found[RunOutcome.UNREACHED].finding is Finding.UNREACHED
