"""Each job has a unique name, also with the same allocation of the scheduler."""

from __future__ import annotations

from pathlib import Path

from outlast.incidents import RecoveryLevel
from outlast.launch.job_settings import name_job
from outlast.launch.recovery_state_file import load_recovery_state, save_recovery_state, state_of_job
from outlast.policy.recovery_point import Exclusion, Load
from outlast.policy.recovery_policy import RecoveryState, RecoveryStep


def test_a_requeued_allocation_gets_another_name() -> None:
    """A requeued allocation keeps its number and gets a job name that no record contains, so that its checkpoints are
    not taken for those of the earlier job."""
    assert name_job("4711", RecoveryState()) == "4711"
    loaded = Load(cycle="4711-0", checkpoint=5, attempt="4711-0-aa.1", tier="local")
    assert name_job("4711", RecoveryState(loads=(loaded,))) == "4711.1"
    step = RecoveryStep(cycle=0, job="4711", recovery_level=RecoveryLevel.RESTART_WORKERS, reason="")
    one = Exclusion(checkpoint=5, attempt="x", tier="local", tainted=("4711.1-3",))
    assert name_job("4711", RecoveryState(history=(step,), excluded=(one,))) == "4711.2"


def test_names_are_random_without_a_scheduler() -> None:
    """Two jobs without a number of a scheduler have different names."""
    assert name_job(None, RecoveryState()) != name_job(None, RecoveryState())


def test_budgets_of_a_finished_run_are_not_inherited(tmp_path: Path) -> None:
    """A finished run leaves no used budgets, but its jobs' names stay taken. The next job of a named run has full
    budgets and the durable iteration; a job in progress keeps its state, and a takeover ignores the record of an
    earlier job."""
    step = RecoveryStep(cycle=0, job="4711", recovery_level=RecoveryLevel.STOP, reason="finished")
    kept_state = RecoveryState(
        job="4711", finished=True, stopped_with=0, restarts_total=5, best_durable=9, history=(step,)
    )
    save_recovery_state(tmp_path, kept_state)
    resumed = RecoveryState(job="4711.1", best_durable=9, best_committed=9, history=(step,))
    saved = load_recovery_state(tmp_path)
    assert state_of_job(saved, "4711.1", is_new_job=True) == resumed
    assert state_of_job(saved, "4711.1", is_new_job=False) == resumed
    assert state_of_job(saved, "4711", is_new_job=False, is_named=False) == kept_state
    another = state_of_job(saved, "4711.1", is_new_job=True, is_named=False)
    assert another == RecoveryState(job="4711.1", history=(step,))
    assert name_job("4711", another) == "4711.1"
