"""Slots: which node carries which ranks, and which incident was the cause of a cycle's end.

A slot is a node's place in the world. Whoever holds one keeps it from cycle to cycle, so that ranks and the order
of nodes stay as they were; only an empty slot is given to somebody else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from outlast.policy.causes import OWN_VERDICTS, root_cause

__all__ = ["OWN_VERDICTS", "Slot", "SlotCandidate", "fill_slots", "root_cause", "shrink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A node's place: who holds it, and how many ranks it carries."""

    holder: str | None = None
    nproc: int | None = None
    """Number of ranks; ``None`` until somebody held it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCandidate:
    """A node that waits to be given a slot."""

    order: int
    """When it came; lower is earlier."""
    nproc: int
    """Number of workers that it would start."""
    wish: int | None = None
    """The slot that its user asked for, if any."""


def fill_slots(
    slots: Sequence[Slot], ready: Mapping[str, SlotCandidate], *, barred: Collection[str] = ()
) -> tuple[Slot, ...]:
    """Return the slots after every empty one was given to a waiting node, as far as there are any.

    A holder that is ready and not barred keeps its slot. The others are filled by wish, then in the order of
    arrival, by nodes with as many workers as the slot has ranks.
    """
    kept = [slot if slot.holder in ready and slot.holder not in barred else Slot(nproc=slot.nproc) for slot in slots]
    taken = {slot.holder for slot in kept if slot.holder}
    free = {name: node for name, node in ready.items() if name not in taken and name not in barred}
    for respect_wish in (True, False):
        for index, slot in enumerate(kept):
            if slot.holder is not None:
                continue
            fits = [
                (node.order, name)
                for name, node in free.items()
                if slot.nproc in (None, node.nproc) and (node.wish == index or not respect_wish)
            ]
            if fits:
                _, name = min(fits)
                kept[index] = Slot(holder=name, nproc=free.pop(name).nproc)
    return tuple(kept)


def shrink(slots: Sequence[Slot], *, min_nodes: int | None) -> tuple[Slot, ...] | None:
    """Return the world without its empty slots, or ``None`` when it would get smaller than the script allows."""
    held = tuple(slot for slot in slots if slot.holder is not None)
    return held if min_nodes is not None and len(held) >= min_nodes else None
