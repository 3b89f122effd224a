"""What actors and workers of ``outlast bench ray`` mark in a folder, and how one of them fails there."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from outlast import clock
from outlast.decoding import from_json

__all__ = ["STRUCK", "TOTAL", "VICTIM", "Mark", "Marker", "read_marks", "when_all", "when_victim"]

STRUCK, TOTAL, VICTIM = 6, 8, 1
"""The step in which a rank fails, the last one, and which rank it is; steps count from 1."""
_PEERS_WAIT_S = 0.3
"""Seconds in which the others have come to the all-reduce, and what the step before saved is committed."""
_LONGEST_S = 120.0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened on a rank."""

    name: str
    rank: int
    iteration: int
    at_ns: int
    pid: int


class Marker:
    """Mark what happens on one rank, and have it fail once.

    Args:
        folder: Where marks go.
        fault: ``kill``, ``sleep``, ``stop``, or ``none``.
    """

    def __init__(self, folder: str, fault: str) -> None:
        self._folder, self._fault = Path(folder), fault

    def mark(self, name: str, rank: int, iteration: int) -> None:
        """Write down that it happened now."""
        mark = {"name": name, "rank": rank, "iteration": iteration, "at_ns": clock.now_ns(), "pid": os.getpid()}
        with open(self._folder / f"marks-{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(mark) + "\n")

    def strike(self, rank: int, iteration: int) -> None:
        """Fail, if it is this rank's turn."""
        if self._fault == "none" or (rank, iteration) != (VICTIM, STRUCK):
            return
        try:
            (self._folder / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        if self._fault == "sleep":
            time.sleep(_LONGEST_S)
        if self._fault == "stop":
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        time.sleep(_PEERS_WAIT_S)
        self.mark("killed", rank, iteration)
        os.kill(os.getpid(), signal.SIGKILL)


def read_marks(folder: Path) -> list[Mark]:
    """Return all marks of a folder, by time; a line that its writer's death cut short is left out."""
    lines = [line for path in sorted(folder.glob("marks-*.jsonl")) for line in path.read_bytes().splitlines(True)]
    marks = [from_json(line, Mark) for line in lines if line.endswith(b"\n")]
    return sorted(marks, key=lambda mark: mark.at_ns)


def when_all(marks: Sequence[Mark], name: str, *, since_ns: int, num_ranks: int) -> int | None:
    """Return when the last rank first came to something after a moment; ``None``: not all did."""
    first: dict[int, int] = {}
    for mark in marks:
        if mark.name == name and mark.at_ns > since_ns:
            first.setdefault(mark.rank, mark.at_ns)
    return max(first.values()) if len(first) == num_ranks else None


def when_victim(marks: Sequence[Mark], name: str) -> int | None:
    """Return when the rank that fails first came to something in the step in which it does; ``None``: never."""
    found = (mark.at_ns for mark in marks if (mark.name, mark.rank, mark.iteration) == (name, VICTIM, STRUCK))
    return next(found, None)
