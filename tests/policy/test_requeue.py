"""Requeue decisions: exit codes, a budget for failures, and finished runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.requeue import SHUTDOWN_SIGNALS, JobEnd, RequeueState, rule

FRESH = RequeueState()


@pytest.mark.parametrize("exit_code", [0, 2, 17, 93])
def test_finished_and_stopped_runs_are_not_requeued(exit_code: int) -> None:
    """A finished run, invalid input, a judged result and a spent budget are never requeued."""
    decision = rule(FRESH, JobEnd(exit_code=exit_code), num_job_retries_on_failure=100)
    assert not decision.requeue
    assert decision.reason


@pytest.mark.parametrize("stopped_with", [17, 93])
def test_recorded_stop_overrides_a_higher_exit_code(stopped_with: int) -> None:
    """A node that was not admitted ends with 19, which is higher than the 17 of the others, so the run's record is read
    as well."""
    decision = rule(FRESH, JobEnd(exit_code=19, stopped_with=stopped_with), num_job_retries_on_failure=100)
    assert not decision.requeue
    assert f"exit code {stopped_with}" in decision.reason


@pytest.mark.parametrize("exit_code", [75, *SHUTDOWN_SIGNALS])
def test_preempted_jobs_are_requeued_without_limit(exit_code: int) -> None:
    """A preemption counts against no budget."""
    state = FRESH
    for _ in range(50):
        decision = rule(state, JobEnd(exit_code=exit_code), num_job_retries_on_failure=0)
        assert decision.requeue
        state = decision.state
    assert state == FRESH


@pytest.mark.parametrize("exit_code", [1, 16, 18, 19, 134, 137, 255])
def test_failures_are_requeued_within_the_budget(exit_code: int) -> None:
    """Failures, including an undecided invalid result and an unhealthy node, are requeued exactly as often as
    allowed."""
    state, decisions = FRESH, []
    for _ in range(5):
        decision = rule(state, JobEnd(exit_code=exit_code), num_job_retries_on_failure=2)
        decisions.append(decision.requeue)
        state = decision.state
    assert decisions == [True, True, False, False, False]
    assert "all 2 retries are used" in decision.reason
    none = rule(FRESH, JobEnd(exit_code=exit_code), num_job_retries_on_failure=0)
    assert (none.requeue, "no retry is allowed" in none.reason) == (False, True)


def test_progress_resets_the_requeue_budget() -> None:
    """A durable checkpoint at a higher iteration than before resets the budget; the same one does not."""
    spent = RequeueState(failures=2, best_durable=100)
    same = rule(spent, JobEnd(exit_code=1, durable_iteration=100), num_job_retries_on_failure=2)
    assert not same.requeue
    further = rule(spent, JobEnd(exit_code=1, durable_iteration=101), num_job_retries_on_failure=2)
    assert (further.requeue, further.state.failures, further.state.best_durable) == (True, 1, 101)


def test_preemption_does_not_reset_the_requeue_budget() -> None:
    """A job that was preempted between two failures does not extend the budget."""
    state = FRESH
    for code in (1, 75, 1, 75):
        state = rule(state, JobEnd(exit_code=code), num_job_retries_on_failure=2).state
    assert not rule(state, JobEnd(exit_code=1), num_job_retries_on_failure=2).requeue


def test_quarantined_nodes_accumulate_over_jobs() -> None:
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
def test_requeues_are_bounded_for_every_history(ends: list[JobEnd], limit: int) -> None:
    """A finished run is never requeued, and without progress at most N consecutive failures are."""
    state, failures = FRESH, 0
    for end in ends:
        best = state.best_durable
        decision = rule(state, end, num_job_retries_on_failure=limit)
        if end.finished or end.exit_code == 0:
            assert not decision.requeue
        if end.durable_iteration is not None and (best is None or end.durable_iteration > best):
            failures = 0
        if decision.requeue and end.exit_code not in (75, *SHUTDOWN_SIGNALS):
            failures += 1
        assert failures <= limit
        state = decision.state
