"""A run's journal on disk: the names of its files, and how they are read: whole, from their ends, or as they grow.

Each process of a run appends JSON lines to a file of its own in ``<run_dir>/journal/``. A process that is killed, or a
disk that is full, leaves a torn line; it is skipped, and the lines around it are read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from outlast.decoding import json_decoder, open_file, read_file
from outlast.env import clean_name
from outlast.incidents import Event, EventKind

__all__ = ["Event", "EventKind", "read"]

log = logging.getLogger(__name__)
MAX_JOURNAL_BYTES = 1 << 32
"""Limit of a journal file that is read as a whole."""
_CHUNK_BYTES = 4 * 2**20
"""Of a file that is read while it grows; no line is longer."""
_Time = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Number = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_Duration = Annotated[float, msgspec.Meta(ge=-1e9, le=1e12)]


class _IncidentForm(msgspec.Struct, frozen=True):
    """What readers rely on in an incident, whatever else it has."""

    kind: str
    node: str | None = None
    rank: _Rank | None = None
    iteration: _Number | None = None
    evidence: dict[str, Any] = {}


class _VerdictForm(msgspec.Struct, frozen=True):
    """What readers rely on in a decision."""

    rung: _Number | None = None
    reason: str | None = None


class _DataForm(msgspec.Struct, frozen=True):
    """What readers rely on in ``Event.data``, whatever the event's kind: a name has one type in all of them."""

    incident: _IncidentForm | None = None
    verdict: _VerdictForm | None = None
    faults: list[dict[str, Any]] | None = None
    ranks: list[_Rank] | None = None
    named: list[_Rank] | None = None
    pids: list[_Number] | None = None
    scores: list[float | None] | None = None
    worst: dict[str, float] | None = None
    iterations: dict[str, _Number] | None = None
    bytes_read: dict[str, _Number] | None = None
    tiers: list[str] | None = None
    tier: str | None = None
    rejected: list[Any] | None = None
    command: list[Any] | None = None
    endpoints: list[str] | None = None
    world_size: _Rank | None = None
    node_rank: _Rank | None = None
    missing: _Rank = 0
    num: _Number | None = None
    num_bytes: _Number | None = None
    total: _Number | None = None
    exit_code: _Number = 0
    pid: _Number | None = None
    pid_started: _Number | None = None
    max_no_progress_cycles: _Number | None = None
    started_wall_ns: _Time = 0
    start_up_s: _Duration | None = None
    duration_s: _Duration | None = None
    stall_s: _Duration | None = None
    load_s: _Duration | None = None
    step_s: _Duration | None = None
    launcher: str | None = None
    machine: str | None = None
    host: str | None = None
    directory: str | None = None
    local_directory: str | None = None


class _Form(msgspec.Struct, frozen=True):
    """A line whose values readers can count with."""

    wall_ns: _Time
    mono_ns: _Time
    cycle: _Number | None = None
    rank: _Rank | None = None
    iteration: _Number | None = None
    data: _DataForm = _DataForm()


_decoder = json_decoder(Event)
_form_decoder = json_decoder(_Form)


def read(run_dir: str | os.PathLike[str]) -> Iterator[Event]:
    """Yield all events of a run, by wall time; those of one process in the order in which they happened.

    ``Event.data`` holds what :class:`EventKind` documents for the event's kind. What is written to a live run's journal
    after the call is not seen: call again.

    Args:
        run_dir: The run directory; one without a journal has no events.

    Yields:
        One event a line. Torn lines, and kinds of a newer version, are skipped.
    """
    timed: list[tuple[int, Event]] = []
    for path in sorted((Path(run_dir) / "journal").glob("*.jsonl")):
        try:
            found, num_bad = decode_events(read_file(path, max_bytes=MAX_JOURNAL_BYTES))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            log.warning("%s is left out: %s", path, error.strerror)
            continue
        if num_bad:
            log.debug("%d unreadable lines in %s are skipped", num_bad, path)
        wall_ns = 0
        for event in found:
            wall_ns = max(wall_ns, event.wall_ns)  # a clock that was set back does not turn a process's order around
            timed.append((wall_ns, event))
    timed.sort(key=lambda pair: pair[0])
    for _, event in timed:
        yield event


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JournalFile:
    """One file of a journal."""

    path: Path
    size: int
    modified_ns: int

    @property
    def rank(self) -> int | None:
        """The global rank that writes to the file; ``None`` = another process does."""
        found = re.search(r"-rank-(\d+)$", self.path.stem)
        return None if found is None else int(found[1])

    @property
    def is_of_agent(self) -> bool:
        """Whether an agent writes to the file, or the coordinator that an agent hosts."""
        return self.path.stem.endswith(("-agent", "-coordinator"))

    def is_of_job(self, job: str) -> bool:
        """Return whether the name begins with that of the job; so may the name of another job."""
        return self.path.name.startswith(f"{clean_name(job)}-")


