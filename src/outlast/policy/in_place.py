"""Whether training goes on from what the ranks hold in memory after a restart in process, and who gives what to whom.

Each rank reports what it holds: at which iteration its part of the state is *whole*, that is, as the end of that many
optimizer steps left it. It is not whole where an update had begun, or something else has changed it since. What is a
rank's own (random numbers, the position in the data) is kept apart, for the last two iterations, and also by its
neighbours on the node, so that it outlives the rank.

The ranks go on from the newest iteration at which each of them has its part, or another rank has the same part, and at
which the own things of every rank are there. A rank that lacks its part gets it. In any doubt nothing of this is
used, and everybody loads from the checkpoint tiers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

__all__ = ["InPlaceHolding", "InPlacePlan", "Origin", "plan_in_place"]


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that was loaded."""

    generation: int
    attempt: str
    """The attempt that had saved it."""
    tiers: tuple[str, ...]
    """For each rank where its part came from."""


class InPlaceHolding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank holds."""

    iteration: int | None = None
    """Number of optimizer steps that made its part of the state; ``None`` = it has none that is whole."""
    reason: str = ""
    """Why not, for people."""
    rank: int | None = None
    """The rank that it was when it came to hold it; ``None`` = none yet."""
    world_size: int = 0
    """Number of ranks then."""
    digest: str = ""
    """Digest of its part."""
    is_shared: bool = False
    """All of its part is on other ranks, too."""
    replicas: tuple[int, ...] = ()
    """Ranks of now that have the same part, in order, this one included."""
    own: dict[int, tuple[int, ...]] = {}
    """Whose own things it can give (rank of then), at which iterations."""
    has_loaded: Origin | None = None
    """What its part goes back to; ``None`` = it was never loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlacePlan:
    """What the ranks do; the same on all of them."""

    iteration: int | None
    """Where training goes on; ``None`` = from the checkpoint tiers."""
    reason: str = ""
    """Why from there, for people; empty: nobody holds anything."""
    part_from: Mapping[int, int] = field(default_factory=dict)
    """WrappedRank that lacks its part to the rank that gives it."""
    own_from: Mapping[int, int] = field(default_factory=dict)
    """Every rank to the one that has its own things."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """WrappedRank that is given its part to the digest it must have then."""
    has_loaded: Origin | None = None
    """What the state goes back to."""


def plan_in_place(holdings: Sequence[InPlaceHolding]) -> InPlacePlan:
    """Return what the ranks do.

    Args:
        holdings: What each rank of now holds, by rank.
    """
    whole = {rank: one for rank, one in enumerate(holdings) if one.iteration is not None}
    reasons = [f"rank {rank}: {one.reason}" for rank, one in enumerate(holdings) if one.reason]
    if not whole:
        return InPlacePlan(iteration=None, reason="; ".join(reasons[:3]))
    if any(one.world_size != len(holdings) for one in whole.values()):
        return InPlacePlan(iteration=None, reason="the number of ranks has changed")
    first = ""
    for iteration in sorted({one.iteration for one in whole.values() if one.iteration is not None}, reverse=True):
        plan = _plan_at(iteration, holdings)
        if isinstance(plan, InPlacePlan):
            return plan
        first = first or plan
    return InPlacePlan(iteration=None, reason="; ".join([first, *reasons[:3]]))


def _plan_at(iteration: int, holdings: Sequence[InPlaceHolding]) -> InPlacePlan | str:
    """Return the plan to go on from an iteration, or what is in the way of it."""
    part_from, own_from, digests = dict[int, int](), dict[int, int](), dict[int, str]()
    for rank in range(len(holdings)):
        givers = [rank, *(other for other in range(len(holdings)) if other != rank)]
        giver = next((one for one in givers if iteration in holdings[one].own.get(rank, ())), None)
        if giver is None:
            return f"nobody has the random numbers and the like of rank {rank} at iteration {iteration}"
        own_from[rank] = giver
        sources = [
            other
            for other, one in enumerate(holdings)
            if one.iteration == iteration
            and (other == rank or rank in one.replicas)
            and (one.rank == rank if other == rank and not one.is_shared else one.is_shared)
        ]
        if not sources:
            return f"no rank that is left has the part of rank {rank} at iteration {iteration}"
        if len({holdings[source].digest for source in sources}) > 1:
            return f"replicas of rank {rank} differ at iteration {iteration}: ranks {sources}"
        if rank not in sources:
            part_from[rank] = sources[0]
            digests[rank] = holdings[sources[0]].digest
    origins = {one.has_loaded for one in holdings if one.iteration == iteration}
    if len(origins) > 1:
        return "the ranks go back to different generations"
    return InPlacePlan(
        iteration=iteration,
        part_from=part_from,
        own_from=own_from,
        digests=digests,
        has_loaded=next(iter(origins)),
    )
