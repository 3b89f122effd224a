"""A job's name is its own, whatever the scheduler calls it."""

from __future__ import annotations

from pathlib import Path

from outlast.incidents import RecoveryLevel
from outlast.launch.job_settings import name_job
from outlast.launch.recovery_state_file import load_recovery_state, save_recovery_state, state_of_job
from outlast.policy.recovery_point import Exclusion, Load
from outlast.policy.recovery_policy import RecoveryState, RecoveryStep


def test_an_allocation_that_comes_back_gets_another_name() -> None:
    """A re-queued allocation keeps its number; its job does not keep its name, as far as anything is remembered of it:
    what it saves must not be taken for what the earlier job saved."""
    assert name_job("4711", RecoveryState()) == "4711"
    load = Load(cycle="4711-0", checkpoint=5, attempt="4711-0-aa.1", tier="local")
    assert name_job("4711", RecoveryState(loads=(load,))) == "4711.1"
    step = RecoveryStep(cycle=0, job="4711", recovery_level=RecoveryLevel.RESTART_WORKERS, reason="")
    one = Exclusion(checkpoint=5, attempt="x", tier="local", tainted=("4711.1-3",))
    assert name_job("4711", RecoveryState(history=(step,), excluded=(one,))) == "4711.2"


def test_without_a_scheduler_names_are_drawn() -> None:
    """Two jobs that no scheduler numbers have different names."""
    assert name_job(None, RecoveryState()) != name_job(None, RecoveryState())


def test_a_finished_run_without_a_name_is_followed_by_another(tmp_path: Path) -> None:
    """It leaves no budgets behind, but its jobs' names stay taken. The next job of a run with a name has all budgets,
    too, and knows what is durable; a job that is still in progress keeps what it had, and a coordinator that takes it
    over does not take the record of an earlier job for its own."""
    step = RecoveryStep(cycle=0, job="4711", recovery_level=RecoveryLevel.STOP, reason="finished")
    kept = RecoveryState(job="4711", finished=True, stopped_with=0, restarts_total=5, best_durable=9, history=(step,))
    save_recovery_state(tmp_path, kept)
    resumed = RecoveryState(job="4711.1", best_durable=9, best_committed=9, history=(step,))
    saved = load_recovery_state(tmp_path)
    assert state_of_job(saved, "4711.1", is_new_job=True) == resumed
    assert state_of_job(saved, "4711.1", is_new_job=False) == resumed
    assert state_of_job(saved, "4711", is_new_job=False, is_named=False) == kept
    another = state_of_job(saved, "4711.1", is_new_job=True, is_named=False)
    assert another == RecoveryState(job="4711.1", history=(step,))
    assert name_job("4711", another) == "4711.1"
