"""Recovery of a group of actors: who takes which slot, who keeps its state, and whether the call is repeated.

A group has one *slot* for each rank of its mesh, held by an actor. When actors die, only their slots are filled;
survivors keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec


class ActorFacts(msgspec.Struct, frozen=True, kw_only=True):
    actor: int
    """Number of the actor, never reused."""
    node: str
    iteration: int | None = None
    """Iteration of the complete state that it holds; ``None`` = none, or the state is torn."""


class SlotAssignment(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    actor: int
    has: int | None = None
    """Iteration whose state it may keep; ``None`` = it has to load."""


class Formation(msgspec.Struct, frozen=True, kw_only=True):
    """The actors of the next incarnation."""

    slots: tuple[SlotAssignment, ...]
    """By rank."""
    dismissed: tuple[int, ...] = ()
    """Survivors without a slot; they wait as spares."""


class MissingSlots(msgspec.Struct, frozen=True, kw_only=True):
    """No actor is available for these slots."""

    ranks: tuple[int, ...]


def fill_slots(
    before: Mapping[int, str], survivors: Mapping[int, ActorFacts], spares: Sequence[ActorFacts]
) -> Formation | MissingSlots:
    """Fill the empty slots, each with a spare of the lost actor's node if there is one.

    Args:
        before: Rank to the node of the actor that had it.
        survivors: Rank to the actor that still has it.
        spares: Actors ready to take a slot; earlier ones are taken first.
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
    """Form a smaller group of ``num_slots``: survivors in their order, then spares. All load, since shards changed
    owners."""
    actors = [survivors[rank].actor for rank in sorted(survivors)] + [spare.actor for spare in spares]
    if len(actors) < num_slots:
        return MissingSlots(ranks=tuple(range(len(actors), num_slots)))
    return Formation(
        slots=tuple(SlotAssignment(rank=rank, actor=actor) for rank, actor in enumerate(actors[:num_slots])),
        dismissed=tuple(actor for actor in actors[num_slots:] if actor not in {spare.actor for spare in spares}),
    )


def ends_call(begun_at: int | None, reached: Iterable[int | None]) -> bool:
    """Return whether an interrupted call must not be repeated, as the state is not the one it began from.

    Args:
        begun_at: Iteration at which the call began; ``None`` = the actors have no state.
        reached: Iteration of each actor after the recovery.
    """
    return any(iteration != begun_at for iteration in reached)


class RecoveryBudget:
    """Limit the number of recoveries in a row without progress.

    Thread: one.
    """

    def __init__(self, max_recoveries: int) -> None:
        self._max_recoveries = max_recoveries
        self._best: int | None = None
        self.num_without_progress = 0

    def note_end(self, iteration: int | None) -> None:
        """Record that a call returned.

        Args:
            iteration: Iteration of the actors' state; ``None`` = they keep none, and every call is progress.
        """
        if iteration is None or self._best is None or iteration > self._best:
            self.num_without_progress = 0
        if iteration is not None:
            self._best = iteration if self._best is None else max(self._best, iteration)

    def spend(self) -> str | None:
        """Count one more recovery; return why it is refused, or ``None`` if it is granted."""
        if self.num_without_progress >= self._max_recoveries:
            where = "" if self._best is None else f" beyond iteration {self._best}"
            return (
                f"{self.num_without_progress} recoveries in a row brought no progress{where} "
                f"(max_recoveries={self._max_recoveries}); see the reports in `recoveries` for what was lost and why"
            )
        self.num_without_progress += 1
        return None
