"""A ballot: every rank gives numbers, and all get the largest of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from outlast.errors import OutlastError
from outlast.policy.rerun import Diagnosis, decode_diagnosis, encode_diagnosis
from outlast.runtime.dissemination import Dissemination

__all__ = ["Agree", "Ballot", "agree_alone", "agree_on_culprit"]

Agree: TypeAlias = Callable[[Sequence[int]], list[int]]
"""Takes this rank's numbers, below 2^63, and returns the largest of all ranks', one by one. Collective: all ranks, with
as many numbers."""


def agree_alone(values: Sequence[int]) -> list[int]:
    """Agree with nobody: the world has one rank."""
    return list(values)


class Ballot:
    """Agree through connections of its own.

    Args:
        timeout_s: Seconds after which it fails because a peer did not take part.

    Raises:
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the default group make it.
    Blocks: up to ``timeout_s``, until all ranks have come.
    Thread: one at a time.
    """

    def __init__(self, *, timeout_s: float = 1800.0) -> None:
        self._ranks = Dissemination.open(timeout_s=timeout_s)

    def __call__(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' numbers, one by one.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks, with as many numbers.
        Blocks: until all ranks have come; up to the timeout.
        """
        self._ranks.start(values)
        return self._ranks.finish()

    def close(self) -> None:
        """Leave. Blocks: never; peers that wait for this rank fail."""
        self._ranks.cut()
        self._ranks.close()


_FIRST = 1 << 62


def agree_on_culprit(agree: Agree, mine: Diagnosis | None, *, rejected: bool, rank: int, world_size: int) -> Diagnosis:
    """Return one rank's diagnosis on all ranks: of those that have one, that of the earliest validation.

    Args:
        agree: How the ranks agree.
        mine: This rank's diagnosis if it is one of those that decided; at least one rank has one.
        rejected: Whether this rank had an invalid result.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        OutlastError: No rank has one.

    Collective: all ranks.
    Blocks: as ``agree`` does, three times.
    """
    key = 0 if mine is None else _FIRST - (mine.call * world_size + rank)
    best, *flags = agree([key, *(int(rejected and one == rank) for one in range(world_size))])
    if best == 0:
        raise OutlastError("an invalid result was agreed upon, but no rank has one; do all ranks run the same code?")
    is_mine = mine is not None and (_FIRST - best) % world_size == rank
    data = list(encode_diagnosis(mine)) if mine is not None and is_mine else []
    (length,) = agree([len(data)])
    diagnosis = decode_diagnosis(bytes(agree(data or [0] * length)))
    ranks = tuple(one for one, flag in enumerate(flags) if flag)
    return msgspec.structs.replace(diagnosis, rejected_ranks=ranks)
