"""Is a slow rank's machine slow, or what it is given to do: from a small benchmark on it and on others.

A rank that is slow in training and as fast as the others in a matrix product, a memory copy and messages has more to
do than they have, or something beside it takes its time now and then; replacing its machine would not help.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

__all__ = ["MachineTimes", "MachineVerdict", "SlownessCause", "choose_others", "judge_machine"]

SLOWER = 1.15
"""Times as long as the slowest of the others from which a product or a copy is slow."""
SLOWER_LINK = 1.5
"""Times as long as between the others from which messages are slow; they vary more."""


class SlownessCause(StrEnum):
    """What makes a rank slow."""

    MACHINE = "machine"
    """Its processor or its memory: the same work takes longer there."""
    LINK = "link"
    """Its connection to others."""
    WORK = "work"
    """Not the machine: the same work takes as long as elsewhere."""
    UNKNOWN = "unknown"
    """There was nothing to compare with."""


class MachineTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank took for the same work as the others, in seconds."""

    rank: int
    """Global rank."""
    product_s: float
    """A matrix product on what it trains on."""
    copy_s: float
    """A copy within that memory."""
    exchange_s: Mapping[str, float] = {}
    """A message there and back, by the other one's global rank (as text), for those that this rank began."""


class MachineVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the benchmark says about a rank."""

    rank: int
    node: str
    cause: SlownessCause
    reason: str
    """The figures, in words."""

    def describe(self) -> str:
        """Return one line for people."""
        meaning = {
            SlownessCause.MACHINE: "the machine is slow",
            SlownessCause.LINK: "the machine's connection is slow",
            SlownessCause.WORK: (
                "the machine is as fast as others: what it is given to do is slow, or what runs beside it"
            ),
            SlownessCause.UNKNOWN: "it is not known whether the machine is slow",
        }[self.cause]
        return f"Rank={self.rank} Node={self.node}: {meaning} ({self.reason})"


def choose_others(
    suspect: int, nodes: Mapping[int, str], roles: Mapping[int, str], scores: Mapping[int, float], slow: Sequence[int]
) -> tuple[int, ...]:
    """Return up to two ranks to compare a suspect with: not slow ones, on other nodes, of its role, the fastest first.

    Args:
        suspect: Its global rank.
        nodes: Node of each rank.
        roles: Role of each rank.
        scores: Relative score of each rank that has one.
        slow: Ranks that are slow too.
    """
    candidates = [rank for rank in nodes if rank != suspect and rank not in slow]

    def rating(rank: int) -> tuple[bool, bool, float, int]:
        return (nodes[rank] == nodes[suspect], roles[rank] != roles[suspect], -scores.get(rank, 0.0), rank)

    first = sorted(candidates, key=rating)[:1]
    # The second one on a node of its own too, if there is one: messages between two nodes are to be compared.
    rest = sorted(
        (rank for rank in candidates if rank not in first),
        key=lambda rank: (any(nodes[rank] == nodes[other] for other in first), rating(rank)),
    )
    return tuple(sorted([*first, *rest[:1]]))


def judge_machine(suspect: MachineTimes, others: Sequence[MachineTimes], *, node: str) -> MachineVerdict:
    """Return what the benchmark says about a suspect.

    Args:
        suspect: What it took; its ``exchange_s`` are messages with the others.
        others: What they took; of two, one's ``exchange_s`` are messages with the other.
        node: The suspect's node, for the reader.
    """
    if not others:
        return MachineVerdict(
            rank=suspect.rank, node=node, cause=SlownessCause.UNKNOWN, reason="no other rank to compare with"
        )
    product = suspect.product_s / max(other.product_s for other in others)
    copy = suspect.copy_s / max(other.copy_s for other in others)
    between = [seconds for other in others for seconds in other.exchange_s.values()]
    whom = " and ".join(str(other.rank) for other in others)
    reason = f"matrix product {product:.2f} and memory copy {copy:.2f} times as long as on rank {whom}"
    link = None
    if between and suspect.exchange_s:
        link = min(suspect.exchange_s.values()) / max(between)
        reason += f", messages {link:.2f} times as long as between those"
    if max(product, copy) >= SLOWER:
        cause = SlownessCause.MACHINE
    elif link is not None and link >= SLOWER_LINK:
        cause = SlownessCause.LINK
    else:
        cause = SlownessCause.WORK
    return MachineVerdict(rank=suspect.rank, node=node, cause=cause, reason=reason)
