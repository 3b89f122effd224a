"""A directory of checkpoints: the names in it, and which run owns it. Nothing here imports torch.

``step-<n>`` is a committed checkpoint, ``step-<n>.tmp-...`` an attempt, ``step-<n>.aside-...`` a checkpoint that a
newer lineage replaced, ``latest`` a hint for people, ``run.json`` a run's claim, ``owner`` the folder of the owners'
records. Each owner deletes through a folder ``owner/<number>.trash``.

An owner may be stopped between checking the records and acting on them. A new owner therefore moves all attempts and
trash folders of earlier owners into its own trash folder before it reads anything: renaming a missing attempt, or into
a missing trash folder, fails. An earlier owner's commits and deletions happen before the takeover, or not at all.

The claim is made once, atomically, and compared at every save (``policy.lease`` decides). The lease
(:mod:`outlast.runtime.lease`) keeps other living writers away. The rank that leads a directory holds both: rank 0 for
the global tier, one rank per node for the node's folder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from msgspec import structs

from outlast import clock
from outlast.checkpoint.manifest import MANIFEST, SEALED, SHARD_PART, CopyKey, Manifest, decode_manifest, run_of
from outlast.checkpoint.shard import shard_name
from outlast.decoding import from_json, open_file, read_file
from outlast.env import clean_name
from outlast.errors import CheckpointError, Incomplete, OutlastError, Untrusted
from outlast.policy.lease import ClaimStep, DirectoryRun, LeaseOwner, find_owner, is_same_training, judge_claim
from outlast.runtime.files import check_folder, create_atomically, exchange, fsync_folder, write_atomically
from outlast.runtime.injection import reach
from outlast.runtime.lease import FOLDER, FolderRecords, InUse, Lease, Records
from outlast.runtime.storage_calls import is_outage

log = logging.getLogger(__name__)
RUN = "run.json"
"""Names the run of a directory; a hint, since it has no digest."""
SUSPECT = "suspect"
TRACKER = "latest"
_CHECKPOINT = re.compile(r"step-(\d+)")
MAX_TRIES = 3
"""Attempts to make the claim while other processes try, too."""
NAMELESS_S = 1.0
"""Seconds that a reader waits for a checkpoint that is being replaced: it has no name between two renames."""
_LOOK_S = 0.01
_REMEDY = "give it a separate directory"


class DirectoryRefused(Untrusted):
    """The directory belongs to another run, so no save of this run can go there."""


class Refusal:
    """Why no save of this run can succeed; set by leases and lanes, read by the training loop."""

    error: DirectoryRefused | None = None


class ClaimedPlace(ABC):
    """A folder of the local tier, or the global tier: checkpoints and ownership records.

    Methods raise CheckpointError where an object store, and OSError where a file system fails.
    """

    url: str
    """URL, or a path for a file system."""
    is_remote = False
    """Whether fsspec accesses it."""

    @abstractmethod
    def __init__(self, url: str) -> None: ...

    @property
    @abstractmethod
    def owners(self) -> Records:
        """The records of the place's owners."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the direct entries."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file's content. Raises: FileNotFoundError."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write or atomically replace a small file."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create a small file unless it exists; of concurrent calls one succeeds. Return whether this call did.

        Raises:
            OSError: It cannot be written, or an existing one cannot be read: it may be another run's.
        """

    @abstractmethod
    def fence(self, number: int, token: str) -> None:
        """Make commits and deletions of earlier owners impossible, and finish those they have begun.

        Args:
            number: Number of this owner's record, the highest.
            token: Token of this owner's attempts.
        """

    @abstractmethod
    def retire(self, iterations: Sequence[int], number: int, confirm: Callable[[], None]) -> None:
        """Delete checkpoints, unless a later owner has fenced this one.

        Args:
            confirm: Raises when there is a later owner.
        """

    @abstractmethod
    def is_own(self, iteration: int) -> bool:
        """Return whether this package wrote the folder of an iteration, intact or damaged.

        Other programs name their folders ``step-<n>``, too; these are never deleted.
        """

    @abstractmethod
    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        """Remove files of earlier attempts of these processes and of interrupted deletions; return the names.

        Attempts of other owners are left to :meth:`fence`.
        """

    @property
    def suspects(self) -> Self:
        """The place of saves for diagnosis, which never count as the newest checkpoint."""
        return type(self)(f"{self.url}/{SUSPECT}")

    def checkpoints(self) -> list[int]:
        """Return the iterations with a folder of a committed name, newest first, intact or damaged."""
        found = (_CHECKPOINT.fullmatch(name) for name in self.names())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def hint(self) -> str | None:
        """Return the run that ``run.json`` names; ``None`` = missing or unreadable. Raises: OSError, if the place is
        down.
        """
        try:
            return decode_hint(self.read(RUN))
        except OSError as error:
            if is_outage(error):
                raise
            return None  # manifests name it too; a failing disk makes the save fail

    def named_runs(self) -> Iterator[str]:
        """Yield the runs that manifests name, newest checkpoint first, those for diagnosis last."""
        for place in (self, self.suspects):
            for iteration in place.checkpoints():
                try:
                    run = run_of(place.read(f"step-{iteration}/{MANIFEST}"), iteration)
                except OSError as error:
                    if is_outage(error):
                        raise
                    continue
                if run is not None:
                    yield run

    def create_hint(self, run: str) -> bool:
        return self.create(RUN, msgspec.json.encode(_RunHint(run)))

    def write_hint(self, run: str) -> None:
        self.write(RUN, msgspec.json.encode(_RunHint(run)))

    def latest(self) -> int | None:
        """Return the iteration that the tracker names, a hint for people; ``None`` = missing or unreadable."""
        try:
            text = self.read(TRACKER).decode(errors="replace")
        except OSError:
            return None
        prefix, _, number = text.strip().partition("-")
        return int(number) if prefix == "step" and number.isdecimal() else None

    def point_to(self, iteration: int) -> None:
        self.write(TRACKER, f"step-{iteration}\n".encode())


@dataclass(frozen=True, slots=True)
class DirectoryContent:
    hint: str | None = None
    checkpoints: tuple[int, ...] = ()


class _RunHint(msgspec.Struct, frozen=True):
    run: str


def decode_hint(data: bytes) -> str | None:
    try:
        return from_json(data, _RunHint).run or None
    except msgspec.DecodeError:
        return None


def look_at(place: ClaimedPlace) -> DirectoryContent:
    return DirectoryContent(place.hint(), tuple(place.checkpoints()))


def owner_of(place: ClaimedPlace) -> DirectoryRun | None:
    """Return the run that owns a directory, by its manifests and hint; ``None`` = no owner. Raises: CheckpointError."""
    return find_owner(place.hint(), place.named_runs())


class Claim:
    """A run's right to save into a directory, and the lease that keeps other living writers away.

    Args:
        seen: Content of the directory when the run began; ``None`` = unknown.
        token: Token of these processes' attempts; see :class:`SaveAttempt`.

    Thread: one; :meth:`acquire` and :meth:`release` any.
    """

    def __init__(
        self,
        place: ClaimedPlace,
        run: str,
        seen: DirectoryContent | None,
        own: LeaseOwner,
        *,
        may_resume_other: bool,
        refusal: Refusal,
        token: str = "",
    ) -> None:
        self._token, self._is_fenced = token, False
        self._place, self._run, self._seen = place, run, seen
        self._own, self._may_resume_other = own, may_resume_other
        self._refusal = refusal
        self._lease = Lease(place.owners, own, follow=self._follow, on_lost=self._note_lost)
        self._left: Counter[str] | None = None
        self.url = place.url
        self.progress = self._lease.progress
        """Changes while :meth:`acquire` waits for an owner that may be alive."""
        self.is_held = False

    def acquire(self) -> None:
        """Take the lease before anything is loaded from there, or check that this run still has it.

        Raises:
            DirectoryRefused: The directory is another run's.
            CheckpointError: An object store does not respond.
            OSError: A folder cannot be written to.
        """
        try:
            self._lease.hold()
            if not self._is_fenced:  # before anything is read there
                self._place.fence(self._lease.number, self._token)
                self._is_fenced = True
                self._lease.check()  # a takeover may have happened meanwhile
        except InUse as error:
            raise self._refused(error) from None
        except CheckpointError:
            raise
        except OutlastError as error:
            raise CheckpointError(str(error)) from error

    def release(self, *, is_idle: bool) -> None:
        """Release the lease. Idempotent. Blocks: up to 2 s where the directory does not respond."""
        self._lease.release(is_idle=is_idle)

    def hold(self) -> None:
        """Make the claim, or compare it with the directory; a hint that is lost or wrong is rewritten.

        Raises: as :meth:`acquire`.
        """
        self.acquire()
        for _ in range(MAX_TRIES):
            if self._place.hint() == self._run and self.is_held and self._is_as_left():
                return
            if self._take():
                self.is_held = True
                return
        self._place.write_hint(self._run)  # the existing file is unreadable, so it is not a claim
        self.is_held = True

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Commit in the body. Raises: as :meth:`hold`, also when a later owner made the commit fail."""
        self.hold()
        try:
            yield
        except (CheckpointError, OSError):
            self.acquire()  # a later owner moves the attempt away
            raise
        if self._place.is_remote:
            self.acquire()  # with a later owner, a commit counts only if that owner saw it

    def retire(self, iterations: Sequence[int]) -> None:
        """Delete checkpoints. Raises: as :meth:`acquire`."""
        if iterations:
            self.acquire()
            self._place.retire(iterations, self._lease.number, self.acquire)

    def _is_as_left(self) -> bool:
        """Return whether a run whose claim was taken over has committed nothing since."""
        if self._left is None:
            return True
        runs = Counter(self._place.named_runs())
        if self._run in runs:
            self._left = None  # a manifest of this run exists, which other checks cover
            return True
        return runs <= self._left

    def _take(self) -> bool:
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
                f"and saves nothing there; {_REMEDY}"
            )
        return True

    def _refused(self, error: InUse) -> DirectoryRefused:
        is_named = error.owner.series != self._own.series  # otherwise it would load that run's checkpoints
        who = f"this training is run {self._own.series} and" if is_named else "this training"
        remedy = "end one of the two" if error.was_lost else "wait until that one has ended"
        if error.owner.process == self._own.process:
            remedy = "close the manager or session of this process that has it"
        return DirectoryRefused(f"{error}; {who} saves nothing there; {remedy}, or {_REMEDY}")

    def _note_lost(self, error: InUse) -> None:
        self._refusal.error = self._refused(error)

    def _follow(self, before: LeaseOwner) -> LeaseOwner:
        """Check whose checkpoints this run would load, if they are not its own.

        Returns:
            This run's owner record; a run without names takes those of the training that it continues.

        Raises:
            DirectoryRefused: They belong to another training.
        """
        is_same = is_same_training(before, self._own)
        own = self._own if self._own.names or not is_same else structs.replace(self._own, names=before.names)
        if is_same and (not set(before.names).isdisjoint(self._own.names) or before.run == self._own.run):
            return own
        owner = owner_of(self._place)
        if owner is None or not owner.is_verified or owner.run != self._own.series:
            return self._own  # this run would not take any checkpoint there for its own
        what = f"{self._place.url} holds what {_name(before, self._own)} saved"
        if is_same:
            why = ", as it runs the same script" if before.script is not None and self._own.script is not None else ""
            log.warning("%s; training resumes from there%s", what, why)
        elif self._may_resume_other:
            log.warning("%s; training resumes from there, since resume_from_other_run is on", what)
        else:
            own_name = _name(self._own, before).rstrip(",")
            option = " (--resume-from-other-run)" if self._own.outlives else ""
            remedy = f"to resume from there set checkpoint.resume_from_other_run = true{option}, else {_REMEDY}"
            raise DirectoryRefused(f"{what}; this is {own_name}; {remedy}")
        return own


