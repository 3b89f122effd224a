"""A job's name is its own, whatever the scheduler calls it."""

from __future__ import annotations

from pathlib import Path

from outlast.incidents import Rung
from outlast.launch.job_settings import name_job
from outlast.launch.ladder_file import load_ladder, save_ladder
from outlast.policy.ladder import LadderState, LadderStep
from outlast.policy.recovery_point import Distrusted, Load


def test_an_allocation_that_comes_back_gets_another_name() -> None:
    """A re-queued allocation keeps its number; its job does not keep its name, as far as anything is remembered of it:
    what it saves must not be taken for what the earlier job saved."""
    assert name_job("4711", LadderState()) == "4711"
    load = Load(cycle="4711-0", generation=5, attempt="4711-0-aa.1", tier="local")
    assert name_job("4711", LadderState(loads=(load,))) == "4711.1"
    step = LadderStep(cycle=0, job="4711", rung=Rung.RESTART_WORKERS, reason="")
    one = Distrusted(generation=5, attempt="x", tier="local", tainted=("4711.1-3",))
    assert name_job("4711", LadderState(history=(step,), distrusted=(one,))) == "4711.2"


def test_without_a_scheduler_names_are_drawn() -> None:
    """Two jobs that no scheduler numbers have different names."""
    assert name_job(None, LadderState()) != name_job(None, LadderState())


def test_a_finished_run_without_a_name_is_followed_by_another(tmp_path: Path) -> None:
    """It leaves no budgets behind, but its jobs' names stay taken. The next job of a run with a name has all budgets,
    too, and knows what is durable; a job that is still in progress keeps what it had, and a coordinator that takes it
    over does not take the record of an earlier job for its own."""
    step = LadderStep(cycle=0, job="4711", rung=Rung.STOP, reason="finished")
    kept = LadderState(job="4711", finished=True, stopped_with=0, restarts_total=5, best_durable=9, history=(step,))
    save_ladder(tmp_path, kept)
    resumed = LadderState(best_durable=9, best_committed=9, history=(step,))
    assert load_ladder(tmp_path, is_new_job=True) == resumed
    assert load_ladder(tmp_path, job="4711.1") == resumed
    assert load_ladder(tmp_path, is_named=False, job="4711") == kept
    another = load_ladder(tmp_path, is_new_job=True, is_named=False)
    assert another == LadderState(history=(step,))
    assert name_job("4711", another) == "4711.1"
