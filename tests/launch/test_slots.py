"""Slots: who has one keeps it, empty ones are filled, and the cause is told from its effects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.incidents import Incident, IncidentKind
from outlast.launch.slots import Slot, SlotCandidate, fill_slots, shrink
from outlast.policy.causes import root_cause

NAMES = st.sampled_from("abcdefgh")


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Slot], dict[str, SlotCandidate], set[str]]:
    """Draw slots with distinct holders, waiting nodes, and barred ones."""
    names = draw(st.lists(st.one_of(st.none(), NAMES), min_size=1, max_size=5, unique_by=lambda n: n or object()))
    slots = [Slot(holder=name, nproc=draw(st.sampled_from([1, 2])) if name else None) for name in names]
    ready = {
        name: SlotCandidate(order=order, nproc=draw(st.sampled_from([1, 2])), wish=draw(st.sampled_from([None, 0, 1])))
        for order, name in enumerate(draw(st.lists(NAMES, unique=True)))
    }
    return slots, ready, draw(st.sets(NAMES))


@given(worlds())
def test_filling_is_fair_and_complete(world: tuple[list[Slot], dict[str, SlotCandidate], set[str]]) -> None:
    """No node has two slots, none is barred or absent, holders that can stay do, and no slot stays empty that a
    waiting node could fill."""
    slots, ready, barred = world
    filled = fill_slots(slots, ready, barred=barred)
    holders = [slot.holder for slot in filled if slot.holder]
    assert len(filled) == len(slots)
    assert len(holders) == len(set(holders))
    assert set(holders) <= set(ready) - barred
    for before, after in zip(slots, filled, strict=True):
        if before.holder in ready and before.holder not in barred:
            assert after.holder == before.holder
        if after.holder is None:
            left = set(ready) - barred - set(holders)
            assert not any(after.nproc in (None, ready[name].nproc) for name in left)


def test_wish_comes_before_arrival() -> None:
    """A node whose user asked for a slot gets it, though another came first."""
    ready = {"first": SlotCandidate(order=1, nproc=2), "wants0": SlotCandidate(order=2, nproc=2, wish=0)}
    assert [slot.holder for slot in fill_slots([Slot(), Slot()], ready)] == ["wants0", "first"]


def test_world_shrinks_only_as_far_as_allowed() -> None:
    """Without min_nodes never; with it, down to it, in the same order."""
    slots = [Slot(holder="a"), Slot(), Slot(holder="c")]
    assert shrink(slots, min_nodes=None) is None
    assert shrink(slots, min_nodes=3) is None
    assert [slot.holder for slot in shrink(slots, min_nodes=2) or ()] == ["a", "c"]


@given(
    st.permutations(
        [IncidentKind.NODE_LOST, IncidentKind.WORKER_HUNG, IncidentKind.WORKER_DIED, IncidentKind.WORKER_FAILED]
    )
)
def test_cause_is_found_in_any_order(kinds: list[IncidentKind]) -> None:
    """What cannot be an effect of the others is the cause, whatever was told first."""
    cause = root_cause([Incident(kind=kind) for kind in kinds])
    assert cause is not None
    assert cause.kind == IncidentKind.NODE_LOST


def test_a_decision_of_its_own_is_no_effect() -> None:
    """A worker that judged a result invalid is the cause, though a peer that missed it was told of first."""
    peer, judge = (
        Incident(kind=IncidentKind.WORKER_FAILED, rank=rank, exit_code=code) for rank, code in ((3, 1), (1, 17))
    )
    assert root_cause([peer, judge]) == judge


def _left(rank: int, finding: str, *, code: int = 16) -> Incident:
    evidence = {"diagnosis": {"rank": 1, "finding": finding}}
    return Incident(kind=IncidentKind.WORKER_FAILED, rank=rank, exit_code=code, evidence=evidence)


def test_the_rank_that_saw_an_invalid_result_is_the_cause_of_all_leaving() -> None:
    """Of ranks that leave with one diagnosis the cause is the one that it names; a rank that died by it comes after."""
    died = Incident(kind=IncidentKind.WORKER_DIED, rank=0, exit_code=-6)
    incidents = [died, _left(3, "reproduced"), _left(1, "reproduced")]
    assert root_cause(incidents) == incidents[2]


@pytest.mark.parametrize(("finding", "is_cause"), [("persistent", True), ("correct", True), ("reproduced", False)])
def test_what_was_found_out_comes_before_a_lost_node(finding: str, is_cause: bool) -> None:
    """A decision that a replay came to is not lost because a node is; a mere question can be asked again."""
    lost, left = Incident(kind=IncidentKind.NODE_LOST), _left(1, finding, code=17)
    assert root_cause([lost, left]) == (left if is_cause else lost)


def test_first_of_equals_is_the_cause() -> None:
    """Among incidents of one kind the one that was seen first; among none, none."""
    incidents = [Incident(kind=IncidentKind.WORKER_FAILED, rank=rank) for rank in (3, 1)]
    assert root_cause(incidents) == incidents[0]
    assert root_cause([]) is None
    assert root_cause([Incident(kind=IncidentKind.SAVE_FAILED)]) is None
