"""Recovery of a group of actors: who takes which slot, who keeps its state, and whether the call is repeated.

Facts in, decisions out. A group has one *slot* for each rank of its mesh, which an actor holds. When actors die, just
their slots are filled, wherever in the mesh they are; survivors keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec


class ActorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known of a living actor."""

    actor: int
    """Number of the actor, never used again."""
    node: str
    """Node that it is on."""
    iteration: int | None = None
    """Iteration of which it holds exactly the state; ``None``: it has none, or it is torn."""


class SlotAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """Who has a rank, and what it brings along."""

    rank: int
    actor: int
    has: int | None = None
    """Iteration whose state it may keep; ``None``: it has to load."""


class Formation(msgspec.Struct, frozen=True, kw_only=True):
    """Who works in the next incarnation."""

    slots: tuple[SlotAssignment, ...]
    """In the order of the ranks."""
    dismissed: tuple[int, ...] = ()
    """Survivors that have no slot any more; they wait as spares."""


class MissingSlots(msgspec.Struct, frozen=True, kw_only=True):
    """There are slots that no actor can take now."""

    ranks: tuple[int, ...]


def fill_slots(
    before: Mapping[int, str], survivors: Mapping[int, ActorFacts], spares: Sequence[ActorFacts]
) -> Formation | MissingSlots:
    """Fill exactly the empty slots, each with a spare of the lost actor's node if there is one.

    Args:
        before: Rank to the node of the actor that had it.
        survivors: Rank to who still has it.
        spares: Who is ready to take a slot; earlier ones are taken first.

    Returns:
        The formation, or the ranks for which there is no spare.
    """
    empty = [rank for rank in sorted(before) if rank not in survivors]
    left = list(spares)
    taken: dict[int, ActorFacts] = {}
    for rank in empty:
        if near := [spare for spare in left if spare.node == before[rank]]:
            taken[rank] = near[0]
            left.remove(near[0])
    for rank in empty:
        if rank not in taken and left:
            taken[rank] = left.pop(0)
    if missing := tuple(rank for rank in empty if rank not in taken):
        return MissingSlots(ranks=missing)
    kept = {rank: SlotAssignment(rank=rank, actor=one.actor, has=one.iteration) for rank, one in survivors.items()}
    new = {rank: SlotAssignment(rank=rank, actor=one.actor) for rank, one in taken.items()}
    return Formation(slots=tuple((kept | new)[rank] for rank in sorted(before)))


def shrink_slots(
    num_slots: int, survivors: Mapping[int, ActorFacts], spares: Sequence[ActorFacts]
) -> Formation | MissingSlots:
    """Form a smaller group: survivors in their order first, then spares. All load, since shards changed hands.

    Args:
        num_slots: Size of the smaller mesh.
        survivors: Rank to who still has it.
        spares: Who is ready to take a slot.
    """
    actors = [survivors[rank].actor for rank in sorted(survivors)] + [spare.actor for spare in spares]
    if len(actors) < num_slots:
        return MissingSlots(ranks=tuple(range(len(actors), num_slots)))
    return Formation(
        slots=tuple(SlotAssignment(rank=rank, actor=actor) for rank, actor in enumerate(actors[:num_slots])),
        dismissed=tuple(actor for actor in actors[num_slots:] if actor not in {spare.actor for spare in spares}),
    )


def ends_call(begun_at: int | None, reached: Iterable[int | None]) -> bool:
    """Return whether an interrupted call must not be repeated, as the state is not the one that it began from.

    Args:
        begun_at: Iteration at which the call began; ``None``: the actors have no state.
        reached: Iteration of each actor after the recovery.
    """
    return any(iteration != begun_at for iteration in reached)


class RecoveryBudget:
    """Count recoveries without progress, so that nothing is repeated forever.

    Args:
        max_recoveries: Recoveries in a row without progress.

    Thread: one.
    """

    def __init__(self, max_recoveries: int) -> None:
        self._max_recoveries = max_recoveries
        self._best: int | None = None
        self.num_without_progress = 0

    def note_end(self, iteration: int | None) -> None:
        """Note that a call ended in order.

        Args:
            iteration: Where the actors' state is now; ``None``: they keep none, and every call is progress.
        """
        if iteration is None or self._best is None or iteration > self._best:
            self.num_without_progress = 0
        if iteration is not None:
            self._best = iteration if self._best is None else max(self._best, iteration)

    def spend(self) -> str | None:
        """Count one more recovery; return why it is not granted, for people; ``None`` if it is."""
        if self.num_without_progress >= self._max_recoveries:
            where = "" if self._best is None else f" beyond iteration {self._best}"
            return (
                f"{self.num_without_progress} recoveries in a row brought no progress{where} "
                f"(max_recoveries={self._max_recoveries}); see the reports in `recoveries` for what was lost and why"
            )
        self.num_without_progress += 1
        return None
