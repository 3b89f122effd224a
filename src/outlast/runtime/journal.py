"""The journal: append-only JSON lines, one file per process, under ``<run_dir>/journal/``.

Everything that is reported later is derived from here and from nothing else. A line is written with one
``write`` to a descriptor opened for appending, so that a reader sees whole lines and a SIGKILL loses at most
the line being written. A full or vanished disk must not end training: a failed write, or a file that cannot be
made yet, is logged once and counted, and a line torn by it, or by a kill, does not swallow the one after it.

A disk that hangs must not stop it either. A thread writes, which ends when there is nothing to write; whoever has an
event waits until it is written, so that an event is there before what is done next. Once a write has kept somebody
waiting for ``PATIENCE_S``, nobody waits any more until it returns: events queue up, and what finds no room is counted.
The count is an event itself (``events_lost``), written when writing works again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from outlast import clock
from outlast.env import clean_name
from outlast.incidents import Event, EventKind
from outlast.runtime.files import OptionalFile, make_private_folder, open_private

log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
PATIENCE_S = 1.0
"""How long the first event that a hung disk does not take keeps its process waiting."""
MAX_QUEUED = 4096
"""Lines that wait for a hung disk; further ones are lost."""
_OPEN_S = 5.0
_CLOSE_S = 2.0
_IDLE_S = 1.0
_UNUSABLE = (PermissionError, FileExistsError, NotADirectoryError)
"""Errors of a path that was never usable."""


class Journal:
    """Append events of one process.

    Args:
        run_dir: The run directory; ``None`` makes every write a no-op (a session without a run directory).
        run_id: Name of the run.
        job: Name of the job.
        node: Name of the node.
        proc: Name of the process, as in :class:`outlast.incidents.Event`.

    Raises:
        OSError: The path cannot be used (permissions, or a part of it is not a folder). A disk that is full, read-only,
            gone or hung raises nothing: each write tries to make the file.

    Blocks: a write until it is done, at most :data:`PATIENCE_S` once a disk hangs.
    Thread: any; lines of several threads do not mix. A forked child may write, too.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None, *, run_id: str, job: str, node: str, proc: str) -> None:
        self.run_id, self.job, self.node, self.proc = run_id, job, node, proc
        self.cycle: int | None = None
        """Written into every event that does not name another."""
        self.opened_wall_ns, self.opened_ns = clock.wall_ns(), clock.now_ns()
        """When it was opened, by the wall clock and the monotonic one."""
        self.incidents = Counter[str]()
        """Incidents that this process wrote, by kind."""
        self.path: Path | None = None
        self._file: _JournalWriter | None = None
        if run_dir is not None:
            self.path = Path(run_dir) / "journal" / f"{clean_name(job)}-{clean_name(node)}-{clean_name(proc)}.jsonl"
            self._file = _JournalWriter(self.path, self._describe_lost)

    @property
    def num_lost(self) -> int:
        """Lines that could not be written."""
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
        """Append one event and return it."""
        event = self._event(kind, cycle=cycle, rank=rank, iteration=iteration, data=data)
        if kind == EventKind.INCIDENT and (incident := data.get("incident")) is not None:
            self.incidents[str(incident["kind"] if isinstance(incident, dict) else incident.kind)] += 1
        if self._file is not None:
            self._file.append(_encode(event))
        return event

    def tell_time(self) -> str:
        """Return the time as the journal writes it, for what is kept beside it."""
        return clock.as_iso(clock.wall_ns())

    def close(self) -> None:
        """Write what is left and close the file; later writes are no-ops. Idempotent. Blocks: up to 2 s."""
        if self._file is not None:
            self._file.close()

    def _event(
        self, kind: EventKind, *, data: dict[str, Any], cycle: int | None, rank: int | None, iteration: int | None
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
        return _encode(self._event(EventKind.EVENTS_LOST, cycle=None, rank=None, iteration=None, data={"num": num}))


def _encode(event: Event) -> bytes:
    try:
        return _encoder.encode(event) + b"\n"
    except UnicodeEncodeError:  # a file's name, or an argument, that is not UTF-8: its strange bytes become "?"
        return json.dumps(msgspec.to_builtins(event), ensure_ascii=False).encode(errors="replace") + b"\n"


class _JournalWriter:
    """The file of a journal, and the thread that writes it while there is something to write.

    Args:
        path: The file; its folder is made.
        describe_lost: Returns the line which tells that so many are lost.

    Raises:
        OSError: The path cannot be used.
    """

    def __init__(self, path: Path, describe_lost: Callable[[int], bytes]) -> None:
        self._path, self._describe_lost = path, describe_lost
        self._state = OptionalFile("events of the journal", path, "they are lost until there is room")
        self.num_lost = 0
        self._num_untold = 0
        """Number of lost lines that the journal does not report yet."""
        self._fd, self._is_torn, self._is_closed = -1, False, False
        self._begin()
        if isinstance(error := self._open_error, OSError):
            raise error

    def _begin(self) -> None:
        """Begin with an empty queue and without a thread: a forked child inherits no thread."""
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._num_queued = self._num_done = 0
        self._is_stuck = False
        """A caller's wait for the line that is being written has timed out."""
        self._thread: threading.Thread | None = None
        self._open_error: OSError | None = None
        if self._fd < 0:
            self.append(b"", _OPEN_S)  # opens it, and no more

    def append(self, line: bytes, patience_s: float | None = None) -> None:
        """Write a line, or leave it to be written once the disk answers."""
        if self._owner != os.getpid():
            self._begin()
        with self._changed:
            if self._is_closed:
                return
            if len(self._lines) >= MAX_QUEUED:
                self._lose("the disk does not answer, and the queue is full")
                return
            self._lines.append(line)
            self._num_queued += 1
            number = self._num_queued
            if self._thread is None:
                self._start()
            else:
                self._changed.notify_all()
            wait_s = 0.0 if self._is_stuck else PATIENCE_S if patience_s is None else patience_s
            if self._changed.wait_for(lambda: self._num_done >= number, wait_s) or self._is_stuck:
                return
            self._is_stuck = True
        log.warning("journal %s: the disk has not answered for %g s; events wait in memory", self._path, wait_s)

    def close(self) -> None:
        """Write what is left, and close the file; a hung disk gets two seconds for it. Idempotent."""
        if self._owner != os.getpid():
            self._begin()
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            thread = self._thread
            if thread is None:
                self._close()
                return
            self._changed.notify_all()
        thread.join(_CLOSE_S)
        if thread.is_alive():
            text = "journal %s: the disk does not answer; %d events are not written"
            log.warning(text, self._path, len(self._lines) + self._num_untold)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, args=(_IDLE_S,), name="outlast-journal", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the interpreter is ending, or no thread can be had
            log.debug("the journal is written without a thread: %s", error)
            self._serve(0.0)

    def _serve(self, idle_s: float) -> None:
        """Write what there is; end when nothing has come for ``idle_s``, or the journal is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closed, idle_s)
                if not self._lines:
                    self._thread = None
                    if self._is_closed:
                        self._close()
                    return
                line = self._lines[0]
            try:
                self._put(line)
            except Exception as error:  # noqa: BLE001  whatever it is, the next line may be written
                self._lose(f"{type(error).__name__}: {error}")
            with self._changed:
                self._lines.popleft()
                self._num_done += 1
                self._is_stuck = False
                self._changed.notify_all()

    def _put(self, line: bytes) -> None:
        """Write one line, and then how many before it were lost. Blocks: as long as the disk does."""
        try:
            if self._fd < 0:
                make_private_folder(self._path.parent)
                self._fd = open_private(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
                self._is_torn = _ends_torn(self._fd)
        except OSError as error:
            if line:
                self._lose(str(error))
            elif isinstance(error, _UNUSABLE):
                self._open_error = error
            return
        if line and self._append(line) and self._num_untold:
            self._state.note_written()
            num, self._num_untold = self._num_untold, 0
            if not self._append(self._describe_lost(num)):
                self._num_untold += num - 1  # the line which tells of them is no event of the process
                self.num_lost -= 1

    def _append(self, line: bytes) -> bool:
        data = b"\n" + line if self._is_torn else line  # a torn line must not swallow the next one
        try:
            written = os.write(self._fd, data)
            problem = None if written == len(data) else "the disk is full"
        except OSError as error:
            written, problem = 0, str(error)
        if written:
            self._is_torn = problem is not None
        if problem is not None:
            self._lose(problem)
        return problem is None

    def _lose(self, problem: str) -> None:
        self._state.note_missed(problem)
        self.num_lost += 1
        self._num_untold += 1

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