def name_file(run_dir: str | os.PathLike[str], *, job: str, node: str, proc: str, number: int = 1) -> Path:
    """Return the path of a process's file; the first of a name has no number."""
    which = "" if number == 1 else f".{number}"
    return Path(run_dir) / "journal" / f"{clean_name(job)}-{clean_name(node)}{which}-{clean_name(proc)}.jsonl"


def list_files(run_dir: str | os.PathLike[str]) -> list[JournalFile]:
    """Return a journal's files, by name.

    Raises:
        OSError: The folder does not exist, or cannot be read.
    """
    found = []
    with os.scandir(Path(run_dir) / "journal") as entries:
        for entry in entries:
            if entry.name.endswith(".jsonl"):
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:  # removed meanwhile
                    continue
                found.append(JournalFile(Path(entry.path), status.st_size, status.st_mtime_ns))
    return sorted(found, key=lambda file: file.path.name)


def read_ends(path: Path, *, head_bytes: int, end_bytes: int) -> tuple[list[Event], int]:
    """Return the first and the last events of a file, and the number of lines between that are no event.

    Args:
        path: The file.
        head_bytes: How much of its begin is read; 0 = nothing, unless it is short enough to be read whole.
        end_bytes: How much of its end is read.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= head_bytes + end_bytes:
            return decode_events(_whole_lines(file.read(size)))
        first = decode_events(_whole_lines(file.read(head_bytes)))
        file.seek(size - end_bytes)
        last = decode_events(_whole_lines(file.read(end_bytes).partition(b"\n")[2]))
    return first[0] + last[0], first[1] + last[1]


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


class JournalTail:
    """Read a growing journal: each event once; files that are added meanwhile, too.

    Args:
        run_dir: The run directory; may not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[Path, int] = {}
        self.refused: set[Path] = set()
        """Files that could not be read at the last attempt."""

    def read_new(self, files: Iterable[Path] | None = None, *, max_chunks: int = 256) -> list[Event]:
        """Return the events since the last call, by wall time; a line that is not whole yet comes at a later one.

        A file that cannot be read is left out, and logged once.

        Args:
            files: The files to read; ``None`` = all.
            max_chunks: Chunks of 4 MiB that are read of a file; the rest follows at the next calls.

        Blocks: as long as the disk does.
        """
        found: list[Event] = []
        if files is None:
            files = sorted((self._run_dir / "journal").glob("*.jsonl"))
        for path in files:
            try:
                for _ in range(max_chunks):
                    events, has_more = self._read_chunk(path)
                    found += events
                    if not has_more:
                        break
            except FileNotFoundError:  # not there yet, or removed meanwhile
                pass
            except OSError as error:
                if path not in self.refused:
                    log.warning("%s cannot be read: %s", path, error.strerror)
                self.refused.add(path)
                continue
            self.refused.discard(path)
        return sorted(found, key=lambda event: event.wall_ns)

    def _read_chunk(self, path: Path) -> tuple[list[Event], bool]:
        """Return the next events of a file, and whether more can be read now."""
        begin = self._offsets.get(path, 0)
        with open(open_file(path), "rb", buffering=0) as file:
            file.seek(begin)
            data = file.read(_CHUNK_BYTES)
        is_full = len(data) == _CHUNK_BYTES
        num_whole = data.rfind(b"\n") + 1
        if not num_whole and is_full:
            num_whole = len(data)  # what is there is damaged
        self._offsets[path] = begin + num_whole
        return decode_events(data[:num_whole])[0], is_full


# -- lines -------------------------------------------------------------------------------------------------------------


def decode_events(data: bytes) -> tuple[list[Event], int]:
    """Return the events in some lines of a journal file, and the number of lines that are no event.

    A line is no event, either, where it has a value of another type or size than every version writes.
    """
    events: list[Event] = []
    num_bad = 0
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            event = _decoder.decode(line)
            _form_decoder.decode(line)
            events.append(event)
        except (msgspec.DecodeError, msgspec.ValidationError):
            num_bad += 1
    return events, num_bad
