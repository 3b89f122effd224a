"""Which generation all ranks go back to, and from which copy each of them.

A *copy* is one rank's part of a generation in one place. Two attempts at the same iteration are two generations:
their parts are never mixed. The rule: the newest generation of which every rank has a copy that nobody refused; of
each rank's copies of it, the one in the nearest tier.

What there are reasons against without proof comes after all else: copies that are doubtful (:mod:`policy.quarantine`),
and before them generations with numbers that are infinite or NaN. Such a state may be right, with masks for example,
but then so are all its generations: a newer one is left aside only for an older one that is finite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

__all__ = ["Copy", "RecoveryPoint", "Tier", "choose_best_point", "choose_recovery_point"]


class Tier(IntEnum):
    """Where a copy lives, nearest first."""

    MEMORY = 0
    """Held by this node's writer."""
    LOCAL = 1
    """On this node's disk."""
    REPLICA = 2
    """Held by another node, in its memory or on its disk."""
    GLOBAL = 3
    """In the global store."""

    def __str__(self) -> str:
        return self.name.lower()


class Copy(msgspec.Struct, frozen=True, order=True):
    """One rank's part of a generation, in one place."""

    generation: int
    attempt: str
    """The attempt that wrote it."""
    tier: Tier
    holder: str = ""
    """The node that holds it; empty for the global tier."""


class RecoveryPoint(msgspec.Struct, frozen=True):
    """What all ranks load."""

    generation: int
    attempt: str
    copies: tuple[Copy, ...]
    """The copy that each rank loads, by rank."""


Copies: TypeAlias = Sequence[Collection[Copy]]


def choose_recovery_point(
    copies: Copies, refused: Mapping[int, Collection[Copy]] | None = None
) -> RecoveryPoint | None:
    """Choose a generation and each rank's copy; every rank that is given the same facts chooses the same.

    Args:
        copies: For each rank, what it could load.
        refused: For each rank, copies that its verification rejected or that are known to be bad.

    Returns:
        The newest complete generation, each rank's part from the nearest tier; ``None`` when there is none. Of two
        attempts at the newest iteration the one with the nearer copies is chosen, then the one whose name is last.
    """
    if not copies:
        return None
    best: list[dict[tuple[int, str], Copy]] = []
    for rank, held in enumerate(copies):
        bad = (refused or {}).get(rank, ())
        nearest: dict[tuple[int, str], Copy] = {}
        for copy in held:
            key = (copy.generation, copy.attempt)
            if copy not in bad and (key not in nearest or (copy.tier, copy.holder) < _place(nearest[key])):
                nearest[key] = copy
        best.append(nearest)
    complete = set(best[0]).intersection(*best[1:])
    if not complete:
        return None
    generation = max(key[0] for key in complete)
    attempts = sorted(key[1] for key in complete if key[0] == generation)
    attempt = min(reversed(attempts), key=lambda name: sum(nearest[generation, name].tier for nearest in best))
    return RecoveryPoint(generation, attempt, tuple(nearest[generation, attempt] for nearest in best))


def choose_best_point(
    copies: Copies,
    refused: Mapping[int, Collection[Copy]],
    *,
    doubtful: Copies = (),
    not_finite: Collection[tuple[int, str]] = (),
) -> RecoveryPoint | None:
    """Choose as :func:`choose_recovery_point`, but what there are reasons against only if nothing else is left.

    Args:
        copies: For each rank, what it could load.
        refused: For each rank, copies that are never loaded.
        doubtful: For each rank, copies that are loaded if there are no others; empty = none.
        not_finite: Iteration and attempt of the generations that hold numbers that are infinite or NaN; they are loaded
            if there are no others, be those doubtful or not.

    Returns:
        The choice; ``None`` when nothing is complete that nobody refused.
    """
    unsure = [set(doubtful[rank]) if doubtful else set() for rank in range(len(copies))]
    infinite = [{copy for copy in held if (copy.generation, copy.attempt) in not_finite} for held in copies]
    for left_out in ((unsure, infinite), (infinite,), (unsure,), ()):
        bad = {rank: set(refused.get(rank, ())).union(*(one[rank] for one in left_out)) for rank in range(len(copies))}
        if (point := choose_recovery_point(copies, bad)) is not None:
            return point
    return None


def _place(copy: Copy) -> tuple[Tier, str]:
    return copy.tier, copy.holder
