"""Slots: holders keep them, empty ones are filled, and the root cause is identified among its effects."""

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
    """Draw slots with distinct holders, waiting nodes, and excluded ones."""
    names = draw(st.lists(st.one_of(st.none(), NAMES), min_size=1, max_size=5, unique_by=lambda n: n or object()))
    slots = [Slot(holder=name, nproc=draw(st.sampled_from([1, 2])) if name else None) for name in names]
    ready = {
        name: SlotCandidate(order=order, nproc=draw(st.sampled_from([1, 2])), wish=draw(st.sampled_from([None, 0, 1])))
        for order, name in enumerate(draw(st.lists(NAMES, unique=True)))
    }
    return slots, ready, draw(st.sets(NAMES))


@given(worlds())
def test_slots_are_filled_fairly_and_completely(world: tuple[list[Slot], dict[str, SlotCandidate], set[str]]) -> None:
    """No node has two slots, no excluded or absent node has one, holders that can stay do, and no slot stays empty
    that a waiting node could fill."""
    slots, ready, excluded = world
    filled = fill_slots(slots, ready, barred=excluded)
    holders = [slot.holder for slot in filled if slot.holder]
    assert len(filled) == len(slots)
    assert len(holders) == len(set(holders))
    assert set(holders) <= set(ready) - excluded
    for before, after in zip(slots, filled, strict=True):
        if before.holder in ready and before.holder not in excluded:
            assert after.holder == before.holder
        if after.holder is None:
            remaining = set(ready) - excluded - set(holders)
            assert not any(after.nproc in (None, ready[name].nproc) for name in remaining)


def test_requested_slot_takes_precedence_over_arrival() -> None:
    """A node whose user requested a slot gets it, even if another node came first."""
    ready = {"first": SlotCandidate(order=1, nproc=2), "wants0": SlotCandidate(order=2, nproc=2, wish=0)}
    assert [slot.holder for slot in fill_slots([Slot(), Slot()], ready)] == ["wants0", "first"]


def test_world_shrinks_only_to_min_nodes() -> None:
    """The world never shrinks without min_nodes; with it, it shrinks to that size in the same order."""
    slots = [Slot(holder="a"), Slot(), Slot(holder="c")]
    assert shrink(slots, min_nodes=None) is None
    assert shrink(slots, min_nodes=3) is None
    assert [slot.holder for slot in shrink(slots, min_nodes=2) or ()] == ["a", "c"]


@given(
    st.permutations(
        [IncidentKind.NODE_LOST, IncidentKind.WORKER_HUNG, IncidentKind.WORKER_DIED, IncidentKind.WORKER_FAILED]
    )
)
def test_root_cause_does_not_depend_on_the_order(kinds: list[IncidentKind]) -> None:
    """The incident that cannot be an effect of the others is the root cause, in whatever order they are reported."""
    cause = root_cause([Incident(kind=kind) for kind in kinds])
    assert cause is not None
    assert cause.kind == IncidentKind.NODE_LOST


def test_worker_with_an_invalid_result_is_the_root_cause() -> None:
    """A worker that exits for an invalid result is the root cause, even if the failure of its peer is reported
    first."""
    peer, failed = (
        Incident(kind=IncidentKind.WORKER_FAILED, rank=rank, exit_code=code) for rank, code in ((3, 1), (1, 17))
    )
    assert root_cause([peer, failed]) == failed


def _exited(rank: int, finding: str, *, code: int = 16) -> Incident:
    evidence = {"diagnosis": {"rank": 1, "finding": finding}}
    return Incident(kind=IncidentKind.WORKER_FAILED, rank=rank, exit_code=code, evidence=evidence)


def test_rank_of_the_diagnosis_is_the_root_cause() -> None:
    """Of ranks that exit with one diagnosis, the root cause is the rank in that diagnosis; a rank that died of it
    comes after."""
    died = Incident(kind=IncidentKind.WORKER_DIED, rank=0, exit_code=-6)
    incidents = [died, _exited(3, "reproduced"), _exited(1, "reproduced")]
    assert root_cause(incidents) == incidents[2]


@pytest.mark.parametrize(("finding", "is_cause"), [("persistent", True), ("correct", True), ("reproduced", False)])
def test_replay_decision_takes_precedence_over_a_lost_node(finding: str, is_cause: bool) -> None:
    """A replay's decision takes precedence over a lost node; an undecided finding does not, since it can be replayed
    again."""
    lost, remaining = Incident(kind=IncidentKind.NODE_LOST), _exited(1, finding, code=17)
    assert root_cause([lost, remaining]) == (remaining if is_cause else lost)


def test_first_of_equal_incidents_is_the_root_cause() -> None:
    """Among incidents of one kind the first detected is the root cause; without incidents there is none."""
    incidents = [Incident(kind=IncidentKind.WORKER_FAILED, rank=rank) for rank in (3, 1)]
    assert root_cause(incidents) == incidents[0]
    assert root_cause([]) is None
    assert root_cause([Incident(kind=IncidentKind.SAVE_FAILED)]) is None
