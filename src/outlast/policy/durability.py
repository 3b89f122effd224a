"""Failures that a checkpoint survives, and how long a commit that survives the job has been overdue.

A checkpoint survives a failure if a tier that holds it does:

* the failure of *workers*: any tier; the node's checkpoint writer keeps the memory tier;
* the loss of a *node*: a replica, or the global directory, but not the local disk;
* the end of the *job*: the global directory or, if none is configured, the local directory, where the next job finds
  its checkpoints if it gets the same nodes.

With a global directory, a checkpoint that survives the end of the job also survives the loss of a node. With a local
directory alone the two are independent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from outlast.policy.recovery_point import Tier
from outlast.wording import duration

_MAX_OWED = 256
"""Saves that are remembered until a commit covers them; above it every second one is dropped, never the oldest."""


class SurvivalLevel(IntEnum):
    """A failure that a checkpoint survives, the smallest first."""

    WORKER = 0
    NODE = 1
    JOB = 2

    def __str__(self) -> str:
        return self.name.lower()


def job_tier(configured: Collection[Tier]) -> Tier | None:
    """Return the configured tier that outlives the job; ``None`` = there is none."""
    return next((tier for tier in (Tier.GLOBAL, Tier.LOCAL) if tier in configured), None)


def levels_of(tiers: Collection[Tier], configured: Collection[Tier]) -> frozenset[SurvivalLevel]:
    """Return which failures a checkpoint survives.

    Args:
        tiers: The tiers that hold it.
        configured: The tiers that the run saves to.
    """
    holding = frozenset(tiers)
    found = {SurvivalLevel.WORKER} if holding else set()
    if holding & {Tier.REPLICA, Tier.GLOBAL}:
        found.add(SurvivalLevel.NODE)
    if job_tier(configured) in holding:
        found.add(SurvivalLevel.JOB)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Durability:
    """The newest iteration whose checkpoint survives each failure; ``None`` = none does."""

    worker: int | None = None
    """The newest one in any tier."""
    node: int | None = None
    job: int | None = None


def with_commit(known: Durability, iteration: int, tiers: Collection[Tier], configured: Collection[Tier]) -> Durability:
    """Return the durability once a checkpoint of an iteration is in ``tiers``, of the configured ones."""
    levels = levels_of(tiers, configured)
    before = {level: getattr(known, str(level)) for level in SurvivalLevel}
    newest = {str(level): max(iteration, before[level] or 0) if level in levels else before[level] for level in before}
    return Durability(**newest)


def describe_end(known: Durability, done: int) -> str:
    """Return one sentence on what is lost if the job ends now, after ``done`` optimizer steps."""
    kept = known.job
    if kept is not None and kept >= done:
        return f"iteration {kept} is saved, nothing is lost"
    if not done and known.worker is None:
        return "no iteration was completed; nothing is lost"
    lost = _describe_lost(known, done)
    ahead = known.worker if known.worker is not None and known.worker > (kept or 0) else None
    if ahead is None:
        return lost
    return f"iteration {ahead} is in node-local tiers only and is lost when this job ends; {lost}"


def _describe_lost(known: Durability, done: int) -> str:
    kept = known.job
    first = (kept or 0) + 1
    lost = f"iteration {done} is lost" if first >= done else f"iterations {first} to {done} are lost"
    if kept is None:
        return f"no checkpoint survives the end of the job: {lost}"
    return f"the newest checkpoint that survives the end of the job is iteration {kept}: {lost}"


@dataclass(frozen=True, slots=True)
class OwedSaves:
    """Saves that were to survive the end of the job, and are not covered by such a commit yet.

    A save is covered by the commit of its own or a newer iteration. Commits to other tiers cover nothing.
    """

    saves: tuple[tuple[int, float], ...] = ()
    """Iteration, and the monotonic seconds at which the save began."""

    def add(self, iteration: int, now_s: float) -> OwedSaves:
        """Return the saves with one to the tier that outlives the job that has begun."""
        if any(known == iteration for known, _ in self.saves):
            return self
        saves = (*self.saves, (iteration, now_s))
        if len(saves) > _MAX_OWED:
            oldest = min(saves, key=lambda save: save[1])
            saves = (oldest, *(save for save in saves[1::2] if save != oldest))
        return OwedSaves(saves)

    def cover(self, iteration: int | None) -> OwedSaves:
        """Return the saves that are not covered once an iteration survives the end of the job; ``None`` = none does."""
        if iteration is None:
            return self
        return OwedSaves(tuple(save for save in self.saves if save[0] > iteration))

    @property
    def oldest(self) -> tuple[int, float] | None:
        """Iteration of the save that has been owed for the longest time, and when it began."""
        return min(self.saves, key=lambda save: (save[1], save[0]), default=None)

    def lag_s(self, now_s: float) -> float:
        """Return for how many seconds a commit has been overdue; 0 = nothing is owed."""
        oldest = self.oldest
        return 0.0 if oldest is None else max(0.0, now_s - oldest[1])


def describe_overdue(*, where: str, lag_s: float, limit_s: float, error: str, known: Durability, done: int) -> str:
    """Return why a run stops whose checkpoints have not survived the end of the job for too long.

    Args:
        where: The tier and its path.
        lag_s: How long a commit there has been overdue.
        limit_s: ``max_durable_lag``.
        error: The last error; empty = not known.
        known: What is committed.
        done: Number of optimizer steps done.
    """
    why = f"; the last error: {error}" if error else ""
    return (
        f"no checkpoint was committed to {where} for {duration(lag_s)} although saves were due "
        f"(max_durable_lag={limit_s:g} s); {_describe_lost(known, done)}; repair it, then start the run again{why}"
    )
