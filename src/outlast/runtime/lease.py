"""A lease on a directory: one owner at a time, which renews it in a thread of its own.

The records are numbered files in the folder ``owner`` of the directory, one per owner; the highest number belongs to
the current owner, and its file stays when the owner ends, so that no number is reused. The only exclusive operation is
the creation of a file under a new name, which both file systems and object stores support.

All decisions are made in :mod:`outlast.policy.lease`. Training never waits for a renewal: if a file system does not
respond, only the thread waits. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from outlast import clock
from outlast.decoding import from_json, open_file, read_file
from outlast.errors import OutlastError
from outlast.policy.lease import LeaseOwner, LeaseStep, OwnerStanding, Process, Silence, find_life, judge_owner
from outlast.runtime.files import PRIVATE, check_folder, create_atomically, make_private_folder
from outlast.runtime.processes import is_alive
from outlast.runtime.storage_calls import CallProgress

log = logging.getLogger(__name__)
FOLDER = "owner"
RENEW_S = 2.0
"""Between two renewals on a file system."""
MAX_POLL_S = 2.0
"""Longest time between two reads by a process that waits for a lease."""
REPORT_S = 10.0
"""Time between two log lines of a process that waits for a lease."""
RELEASE_S = 2.0
RECORD_BYTES = 1024
"""Records are padded to a multiple of this size, so that a renewal never changes the file's length."""
MAX_RECORD_BYTES = 1 << 16
MAX_TRIES = 100
MAX_LOOKS = 10_000
MAX_TORN = 3
UNREADABLE = LeaseOwner(
    token="", process=Process(host="an unknown machine", machine="", pid=0, started=0), run="unknown"
)
"""Stands for a torn record: its bytes still show whether it is renewed."""
_RECORD = re.compile(r"(\d+)\.json")

_held: set[str] = set()
"""Tokens of this process's current leases; any other record of this process is of an owner that has ended."""


class InUse(OutlastError):
    """The directory belongs to another owner."""

    def __init__(self, url: str, owner: LeaseOwner, *, was_lost: bool = False) -> None:
        what = "was taken over by" if was_lost else "is in use by"
        super().__init__(f"{url} {what} {owner.describe()}")
        self.owner, self.was_lost = owner, was_lost


class Records(Protocol):
    """The numbered records of a directory's owners."""

    renew_s: float

    @property
    def url(self) -> str: ...

    def numbers(self) -> list[int]:
        """Return the numbers of the existing records."""

    def read(self, number: int) -> bytes:
        """Return a record. Raises: FileNotFoundError."""

    def create(self, number: int, data: bytes) -> bool:
        """Create a record unless its number is taken; return whether this call did."""

    def renew(self, number: int, data: bytes) -> None:
        """Replace one's own record. Raises: FileNotFoundError, if that can be detected."""

    def remove(self, number: int) -> None:
        """Delete a record, if it exists."""

    def forget(self) -> None:
        """Remove the container of the records, if it is empty."""


class FolderRecords:
    """Records in a folder of ``directory``."""

    renew_s = RENEW_S

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.url = os.fspath(directory)
        self._folder = Path(directory) / FOLDER

    def numbers(self) -> list[int]:
        check_folder(self._folder)
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return [int(match[1]) for name in names if (match := _RECORD.fullmatch(name))]

    def read(self, number: int) -> bytes:
        return read_file(self._path(number), max_bytes=MAX_RECORD_BYTES)

    def create(self, number: int, data: bytes) -> bool:
        check_folder(self._folder)
        make_private_folder(self._folder)
        return create_atomically(self._path(number), data, mode=PRIVATE)

    def renew(self, number: int, data: bytes) -> None:
        # In place and at the same length: nothing new must be made durable, and a deleted record is not recreated.
        # Closing the file publishes it to the other clients of a network file system.
        with open(open_file(self._path(number), os.O_RDWR), "r+b", buffering=0) as file:
            file.write(data)

    def remove(self, number: int) -> None:
        try:
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{number}.json", dir_fd=fd)
        finally:
            os.close(fd)

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"


