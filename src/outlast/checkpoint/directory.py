"""A directory of generations: the names in a node's folder, and whose a directory is. Nothing here imports torch.

``step-<n>`` is a committed generation, ``step-<n>.tmp-...`` an attempt, ``step-<n>.aside-...`` what stood in the way
of a newer lineage, ``latest`` a hint for people, ``run.json`` a run's claim, and in ``owner`` lie the records of who
writes there. Each owner has a folder ``owner/<number>.trash``, through which it deletes.

An owner that was stopped between its last look at the records and what it does next harms nothing when it continues:
whoever takes the directory over moves all attempts and all trash folders of earlier owners into a trash folder of its
own, before it reads anything. A rename of an attempt that is gone, or into a trash folder that is gone, fails. So what
an earlier owner commits or deletes happens before the takeover, or not at all.

The claim is made once, atomically, and compared at every save; ``policy.lease`` decides whose a directory is. The lease
(:mod:`outlast.runtime.lease`) keeps other living writers away: it is taken before anything is loaded or saved and
renewed. The rank that leads a directory holds both: rank 0 those of the global tier, one rank of each node those of the
node's folder.
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
"""Names the run that a directory belongs to; a hint, since it has no digest."""
SUSPECT = "suspect"
"""Folder of what was saved for diagnosis."""
TRACKER = "latest"
_GENERATION = re.compile(r"step-(\d+)")
MAX_TRIES = 3
"""To be the first in a directory where others try, too."""
NAMELESS_S = 1.0
"""How long a reader waits for a checkpoint that is being replaced: it has no name between two renames."""
_LOOK_S = 0.01
_REMEDY = "give it a separate directory"


class DirectoryRefused(Untrusted):
    """The directory is another run's: no save of this run can go there, now or later."""


class Refusal:
    """Why no save of this run can succeed any more: leases and lanes set it, the training loop reads it."""

    error: DirectoryRefused | None = None


class ClaimedPlace(ABC):
    """A folder of the local tier, or the global tier: generations, and names of who they belong to.

    Its methods raise CheckpointError where an object store, and OSError where a file system fails.
    """

    url: str
    """The place, as a path where it is one."""
    is_remote = False
    """Whether it is reached through fsspec."""

    @abstractmethod
    def __init__(self, url: str) -> None: ...

    @property
    @abstractmethod
    def owners(self) -> Records:
        """The records of the place's owners."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all that lies directly in the place."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file. Raises: FileNotFoundError, when there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Put a small file, or replace it in one step."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Put a small file unless it exists; of several that try at once, one succeeds; return whether this call did.

        Raises:
            OSError: It cannot be written, or there is one that cannot be read: it may be another run's.
        """

    @abstractmethod
    def fence(self, number: int, token: str) -> None:
        """Take from earlier owners what they need to commit or delete anything, and finish what they have begun.

        Args:
            number: Of this owner's record, which is the highest.
            token: Attempts that carry it are this owner's.
        """

    @abstractmethod
    def retire(self, iterations: Sequence[int], number: int, confirm: Callable[[], None]) -> None:
        """Delete generations, unless a later owner has fenced this one.

        Args:
            confirm: Raises when a later owner has come.
        """

    @abstractmethod
    def is_own(self, iteration: int) -> bool:
        """Return whether the folder of an iteration is one that this package wrote, whole or damaged.

        People and other programs name their folders ``step-<n>``, too; these are never deleted.
        """

    @abstractmethod
    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        """Remove what earlier attempts of these processes, and interrupted deletions, left; return the names.

        Only what is provably not in use: what other owners left is moved away when the place is taken over.
        """

    @property
    def suspects(self) -> Self:
        """Where saves for diagnosis go; none of them is ever the newest generation."""
        return type(self)(f"{self.url}/{SUSPECT}")

    def generations(self) -> list[int]:
        """Return the iterations that have a folder of a committed name, newest first; whole or not."""
        found = (_GENERATION.fullmatch(name) for name in self.names())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def hint(self) -> str | None:
        """Return the run that ``run.json`` names; ``None``: it is not there, or cannot be read.

        Raises:
            OSError: The place does not respond, so that its run is unknown.
        """
        try:
            return decode_hint(self.read(RUN))
        except OSError as error:
            if is_outage(error):
                raise
            return None  # manifests name it too; a disk that fails makes the save fail

    def named_runs(self) -> Iterator[str]:
        """Yield the runs that manifests name, newest generation first, those for diagnosis last."""
        for place in (self, self.suspects):
            for iteration in place.generations():
                try:
                    run = run_of(place.read(f"step-{iteration}/{MANIFEST}"), iteration)
                except OSError as error:
                    if is_outage(error):
                        raise
                    continue
                if run is not None:
                    yield run

    def create_hint(self, run: str) -> bool:
        """Name the run that the place belongs to, unless it is named; return whether this call did."""
        return self.create(RUN, msgspec.json.encode(_RunHint(run)))

    def write_hint(self, run: str) -> None:
        """Name the run that the place belongs to, whatever it was named before."""
        self.write(RUN, msgspec.json.encode(_RunHint(run)))

    def latest(self) -> int | None:
        """Return what the tracker names, a hint for people; ``None``: nothing that can be read."""
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
    """What lay in a directory when a run began; by default nothing."""

    hint: str | None = None
    generations: tuple[int, ...] = ()


