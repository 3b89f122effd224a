"""The re-run machine's table: what it never does, whatever the ranks report."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.rerun import TABLE, Action, Finding, RunOutcome, StepRun, advance, replay_state

OUTCOMES = st.lists(st.sampled_from(RunOutcome), min_size=1, max_size=40)
STATES = st.sampled_from(list(TABLE))
MAY_GO_ON = {RunOutcome.VALID, RunOutcome.CLEARED, RunOutcome.TOLERATED}


def walk(state: StepRun, outcomes: list[RunOutcome]) -> Iterator[tuple[StepRun, RunOutcome, Action]]:
    """Yield what is done, run by run, until the process ends."""
    for outcome in outcomes:
        transition = advance(state, outcome)
        yield state, outcome, transition.action
        if transition.state is StepRun.LEFT:
            return
        state = transition.state


@given(STATES, OUTCOMES)
def test_rejected_results_are_never_trained_on(start: StepRun, outcomes: list[RunOutcome]) -> None:
    """Whatever is reported, a step goes on only after a run in which nothing fatal was rejected or left open."""
    for state, outcome, action in walk(start, outcomes):
        if action is Action.GO_ON:
            assert outcome in MAY_GO_ON
            assert outcome is not RunOutcome.VALID or state is StepRun.FIRST_RUN


@given(STATES, OUTCOMES)
def test_a_step_is_run_again_at_most_once(start: StepRun, outcomes: list[RunOutcome]) -> None:
    """No two runs in a row end in another run in place."""
    actions = [action for _, _, action in walk(start, outcomes)]
    assert (Action.RUN_AGAIN, Action.RUN_AGAIN) not in set(pairwise(actions))


@given(STATES, OUTCOMES)
def test_nothing_goes_round_in_circles(start: StepRun, outcomes: list[RunOutcome]) -> None:
    """Every step ends within two runs, by going on or by leaving; a replay is never followed by one in place."""
    num_runs = 0
    for state, _, action in walk(start, outcomes):
        num_runs = num_runs + 1
        assert num_runs <= 2
        if state not in (StepRun.FIRST_RUN, StepRun.SECOND_RUN):
            assert num_runs == 1
            assert action is not Action.RUN_AGAIN
        if action is not Action.RUN_AGAIN:
            num_runs = 0


def test_quiet_path_comes_back_to_where_it_was() -> None:
    """A step with nothing to say leaves the machine as it found it, and finds nothing."""
    transition = advance(StepRun.FIRST_RUN, RunOutcome.VALID)
    assert transition == (StepRun.FIRST_RUN, Action.GO_ON, None)


@pytest.mark.parametrize("state", list(TABLE))
@pytest.mark.parametrize("outcome", list(RunOutcome))
def test_every_outcome_has_an_answer(state: StepRun, outcome: RunOutcome) -> None:
    """The table is complete; who leaves is told a finding and an exit code, and leaving and the end are one."""
    transition = advance(state, outcome)
    leaves = transition.state is StepRun.LEFT
    assert leaves == (transition.action.exit_code is not None)
    assert not leaves or transition.finding is not None
    assert transition.action is not Action.SAVE_AND_EXIT or state is StepRun.SECOND_RUN


def test_nothing_follows_the_end() -> None:
    """Who was to leave and runs another step is stopped."""
    with pytest.raises(ValueError, match="no step follows"):
        advance(StepRun.LEFT, RunOutcome.VALID)


@given(st.integers(0, 5), st.integers(0, 20))
def test_replays_on_the_same_device_come_to_an_end(max_tries: int, tries: int) -> None:
    """However often it is reproduced, the device's replays end with the one that reaches the limit."""
    state = replay_state(same_device=True, tries=tries, max_tries=max_tries)
    code = advance(state, RunOutcome.REPRODUCED).action.exit_code
    assert code == (16 if tries + 1 < max_tries else 17)


def test_another_device_decides() -> None:
    """Valid elsewhere: that device is at fault; invalid elsewhere: the result is correct; never another restart."""
    state = replay_state(same_device=False, tries=0, max_tries=2)
    found = {outcome: advance(state, outcome) for outcome in RunOutcome}
    assert {transition.action for transition in found.values()} == {Action.STOP}
    assert found[RunOutcome.CLEARED].finding is Finding.PERSISTENT
    assert found[RunOutcome.REPRODUCED].finding is found[RunOutcome.CHANGED].finding is Finding.CORRECT
    assert found[RunOutcome.NEW].finding is Finding.UNDECIDED
    assert found[RunOutcome.UNREACHED].finding is Finding.UNREACHED
