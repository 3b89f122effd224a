"""Re-queueing: by the exit-code table, failures within a budget, a finished run never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.requeue import SHUTDOWN_SIGNALS, JobEnd, RequeueState, rule

FRESH = RequeueState()


@pytest.mark.parametrize("exit_code", [0, 2, 17, 93])
def test_what_is_done_or_needs_a_person_stays_ended(exit_code: int) -> None:
    """A finished run, bad input, a judged result and a spent budget are never re-queued."""
    ruling = rule(FRESH, JobEnd(exit_code=exit_code), num_job_retries_on_failure=100)
    assert not ruling.requeue
    assert ruling.reason


@pytest.mark.parametrize("stopped_with", [17, 93])
def test_what_needs_a_person_counts_even_behind_another_tasks_code(stopped_with: int) -> None:
    """A node that stayed outside ends with 19, which is higher than the 17 of the others: the run's own record is
    asked as well."""
    ruling = rule(FRESH, JobEnd(exit_code=19, stopped_with=stopped_with), num_job_retries_on_failure=100)
    assert not ruling.requeue
    assert f"exit code {stopped_with}" in ruling.reason


@pytest.mark.parametrize("exit_code", [75, *SHUTDOWN_SIGNALS])
def test_who_was_told_to_leave_comes_back_as_often_as_it_takes(exit_code: int) -> None:
    """Being told to leave is charged to no budget."""
    state = FRESH
    for _ in range(50):
        ruling = rule(state, JobEnd(exit_code=exit_code), num_job_retries_on_failure=0)
        assert ruling.requeue
        state = ruling.state
    assert state == FRESH


@pytest.mark.parametrize("exit_code", [1, 16, 18, 19, 134, 137, 255])
def test_failures_have_a_budget(exit_code: int) -> None:
    """Failures, an invalid result to disambiguate and a bad node among them, are re-queued as often as allowed
    and no more."""
    state, answers = FRESH, []
    for _ in range(5):
        ruling = rule(state, JobEnd(exit_code=exit_code), num_job_retries_on_failure=2)
        answers.append(ruling.requeue)
        state = ruling.state
    assert answers == [True, True, False, False, False]
    assert "all 2 retries are used" in ruling.reason
    none = rule(FRESH, JobEnd(exit_code=exit_code), num_job_retries_on_failure=0)
    assert (none.requeue, "no retry is allowed" in none.reason) == (False, True)


def test_progress_gives_retries_back_and_time_does_not() -> None:
    """A durable checkpoint at a higher iteration than ever resets the budget; the same one again does not."""
    spent = RequeueState(failures=2, best_durable=100)
    same = rule(spent, JobEnd(exit_code=1, durable_iteration=100), num_job_retries_on_failure=2)
    assert not same.requeue
    further = rule(spent, JobEnd(exit_code=1, durable_iteration=101), num_job_retries_on_failure=2)
    assert (further.requeue, further.state.failures, further.state.best_durable) == (True, 1, 101)


def test_preemption_in_between_gives_no_retries_back() -> None:
    """A job that was told to leave between two failures does not lengthen the budget."""
    state = FRESH
    for code in (1, 75, 1, 75):
        state = rule(state, JobEnd(exit_code=code), num_job_retries_on_failure=2).state
    assert not rule(state, JobEnd(exit_code=1), num_job_retries_on_failure=2).requeue


def test_quarantined_nodes_add_up() -> None:
    """Nodes that one job quarantined stay excluded in all later ones."""
    state = rule(FRESH, JobEnd(exit_code=75, quarantined=("n1",)), num_job_retries_on_failure=2).state
    state = rule(state, JobEnd(exit_code=75, quarantined=("n2", "n1")), num_job_retries_on_failure=2).state
    assert state.excluded == ("n1", "n2")


ENDS = st.builds(
    JobEnd,
    exit_code=st.integers(0, 255),
    finished=st.booleans(),
    durable_iteration=st.none() | st.integers(0, 50),
    quarantined=st.lists(st.sampled_from(["a", "b"]), max_size=2).map(tuple),
)


@given(st.lists(ENDS, max_size=40), st.integers(0, 4))
def test_no_history_of_jobs_loops(ends: list[JobEnd], limit: int) -> None:
    """Whatever happens: a finished run is never re-queued, and without progress at most N failures in a row are."""
    state, failures = FRESH, 0
    for end in ends:
        best = state.best_durable
        ruling = rule(state, end, num_job_retries_on_failure=limit)
        if end.finished or end.exit_code == 0:
            assert not ruling.requeue
        if end.durable_iteration is not None and (best is None or end.durable_iteration > best):
            failures = 0
        if ruling.requeue and end.exit_code not in (75, *SHUTDOWN_SIGNALS):
            failures += 1
        assert failures <= limit
        state = ruling.state
