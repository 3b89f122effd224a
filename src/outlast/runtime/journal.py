"""The journal: append-only JSON lines, one file per process, under ``<run_dir>/journal/``.

A line is one ``write`` to a descriptor opened for appending, so readers see whole lines and a SIGKILL loses at most the
line being written; a torn line does not corrupt the next one. Each process locks its own file; if another process holds
the lock, such as an agent of the same name, the next file by number is used.

A full, missing or hung disk must not end or block training: failed writes are logged once and counted. A thread writes;
a caller waits until its event is written, so that the event exists before the next action. Once a write has blocked a
caller for ``PATIENCE_S``, no caller waits until it returns: events queue up, and those beyond the queue's limit are
counted, in an event of their own (``events_lost``) when writing works again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from outlast import clock
from outlast.incidents import Event, EventKind
from outlast.journal import name_file
from outlast.queued_writer import QueuedWriter
from outlast.runtime.files import OptionalFile, make_private_folder, open_private

log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
PATIENCE_S = 1.0
"""How long the first event that a hung disk does not accept blocks its process."""
MAX_FILES = 1000
"""Files of one name, for processes that hold them at the same time."""
MAX_QUEUED = 4096
"""Lines queued for a hung disk; further ones are lost."""
_OPEN_S = 5.0
_CLOSE_S = 2.0
_UNUSABLE = (PermissionError, FileExistsError, NotADirectoryError)
"""Errors of a path that was never usable."""


class Journal:
    """Append events of one process.

    Args:
        run_dir: The run directory; ``None`` makes every write a no-op (a session without a run directory).
        proc: Name of the process, as in :class:`outlast.incidents.Event`.

    Raises:
        OSError: The path cannot be used (permissions, or a part of it is not a folder). A disk that is full, read-only,
            missing or hung raises nothing: each write tries to create the file.

    Blocks: a write until it is done, at most :data:`PATIENCE_S` once a disk hangs.
    Thread: any; lines of several threads do not mix. A forked child may write, too.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None, *, run_id: str, job: str, node: str, proc: str) -> None:
        self.run_id, self.job, self.node, self.proc = run_id, job, node, proc
        self.cycle: int | None = None
        """Default cycle of every event."""
        self.opened_wall_ns, self.opened_ns = clock.wall_ns(), clock.now_ns()
        """When it was opened, by the wall clock and the monotonic clock."""
        self.incidents = Counter[str]()
        """Incidents that this process wrote, by kind."""
        self.path: Path | None = None
        self._file: _JournalWriter | None = None
        if run_dir is not None:
            path_of = partial(name_file, run_dir, job=job, node=node, proc=proc)
            self.path = path_of(number=1)
            self._file = _JournalWriter(path_of, self._describe_lost)

    @property
    def num_lost(self) -> int:
        return self._file.num_lost if self._file is not None else 0

    def write(
        self,
        kind: EventKind,
        *,
        cycle: int | None = None,
        rank: int | None = None,
        iteration: int | None = None,
        **data: Any,
    ) -> Event:
        event = self._event(kind, data, cycle, rank, iteration)
        if kind == EventKind.INCIDENT and (incident := data.get("incident")) is not None:
            self.incidents[str(incident["kind"] if isinstance(incident, dict) else incident.kind)] += 1
        if self._file is not None:
            self._file.write(_encode(event))
        return event

    def format_time(self) -> str:
        """Return the current time in the journal's format, for records stored alongside it."""
        return clock.as_iso(clock.wall_ns())

    def close(self) -> None:
        """Write the queued events and close the file; later writes are no-ops. Idempotent. Blocks: up to 2 s."""
        if self._file is not None:
            self._file.finish()

    def _event(
        self,
        kind: EventKind,
        data: dict[str, Any],
        cycle: int | None = None,
        rank: int | None = None,
        iteration: int | None = None,
    ) -> Event:
        wall_ns = clock.wall_ns()
        return Event(
            kind=kind,
            time=clock.as_iso(wall_ns),
            wall_ns=wall_ns,
            mono_ns=clock.now_ns(),
            run_id=self.run_id,
            job=self.job,
            node=self.node,
            proc=self.proc,
            cycle=self.cycle if cycle is None else cycle,
            rank=rank,
            iteration=iteration,
            data=data,
        )

    def _describe_lost(self, num: int) -> bytes:
        return _encode(self._event(EventKind.EVENTS_LOST, {"num": num}))


