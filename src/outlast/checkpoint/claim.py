"""A run's claim to a directory and its lease on it. Nothing here imports torch.

The claim, ``run.json``, is made once, atomically, and compared at every save; ``policy.directory_owner`` decides whose
a directory is. The lease keeps other living writers away: it is taken before anything is loaded or saved and renewed;
see :mod:`outlast.runtime.lease`. The rank that leads a directory holds both: rank 0 those of the global tier, one rank
of each node those of the node's folder.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import structs

from outlast.decoding import from_json
from outlast.errors import CheckpointError, OutlastError, Untrusted
from outlast.policy.lease import ClaimStep, DirectoryRun, LeaseOwner, find_owner, is_same_training, judge_claim
from outlast.runtime.lease import InUse, Lease, Records

__all__ = [
    "NEW",
    "RUN",
    "Claim",
    "ClaimedPlace",
    "DirectoryContent",
    "DirectoryLease",
    "DirectoryRefused",
    "decode_hint",
    "encode_hint",
    "look_at",
    "owner_of",
]

log = logging.getLogger(__name__)
RUN = "run.json"
"""Names the run that a directory belongs to; a hint, since it has no digest."""
MAX_TRIES = 3
"""To be the first in a directory where others try, too."""
_REMEDY = "give it a directory of its own"


class DirectoryRefused(Untrusted):
    """The directory is another run's: no save of this run can go there, now or later."""


class ClaimedPlace(Protocol):
    """A folder of the local tier, or the global tier."""

    @property
    def url(self) -> str:
        """The place, as a path where it is one."""

    @property
    def owners(self) -> Records:
        """The records of the place's owners."""

    def generations(self) -> list[int]:
        """Return the iterations that have a folder of a committed name, newest first; whole or not."""

    def hint(self) -> str | None:
        """Return the run that ``run.json`` names; ``None``: it is not there, or cannot be read."""

    def named_runs(self) -> Iterator[str]:
        """Yield the runs that manifests name, newest generation first, those for diagnosis last."""

    def create_hint(self, run: str) -> bool:
        """Name the run that the place belongs to, unless it is named; return whether this call did."""

    def write_hint(self, run: str) -> None:
        """Name the run that the place belongs to, whatever it was named before."""


@dataclass(frozen=True, slots=True)
class DirectoryContent:
    """What lay in a directory when a run began: nothing, unless it is said."""

    hint: str | None = None
    generations: tuple[int, ...] = ()


NEW = DirectoryContent()
"""An empty directory."""


class _RunHint(msgspec.Struct, frozen=True):
    run: str


def encode_hint(run: str) -> bytes:
    """Return the content of ``run.json``."""
    return msgspec.json.encode(_RunHint(run))


def decode_hint(data: bytes) -> str | None:
    """Return the run that ``run.json`` names; ``None``: it cannot be read."""
    try:
        return from_json(data, _RunHint).run or None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def look_at(place: ClaimedPlace) -> DirectoryContent:
    """Return what lies in a directory. Raises: CheckpointError, OSError."""
    return DirectoryContent(place.hint(), tuple(place.generations()))


def owner_of(place: ClaimedPlace) -> DirectoryRun | None:
    """Return the run that a directory belongs to, by its manifests and hint; ``None`` = nobody's.

    Raises:
        CheckpointError: A store does not answer.
    """
    return find_owner(place.hint(), place.named_runs())


