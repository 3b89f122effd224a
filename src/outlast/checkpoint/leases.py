"""A run's leases on its directories: taken before anything is loaded or saved, compared at every commit.

The rank that leads a directory holds its lease: rank 0 the global tier's, one rank of each node the node's folder's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from outlast.checkpoint.claim import ClaimedPlace as Claimed
from outlast.checkpoint.claim import DirectoryRefused, owner_of
from outlast.checkpoint.places import Places
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, OutlastError
from outlast.policy.lease import LeaseOwner, is_same_training
from outlast.runtime.lease import InUse, Lease, Records
from outlast.runtime.processes import this_process, this_program

__all__ = ["DirectoryLease", "Leases"]

log = logging.getLogger(__name__)
_REMEDY = "give it a directory of its own"


class _Place(Claimed, Protocol):
    @property
    def owners(self) -> Records: ...


class DirectoryLease:
    """The lease on one directory of generations.

    Args:
        place: The directory.
        own: What this run says of itself.
        may_resume_other: What another run saved there may be gone on from.
        on_lost: Called once, in a thread of the lease's, when the directory was taken over.

    Thread: any.
    """

    def __init__(
        self, place: _Place, own: LeaseOwner, *, may_resume_other: bool, on_lost: Callable[[DirectoryRefused], None]
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
        is_named = error.owner.series != self._own.series  # else it would go on from what that one saved
        who = f"this training is run {self._own.series} and" if is_named else "this training"
        remedy = "end one of the two" if error.was_lost else "wait until that one has ended"
        if error.owner.process == self._own.process:
            remedy = "close the manager or session of this process that has it"
        return DirectoryRefused(f"{error}; {who} saves nothing there; {remedy}, or {_REMEDY}")

    def _follow(self, before: LeaseOwner) -> LeaseOwner:
        """Say whose generations this run goes on from, if they are not its own.

        Returns:
            What this run says of itself: without a name of its own it has that of the training with which it goes on.

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


class Leases:
    """The leases of this rank.

    Args:
        config: Whether another run's generations may be gone on from.
        place: This rank's place.
        places: Where the ranks save.
        on_lost: Called in a thread of a lease's, when a directory was taken over.
    """

    def __init__(
        self, config: CheckpointConfig, place: WorkerEnv, places: Places, *, on_lost: Callable[[DirectoryRefused], None]
    ) -> None:
        self.near: DirectoryLease | None = None
        """On this node's folder, on the rank that leads it."""
        self.far: DirectoryLease | None = None
        """On the global tier, on rank 0."""
        self._is_far_reachable = places.global_error is None
        own = describe_run(place, places.run)
        rank, other = place.global_rank, config.resume_from_other_run or place.resumes_other
        if places.local is not None and places.is_leader(rank):
            self.near = DirectoryLease(places.local, own, may_resume_other=other, on_lost=on_lost)
        if places.directory is not None and rank == 0:
            self.far = DirectoryLease(places.directory, own, may_resume_other=other, on_lost=on_lost)

    def acquire(self) -> DirectoryRefused | None:
        """Take this rank's directories; return why that is refused.

        One that cannot be written to may be loaded from all the same: its saves are going to fail with that error.

        Blocks: where only time can tell whether an owner on another machine lives: 10 s, 50 s in an object store.
        """
        for lease, is_reachable in ((self.near, True), (self.far, self._is_far_reachable)):
            try:
                if lease is not None and is_reachable:
                    lease.hold()
            except DirectoryRefused as error:
                return error
            except (CheckpointError, OSError) as error:
                log.debug("a directory cannot be taken yet: %s", error)
        return None

    def release(self, *, is_idle: bool) -> None:
        """Let go of this rank's directories. Idempotent. Blocks: up to 2 s for each that does not answer."""
        for lease in (self.near, self.far):
            if lease is not None:
                lease.release(is_idle=is_idle)


def describe_run(place: WorkerEnv, series: str) -> LeaseOwner:
    """Return what a worker's run says of itself."""
    has_job = place.launcher in ("outlast", "ray")
    return LeaseOwner(
        token="",
        process=this_process(),
        run=place.run_id,
        run_dir=place.run_dir,
        series=series,
        names=place.names,
        script=None if place.launcher == "ray" else this_program(),
        job=f"{place.run_id} {place.job} {place.run_dir}" if has_job else None,
        stage=(place.cycle, place.call),
        allocation=place.allocation,
        requeues=place.requeues,
        outlives=place.config_file is not None,
    )


def _name(owner: LeaseOwner, other: LeaseOwner) -> str:
    """Return who a run is, by what tells it from another one."""
    name = f"the run with {' and '.join(owner.names)}" if owner.names else f"run {owner.run}"
    if owner.script is None or (owner.names and other.names):
        return name
    return f"{name}, script {owner.script},"
