"""Slots: the nodes' places in the world, and which waiting nodes get the empty ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    holder: str | None = None
    nproc: int | None = None
    """Number of ranks; ``None`` while no node has held the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCandidate:
    """A node that waits for a slot."""

    order: int
    """Position in the order of arrival."""
    nproc: int
    """Number of workers that it would start."""
    wish: int | None = None
    """The slot that its user requested, if any."""


def fill_slots(
    slots: Sequence[Slot], ready: Mapping[str, SlotCandidate], *, barred: Collection[str] = ()
) -> tuple[Slot, ...]:
    """Return the slots after waiting nodes were given the empty ones, as far as there are any.

    A holder that is ready and not barred keeps its slot, so that ranks and the order of nodes stay as they were. The
    other slots are filled by wish, then in the order of arrival, by nodes with as many workers as the slot has ranks.
    """
    kept = [slot if slot.holder in ready and slot.holder not in barred else Slot(nproc=slot.nproc) for slot in slots]
    taken = {slot.holder for slot in kept if slot.holder}
    free = sorted((node.order, name) for name, node in ready.items() if name not in taken and name not in barred)
    empty = [index for index, slot in enumerate(kept) if slot.holder is None]
    wishes: dict[int | None, list[str]] = {}
    for _, name in free:
        wishes.setdefault(ready[name].wish, []).append(name)
    given: set[str] = set()
    for index in empty:  # each node is visited once: there may be thousands of slots
        nproc = kept[index].nproc
        fits = (name for name in wishes.get(index, ()) if nproc in (None, ready[name].nproc))
        if (wished := next(fits, None)) is not None:
            kept[index] = Slot(holder=wished, nproc=ready[wished].nproc)
            given.add(wished)
    queues: dict[int, deque[tuple[int, str]]] = {}
    for order, name in free:
        if name not in given:
            queues.setdefault(ready[name].nproc, deque()).append((order, name))
    for index in empty:
        if kept[index].holder is not None:
            continue
        nproc = kept[index].nproc
        matching = [queue for size, queue in queues.items() if queue and nproc in (None, size)]
        if matching:
            queue = min(matching, key=lambda queue: queue[0])
            _, name = queue.popleft()
            kept[index] = Slot(holder=name, nproc=ready[name].nproc)
    return tuple(kept)


def shrink(slots: Sequence[Slot], *, min_nodes: int | None) -> tuple[Slot, ...] | None:
    """Return the world without its empty slots; ``None`` if it would be smaller than allowed."""
    held = tuple(slot for slot in slots if slot.holder is not None)
    return held if min_nodes is not None and len(held) >= min_nodes else None