def _name(owner: LeaseOwner, other: LeaseOwner) -> str:
    name = f"the run with {' and '.join(owner.names)}" if owner.names else f"run {owner.run}"
    if owner.script is None or (owner.names and other.names):
        return name
    return f"{name}, script {owner.script},"


_OWN_FILE = re.compile(
    r"rank-\d{5,}\.safetensors|[\w.-]+-\d{5,}\.bin|__\d+_\d+(?:\..+)?\.distcp|manifest\.json|\.metadata|\..+\.partial"
)
_DOOMED = re.compile(r"step-\d+\.doomed")
_UNDER_WAY = re.compile(r"step-(?P<iteration>\d+)\.(?P<kind>tmp|aside)-(?P<attempt>.+)")
_TRASH = re.compile(r"(\d+)\.trash")
_IN_THE_WAY = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
_PASSED = re.compile(
    r"step-(?P<iteration>\d+)\.(?P<kind>tmp|aside)-(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)"
    r"(?:r(?P<retry>\d+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAttempt:
    """Names one attempt to save, among all attempts of all processes."""

    job: str
    cycle: int
    token: str
    """Random, agreed by the ranks of one set of processes."""
    ordinal: int
    retry: int = 0
    """Number of earlier attempts to write to the same tier. Each has separate files, since an earlier attempt may still
    write or delete when a place responds again."""

    @property
    def label(self) -> str:
        return f"{self}r{self.retry}" if self.retry else str(self)

    def makes_stale(self, match: re.Match[str] | None) -> bool:
        """Return whether a name belongs to a decided attempt of these processes.

        Attempts of other processes are over only when the directory is taken over from them.

        Args:
            match: The groups ``token``, ``ordinal`` and ``retry`` of the name; ``None`` = not an attempt.
        """
        if match is None or match["token"] != self.token:
            return False
        return (int(match["ordinal"]), int(match["retry"] or 0)) < (self.ordinal, self.retry)

    def __str__(self) -> str:
        return f"{clean_name(self.job)}-{self.cycle}-{self.token}.{self.ordinal}"


def holds_own_files(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and all(map(_OWN_FILE.fullmatch, os.listdir(folder)))
    except OSError:
        return False


def part_name(key: CopyKey) -> str:
    return shard_name(key.rank) if key.part == SHARD_PART else f"{clean_name(key.part)}-{key.rank:05d}.bin"


class CheckpointFolder(ClaimedPlace):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.url = os.fspath(self.path)

    def checkpoint(self, iteration: int) -> Path:
        return self.path / f"step-{iteration}"

    def temporary(self, iteration: int, attempt: SaveAttempt | str) -> Path:
        return self.path / f"step-{iteration}.tmp-{attempt}"

    @property
    def owners(self) -> Records:
        return FolderRecords(self.path)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        return read_file(self.path / name)

    def write(self, name: str, data: bytes) -> None:
        write_atomically(self.path / name, data)

    def create(self, name: str, data: bytes) -> bool:
        self.path.mkdir(parents=True, exist_ok=True)
        if create_atomically(self.path / name, data):
            return True
        with contextlib.suppress(FileNotFoundError):
            self.read(name)
        return False

    def checkpoints(self) -> list[int]:
        for iteration, name in self.wait_for_names().items():
            log.warning(
                "%s/step-%d is skipped until a run that saves there resumes: its replacement was interrupted before "
                "the final rename; it is stored in %s",
                self.url,
                iteration,
                name,
            )
        return super().checkpoints()

    def wait_for_names(self) -> dict[int, str]:
        """Wait for checkpoints that have no name at the moment, because another process replaces them.

        A file system that cannot swap names sets the old one aside before the new one gets the name.

        Returns:
            The iterations still without a name, and the names of the old ones set aside.

        Blocks: up to ``NAMELESS_S`` if there are any.
        """
        end_s = clock.now_s() + NAMELESS_S
        while True:
            names = self.names()
            matches = filter(None, map(_UNDER_WAY.fullmatch, names))
            aside = {int(match["iteration"]): match[0] for match in matches if match["kind"] == "aside"}
            nameless = {one: name for one, name in aside.items() if self.checkpoint(one).name not in names}
            if not nameless or clock.now_s() > end_s:
                return nameless
            time.sleep(_LOOK_S)  # a shared file system does not notify

    def promote(self, iteration: int, attempt: SaveAttempt) -> None:
        temporary, final = self.temporary(iteration, attempt), self.checkpoint(iteration)
        aside = self.path / f"step-{iteration}.aside-{attempt}"
        try:
            os.rename(temporary, final)  # the name is free
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            if exchange(temporary, final):
                os.rename(temporary, aside)
            else:
                _replace(temporary, final, aside)
        fsync_folder(self.path)

    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        removed = []
        for name in self.names():
            match = _PASSED.fullmatch(name)
            is_replaced = (
                match is not None
                and (match["kind"], match["token"]) == ("aside", attempt.token)
                and self.checkpoint(int(match["iteration"])).exists()
            )
            is_doomed = _DOOMED.fullmatch(name) is not None and holds_own_files(self.path / name)
            if is_doomed or is_replaced or attempt.makes_stale(match):
                shutil.rmtree(self.path / name, ignore_errors=True)
                removed.append(name)
        for trash in self._trashes():
            removed += _empty(trash)
        return removed

    def fence(self, number: int, token: str) -> None:
        trash = self._trash(number)
        check_folder(trash.parent)
        trash.parent.mkdir(exist_ok=True)
        check_folder(trash)
        trash.mkdir(mode=0o700, exist_ok=True)
        for earlier in self._trashes():
            if int(earlier.stem) < number:
                _move(earlier, trash / earlier.name)
        for place in (self, self.suspects):
            check_folder(place.path)
            for name in sorted(place.names(), key=lambda name: _age_ns(place.path / name)):
                match, path = _PASSED.fullmatch(name), place.path / name  # other programs may use "step-1.tmp-x"
                if match is None or match["token"] == token:
                    continue
                # A checkpoint whose replacement was interrupted, on a file system that cannot swap names.
                is_orphan = match["kind"] == "aside" and not place.checkpoint(int(match["iteration"])).exists()
                _move(
                    path,
                    place.checkpoint(int(match["iteration"])) if is_orphan else trash / f"{place.path.name}-{name}",
                )
        fsync_folder(self.path)

    def retire(self, iterations: Sequence[int], number: int, confirm: Callable[[], None]) -> None:
        for iteration in iterations:
            confirm()
            reach("checkpoint.retire")
            check_folder(self._trash(number))
            gone = self._trash(number) / f"step-{iteration}-{secrets.token_hex(4)}"
            os.rename(self.checkpoint(iteration), gone)
            shutil.rmtree(gone, ignore_errors=True)

    def is_own(self, iteration: int) -> bool:
        try:  # the manifest is written before the folder's final name; a crash of the machine may leave zeros in it
            with open(open_file(self.checkpoint(iteration) / MANIFEST), "rb") as file:
                head = file.read(len(SEALED))
        except OSError:
            return False
        return head == SEALED or not head.strip(b"\0")

    def _trash(self, number: int) -> Path:
        """Return the folder through which an owner deletes."""
        return self.path / FOLDER / f"{number}.trash"

    def _trashes(self) -> list[Path]:
        folder = self.path / FOLDER
        names = os.listdir(folder) if folder.is_dir() else []
        found = []
        for name in filter(_TRASH.fullmatch, names):
            try:
                check_folder(folder / name)
                found.append(folder / name)
            except OSError as error:
                log.warning("%s is left alone: %s", error.filename, error.strerror)
        return found

    def discard(self, iteration: int, attempt: SaveAttempt) -> None:
        shutil.rmtree(self.temporary(iteration, attempt), ignore_errors=True)

    def remove(self, iteration: int) -> None:
        """Delete a checkpoint, renaming it first so that readers never see a part of it."""
        path = self.checkpoint(iteration)
        doomed = path.with_name(f"{path.name}.doomed")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _replace(temporary: Path, final: Path, aside: Path) -> None:
    """Set the named folder aside and give its name to another one; undo that if the other is missing."""
    os.rename(final, aside)
    reach("checkpoint.nameless", final=final)
    try:
        os.rename(temporary, final)
    except OSError:
        _move(aside, final)
        raise


def _empty(folder: Path) -> list[str]:
    """Remove the folders in a folder, without following a link put in its place; return their names."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # a later owner has moved it
        return []
    try:
        names = os.listdir(fd)
        for name in names:
            shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
        return names
    finally:
        os.close(fd)


def _move(source: Path, target: Path) -> None:
    """Rename, unless the source is missing or the target name is taken."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if source.exists():
            raise
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise


def _age_ns(path: Path) -> int:
    try:
        return -path.stat().st_mtime_ns
    except OSError:
        return 0


class Directory(CheckpointFolder):
    def manifest(self, iteration: int) -> tuple[Manifest, str]:
        """Return a checkpoint's manifest and its SHA-256. Raises: CheckpointError, when it is missing or invalid."""
        path = self.checkpoint(iteration) / MANIFEST
        try:
            data = read_file(path)
        except FileNotFoundError:
            raise Incomplete("there is no manifest") from None
        except OSError as error:
            raise CheckpointError(f"the manifest cannot be read ({error.strerror})") from error
        return decode_manifest(data)
