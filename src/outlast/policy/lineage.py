"""Branches of a run: the checkpoints that training continued from, and those that it abandoned.

A *branch* is everything that one set of processes saves. Where a set resumes from an older checkpoint than the newest
that exists (on a lost node, or of another number of ranks), the run forks: checkpoints beyond the fork are *superseded*
as soon as the new branch has saved one. Loading one later, when its node is back, would silently discard the training
done since.

The newest branch decides. Every manifest names its branch and the forks through which the branch descends from earlier
ones; each of these counts up to the iteration at which the next branch left it. So one manifest of the newest branch is
sufficient, even if all between are deleted.

Branches are ordered by *era*, which is above the eras of all checkpoints that the branch's ranks found at its start.
Its first number counts the global tier alone, which every set of processes reads: of two branches with the same number,
one that has committed to the global tier is later, as the other has not seen that commit. The second number orders
branches in node-local tiers; nodes may be absent, so two branches can share it. Then the higher iteration counts.

Rejected: the order of job and cycle numbers (those of a scheduler or ``torchrun`` are not ordered), wall clocks (never
compared between machines), and the number of the lease (each directory has its own).

Manifests of earlier versions name no branch; their attempt and the one that they loaded replace it, and such a
checkpoint is excluded only where a fork proves that it was abandoned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

MAX_FORKS = 32
"""How many of its newest forks a branch records; checkpoints of older branches are not excluded."""

Era: TypeAlias = tuple[int, int]
UNKNOWN_ERA: Era = (0, 0)
"""Of checkpoints saved by earlier versions."""


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Where a branch was abandoned."""

    branch: str
    era: Era
    iteration: int
    """The newest checkpoint of that branch from which training continued."""


class Branch(msgspec.Struct, frozen=True, array_like=True):
    name: str
    """Name of the processes; see :func:`processes_of`."""
    era: Era = UNKNOWN_ERA
    forks: tuple[Fork, ...] = ()
    """The branches that it descends from, oldest first."""


UNKNOWN_BRANCH = Branch("")


