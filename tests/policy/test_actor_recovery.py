"""Actor groups fill exactly the empty slots, keep who survived, and never recover forever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.actor_recovery import (
    ActorFacts,
    Formation,
    MissingSlots,
    RecoveryBudget,
    ends_call,
    fill_slots,
    shrink_slots,
)

NODES = st.sampled_from(["a", "b", "c"])


@st.composite
def losses(draw: st.DrawFn) -> tuple[dict[int, str], dict[int, ActorFacts], list[ActorFacts]]:
    nodes = draw(st.lists(NODES, min_size=1, max_size=16))
    before = dict(enumerate(nodes))
    dead = draw(st.sets(st.sampled_from(sorted(before))))
    iterations = st.none() | st.integers(0, 3)
    survivors = {
        rank: ActorFacts(actor=100 + rank, node=node, iteration=draw(iterations))
        for rank, node in before.items()
        if rank not in dead
    }
    spares = [ActorFacts(actor=number, node=node) for number, node in enumerate(draw(st.lists(NODES, max_size=6)))]
    return before, survivors, spares


@given(losses())
def test_exactly_the_empty_slots_are_filled(
    case: tuple[dict[int, str], dict[int, ActorFacts], list[ActorFacts]],
) -> None:
    """Survivors keep slot and state; each empty slot, wherever it is, gets one spare that loads; none has two."""
    before, survivors, spares = case
    formation = fill_slots(before, survivors, spares)
    empty = set(before) - set(survivors)
    if len(spares) < len(empty):
        assert isinstance(formation, MissingSlots)
        assert len(formation.ranks) == len(empty) - len(spares)
        assert set(formation.ranks) <= empty
        return
    assert isinstance(formation, Formation)
    assert [slot.rank for slot in formation.slots] == sorted(before)
    assert len({slot.actor for slot in formation.slots}) == len(before)
    for slot in formation.slots:
        if slot.rank in survivors:
            assert (slot.actor, slot.has) == (survivors[slot.rank].actor, survivors[slot.rank].iteration)
        else:
            assert slot.actor in {spare.actor for spare in spares}
            assert slot.has is None
    assert not formation.dismissed


@given(losses())
def test_a_spare_of_the_same_node_comes_first(
    case: tuple[dict[int, str], dict[int, ActorFacts], list[ActorFacts]],
) -> None:
    """As many slots as possible are filled from the node that they were on."""
    before, survivors, spares = case
    formation = fill_slots(before, survivors, spares)
    if isinstance(formation, MissingSlots):
        return
    node_of = {spare.actor: spare.node for spare in spares}
    for node in "abc":
        empty = [rank for rank in before if rank not in survivors and before[rank] == node]
        stayed = [slot for slot in formation.slots if slot.rank in empty and node_of[slot.actor] == node]
        assert len(stayed) == min(len(empty), sum(spare.node == node for spare in spares))


@given(losses(), st.integers(1, 16))
def test_a_smaller_group_takes_survivors_first_and_all_load(
    case: tuple[dict[int, str], dict[int, ActorFacts], list[ActorFacts]], num_slots: int
) -> None:
    """When a group shrinks nobody trusts its state, survivors come before spares, and the rest of them waits."""
    _, survivors, spares = case
    formation = shrink_slots(num_slots, survivors, spares)
    if num_slots > len(survivors) + len(spares):
        assert isinstance(formation, MissingSlots)
        assert len(formation.ranks) == num_slots - len(survivors) - len(spares)
        return
    assert isinstance(formation, Formation)
    in_order = [survivors[rank].actor for rank in sorted(survivors)]
    holders = [slot.actor for slot in formation.slots]
    assert [slot.rank for slot in formation.slots] == list(range(num_slots))
    assert all(slot.has is None for slot in formation.slots)
    assert holders[: len(in_order)] == in_order[:num_slots]
    assert list(formation.dismissed) == in_order[num_slots:]


def test_a_call_is_repeated_from_where_it_began_only() -> None:
    """Any actor at another iteration than the call began from, before or after it, ends the call."""
    assert not ends_call(7, [7, 7])
    assert not ends_call(None, [None])
    assert ends_call(7, [6])
    assert ends_call(7, [8])
    assert ends_call(7, [7, 8])
    assert ends_call(7, [None])


@given(st.lists(st.sampled_from(["lost", "end", "same"]), max_size=60), st.integers(1, 4))
def test_recoveries_without_progress_are_bounded(story: list[str], limit: int) -> None:
    """However calls end in between, more than the limit of recoveries in a row are granted with progress only."""
    budget, iteration, granted = RecoveryBudget(limit), 0, 0
    for event in story:
        if event == "lost":
            if budget.spend() is not None:
                assert granted == limit
                return
            granted += 1
            assert granted <= limit
        elif event == "end":
            iteration += 1
            budget.note_end(iteration)
            granted = 0
        elif iteration:
            budget.note_end(iteration)  # an evaluation, or a step done again after going back


def test_going_back_and_getting_no_further_is_no_progress() -> None:
    """An iteration that kills whoever comes to it is not tried forever, though others end in between."""
    budget = RecoveryBudget(2)
    budget.note_end(6)
    for _ in range(2):
        assert budget.spend() is None
        budget.note_end(5)
        budget.note_end(6)
    exhausted = budget.spend()
    assert exhausted is not None
    assert "iteration 6" in exhausted


def test_without_state_every_call_is_progress() -> None:
    """Actors that keep no state have no iterations to tell progress by."""
    budget = RecoveryBudget(1)
    for _ in range(5):
        assert budget.spend() is None
        budget.note_end(None)
