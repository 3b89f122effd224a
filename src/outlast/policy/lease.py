"""Who may write to a directory: one live owner at a time, and which run's generations a directory holds.

*The owner* (:class:`LeaseOwner`) leaves a numbered record in the directory and renews it as long as it lives. Whoever
takes a directory over creates the record with the next number, which only one of several can do. A number is never used
again: an owner that was stopped finds a higher number when it wakes up, and its own record gone, and writes nothing
more. Whether an owner lives is known at once where it can be asked: on the same machine, by its process. Elsewhere its
record is watched: a record that changes is alive, and one that does not change for ``expires_s`` seconds of the
observer's own clock is gone. Clocks of two machines are never compared.

*The run* (:class:`DirectoryRun`) that a directory of generations belongs to outlives its owners. Every manifest names
its run under its own digest. The file ``run.json`` beside them is a hint without a digest: it decides which of several
runs is meant, and it is the claim of a run that has committed nothing yet. So a lost, torn or changed hint costs
nothing, and of two runs that begin in one empty directory the one that creates the file gets it.

A run looks at a directory when it begins, and adopts its name if a manifest there proves one; a hint alone proves
nothing, since whoever wrote it may be gone. At every save it compares again:

* The directory is its own: it continues, and repairs the hint if need be.
* It is nobody's: it creates the hint, which only one of several can.
* It is another run's, and nothing has changed since this run began beside it (a dead run's hint, or what another run
  left on a node's disk): it takes the directory over.
* It is another run's, which has come since: it is refused.

Rejected: one record for both. A lease is about processes and expires; a name is about data, is proven by digests, and
must be found again when all leases are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum

import msgspec

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
    """What identifies an owner."""

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
    meets_at: tuple[str, ...] = ()
    """Where processes of its job meet: jobs of one name without a place in common are different jobs."""
    stage: tuple[int, ...] = ()
    """How far its job had come: a later stage begins once the earlier ones have ended."""
    allocation: str | None = None
    """The scheduler's number of the job; ``None`` without a scheduler."""
    requeues: int = 0
    """How often the scheduler had started it again."""
    outlives: bool = False
    """Its job may continue when this process ends."""
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

    def is_of_job(self, other: LeaseOwner) -> bool:
        """Return whether this owner and another one belong to the same job."""
        if self.job is None or self.job != other.job:
            return False
        return self.meets_at == other.meets_at or not set(self.meets_at).isdisjoint(other.meets_at)

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
    """Return whether a run continues the training of the last owner of a directory, as far as can be told.

    Runs that somebody named are the same if they have a name in common. Where one of them has no name, they are the
    same if they run the same program.
    """
    if before.names and own.names:
        return not set(before.names).isdisjoint(own.names)
    return before.script is None or own.script is None or before.script == own.script


@dataclass(frozen=True, slots=True)
class DirectoryRun:
    """The run that a directory belongs to."""

    run: str
    is_proven: bool
    """A manifest names it; otherwise nothing but the hint does."""


class RunEvidence(msgspec.Struct, frozen=True, array_like=True):
    """What one place shows of the run that it belongs to."""

    hint: str | None = None
    """The run that ``run.json`` names."""
    run: str | None = None
    """The run that its manifests name; see :func:`find_owner`."""
    iteration: int = 0
    """Of its newest generation."""

    def choose(self, proven: Collection[str]) -> str | None:
        """Return the run that it names, given those that any place's manifests name."""
        return self.hint if self.hint in proven else self.run


class ClaimStep(Enum):
    """What a run does before it saves into a directory."""

    HOLD = "hold"
    """Go on: it is its own."""
    WRITE = "write"
    """Write the hint, in place of what is there."""
    CREATE = "create"
    """Make the hint, unless another run is quicker."""
    REFUSE = "refuse"
    """Save nothing: it is another run's."""


def find_owner(hint: str | None, runs: Iterable[str], *, own: str | None = None) -> DirectoryRun | None:
    """Return the run that a directory belongs to; ``None`` = nobody's.

    Args:
        hint: The run that ``run.json`` names; ``None``: it is not there, or cannot be read.
        runs: The runs that manifests name, newest generation first. No more are taken than are needed.
        own: The run that looks, when it has saved there or may have: where the hint names none of the runs, it is
            the directory's if a manifest names it.
    """
    found = list[str]()
    for run in runs:
        if run == hint or (hint is None and own in (None, run)):
            return DirectoryRun(run, is_proven=True)
        found.append(run)
    if found:
        return DirectoryRun(own if own is not None and own in found else found[0], is_proven=True)
    return DirectoryRun(hint, is_proven=False) if hint is not None else None


def judge_claim(run: str, owner: DirectoryRun | None, hint: str | None, *, is_unchanged: bool) -> ClaimStep:
    """Say what a run does before it saves into a directory.

    Args:
        run: The run.
        owner: Whose the directory is.
        hint: The run that ``run.json`` names.
        is_unchanged: The directory is what it was when the run began, which took another name than its owner's.
    """
    if owner is None:
        return ClaimStep.CREATE
    if owner.run == run:
        return ClaimStep.HOLD if hint == run else ClaimStep.WRITE
    return ClaimStep.WRITE if is_unchanged else ClaimStep.REFUSE


def choose_run(global_place: RunEvidence | None, near_places: Iterable[RunEvidence]) -> str | None:
    """Return the run that ranks continue, whose places may name different ones.

    A hint counts if a manifest names the same run, in whichever place: a manifest that is not the run's, the last that
    can be read in its place, does not decide against all others. A node that took another's place may bring what an
    older run left there.

    Args:
        global_place: What the global tier shows.
        near_places: What each node's memory and folder show; a place counts as often as it is given.

    Returns:
        The global tier's run, else what most places name, else what is newest; ``None`` = it is a new one.
    """
    near = list(near_places)
    proven = {place.run for place in (global_place, *near) if place is not None and place.run is not None}
    if global_place is not None and (run := global_place.choose(proven)) is not None:
        return run
    named = [(run, place.iteration) for place in near if (run := place.choose(proven)) is not None]
    count = Counter(run for run, _ in named)
    newest = {run: max(iteration for other, iteration in named if other == run) for run in count}
    return max(count, key=lambda run: (count[run], newest[run], run), default=None)