class SavedPoint(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that exists in any place, whether these ranks can load it or not."""

    iteration: int
    attempt: str
    era: Era
    is_global: bool
    """It is in the global tier."""

    @property
    def branch(self) -> str:
        return processes_of(self.attempt)

    @property
    def age_key(self) -> tuple[int, bool, int, int, str]:
        """Sort key: the order in which the branches began; see the module docstring."""
        return self.era[0], self.is_global, self.era[1], self.iteration, self.branch


class Descent(Protocol):
    """The fields of a manifest that name a branch."""

    @property
    def attempt(self) -> str | None: ...
    @property
    def era(self) -> Era: ...
    @property
    def forks(self) -> tuple[Fork, ...]: ...
    @property
    def restored_from(self) -> int | None: ...
    @property
    def restored_attempt(self) -> str | None: ...


def branch_of(manifest: Descent) -> Branch:
    """Return the branch that saved a checkpoint."""
    forks = manifest.forks
    if manifest.era == UNKNOWN_ERA and manifest.restored_attempt is not None and manifest.restored_from is not None:
        forks = (Fork(processes_of(manifest.restored_attempt), UNKNOWN_ERA, manifest.restored_from),)
    return Branch(processes_of(manifest.attempt or ""), manifest.era, forks)


def processes_of(attempt: str) -> str:
    """Return the name of the set of processes that made an attempt, ``<processes>.<ordinal>``."""
    return attempt.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Lineage:
    """The branches of all checkpoints that the ranks found."""

    newest: Branch | None = None
    """``None`` = there is no checkpoint."""
    saved: Mapping[str, SavedPoint] = field(default_factory=dict)
    """By attempt."""

    @classmethod
    def of(cls, saved: Iterable[SavedPoint], branches: Iterable[Branch]) -> Lineage:
        """Return the lineage of all checkpoints.

        Args:
            saved: All checkpoints.
            branches: At least the branch of the newest one, by :attr:`SavedPoint.age_key`.
        """
        by_attempt: dict[str, SavedPoint] = {}
        for point in saved:
            known = by_attempt.setdefault(point.attempt, point)
            if point.age_key > known.age_key:  # the same one, in the global tier too
                by_attempt[point.attempt] = point
        if not by_attempt:
            return cls()
        newest = max(by_attempt.values(), key=lambda point: point.age_key).branch
        return cls(next(branch for branch in branches if branch.name == newest), by_attempt)

    def why_superseded(self, attempt: str) -> str | None:
        """Return why a checkpoint belongs to an abandoned branch; ``None`` = it does not."""
        point, newest = self.saved.get(attempt), self.newest
        if point is None or newest is None or point.branch == newest.name:
            return None
        limit = next((fork.iteration for fork in newest.forks if fork.branch == point.branch), None)
        if limit is None:
            is_forgotten = len(newest.forks) == MAX_FORKS and point.era < newest.forks[0].era
            if point.era == UNKNOWN_ERA or is_forgotten:
                return None
        elif point.iteration <= limit:
            return None
        origin = limit if limit is not None else newest.forks[-1].iteration if newest.forks else 0
        saved = max(other.iteration for other in self.saved.values() if other.branch == newest.name)
        return (
            f"its branch was abandoned: later training resumed from iteration {origin} without it and saved "
            f"iteration {saved}"
        )

    def is_superseded_for_certain(self, attempt: str) -> bool:
        """Return whether a checkpoint is superseded regardless of checkpoints that were not found.

        A fork proves it, and so does the global tier, which every set of processes reads. Otherwise one of two branches
        may have committed there unseen, and be the later one.
        """
        if self.newest is None or self.why_superseded(attempt) is None:
            return False
        point, newest = self.saved[attempt], self.newest
        has_fork = any(fork.branch == point.branch for fork in newest.forks)
        is_global = any(other.is_global for other in self.saved.values() if other.branch == newest.name)
        return has_fork or is_global or point.era[0] < newest.era[0]

    def begin(self, name: str, attempt: str | None, iteration: int) -> Branch:
        """Return the branch of processes that resume from a checkpoint.

        Args:
            name: Name of the processes; see :func:`processes_of`.
            attempt: The checkpoint's attempt; ``None`` = they begin from the start.
            iteration: Its iteration.
        """
        newest = self.newest
        if attempt is None:
            return Branch(name, self._next_era())
        point, left = self.saved.get(attempt), processes_of(attempt)
        forks: tuple[Fork, ...] = ()
        if newest is not None:
            names = [fork.branch for fork in newest.forks]
            forks = newest.forks[: names.index(left)] if left in names else newest.forks if left == newest.name else ()
        fork = Fork(left, UNKNOWN_ERA if point is None else point.era, iteration)
        return Branch(name, self._next_era(), (*forks, fork)[-MAX_FORKS:])

    def resume(self, name: str, origin: tuple[str, int] | None, iteration: int) -> Branch:
        """Return the branch of processes that continue the training of earlier ones from memory.

        Args:
            name: Name of the processes.
            origin: Attempt and iteration of the checkpoint that the earlier ones had loaded; ``None`` = none.
            iteration: How far they had trained.
        """
        newest = self.newest
        if newest is None:
            return self.begin(name, None, 0)
        if origin is not None:
            last = newest.forks[-1] if newest.forks else None
            if last is None or (last.branch, last.iteration) != (processes_of(origin[0]), origin[1]):
                return self.begin(name, *origin)  # the earlier processes have saved nothing
        return Branch(name, self._next_era(), (*newest.forks, Fork(newest.name, newest.era, iteration))[-MAX_FORKS:])

    def _next_era(self) -> Era:
        """Return the era of a branch that begins after all that was found."""
        first = 1 + max((point.era[0] for point in self.saved.values() if point.is_global), default=0)
        return first, 1 + max((point.era[1] for point in self.saved.values() if point.era[0] == first), default=0)
