"""Actor groups fill exactly the empty slots, keep the survivors and bound recoveries without progress."""

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
def test_spares_fill_exactly_the_empty_slots(
    case: tuple[dict[int, str], dict[int, ActorFacts], list[ActorFacts]],
) -> None:
    """Survivors keep slot and state; each empty slot gets exactly one spare, which loads its state."""
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
def test_spares_of_the_same_node_are_preferred(
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
        same_node = [slot for slot in formation.slots if slot.rank in empty and node_of[slot.actor] == node]
        assert len(same_node) == min(len(empty), sum(spare.node == node for spare in spares))


@given(losses(), st.integers(1, 16))
def test_shrunken_group_prefers_survivors_and_loads_state(
    case: tuple[dict[int, str], dict[int, ActorFacts], list[ActorFacts]], num_slots: int
) -> None:
    """A group that shrinks takes survivors before spares, every member loads its state, and the other survivors are
    dismissed."""
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


def test_call_repeats_only_from_its_starting_iteration() -> None:
    """An actor at an iteration before or after the start of the call ends the call."""
    assert not ends_call(7, [7, 7])
    assert not ends_call(None, [None])
    assert ends_call(7, [6])
    assert ends_call(7, [8])
    assert ends_call(7, [7, 8])
    assert ends_call(7, [None])


@given(st.lists(st.sampled_from(["lost", "end", "same"]), max_size=60), st.integers(1, 4))
def test_recoveries_without_progress_are_bounded(events: list[str], limit: int) -> None:
    """No more recoveries in a row than the limit are granted without progress, in any order of calls and losses."""
    budget, iteration, granted = RecoveryBudget(limit), 0, 0
    for event in events:
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
            budget.note_end(iteration)  # an evaluation, or a step repeated after a recovery


def test_repeated_iterations_are_not_progress() -> None:
    """An iteration that kills every actor that reaches it exhausts the budget although earlier iterations end in
    between."""
    budget = RecoveryBudget(2)
    budget.note_end(6)
    for _ in range(2):
        assert budget.spend() is None
        budget.note_end(5)
        budget.note_end(6)
    exhausted = budget.spend()
    assert exhausted is not None
    assert "iteration 6" in exhausted


def test_stateless_actors_progress_with_every_call() -> None:
    """Each completed call of actors without state counts as progress."""
    budget = RecoveryBudget(1)
    for _ in range(5):
        assert budget.spend() is None
        budget.note_end(None)
