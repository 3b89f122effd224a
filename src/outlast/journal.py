"""Reading a run's journal: everything that happened to it, as typed events.

Each process of a run appends JSON lines to a file of its own in ``<run_dir>/journal/``. A process that is killed, or a
disk that is full, leaves a torn line; it is skipped, and the lines around it are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outlast.decoding import json_decoder, read_file
from outlast.incidents import Event, EventKind

__all__ = ["Event", "EventKind", "read"]

log = logging.getLogger(__name__)
MAX_JOURNAL_BYTES = 1 << 32
"""Limit of a journal file that is read as a whole."""
_decoder = json_decoder(Event)


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


def decode_events(data: bytes) -> tuple[list[Event], int]:
    """Return the events in some lines of a journal file, and the number of lines that are no event."""
    events: list[Event] = []
    num_bad = 0
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            events.append(_decoder.decode(line))
        except (msgspec.DecodeError, msgspec.ValidationError):
            num_bad += 1
    return events, num_bad
