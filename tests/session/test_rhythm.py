"""When a session saves by itself, and to which tiers: alike on all ranks, and as often as it pays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import CheckpointConfig
from outlast.policy.checkpoint_plan import GLOBAL_SHARE, failures_per_s, iterations_between
from outlast.session.saves import MIN_TIMED_STEPS, DueSave, SaveSchedule


def rhythms(world_size: int = 1, *, has_near: bool = True, **settings: Any) -> list[SaveSchedule]:
    config = CheckpointConfig(directory="x", **settings)
    return [
        SaveSchedule(config, decides=rank == 0, world_size=world_size, has_near=has_near) for rank in range(world_size)
    ]


def train(
    ranks: list[SaveSchedule], steps: int, *, start: int = 0, step_s: list[float] | None = None, cost_s: float = 1.0
) -> list[tuple[int, DueSave]]:
    """Go through steps as a session does; return what was saved when. The ranks measure steps of their own length."""
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
    """Every N iterations of the run, not of the cycle; where both are due, one save goes to all tiers."""
    saved = train(rhythms(save_interval=10, non_persistent_save_interval=4), 24, start=6)
    near, both = DueSave.NEAR, DueSave.ALL
    assert saved == [
        *((8, near), (10, both), (12, near), (16, near), (20, both)),
        *((24, near), (28, near), (30, both)),
    ]


def test_zero_never_saves() -> None:
    """Without intervals nothing is saved by itself, and nobody is told to expect progress."""
    (rhythm,) = rhythms()
    assert not rhythm.is_automatic
    assert train([rhythm], 50) == []


def test_no_near_tier_means_no_near_saves() -> None:
    """Where nothing near keeps a save, the interval for it is passed over."""
    (rhythm,) = rhythms(has_near=False, non_persistent_save_interval=2)
    assert not rhythm.is_automatic
    assert train([rhythm], 10) == []


def test_auto_measures_first_and_then_keeps_the_optimum() -> None:
    """The first save comes as soon as steps are timed; then one every sqrt(2 C / lambda) seconds."""
    saved = train(rhythms(save_interval="auto", rank_mttf_hours=100.0), 2500)
    number = iterations_between(1.0, 1.0, failures_per_s(1, 100.0))
    first = MIN_TIMED_STEPS + 2  # one step warms up, and a wish is uttered before its step
    assert saved == [(at, DueSave.ALL) for at in range(first, 2501, number)]
    assert len(saved) > 2


def test_the_global_tier_is_needed_less_often_beside_near_ones() -> None:
    """With both automatic, most saves stay near: the global one is for failures that take the near copies along."""
    saved = train(rhythms(save_interval="auto", non_persistent_save_interval="auto", rank_mttf_hours=1.0), 4000)
    num_all = sum(kind == DueSave.ALL for _, kind in saved)
    assert num_all >= 3
    assert len(saved) / num_all == pytest.approx(GLOBAL_SHARE**-0.5, rel=0.3)


@given(
    st.sampled_from([0, 3, "auto"]),
    st.sampled_from([0, 2, "auto"]),
    st.lists(st.floats(0.001, 10.0), min_size=1, max_size=4),
    st.floats(0.0, 10.0),
)
def test_ranks_that_measure_differently_save_alike(
    save: int | str, near: int | str, step_s: list[float], cost_s: float
) -> None:
    """However differently long the ranks' steps are, all save after the same steps to the same tiers."""
    ranks = rhythms(4, save_interval=save, non_persistent_save_interval=near, rank_mttf_hours=0.1)
    train(ranks, 60, step_s=step_s, cost_s=cost_s)


def test_one_rank_may_request_a_save() -> None:
    """What one rank wants saved, all ranks save after the next step, once; beside the intervals the larger counts."""
    ranks = rhythms(3, save_interval=10)
    ranks[2].wanted = DueSave.NEAR
    assert train(ranks, 5) == [(1, DueSave.NEAR)]
    ranks[1].wanted = DueSave.NEAR
    assert train(ranks, 5, start=9) == [(10, DueSave.ALL)]
