"""What ranks decide about what they hold in memory after a restart in process."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.recovery_point import InPlaceHolding, InPlacePlan, Origin, plan_in_place

WORLD = 4


def holding(rank: int, iteration: int | None = 7, **facts: Any) -> InPlaceHolding:
    """Return what a survivor holds whose neighbours are those next to it."""
    around = dict.fromkeys(range(WORLD), (iteration - 1, iteration)) if iteration is not None else {}
    usual: dict[str, Any] = {
        "iteration": iteration,
        "rank": rank,
        "world_size": WORLD,
        "digest": "aa",
        "is_shared": True,
        "replicas": tuple(range(WORLD)),
        "own": around,
    }
    return InPlaceHolding(**{**usual, **facts})


def spare() -> InPlaceHolding:
    return InPlaceHolding(replicas=tuple(range(WORLD)), is_shared=True)


def test_survivors_go_on_in_place() -> None:
    """All whole at one iteration: nothing is sent."""
    plan = plan_in_place([holding(rank) for rank in range(WORLD)])
    assert plan == InPlacePlan(iteration=7, own_from={rank: rank for rank in range(WORLD)})


def test_a_spare_is_given_both() -> None:
    """The part comes from the first survivor with the same, what is its own from whoever has that of the dead rank."""
    plan = plan_in_place([holding(0), spare(), holding(2, own={2: (7,)}), holding(3, own={3: (7,), 1: (6, 7)})])
    assert (plan.iteration, plan.part_from, plan.digests) == (7, {1: 0}, {1: "aa"})
    assert plan.own_from == {0: 0, 1: 0, 2: 2, 3: 3}
    few = [holding(rank, own={rank: (7,)}) for rank in range(WORLD)]
    few[1], few[3] = spare(), holding(3, own={3: (7,), 1: (6, 7)})
    assert plan_in_place(few).own_from[1] == 3


def test_ranks_one_step_apart_meet_at_the_older_one() -> None:
    """Two ranks finished the step, two did not: all go on from before it, as the own things of two iterations are kept;
    without those of one rank nobody does."""
    apart = [holding(0, 8), holding(1, 7), holding(2, 8), holding(3, 7)]
    apart = [msgspec.structs.replace(one, own={rank: (6, 7) if rank % 2 else (7, 8)}) for rank, one in enumerate(apart)]
    plan = plan_in_place(apart)
    assert (plan.iteration, plan.part_from) == (7, {0: 1, 2: 1})
    apart[0] = msgspec.structs.replace(apart[0], own={0: (8,)})
    plan = plan_in_place(apart)
    assert plan.iteration is None
    assert "of rank 1 at iteration 8" in plan.reason


def test_a_torn_rank_is_given_its_part() -> None:
    """Left within the update while others had not begun theirs: the survivors' part replaces it."""
    torn = holding(2, None, reason="left within an optimizer's step", own={2: (6, 7)})
    plan = plan_in_place([holding(0), holding(1), torn, holding(3)])
    assert (plan.iteration, plan.part_from, plan.own_from[2]) == (7, {2: 0}, 2)


def test_any_doubt_leads_to_the_tiers() -> None:
    """Replicas that differ, another world size, parts or own things that nobody has, different origins: the tiers."""
    whole = [holding(rank) for rank in range(WORLD)]

    def reason(*ranks: InPlaceHolding | None) -> str:
        given = [one if one is not None else whole[rank] for rank, one in enumerate(ranks)]
        plan = plan_in_place(given)
        assert plan.iteration is None
        return plan.reason

    assert "differ" in reason(None, holding(1, digest="bb"), None, None)
    assert "number of ranks" in reason(None, holding(1, world_size=3), None, None)
    assert "has the part of rank 1" in reason(*[holding(r, is_shared=False) if r != 1 else spare() for r in range(4)])
    assert "of rank 1" in reason(*[holding(r, own={r: (7,)}) if r != 1 else spare() for r in range(4)])
    origin = Origin(checkpoint=5, attempt="a", tiers=("local",) * 4)
    assert "different checkpoints" in reason(None, None, None, holding(3, has_loaded=origin))
    assert reason(*[holding(r, None, reason="torn") for r in range(4)]).startswith("rank 0: torn")


def test_nothing_held_is_no_news() -> None:
    """The first call of a function: there is nothing to say."""
    assert plan_in_place([spare()] * WORLD) == InPlacePlan(iteration=None)


def test_parts_of_their_own_stay_where_they_are() -> None:
    """Ranks that hold what no other does go on in place; once they have changed places, nobody does."""
    alone = [holding(rank, is_shared=False, digest=str(rank), replicas=(rank,)) for rank in range(WORLD)]
    assert plan_in_place(alone).iteration == 7
    assert plan_in_place([alone[1], alone[0], alone[2], alone[3]]).iteration is None


@st.composite
def worlds(draw: st.DrawFn) -> list[InPlaceHolding]:
    size = draw(st.integers(1, 5))
    ranks = st.integers(0, size - 1)
    return [
        InPlaceHolding(
            iteration=(iteration := draw(st.none() | st.integers(5, 7))),
            reason="" if iteration is not None else "torn",
            rank=draw(ranks),
            world_size=size,
            digest=draw(st.sampled_from("ab")),
            is_shared=draw(st.booleans()),
            replicas=tuple(range(size)),
            own=draw(st.dictionaries(ranks, st.lists(st.integers(5, 7), max_size=2).map(tuple))),
        )
        for _ in range(size)
    ]


@given(worlds())
def test_a_plan_can_be_carried_out(holdings: list[InPlaceHolding]) -> None:
    """Whatever ranks hold: who gives has what is given, at the plan's iteration, and everybody ends up with all."""
    plan = plan_in_place(holdings)
    if plan.iteration is None:
        return
    for rank, one in enumerate(holdings):
        assert plan.iteration in holdings[plan.own_from[rank]].own[rank]
        giver = plan.part_from.get(rank, rank)
        assert holdings[giver].iteration == plan.iteration
        assert giver == rank or holdings[giver].is_shared
        if giver == rank:
            assert one.is_shared or one.rank == rank
        else:
            assert plan.digests[rank] == holdings[giver].digest
