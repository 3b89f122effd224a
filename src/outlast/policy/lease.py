"""Write access to a directory: one live owner at a time, and the run that a directory belongs to.

*The owner* (:class:`LeaseOwner`) creates a numbered record in the directory and renews it while it lives. A successor
creates the record with the next number, which only one of several can do. Numbers are never reused: an owner that was
stopped finds a higher number when it resumes, and writes nothing more. On the same machine an owner's process shows
whether it lives. Elsewhere its record is observed: one that does not change for ``expires_s`` seconds of the observer's
clock is gone. Clocks of two machines are never compared.

*The run* (:class:`DirectoryRun`) that a directory of checkpoints belongs to outlives its owners. Every manifest names
its run under its own digest. ``run.json`` is a hint without a digest: it decides between several runs, and is the claim
of a run that has committed nothing yet. A lost, torn or changed hint costs nothing, and of two runs that begin in one
empty directory the one that creates the file gets it.

A run reads a directory when it begins, and adopts its name if a manifest proves one; a hint alone proves nothing. It
compares again at every save:

* The directory is its own: it continues, and repairs the hint if necessary.
* It belongs to no run: it creates the hint, which only one of several can.
* It is another run's, unchanged since this run began (a dead run's hint, or what another run left on a node's disk): it
  takes the directory over.
* It is another run's, which came later: the save is refused.

Rejected: one record for both. A lease is about processes and expires; a name is about data, is verified by digests, and
must be found again when all leases are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum

import msgspec

EXPIRES_AFTER = 5
"""Missed renewals after which an owner counts as gone."""
GAP_S = 2.0
"""Longest pause between two observations that counts: an observer that paused cannot know that nothing changed."""


class Process(msgspec.Struct, frozen=True):
    """A process, as other processes of its machine can find it."""

    host: str
    machine: str
    """Boot id and pid namespace of the machine."""
    pid: int
    started: int
    """Start time in clock ticks of the machine; distinguishes processes with the same pid."""


class LeaseOwner(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    """Random; identifies this ownership of this directory."""
    process: Process
    run: str
    run_dir: str | None = None
    series: str | None = None
    """The run that manifests name, for a directory of checkpoints."""
    names: tuple[str, ...] = ()
    """Names given to the run by users, such as ``id a`` and ``directory /a``."""
    script: str | None = None
    """The program that runs; ``None`` = not known."""
    job: str | None = None
    """Job whose processes follow each other and never write at the same time; ``None`` = nothing follows this process.
    """
    meets_at: tuple[str, ...] = ()
    """Rendezvous addresses of its job: jobs of one name without a common one are different jobs."""
    stage: tuple[int, ...] = ()
    """Progress of its job: a later stage begins once the earlier ones have ended."""
    allocation: str | None = None
    """The scheduler's number of the job; ``None`` = no scheduler."""
    requeues: int = 0
    """How often the scheduler had requeued it."""
    outlives: bool = False
    """Its job may continue when this process ends."""
    shares: bool = False
    """Processes of its job write concurrently, on other nodes too."""
    renew_s: float = 2.0
    renewals: int = 0
    released: bool = False
    """It has ended in order, and writes nothing more."""

    @property
    def expires_s(self) -> float:
        """Seconds without a renewal after which it is gone."""
        return self.renew_s * EXPIRES_AFTER

    def is_of_job(self, other: LeaseOwner) -> bool:
        if self.job is None or self.job != other.job:
            return False
        return self.meets_at == other.meets_at or not set(self.meets_at).isdisjoint(other.meets_at)

    def describe(self) -> str:
        where = f"pid {self.process.pid} on {self.process.host}"
        place = f", run directory {self.run_dir}" if self.run_dir is not None else ""
        return f"run {self.series or self.run} ({where}{place})"


class LeaseStep(Enum):
    """Next step of a process that is to write to a directory."""

    TAKE = "take"
    """Create the next record: the directory has no live owner."""
    ENTER = "enter"
    """Write alongside the owner, which is of the same job."""
    WAIT = "wait"
    """Look again: whether the owner lives is not known yet."""
    REFUSE = "refuse"
    """Write nothing: another one owns the directory."""


class OwnerStanding(msgspec.Struct, frozen=True, kw_only=True):
    is_alive: bool | None = None
    """See :func:`find_life`."""
    has_changed: bool = False
    """Its record was renewed since it was first read."""
    silent_s: float = 0.0