class _RunHint(msgspec.Struct, frozen=True):
    run: str


def decode_hint(data: bytes) -> str | None:
    """Return the run that ``run.json`` names; ``None``: it cannot be read."""
    try:
        return from_json(data, _RunHint).run or None
    except msgspec.DecodeError:
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


class Claim:
    """A run's right to save into a directory, and the lease that keeps other living writers away.

    Args:
        seen: What lay there when the run began; ``None`` = that is not known.
        token: Names the attempts of these processes; see :class:`SaveAttempt`.

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
        """Changes while :meth:`acquire` waits for an owner that may live."""
        self.is_held = False
        """Whether the directory was this run's when it was last looked at."""

    def acquire(self) -> None:
        """Take the lease, before anything there is resumed from, or compare: it is still this run's.

        Raises:
            DirectoryRefused: The directory is another run's.
            CheckpointError: A store does not answer.
            OSError: A folder cannot be written to.
        """
        try:
            self._lease.hold()
            if not self._is_fenced:  # before anything is read there
                self._place.fence(self._lease.number, self._token)
                self._is_fenced = True
                self._lease.check()  # what this process has just made must not outlast a takeover meanwhile
        except InUse as error:
            raise self._refused(error) from None
        except CheckpointError:
            raise
        except OutlastError as error:
            raise CheckpointError(str(error)) from error

    def release(self, *, is_idle: bool) -> None:
        """Release the lease. Idempotent. Blocks: up to 2 s where the directory does not answer."""
        self._lease.release(is_idle=is_idle)

    def hold(self) -> None:
        """Make the claim, or compare it with what lies there now; a hint that is lost or wrong is written again.

        Raises: as :meth:`acquire`.
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

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Commit something in the body. Raises: as :meth:`hold`, also when a later owner made the commit fail."""
        self.hold()
        try:
            yield
        except (CheckpointError, OSError):
            self.acquire()  # whoever took the directory over has taken the attempt away
            raise
        if self._place.is_remote:
            self.acquire()  # a commit that a later owner came upon counts only if that one saw it

    def retire(self, iterations: Sequence[int]) -> None:
        """Delete generations of the place. Raises: as :meth:`acquire`."""
        if iterations:
            self.acquire()
            self._place.retire(iterations, self._lease.number, self.acquire)

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
                f"and saves nothing there; {_REMEDY}"
            )
        return True

    def _refused(self, error: InUse) -> DirectoryRefused:
        is_named = error.owner.series != self._own.series  # else it would resume from what that one saved
        who = f"this training is run {self._own.series} and" if is_named else "this training"
        remedy = "end one of the two" if error.was_lost else "wait until that one has ended"
        if error.owner.process == self._own.process:
            remedy = "close the manager or session of this process that has it"
        return DirectoryRefused(f"{error}; {who} saves nothing there; {remedy}, or {_REMEDY}")

    def _note_lost(self, error: InUse) -> None:
        self._refusal.error = self._refused(error)

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
        owner = owner_of(self._place)
        if owner is None or not owner.is_proven or owner.run != self._own.series:
            return self._own  # no generation there is one that this run takes for its own
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
"""Errors of a rename to a name that is taken."""
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
    """Earlier tries to write it to the same tier. What is saved is the same, and so is the attempt's name; but each try
    has files of its own, as an earlier one may still write, or delete, when a place responds again."""

    @property
    def label(self) -> str:
        return f"{self}r{self.retry}" if self.retry else str(self)

    def makes_stale(self, match: re.Match[str] | None) -> bool:
        """Return whether a name is of an attempt of these processes that is decided.

        Others' attempts are known to be over when the directory is taken over from them, and only then.

        Args:
            match: The groups ``token``, ``ordinal`` and ``retry`` of the name; ``None`` = it names no attempt.
        """
        if match is None or match["token"] != self.token:
            return False
        return (int(match["ordinal"]), int(match["retry"] or 0)) < (self.ordinal, self.retry)

    def __str__(self) -> str:
        return f"{clean_name(self.job)}-{self.cycle}-{self.token}.{self.ordinal}"


def holds_own_files(folder: Path) -> bool:
    """Return whether all that a folder holds has names of a generation's files: no other program's are among it."""
    try:
        return not folder.is_symlink() and all(map(_OWN_FILE.fullmatch, os.listdir(folder)))
    except OSError:
        return False