def _encode(event: Event) -> bytes:
    try:
        return _encoder.encode(event) + b"\n"
    except UnicodeEncodeError:  # a file name or argument that is not UTF-8: invalid bytes become "?"
        return json.dumps(msgspec.to_builtins(event), ensure_ascii=False).encode(errors="replace") + b"\n"


class _JournalWriter(QueuedWriter):
    """The file of a journal.

    Args:
        path_of: Path of the file with a number, from 1; the first file that no other process holds is used.
        describe_lost: Returns the line that reports a number of lost lines.

    Raises: OSError: The path cannot be used.
    """

    def __init__(self, path_of: Callable[..., Path], describe_lost: Callable[[int], bytes]) -> None:
        self._path_of, self._describe_lost = path_of, describe_lost
        self._path = path_of(number=1)
        self._state = OptionalFile("events of the journal", self._path, "they are lost until there is room")
        self.num_lost = 0
        self._num_untold = 0
        """Lost lines that the journal does not report yet."""
        self._fd, self._is_torn = -1, False
        self._open_error: OSError | None = None
        _writers.add(self)
        super().__init__("outlast-journal", patience_s=PATIENCE_S, max_lines=MAX_QUEUED)
        if isinstance(error := self._open_error, OSError):
            raise error

    def _begin(self) -> None:
        super()._begin()
        if self._fd < 0:
            self.write(b"", _OPEN_S)  # only opens the file

    def write(self, line: bytes, patience_s: float = -1.0) -> None:
        """Write a line, or queue it while the disk does not respond."""
        wait_s = PATIENCE_S if patience_s < 0 else patience_s
        if not self.append(line, wait_s):
            log.warning(
                "journal %s: the disk has not responded for %g s; events are buffered in memory", self._path, wait_s
            )

    def finish(self) -> None:
        """Write the queue and close the file; a hung disk gets two seconds. Idempotent."""
        if not self.close(_CLOSE_S):
            text = "journal %s: the disk does not respond; %d events were not written"
            log.warning(text, self._path, len(self._lines) + self._num_untold)

    def _put(self, line: bytes) -> None:
        """Write one line, then the number of lost lines before it. Blocks: as long as the disk does."""
        try:
            if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
                log.debug("journal %s was removed; it begins again", self._path)
                self._free()
            if self._fd < 0:
                make_private_folder(self._path.parent)
                self._fd, self._path = _open_alone(self._path_of)
                self._is_torn = _ends_torn(self._fd)
        except OSError as error:
            if line:
                self._lose(line, str(error))
            elif isinstance(error, _UNUSABLE):
                self._open_error = error
            return
        if line and self._append(line) and self._num_untold:
            self._state.note_written()
            num, self._num_untold = self._num_untold, 0
            if not self._append(self._describe_lost(num)):
                self._num_untold += num - 1  # the report itself is not a lost event
                self.num_lost -= 1

    def _append(self, line: bytes) -> bool:
        data = b"\n" + line if self._is_torn else line  # end a torn line first
        try:
            written = os.write(self._fd, data)
            problem = None if written == len(data) else "the disk is full"
        except OSError as error:
            written, problem = 0, str(error)
        if written:
            self._is_torn = problem is not None
        if problem is not None:
            self._lose(line, problem)
        return problem is None

    def _lose(self, line: bytes, problem: str) -> None:
        self._state.note_missed(problem)
        self.num_lost += 1
        self._num_untold += 1

    def _free(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fileno(self) -> int:
        return self._fd


_writers: weakref.WeakSet[_JournalWriter] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the files in a forked child, which would keep them locked after its parent has ended."""
    for writer in list(_writers):
        writer._free()


os.register_at_fork(after_in_child=_leave_to_parent)


def _share(fd: int) -> int | None:
    """Return a duplicate of this process's descriptor of the same open file; ``None``: it has none."""
    for writer in list(_writers):
        with contextlib.suppress(OSError):  # it is being closed
            own = os.dup(writer.fileno())
            if os.path.sameopenfile(own, fd):
                return own
            os.close(own)
    return None


def _open_alone(path_of: Callable[..., Path]) -> tuple[int, Path]:
    """Open the first file that no other process holds, for appending; return its descriptor and path.

    If this process holds the file already, both descriptors share one open file, and so its lock.
    """
    for number in range(1, MAX_FILES + 1):
        path = path_of(number=number)
        fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                own = _share(fd)
                os.close(fd)
                if own is None:
                    continue
                return own, path
            log.debug("%s cannot be locked: %s", path, error)  # a file system without locks
        return fd, path
    raise OSError(errno.EMFILE, "too many processes write this journal file")


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
