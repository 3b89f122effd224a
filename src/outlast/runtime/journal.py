"""The journal: append-only JSON lines, one file per process, under ``<run_dir>/journal/``.

Everything that is reported later is derived from here and from nothing else. A line is written with one
``write`` to a descriptor opened for appending, so that a reader sees whole lines and a SIGKILL loses at most
the line being written. A full or vanished disk must not end training: a failed write is logged once and
counted, and a line torn by it, or by a kill, does not swallow the one after it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from outlast import clock
from outlast.env import clean_name
from outlast.incidents import Event, EventKind
from outlast.runtime.files import make_private_folder, open_private

log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class Journal:
    """Append events of one process.

    Args:
        run_dir: The run directory; ``None`` makes every write a no-op (a session without a run directory).
        run_id: Name of the run.
        job: Name of the job.
        node: Name of the node.
        proc: Name of the process, as in :class:`outlast.incidents.Event`.

    Thread: any; lines of several threads do not mix.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None, *, run_id: str, job: str, node: str, proc: str) -> None:
        self.run_id, self.job, self.node, self.proc = run_id, job, node, proc
        self.cycle: int | None = None
        """Written into every event that does not name another."""
        self.num_lost = 0
        """Lines that could not be written."""
        self.incidents = Counter[str]()
        """Incidents that this process wrote, by kind."""
        self.path: Path | None = None
        self._fd = -1
        self._torn = False
        self._lock = threading.Lock()
        if run_dir is not None:
            folder = Path(run_dir) / "journal"
            make_private_folder(folder)
            self.path = folder / f"{clean_name(job)}-{clean_name(node)}-{clean_name(proc)}.jsonl"
            self._fd = open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._torn = _ends_torn(self._fd)

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
        wall_ns = clock.wall_ns()
        event = Event(
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
        try:
            line = _encoder.encode(event) + b"\n"
        except UnicodeEncodeError:  # a file's name, or an argument, that is not UTF-8: its strange bytes become "?"
            line = json.dumps(msgspec.to_builtins(event), ensure_ascii=False).encode(errors="replace") + b"\n"
        with self._lock:
            if kind == EventKind.INCIDENT and (incident := data.get("incident")) is not None:
                self.incidents[str(incident["kind"] if isinstance(incident, dict) else incident.kind)] += 1
            if self._fd >= 0:
                self._append(line)
        return event

    def tell_time(self) -> str:
        """Return the time as the journal writes it, for what is kept beside it."""
        return clock.as_iso(clock.wall_ns())

    def _append(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line  # a torn line must not swallow the next one
        try:
            written = os.write(self._fd, data)
            problem = None if written == len(data) else "the disk is full"
        except OSError as error:
            written, problem = 0, str(error)
        if written:
            self._torn = problem is not None
        if problem is not None:
            if not self.num_lost:
                log.warning("journal %s cannot be written (%s); events are lost until it can", self.path, problem)
            self.num_lost += 1

    def close(self) -> None:
        """Close the file; later writes are no-ops."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