def part_name(key: CopyKey) -> str:
    return shard_name(key.rank) if key.part == SHARD_PART else f"{clean_name(key.part)}-{key.rank:05d}.bin"


class GenerationFolder(ClaimedPlace):
    """A folder of generations, as this rank sees it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.url = os.fspath(self.path)

    def generation(self, iteration: int) -> Path:
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

    def generations(self) -> list[int]:
        for iteration, name in self.wait_for_names().items():
            log.warning(
                "%s/step-%d is skipped until a run that saves there resumes: its replacement was interrupted before "
                "the final rename; it is stored in %s",
                self.url,
                iteration,
                name,
            )
        return super().generations()

    def wait_for_names(self) -> dict[int, str]:
        """Wait for generations that have no name at the moment, as another process replaces them.

        On a file system that cannot swap names the old one is set aside before the new one gets the name.

        Returns:
            Those that have none for longer, and the names of what was set aside.

        Blocks: up to ``NAMELESS_S`` where there are some.
        """
        end_s = clock.now_s() + NAMELESS_S
        while True:
            names = self.names()
            matches = filter(None, map(_UNDER_WAY.fullmatch, names))
            aside = {int(match["iteration"]): match[0] for match in matches if match["kind"] == "aside"}
            nameless = {one: name for one, name in aside.items() if self.generation(one).name not in names}
            if not nameless or clock.now_s() > end_s:
                return nameless
            time.sleep(_LOOK_S)  # a file system of other machines tells nothing

    def promote(self, iteration: int, attempt: SaveAttempt) -> None:
        """Give an attempt its final name; what has that name already is set aside, not written to."""
        temporary, final = self.temporary(iteration, attempt), self.generation(iteration)
        aside = self.path / f"step-{iteration}.aside-{attempt}"
        try:
            os.rename(temporary, final)  # in place of nothing
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
                and self.generation(int(match["iteration"])).exists()
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
                match, path = _PASSED.fullmatch(name), place.path / name  # other programs have their own "step-1.tmp-x"
                if match is None or match["token"] == token:
                    continue
                # A generation whose replacement failed half-way, where a file system cannot swap names.
                is_orphan = match["kind"] == "aside" and not place.generation(int(match["iteration"])).exists()
                _move(
                    path,
                    place.generation(int(match["iteration"])) if is_orphan else trash / f"{place.path.name}-{name}",
                )
        fsync_folder(self.path)

    def retire(self, iterations: Sequence[int], number: int, confirm: Callable[[], None]) -> None:
        for iteration in iterations:
            confirm()
            reach("checkpoint.retire")
            check_folder(self._trash(number))
            gone = self._trash(number) / f"step-{iteration}-{secrets.token_hex(4)}"
            os.rename(self.generation(iteration), gone)
            shutil.rmtree(gone, ignore_errors=True)

    def is_own(self, iteration: int) -> bool:
        try:  # the manifest is there when the folder gets its name; a crash of the machine may leave zeros in it
            with open(open_file(self.generation(iteration) / MANIFEST), "rb") as file:
                head = file.read(len(SEALED))
        except OSError:
            return False
        return head == SEALED or not head.strip(b"\0")

    def _trash(self, number: int) -> Path:
        """Return the folder through which an owner deletes; without it, it can delete nothing."""
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
        """Delete what a failed attempt wrote: its room may be what the next one lacks."""
        shutil.rmtree(self.temporary(iteration, attempt), ignore_errors=True)

    def remove(self, iteration: int) -> None:
        """Delete a generation: first its name, so that no half of it is ever seen."""
        path = self.generation(iteration)
        doomed = path.with_name(f"{path.name}.doomed")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _replace(temporary: Path, final: Path, aside: Path) -> None:
    """Set what has a name aside, and give the name to another folder; if that one is gone, undo it."""
    os.rename(final, aside)
    reach("checkpoint.nameless", final=final)
    try:
        os.rename(temporary, final)
    except OSError:
        _move(aside, final)
        raise


def _empty(folder: Path) -> list[str]:
    """Remove the folders in a folder, without following a link that is put in its place; return their names."""
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
    """Rename something, unless it is gone, or its new name is taken meanwhile."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if source.exists():
            raise
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise


def _age_ns(path: Path) -> int:
    """Return how old a folder is, as a number to sort by, newest first."""
    try:
        return -path.stat().st_mtime_ns
    except OSError:
        return 0


class Directory(GenerationFolder):
    """The folder of a node's generations in the local tier."""

    def manifest(self, iteration: int) -> tuple[Manifest, str]:
        """Read a generation's manifest; return it and its SHA-256.

        Raises:
            CheckpointError: There is none, or it cannot be trusted.
        """
        path = self.generation(iteration) / MANIFEST
        try:
            data = read_file(path)
        except FileNotFoundError:
            raise Incomplete("there is no manifest") from None
        except OSError as error:
            raise CheckpointError(f"the manifest cannot be read ({error.strerror})") from error
        return decode_manifest(data)
