"""Who may write to a directory: one live owner at a time, and whose generations a run goes on from.

An owner leaves a record in the directory, with a number of its own, and renews it as long as it lives. Who takes a
directory over makes the record with the next number, which one of several can. A number is never used again: an owner
that was stopped finds a higher one when it wakes up, and its own record gone, and writes nothing more.

Whether an owner lives is known at once where it can be asked: on the same machine, by its process. Elsewhere its record
is watched: what changes lives, and what does not change for ``expires_s`` seconds of the observer's own clock is gone.
Clocks of two machines are never compared.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

import msgspec

__all__ = [
    "LeaseOwner",
    "LeaseStep",
    "OwnerStanding",
    "Process",
    "Silence",
    "find_life",
    "is_same_training",
    "judge_owner",
]

EXPIRES_AFTER = 5
"""Renewals that an owner misses before it counts as gone."""
GAP_S = 2.0
"""A longer pause between two looks counts as this much: who did not look cannot know that nothing changed."""


class Process(msgspec.Struct, frozen=True):
    """A process, as other processes of its machine can find it."""

    host: str
    """Name of the machine, for people."""
    machine: str
    """This start of the machine, and the space of process numbers in it."""
    pid: int
    started: int
    """When it was started, in ticks of the machine's clock: another process of the same number has another time."""


class LeaseOwner(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner says of itself."""

    token: str
    """Random; names this holding of this directory."""
    process: Process
    run: str
    """The run's id."""
    run_dir: str | None = None
    series: str | None = None
    """The run that manifests name, for a directory of generations."""
    names: tuple[str, ...] = ()
    """The names that somebody gave to the run, such as ``id a`` and ``directory /a``."""
    script: str | None = None
    """The program that runs; ``None`` = that is not known."""
    job: str | None = None
    """Whose processes follow each other, and never write at the same time; ``None`` = nothing follows this process."""
    stage: tuple[int, ...] = ()
    """How far its job had come: a later stage begins once the earlier ones have ended."""
    allocation: str | None = None
    """The scheduler's number of the job; ``None`` without a scheduler."""
    requeues: int = 0
    """How often the scheduler had started it again."""
    outlives: bool = False
    """Its job may go on when this process ends."""
    shares: bool = False
    """Processes of its job write beside each other, on other nodes too."""
    renew_s: float = 2.0
    renewals: int = 0
    released: bool = False
    """It has ended in order, and writes nothing more."""

    @property
    def expires_s(self) -> float:
        """Seconds without a renewal after which it is gone."""
        return self.renew_s * EXPIRES_AFTER

    def describe(self) -> str:
        """Return who it is, for people."""
        where = f"pid {self.process.pid} on {self.process.host}"
        place = f", run directory {self.run_dir}" if self.run_dir is not None else ""
        return f"run {self.series or self.run} ({where}{place})"


class LeaseStep(Enum):
    """What a process does that wants to write to a directory."""

    TAKE = "take"
    """Make the next record: nobody owns the directory, or no longer."""
    ENTER = "enter"
    """Write beside the owner: it is of the same job."""
    WAIT = "wait"
    """Look again: whether the owner lives is not known yet."""
    REFUSE = "refuse"
    """Write nothing: another one owns the directory."""


class OwnerStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an owner's life."""

    is_alive: bool | None = None
    """See :func:`find_life`."""
    has_changed: bool = False
    """It renewed its record since it was first looked at."""
    silent_s: float = 0.0
    """Seconds in which it did not."""


class Silence:
    """Measure for how long something that is looked at again and again has not changed."""

    def __init__(self) -> None:
        self.has_changed = False
        self.silent_s = 0.0
        self._mark: Hashable = None
        self._looked_at_s: float | None = None

    def look(self, mark: Hashable, now_s: float) -> None:
        """Take in what is there now; a pause of the observer's own counts for little.

        Args:
            mark: What changes with each renewal.
            now_s: Monotonic seconds of the observer.
        """
        if self._looked_at_s is None:
            self._mark = mark
        elif mark != self._mark:
            self._mark, self.has_changed, self.silent_s = mark, True, 0.0
        else:
            self.silent_s += min(now_s - self._looked_at_s, GAP_S)
        self._looked_at_s = now_s


def find_life(owner: LeaseOwner, *, process: bool | None, job: bool | None) -> bool | None:
    """Return whether an owner lives; ``None`` = that is not known.

    Args:
        owner: Its record.
        process: Whether its process lives; ``None`` = it is of another machine.
        job: Whether the launcher of its job lives; ``None`` = that is not known, or it has none.
    """
    if process or job:
        return True
    if process is False and (job is False or not owner.outlives):
        return False
    return None


def judge_owner(
    owner: LeaseOwner | None, own: LeaseOwner, standing: OwnerStanding, *, leads: bool = False
) -> LeaseStep:
    """Say what a process does that wants to write.

    Args:
        owner: The newest record; ``None`` = there is none.
        own: What the process would write.
        standing: What is known of the owner's life.
        leads: The process acts for its job from now on, as one that hosts the job's coordinator.
    """
    if owner is None or owner.released:
        return LeaseStep.TAKE
    if own.job is not None and own.job == owner.job:
        if leads or own.stage > owner.stage:
            return LeaseStep.TAKE
        if own.shares and standing.is_alive is not False:
            return LeaseStep.ENTER
    if own.allocation is not None and own.allocation == owner.allocation and own.requeues > owner.requeues:
        return LeaseStep.TAKE
    if standing.is_alive or standing.has_changed:
        return LeaseStep.REFUSE
    if standing.is_alive is False:
        return LeaseStep.TAKE
    return LeaseStep.TAKE if standing.silent_s >= owner.expires_s else LeaseStep.WAIT


def is_same_training(before: LeaseOwner, own: LeaseOwner) -> bool:
    """Return whether a run goes on with the training of the last owner of a directory, as far as can be told.

    Runs that somebody named are the same if they have a name in common. Where one of them has no name, they are the
    same if they run the same program.
    """
    if before.names and own.names:
        return not set(before.names).isdisjoint(own.names)
    return before.script is None or own.script is None or before.script == own.script
