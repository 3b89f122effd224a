"""Slots: which node carries which ranks, and which incident was the cause of a cycle's end.

A slot is a node's place in the world. Whoever holds one keeps it from cycle to cycle, so that ranks and the order
of nodes stay as they were; only an empty slot is given to somebody else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind
from outlast.policy.rerun import Finding

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


OWN_VERDICTS = frozenset(
    {ExitReason.RESUME_TO_DISAMBIGUATE, ExitReason.FAILED_VALIDATION, ExitReason.STRAGGLER},
)
"""Exit codes by which a worker says why all ranks leave: a result was invalid, or a rank is slow."""
_GRAVITY = {
    IncidentKind.NODE_LOST: 0,
    IncidentKind.CANNOT_START: 1,
    IncidentKind.NODE_UNHEALTHY: 1,
    IncidentKind.WORKER_HUNG: 3,
    IncidentKind.WORKER_DIED: 4,
    IncidentKind.WORKER_FAILED: 5,
}
_OWN_VERDICT = 2
"""A worker that left with a verdict of its own was not driven out by its peers; they may have been by it."""
_FOUND_OUT = -1
"""What a replay found out is not lost, also where a node is lost at the same time: its slot is empty anyway."""


def root_cause(incidents: Sequence[Incident]) -> Incident | None:
    """Return the cause among the incidents of one cycle, in the order of their arrival.

    One fault shows in many places: peers of a lost node or of a killed rank fail in their collectives. What
    cannot be an effect comes first, then what was seen first. Where all ranks leave because of one invalid result, the
    cause is the rank that saw it; because of a slow rank, that rank.
    """
    ranked = [
        (_gravity(incident), _distance(incident), order)
        for order, incident in enumerate(incidents)
        if incident.kind in _GRAVITY
    ]
    return incidents[min(ranked)[2]] if ranked else None


def _gravity(incident: Incident) -> int:
    if incident.kind == IncidentKind.WORKER_FAILED and incident.exit_code in OWN_VERDICTS:
        return _FOUND_OUT if _finding(incident) in (Finding.PERSISTENT, Finding.CORRECT) else _OWN_VERDICT
    return _GRAVITY[incident.kind]


def _finding(incident: Incident) -> object:
    diagnosis = incident.evidence.get("diagnosis")
    return diagnosis.get("finding") if isinstance(diagnosis, dict) else None


def _distance(incident: Incident) -> int:
    """Return how far a worker is from the reason for which it left: 0 = it is what it saw itself."""
    diagnosis = incident.evidence.get("diagnosis")
    if not isinstance(diagnosis, dict):
        return 2
    return int(diagnosis.get("rank") != incident.rank)