class DirectoryLease:
    """The lease on one directory of generations.

    Args:
        place: The directory.
        own: How this run describes itself.
        may_resume_other: Generations that another run saved there may be loaded.
        on_lost: Called once, in a thread of the lease's, when the directory was taken over.

    Thread: any.
    """

    def __init__(
        self,
        place: ClaimedPlace,
        own: LeaseOwner,
        *,
        may_resume_other: bool,
        on_lost: Callable[[DirectoryRefused], None],
    ) -> None:
        self._place, self._own, self._may_resume_other = place, own, may_resume_other
        self._lease = Lease(place.owners, own, follow=self._follow, on_lost=lambda lost: on_lost(self._refused(lost)))

    def hold(self) -> None:
        """Take the directory, or compare: the directory is still this run's.

        Raises:
            DirectoryRefused: It is another run's.
            CheckpointError: A store does not answer.
            OSError: A folder cannot be written to.
        """
        try:
            self._lease.hold()
        except InUse as error:
            raise self._refused(error) from None
        except CheckpointError:
            raise
        except OutlastError as error:
            raise CheckpointError(str(error)) from error

    def release(self, *, is_idle: bool) -> None:
        """Let go of the directory; see :meth:`Lease.release`."""
        self._lease.release(is_idle=is_idle)

    def _refused(self, error: InUse) -> DirectoryRefused:
        is_named = error.owner.series != self._own.series  # else it would resume from what that one saved
        who = f"this training is run {self._own.series} and" if is_named else "this training"
        remedy = "end one of the two" if error.was_lost else "wait until that one has ended"
        if error.owner.process == self._own.process:
            remedy = "close the manager or session of this process that has it"
        return DirectoryRefused(f"{error}; {who} saves nothing there; {remedy}, or {_REMEDY}")

    def _follow(self, before: LeaseOwner) -> LeaseOwner:
        """Check whose generations this run resumes from, if they are not its own.

        Returns:
            How this run describes itself: without a name of its own it has that of the training that it continues.

        Raises:
            DirectoryRefused: They are another training's.
        """
        is_same = is_same_training(before, self._own)
        own = self._own if self._own.names or not is_same else structs.replace(self._own, names=before.names)
        if is_same and (not set(before.names).isdisjoint(self._own.names) or before.run == self._own.run):
            return own
        if not self._goes_on():
            return self._own
        what = f"{self._place.url} holds what {_name(before, self._own)} saved"
        if is_same:
            why = ", as it runs the same script" if before.script is not None and self._own.script is not None else ""
            log.warning("%s; training goes on from there%s", what, why)
        elif self._may_resume_other:
            log.warning("%s; training goes on from there, since resume_from_other_run is on", what)
        else:
            own_name = _name(self._own, before).rstrip(",")
            option = " (--resume-from-other-run)" if self._own.outlives else ""
            remedy = f"to go on from there set checkpoint.resume_from_other_run = true{option}, else {_REMEDY}"
            raise DirectoryRefused(f"{what}; this is {own_name}; {remedy}")
        return own

    def _goes_on(self) -> bool:
        """Return whether the directory holds generations that this run takes for its own."""
        owner = owner_of(self._place)
        return owner is not None and owner.is_proven and owner.run == self._own.series


class Claim:
    """A run's right to save into a directory.

    Args:
        place: The directory.
        run: The run.
        seen: What lay there when the run began; ``None`` = that is not known.
        lease: Keeps other living writers away; ``None`` = nothing does.

    Thread: one.
    """

    def __init__(
        self, place: ClaimedPlace, run: str, seen: DirectoryContent | None, lease: DirectoryLease | None = None
    ) -> None:
        self._place, self._run, self._seen, self._lease = place, run, seen, lease
        self._left: Counter[str] | None = None
        self.is_held = False
        """Whether the directory was this run's when it was last looked at."""

    def acquire(self) -> None:
        """Take the lease, before anything there is resumed from; see :meth:`DirectoryLease.hold`."""
        if self._lease is not None:
            self._lease.hold()

    def release(self, *, is_idle: bool) -> None:
        """Release the lease. Idempotent. Blocks: up to 2 s where the directory does not answer."""
        if self._lease is not None:
            self._lease.release(is_idle=is_idle)

    def hold(self) -> None:
        """Make the claim, or compare it with what lies there now; a hint that is lost or wrong is written again.

        Raises:
            DirectoryRefused: The directory is another run's.
            CheckpointError: A store does not answer.
            OSError: A folder cannot be written to.
        """
        self.acquire()
        for _ in range(MAX_TRIES):
            if self._place.hint() == self._run and self.is_held and self._is_as_left():
                return
            if self._take():
                self.is_held = True
                return
        self._place.write_hint(self._run)  # what is there is no claim: it cannot be read
        self.is_held = True

    def _is_as_left(self) -> bool:
        """Return whether a run whose claim was taken over has committed nothing since; it may have been about to."""
        if self._left is None:
            return True
        runs = Counter(self._place.named_runs())
        if self._run in runs:
            self._left = None  # a manifest proves this run: others look at that
            return True
        return runs <= self._left

    def _take(self) -> bool:
        """Do what is to be done; return whether the directory is this run's now."""
        seen = look_at(self._place)
        owner = find_owner(seen.hint, self._place.named_runs(), own=self._run)
        step = judge_claim(self._run, owner, seen.hint, is_unchanged=not self.is_held and seen == self._seen)
        if step is ClaimStep.CREATE:
            return self._place.create_hint(self._run)
        if step is ClaimStep.WRITE:
            if owner is not None and owner.run != self._run:
                self._left = Counter(self._place.named_runs())
                if look_at(self._place) != seen:
                    return False  # it changed meanwhile
            self._place.write_hint(self._run)
        elif step is ClaimStep.REFUSE:
            assert owner is not None
            self.is_held = False
            raise DirectoryRefused(
                f"{self._place.url} belongs to run {owner.run}, which saves there; this training is run {self._run} "
                "and saves nothing there; give it a directory of its own"
            )
        return True


def _name(owner: LeaseOwner, other: LeaseOwner) -> str:
    """Return a run's name, by what distinguishes it from another one."""
    name = f"the run with {' and '.join(owner.names)}" if owner.names else f"run {owner.run}"
    if owner.script is None or (owner.names and other.names):
        return name
    return f"{name}, script {owner.script},"
