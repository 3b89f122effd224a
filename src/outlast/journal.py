"""Read a run's journal from disk: whole files, their ends, or files as they grow; and name the files.

Each process of a run appends JSON lines to a separate file in ``<run_dir>/journal/``. A killed process or a full disk
leaves a torn line; readers skip torn lines.
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
"""Limit of a journal file that is read whole."""
_CHUNK_BYTES = 4 * 2**20
"""Chunk of a growing file; no line is longer."""
_Time = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Number = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_Duration = Annotated[float, msgspec.Meta(ge=-1e9, le=1e12)]


class _IncidentForm(msgspec.Struct, frozen=True):
    """The types that readers rely on in an incident; other keys are ignored."""

    kind: str
    node: str | None = None
    rank: _Rank | None = None
    iteration: _Number | None = None
    evidence: dict[str, Any] = {}


class _DecisionForm(msgspec.Struct, rename={"recovery_level": "rung"}, frozen=True):
    recovery_level: _Number | None = None
    reason: str | None = None


class _DataForm(msgspec.Struct, rename={"decision": "verdict"}, frozen=True):
    """The types that readers rely on in ``Event.data``: a name has the same type in all kinds of events."""

    incident: _IncidentForm | None = None
    decision: _DecisionForm | None = None
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
    wall_ns: _Time
    mono_ns: _Time
    cycle: _Number | None = None
    rank: _Rank | None = None
    iteration: _Number | None = None
    data: _DataForm = _DataForm()


_decoder = json_decoder(Event)
_form_decoder = json_decoder(_Form)


def read(run_dir: str | os.PathLike[str]) -> Iterator[Event]:
    """Yield all events of a run by wall time, those of one process in the order in which they happened.

    ``Event.data`` is documented in :class:`EventKind`. Events that a live run writes after the call are not included.

    Args:
        run_dir: The run directory; one without a journal has no events.

    Yields:
        One event for each line; torn lines and kinds of a newer version are skipped.
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
            wall_ns = max(wall_ns, event.wall_ns)  # keeps a process's order if the clock was set back
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
        """The global rank that writes the file; ``None`` = another kind of process writes the file."""
        found = re.search(r"-rank-(\d+)$", self.path.stem)
        return None if found is None else int(found[1])

    @property
    def is_of_agent(self) -> bool:
        """Whether an agent writes the file, or the coordinator that an agent hosts."""
        return self.path.stem.endswith(("-agent", "-coordinator"))

    def is_of_job(self, job: str) -> bool:
        """Return whether the file name starts with the job's name; another job's name may be a prefix too."""
        return self.path.name.startswith(f"{clean_name(job)}-")


def name_file(run_dir: str | os.PathLike[str], *, job: str, node: str, proc: str, number: int = 1) -> Path:
    """Return the path of a process's file; file 1 has no number in its name."""
    which = "" if number == 1 else f".{number}"
    return Path(run_dir) / "journal" / f"{clean_name(job)}-{clean_name(node)}{which}-{clean_name(proc)}.jsonl"


def list_files(run_dir: str | os.PathLike[str]) -> list[JournalFile]:
    """Return the files of a journal, sorted by name.

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
    """Return the first and the last events of a file, and the number of undecodable lines read.

    Args:
        path: The file.
        head_bytes: Bytes to read from the start; 0 = none, unless the file fits in ``end_bytes``.
        end_bytes: Bytes to read from the end.

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
    """Read a growing journal, each event once, including files that are added later.

    Args:
        run_dir: The run directory; may not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[Path, int] = {}
        self.refused: set[Path] = set()
        """Files that could not be read at the last attempt."""

    def read_new(self, files: Iterable[Path] | None = None, *, max_chunks: int = 256) -> list[Event]:
        """Return the events since the last call, by wall time; an incomplete line is returned by a later call.

        A file that cannot be read is skipped and logged once.

        Args:
            files: The files to read; ``None`` = all.
            max_chunks: Chunks of 4 MiB to read from each file; later calls continue.

        Blocks: on the disk.
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
            num_whole = len(data)  # damaged: no line is this long
        self._offsets[path] = begin + num_whole
        return decode_events(data[:num_whole])[0], is_full


# -- lines -------------------------------------------------------------------------------------------------------------


def decode_events(data: bytes) -> tuple[list[Event], int]:
    """Decode lines of a journal file; return the events and the number of undecodable lines.

    A line whose values have another type or size than any version writes counts as undecodable.
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
