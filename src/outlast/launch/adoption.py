"""Adoption: how a new coordinator takes over a job whose control store was lost.

The store is soft state. Agents that lost it keep their slots and, once they reach a store again, register with
their place in the last cycle. From these places the coordinator that comes up there rebuilds the slots; what nobody
claims in time belonged to a node that went down with the old store.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outlast.launch import messages as m
from outlast.policy.slots import Slot

__all__ = ["Adoption"]

_ONE_MISSING_S = 1.0
"""How long the last slot's node may take; all others have found the store by then."""


@dataclass(slots=True)
class Adoption:
    """What the agents of a job in progress have registered so far."""

    num_slots: int
    since_s: float | None = None
    """When the first one did; ``None`` = nobody yet."""
    cycle: int = -1
    """The newest cycle that anybody was in."""
    claims: dict[int, Slot] = field(default_factory=dict)
    """Slot number to its holder."""
    running: set[str] = field(default_factory=set)
    """Nodes whose workers run or have finished."""
    ended: dict[str, m.CycleFacts] = field(default_factory=dict)
    """What nodes told of the cycle that had ended for them."""

    def register(self, message: m.Register, now_s: float) -> None:
        """Take one node's place; an older cycle's counts for nothing."""
        if self.since_s is None:
            self.since_s = now_s
        place = message.place
        if place is None or place.cycle < self.cycle:
            return
        if place.cycle > self.cycle:
            self.cycle, self.num_slots = place.cycle, place.num_slots
            self.claims, self.running = {}, set()
        self.claims[place.slot] = Slot(holder=message.node, nproc=message.nproc)
        if message.running:
            self.running.add(message.node)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots as claimed; nobody's are empty."""
        return tuple(self.claims.get(index, Slot()) for index in range(self.num_slots))

    @property
    def missing(self) -> list[int]:
        """Slots that nobody claimed."""
        return [index for index in range(self.num_slots) if index not in self.claims]

    @property
    def has_majority(self) -> bool:
        """Whether most of the slots' holders registered."""
        return len(self.claims) * 2 > self.num_slots

    @property
    def is_running(self) -> bool:
        """Whether the cycle goes on on every node."""
        return not self.missing and all(slot.holder in self.running for slot in self.slots)

    def is_over(self, now_s: float, wait_s: float) -> bool:
        """Return whether all have registered, or had ``wait_s`` seconds to."""
        if self.since_s is None:
            return False
        if self.cycle >= 0 and not self.missing:
            return True
        if self.cycle >= 0 and len(self.missing) == 1:
            wait_s = min(wait_s, _ONE_MISSING_S)  # most likely the very node that hosted the store
        return now_s - self.since_s > wait_s
