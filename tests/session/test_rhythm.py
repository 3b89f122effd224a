"""When a session saves automatically, and to which tiers: identical on all ranks, at the optimal interval."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import CheckpointConfig
from outlast.policy.checkpoint_plan import GLOBAL_SHARE, failures_per_s, iterations_between
from outlast.session.saves import MIN_TIMED_STEPS, DueSave, SaveSchedule


def schedules(world_size: int = 1, *, has_near: bool = True, **settings: Any) -> list[SaveSchedule]:
    config = CheckpointConfig(directory="x", **settings)
    return [
        SaveSchedule(config, decides=rank == 0, world_size=world_size, has_near=has_near) for rank in range(world_size)
    ]


def train(
    ranks: list[SaveSchedule], steps: int, *, start: int = 0, step_s: list[float] | None = None, cost_s: float = 1.0
) -> list[tuple[int, DueSave]]:
    """Run steps as a session does; return the saves. Each rank measures steps of a different length."""
    cost: float | None = None
    saved = []
    for rank in ranks:
        rank.start_from(start)
    for iteration in range(start + 1, start + steps + 1):
        agreed = max(rank.request(iteration, cost) for rank in ranks)
        for number, rank in enumerate(ranks):
            rank.note_step((step_s or [1.0])[number % len(step_s or [1.0])])
        due = {rank.due(iteration, agreed) for rank in ranks}
        assert len(due) == 1, "the ranks do not save alike"
        (kind,) = due
        if kind != DueSave.NOTHING:
            saved.append((iteration, kind))
            cost = cost_s
            for rank in ranks:
                rank.note_save(iteration, kind)
    return saved


def test_fixed_intervals_count_iterations_of_the_run() -> None:
    """A save is due every N iterations of the run, not of the cycle; if both kinds are due, one save goes to all
    tiers."""
    saved = train(schedules(save_interval=10, non_persistent_save_interval=4), 24, start=6)
    near, both = DueSave.NEAR, DueSave.ALL
    assert saved == [
        *((8, near), (10, both), (12, near), (16, near), (20, both)),
        *((24, near), (28, near), (30, both)),
    ]


def test_zero_disables_automatic_saves() -> None:
    """Without intervals nothing is saved automatically, and no progress is expected from saves."""
    (schedule,) = schedules()
    assert not schedule.is_automatic
    assert train([schedule], 50) == []


def test_no_node_local_saves_without_a_node_local_tier() -> None:
    """Without a node-local tier, the interval for node-local saves is ignored."""
    (schedule,) = schedules(has_near=False, non_persistent_save_interval=2)
    assert not schedule.is_automatic
    assert train([schedule], 10) == []


def test_auto_measures_first_and_then_keeps_the_optimum() -> None:
    """The first save is due as soon as steps are timed; then one every sqrt(2 C / lambda) seconds."""
    saved = train(schedules(save_interval="auto", rank_mttf_hours=100.0), 2500)
    number = iterations_between(1.0, 1.0, failures_per_s(1, 100.0))
    first = MIN_TIMED_STEPS + 2  # one step warms up, and a save is requested before its step
    assert saved == [(at, DueSave.ALL) for at in range(first, 2501, number)]
    assert len(saved) > 2


def test_global_saves_are_rarer_with_node_local_tiers() -> None:
    """With both intervals automatic, most saves are node-local: the global save is for failures that lose the
    node-local copies."""
    saved = train(schedules(save_interval="auto", non_persistent_save_interval="auto", rank_mttf_hours=1.0), 4000)
    num_all = sum(kind == DueSave.ALL for _, kind in saved)
    assert num_all >= 3
    assert len(saved) / num_all == pytest.approx(GLOBAL_SHARE**-0.5, rel=0.3)


@given(
    st.sampled_from([0, 3, "auto"]),
    st.sampled_from([0, 2, "auto"]),
    st.lists(st.floats(0.001, 10.0), min_size=1, max_size=4),
    st.floats(0.0, 10.0),
)
def test_ranks_with_different_step_times_save_together(
    save: int | str, near: int | str, step_s: list[float], cost_s: float
) -> None:
    """With different step times per rank, all ranks save after the same steps to the same tiers."""
    ranks = schedules(4, save_interval=save, non_persistent_save_interval=near, rank_mttf_hours=0.1)
    train(ranks, 60, step_s=step_s, cost_s=cost_s)


def test_one_rank_can_request_a_save() -> None:
    """All ranks do a save that one rank requests, once, after the next step; if an interval is due too, the save
    goes to more tiers."""
    ranks = schedules(3, save_interval=10)
    ranks[2].wanted = DueSave.NEAR
    assert train(ranks, 5) == [(1, DueSave.NEAR)]
    ranks[1].wanted = DueSave.NEAR
    assert train(ranks, 5, start=9) == [(10, DueSave.ALL)]
