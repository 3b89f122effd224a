"""Decisions of ranks about the state that they hold in memory after an in-process restart."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.recovery_point import InPlaceHolding, InPlacePlan, Origin, plan_in_place

WORLD = 4


def holding(rank: int, iteration: int | None = 7, **facts: Any) -> InPlaceHolding:
    """Return the state of a survivor whose neighbours are the adjacent ranks."""
    around = dict.fromkeys(range(WORLD), (iteration - 1, iteration)) if iteration is not None else {}
    default: dict[str, Any] = {
        "iteration": iteration,
        "rank": rank,
        "world_size": WORLD,
        "digest": "aa",
        "is_shared": True,
        "replicas": tuple(range(WORLD)),
        "own": around,
    }
    return InPlaceHolding(**{**default, **facts})


def spare() -> InPlaceHolding:
    return InPlaceHolding(replicas=tuple(range(WORLD)), is_shared=True)


def test_survivors_continue_in_place() -> None:
    """If every rank holds a complete state of the same iteration, nothing is sent."""
    plan = plan_in_place([holding(rank) for rank in range(WORLD)])
    assert plan == InPlacePlan(iteration=7, own_from={rank: rank for rank in range(WORLD)})


def test_spare_receives_shared_and_private_state() -> None:
    """The shared part comes from the first survivor with the same part, the private part from the rank that holds the
    dead rank's copy."""
    plan = plan_in_place([holding(0), spare(), holding(2, own={2: (7,)}), holding(3, own={3: (7,), 1: (6, 7)})])
    assert (plan.iteration, plan.part_from, plan.digests) == (7, {1: 0}, {1: "aa"})
    assert plan.own_from == {0: 0, 1: 0, 2: 2, 3: 3}
    states = [holding(rank, own={rank: (7,)}) for rank in range(WORLD)]
    states[1], states[3] = spare(), holding(3, own={3: (7,), 1: (6, 7)})
    assert plan_in_place(states).own_from[1] == 3


def test_ranks_one_step_apart_resume_at_the_older() -> None:
    """If some ranks finished the step and others did not, all resume before it with the private states of that
    iteration; a missing private state prevents this for all."""
    apart = [holding(0, 8), holding(1, 7), holding(2, 8), holding(3, 7)]
    apart = [msgspec.structs.replace(one, own={rank: (6, 7) if rank % 2 else (7, 8)}) for rank, one in enumerate(apart)]
    plan = plan_in_place(apart)
    assert (plan.iteration, plan.part_from) == (7, {0: 1, 2: 1})
    apart[0] = msgspec.structs.replace(apart[0], own={0: (8,)})
    plan = plan_in_place(apart)
    assert plan.iteration is None
    assert "of rank 1 at iteration 8" in plan.reason


def test_torn_rank_receives_the_shared_part() -> None:
    """A rank interrupted within its update receives the part of survivors that had not begun theirs."""
    torn = holding(2, None, reason="left within an optimizer's step", own={2: (6, 7)})
    plan = plan_in_place([holding(0), holding(1), torn, holding(3)])
    assert (plan.iteration, plan.part_from, plan.own_from[2]) == (7, {2: 0}, 2)


def test_doubtful_state_falls_back_to_checkpoints() -> None:
    """Differing replicas, another world size, missing parts or private states, and differing origins lead to a load
    from the tiers."""
    complete = [holding(rank) for rank in range(WORLD)]

    def reason(*ranks: InPlaceHolding | None) -> str:
        given = [one if one is not None else complete[rank] for rank, one in enumerate(ranks)]
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


def test_empty_state_gives_no_reason() -> None:
    """The first call of a function has nothing to report."""
    assert plan_in_place([spare()] * WORLD) == InPlacePlan(iteration=None)


def test_unique_parts_continue_only_in_their_places() -> None:
    """Ranks with parts that no other rank holds continue in place; after a change of ranks no rank does."""
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
def test_every_plan_is_feasible(holdings: list[InPlaceHolding]) -> None:
    """In every plan, each sender has the state that it sends, at the plan's iteration, and every rank ends with a
    complete state."""
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