class Silence:
    """Measure how long something that is polled has not changed."""

    def __init__(self) -> None:
        self.has_changed = False
        self.silent_s = 0.0
        self._mark: Hashable = None
        self._looked_at_s: float | None = None

    def look(self, mark: Hashable, now_s: float) -> None:
        """Record the current state; a pause of the observer counts for at most :data:`GAP_S`.

        Args:
            mark: A value that changes with each renewal.
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
    """Return whether an owner lives; ``None`` = not known.

    Args:
        owner: Its record.
        process: Whether its process lives; ``None`` = it is on another machine.
        job: Whether the launcher of its job lives; ``None`` = not known, or it has none.
    """
    if process or job:
        return True
    if process is False and (job is False or not owner.outlives):
        return False
    return None


def judge_owner(
    owner: LeaseOwner | None, own: LeaseOwner, standing: OwnerStanding, *, leads: bool = False
) -> LeaseStep:
    """Return the next step of a process that is to write.

    Args:
        owner: The newest record; ``None`` = there is none.
        own: The record that the process would write.
        standing: Whether the owner lives.
        leads: The process acts for its job from now on, as the one that hosts the job's coordinator.
    """
    if owner is None or owner.released:
        return LeaseStep.TAKE
    if own.is_of_job(owner):
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
    """Return whether a run continues the training of the last owner of a directory, as far as known.

    Runs that users named are the same if they share a name; otherwise, if they run the same program.
    """
    if before.names and own.names:
        return not set(before.names).isdisjoint(own.names)
    return before.script is None or own.script is None or before.script == own.script


@dataclass(frozen=True, slots=True)
class DirectoryRun:
    run: str
    is_verified: bool
    """A manifest names it; otherwise only the hint does."""


class RunEvidence(msgspec.Struct, frozen=True, array_like=True):
    """Evidence in one place of the run that it belongs to."""

    hint: str | None = None
    """The run that ``run.json`` names."""
    run: str | None = None
    """The run that its manifests name; see :func:`find_owner`."""
    iteration: int = 0
    """Of its newest checkpoint."""

    def choose(self, verified: Collection[str]) -> str | None:
        """Return the run that the place names, given those that any place's manifests name."""
        return self.hint if self.hint in verified else self.run


class ClaimStep(Enum):
    """Step of a run before it saves into a directory."""

    HOLD = "hold"
    """Continue: the directory is its own."""
    WRITE = "write"
    """Write the hint, replacing an existing one."""
    CREATE = "create"
    """Create the hint, unless another run is quicker."""
    REFUSE = "refuse"
    """Save nothing: it is another run's."""


def find_owner(hint: str | None, runs: Iterable[str], *, own: str | None = None) -> DirectoryRun | None:
    """Return the run that a directory belongs to; ``None`` = no run.

    Args:
        hint: The run that ``run.json`` names; ``None`` = missing or unreadable.
        runs: The runs that manifests name, newest checkpoint first; read only as far as needed.
        own: The run that reads, if it has saved there or may have: where the hint names none of the runs, the directory
            is its own if a manifest names it.
    """
    found = list[str]()
    for run in runs:
        if run == hint or (hint is None and own in (None, run)):
            return DirectoryRun(run, is_verified=True)
        found.append(run)
    if found:
        return DirectoryRun(own if own is not None and own in found else found[0], is_verified=True)
    return DirectoryRun(hint, is_verified=False) if hint is not None else None


def judge_claim(run: str, owner: DirectoryRun | None, hint: str | None, *, is_unchanged: bool) -> ClaimStep:
    """Return the step of a run before it saves into a directory.

    Args:
        run: The run.
        owner: The run that the directory belongs to.
        hint: The run that ``run.json`` names.
        is_unchanged: The directory has not changed since the run began under another name than its owner's.
    """
    if owner is None:
        return ClaimStep.CREATE
    if owner.run == run:
        return ClaimStep.HOLD if hint == run else ClaimStep.WRITE
    return ClaimStep.WRITE if is_unchanged else ClaimStep.REFUSE


def choose_run(global_place: RunEvidence | None, node_places: Iterable[RunEvidence]) -> str | None:
    """Return the run that ranks continue, whose places may name different ones.

    A hint counts only if a manifest in any place names the same run. A node that replaced another may have files of an
    older run.

    Args:
        global_place: Evidence in the global tier.
        node_places: Evidence in each node's memory and directory; a place counts as often as it is given.

    Returns:
        The global tier's run, else the one that most places name, else the newest; ``None`` = it is a new run.
    """
    near = list(node_places)
    verified = {place.run for place in (global_place, *near) if place is not None and place.run is not None}
    if global_place is not None and (run := global_place.choose(verified)) is not None:
        return run
    named = [(run, place.iteration) for place in near if (run := place.choose(verified)) is not None]
    count = Counter(run for run, _ in named)
    newest = {run: max(iteration for other, iteration in named if other == run) for run in count}
    return max(count, key=lambda run: (count[run], newest[run], run), default=None)