def encode_owner(owner: LeaseOwner) -> bytes:
    data = msgspec.json.encode(owner)
    return data + b" " * (-(len(data) + 1) % RECORD_BYTES) + b"\n"


def decode_owner(data: bytes) -> LeaseOwner | None:
    """Return the owner in a record; ``None``: unreadable."""
    try:
        return from_json(data, LeaseOwner)
    except msgspec.DecodeError:
        return None


@dataclass(frozen=True, slots=True)
class _Newest:
    number: int = 0
    data: bytes = b""
    owner: LeaseOwner | None = None


def newest_owner(records: Records) -> LeaseOwner | None:
    """Return the owner in the newest record; ``None`` = there is none.

    Raises: OSError, OutlastError: The records cannot be read.
    """
    return _newest_of(records).owner


class Lease:
    """Hold a directory for a job, or for this process.

    Args:
        records: Records of the directory's owners.
        own: This owner's record; token, interval and count are set here.
        follow: Called with the previous owner before the directory is taken over, whether it was released or not;
            returns this owner's new record, or raises an error to raise instead.
        on_lost: Called once, in the lease's thread, when another owner has taken the directory over.

    Thread: any.
    """

    def __init__(
        self,
        records: Records,
        own: LeaseOwner,
        *,
        follow: Callable[[LeaseOwner], LeaseOwner] | None = None,
        on_lost: Callable[[InUse], None] = lambda lost: None,
    ) -> None:
        self._records, self._follow, self._on_lost = records, follow, on_lost
        self.owner = msgspec.structs.replace(own, renew_s=records.renew_s)
        """This owner's record."""
        self.number = 0
        """Number of this owner's record; 0 = none. Later owners have higher numbers."""
        self._lost: InUse | None = None
        self._is_over = self._is_released = self._is_withdrawn = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.progress = CallProgress()
        """Counts the polls of :meth:`acquire`, which may wait for an owner."""

    @property
    def is_held(self) -> bool:
        """Whether this owner held the directory at the last check."""
        return self._thread is not None and self._lost is None

    def acquire(self, *, leads: bool = False) -> None:
        """Take the directory unless it is held already, or join the owner's other processes.

        Args:
            leads: This process acts for its job from now on.

        Raises:
            InUse: Another owner holds it.
            OSError, OutlastError: The records cannot be read or written.

        Blocks: if only time shows whether the owner lives, until it has missed some renewals.
        """
        with self._lock:
            if leads and self._thread is not None:  # another node may have led it since the last check
                with contextlib.suppress(OSError, OutlastError):
                    self.check()
            if self._lost is not None and leads and self._is_of_this_job(self._lost.owner):
                self._lost = self._thread = None  # another node led it meanwhile
            if self._lost is not None:
                raise self._lost
            if self._thread is None:
                self._acquire(leads)

    def check(self) -> None:
        """Compare the newest record with one's own; recreate a record that was deleted.

        Raises:
            InUse: The directory was taken over.
            OSError, OutlastError: The records cannot be read or written.
        """
        if self._lost is not None:
            raise self._lost
        newest = _newest_of(self._records, self.number)
        if newest.owner is None:  # the records were deleted: one owner recreates them
            self._make(self.number)
            log.warning("%s was removed or emptied while this run uses it; what it held is lost", self._records.url)
            newest = _newest_of(self._records, self.number)
        owner = newest.owner or UNREADABLE
        if newest.number != self.number or owner.token not in (self.owner.token, UNREADABLE.token):
            _held.discard(self.owner.token)
            self._lost = InUse(self._records.url, owner, was_lost=True)
            raise self._lost

    def hold(self) -> None:
        """Acquire, or check. Raises: as these do."""
        if self._thread is None:
            self.acquire()
        else:
            self.check()

    def release(self, *, is_idle: bool = True) -> None:
        """Release the directory. Idempotent.

        Args:
            is_idle: This owner certainly writes nothing more; otherwise its record does not show that it has ended.

        Blocks: up to 2 s if the file system does not respond.
        """
        self._is_over, self._is_released = True, is_idle
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        _held.discard(self.owner.token)
        if thread is not threading.current_thread():
            thread.join(RELEASE_S)

    def withdraw(self) -> None:
        """Release the directory as if it had not been taken, as nothing was written. Blocks: as :meth:`release`."""
        self._is_withdrawn = self.number == 1  # else the older record would be lost
        self.release()

    # -- taking it ---------------------------------------------------------------------------------------------

    def _acquire(self, leads: bool) -> None:
        silence, watched, logged_s = Silence(), 0, None
        newest = _Newest()
        for _ in range(MAX_LOOKS):
            if self._is_over:
                raise OutlastError(f"{self._records.url} is not taken: this process is leaving")
            newest = _newest_of(self._records)
            self.progress.count += 1
            if newest.number != watched:
                silence, watched = Silence(), newest.number
            standing = self._judge_life(newest, silence)
            step = judge_owner(newest.owner, self.owner, standing, leads=leads)
            if step is LeaseStep.ENTER:
                return
            if step is LeaseStep.REFUSE:
                assert newest.owner is not None
                raise InUse(self._records.url, newest.owner)
            if step is LeaseStep.TAKE:
                if newest.owner is not None and self._follow is not None:
                    own = self._follow(newest.owner)
                    self.owner = msgspec.structs.replace(own, renew_s=self._records.renew_s)
                if self._take(newest, silence):
                    return
                continue
            assert newest.owner is not None
            is_due = (
                silence.silent_s >= 2 * newest.owner.renew_s
                if logged_s is None
                else clock.now_s() - logged_s >= REPORT_S
            )
            if is_due:
                logged_s = clock.now_s()
                log.warning(
                    "%s was last used by %s, which cannot be queried from this node; waiting until it has sent no "
                    "heartbeat for %.0f s (%.0f s so far)",
                    *(self._records.url, newest.owner.describe(), newest.owner.expires_s, silence.silent_s),
                )
            self._stop.wait(min(MAX_POLL_S, self._records.renew_s / 4))
        assert newest.owner is not None
        raise InUse(self._records.url, newest.owner)

    def _judge_life(self, newest: _Newest, silence: Silence) -> OwnerStanding:
        owner = newest.owner
        if owner is None:
            return OwnerStanding()
        process = owner.token in _held if owner.process == self.owner.process else is_alive(owner.process)
        job: bool | None = None
        mark: tuple[bytes, ...] = (newest.data,)
        own = self.owner
        if own.is_of_job(owner):
            job = False  # this job itself: it does not keep the owner alive
        elif own.outlives and own.run_dir is not None and owner.run_dir == own.run_dir:
            job = False  # the run directory belongs to this launcher now
        elif owner.outlives and owner.run_dir is not None and owner.run_dir != self._records.url:
            launcher = self._look_at_launcher(owner.run_dir)
            mark += (launcher.data,)
            if launcher.owner is not None:
                of_run = launcher.owner.run == owner.run and not launcher.owner.released
                job = of_run and find_life(launcher.owner, process=is_alive(launcher.owner.process), job=None)
        silence.look(mark, clock.now_s())
        return OwnerStanding(
            is_alive=find_life(owner, process=process, job=job),
            has_changed=silence.has_changed,
            silent_s=silence.silent_s,
        )

    def _look_at_launcher(self, run_dir: str) -> _Newest:
        """Return the record of a run directory's owner, which lives as long as its job, if it can be read here."""
        try:
            return _newest_of(FolderRecords(run_dir))
        except OSError as error:
            log.debug("run directory %s cannot be looked into: %s", run_dir, error)
            return _Newest()

    def _take(self, newest: _Newest, silence: Silence) -> bool:
        """Create the next record; return whether this process was the first."""
        number, before = newest.number + 1, newest.owner
        self.owner = msgspec.structs.replace(self.owner, token=secrets.token_hex(8))
        _held.add(self.owner.token)
        try:
            is_made = self._make(number)
            numbers = self._records.numbers() if is_made else []
            if is_made and max(numbers, default=number) > number:  # the number had been used and removed
                self._records.remove(number)
                is_made = False
        except BaseException:  # nothing is held
            _held.discard(self.owner.token)
            raise
        if not is_made:
            _held.discard(self.owner.token)
            return False
        self.number = number
        is_job = before is not None and self.owner.is_of_job(before)
        if before is not None and not before.released and not is_job:
            why = "has stopped sending heartbeats" if silence.silent_s >= before.expires_s else "has ended"
            log.info("%s is taken over from %s, which %s", self._records.url, before.describe(), why)
        # A suspended owner that resumes finds its record gone; the record of an owner that released stays, as it shows
        # who had the directory before.
        kept = newest.number if before is not None and before.released else number
        for old in numbers:
            if old < kept:
                self._remove(old)
        self._thread = threading.Thread(target=self._keep, args=(number, self.owner), name="outlast-lease", daemon=True)
        self._thread.start()
        return True

    def _make(self, number: int) -> bool:
        """Create this owner's record; return whether it exists."""
        if self._records.create(number, encode_owner(self.owner)):
            return True
        try:  # an object store may repeat the request and find its own record
            owner = decode_owner(self._records.read(number))
            return owner is not None and owner.token == self.owner.token
        except FileNotFoundError:
            return False

    # -- keeping it --------------------------------------------------------------------------------------------

    def _keep(self, number: int, own: LeaseOwner) -> None:
        """Renew a record until it is released or lost, or until this process takes the directory again."""
        is_failing = False
        while not self._stop.wait(self._records.renew_s):
            try:
                with self._lock:
                    if self.owner.token != own.token:
                        return
                    self.check()
                    own = msgspec.structs.replace(own, renewals=own.renewals + 1)
                    self._records.renew(number, encode_owner(own))
                is_failing = False
            except InUse as lost:
                self._remove(number)
                if not self._is_of_this_job(lost.owner):
                    self._on_lost(lost)
                return
            except FileNotFoundError:
                continue  # the next check detects who deleted it
            except (OSError, OutlastError) as error:
                if not is_failing:
                    log.warning(
                        "the record of this run in %s cannot be renewed (%s); if that lasts, another run on another "
                        "machine may take the directory over",
                        *(self._records.url, error),
                    )
                is_failing = True
        if self.owner.token != own.token:
            return
        if self._is_withdrawn and self._lost is None:
            self._remove(number)
            self._records.forget()
        elif self._is_released and self._lost is None:
            try:
                self._records.renew(number, encode_owner(msgspec.structs.replace(own, released=True)))
            except (OSError, OutlastError) as error:
                log.debug("%s could not be released: %s", self._records.url, error)

    def _remove(self, number: int) -> None:
        try:
            self._records.remove(number)
        except (OSError, OutlastError) as error:
            log.debug("record %d of %s stays: %s", number, self._records.url, error)

    def _is_of_this_job(self, owner: LeaseOwner) -> bool:
        """Return whether an owner shares the directory with this one."""
        return self.owner.shares and self.owner.is_of_job(owner)


def _newest_of(records: Records, own_number: int = 0) -> _Newest:
    """Return the newest record.

    Args:
        own_number: A record to read even if a listing lacks it: network file systems cache listings, but not the
            content of a file that is opened.
    """
    torn = 0
    for _ in range(MAX_TRIES):
        listed = max(records.numbers(), default=0)
        number = max(listed, own_number)
        if number == 0:
            return _Newest()
        try:
            data = records.read(number)
        except FileNotFoundError:
            if listed < number:
                return _Newest()
            continue  # removed by its successor
        owner = decode_owner(data)
        if owner is None and torn < MAX_TORN:
            torn += 1  # it was being renewed
            continue
        return _Newest(number, data, owner or msgspec.structs.replace(UNREADABLE, renew_s=records.renew_s))
    raise OutlastError(f"{records.url}: the records of its owners change all the time; look into {FOLDER}/ there")
