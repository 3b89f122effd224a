"""Files of a run directory on an incident: stacks, tracebacks with the last output, diagnoses; each bounded.

The journal has paths of the time when it was written, but a run directory may have been copied since, and a journal may
contain any path. Paths are therefore built here from job, cycle and rank, and nothing outside the run directory is
read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from outlast.decoding import open_file
from outlast.env import clean_name
from outlast.goodput.account import IncidentCost
from outlast.incidents import IncidentKind
from outlast.wording import count, number_ranges

INCIDENT_BYTES = 64 * 1024
"""Limit of one incident's files."""
TOTAL_BYTES = 4 * 1024 * 1024
"""Limit of all files; the costliest incidents come first."""
_FILE_BYTES = 24 * 1024
_OTHER_BYTES = 6 * 1024
_MAX_OTHERS = 4
"""Different stacks, or failures, of other ranks that are shown with an incident's own."""
_MAX_FILES_READ = 256
_RANK_FILE = re.compile(r"rank-(\d+)\.txt")
_PID = re.compile(r"\bpid (\d+)\b")
_WHO = re.compile(r"^rank \d+ \([^)]*\),? ?")


class Attachment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One text on an incident."""

    title: str
    path: str
    """Relative to the run directory."""
    text: str = ""
    why_not: str = ""
    """Why the text is missing; empty = it is present."""


class RunFiles:
    """Read the files of a run directory within limits.

    Args:
        run_dir: The run directory; ``None`` = no files.
        jobs: Names of the run's jobs.
    """

    def __init__(self, run_dir: Path | None, jobs: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._jobs = jobs
        self._left_bytes = TOTAL_BYTES

    def find(self, incident: IncidentCost, *, cycle_jobs: Sequence[str] = ()) -> list[Attachment]:
        """Return the files on an incident, the most informative first.

        Args:
            incident: The incident.
            cycle_jobs: Jobs that had a cycle of this number: the names of stack files do not include the job.
        """
        if self._run_dir is None:
            return []
        budget = [INCIDENT_BYTES]
        rank = incident.rank
        failures = f"failures/{clean_name(incident.job)}-cycle-{incident.cycle}"
        found: list[Attachment] = []
        if incident.kind in (IncidentKind.WORKER_HUNG, IncidentKind.WORKER_DIED, IncidentKind.WRONG_ANSWER):
            found += self._stacks(incident, budget, is_only_job=len(cycle_jobs) < 2)
        if rank is not None:
            found += self._read(f"{failures}/rank-{rank}.txt", f"Traceback and last output of rank {rank}", budget)
            name = f"diagnoses/{clean_name(incident.job)}-cycle-{incident.cycle}-rank-{rank}.json"
            found += self._read(name, f"Diagnosis of rank {rank}", budget)
        if incident.kind in (IncidentKind.WORKER_FAILED, IncidentKind.WORKER_DIED, IncidentKind.INVALID_RESULT):
            found += self._others(failures, rank, "Traceback and last output", budget)
        return found

    def _stacks(self, incident: IncidentCost, budget: list[int], *, is_only_job: bool) -> list[Attachment]:
        """Return the stacks of a cycle if they belong to this incident: a later job's cycle may have replaced them."""
        folder = f"stacks/cycle-{incident.cycle}"
        rank = incident.rank
        pid = incident.incident.pid if incident.incident is not None else None
        own = [] if rank is None else self._read(f"{folder}/rank-{rank}.txt", f"Stack of rank {rank}", budget)
        if own and pid is not None and (seen := _PID.search(own[0].text[:400])) and int(seen[1]) != pid:
            return []
        if not own and not is_only_job:
            return []
        return own + self._others(folder, rank, "Stack", budget)

    def _others(self, folder: str, but: int | None, what: str, budget: list[int]) -> list[Attachment]:
        """Return the files of the other ranks in a folder, grouped by equal text."""
        assert self._run_dir is not None
        try:
            names = os.listdir(self._run_dir / folder)
        except OSError:
            return []
        ranks = sorted(int(match[1]) for name in names if (match := _RANK_FILE.fullmatch(name)))
        groups: dict[str, list[int]] = {}
        first: dict[str, tuple[str, str]] = {}
        for rank in [rank for rank in ranks if rank != but][:_MAX_FILES_READ]:
            path = f"{folder}/rank-{rank}.txt"
            text = self._load(path, _OTHER_BYTES)
            if text is None:
                continue
            key = _anonymous(text)
            groups.setdefault(key, []).append(rank)
            first.setdefault(key, (path, text))
        found: list[Attachment] = []
        by_size = sorted(groups.items(), key=lambda one: len(one[1]))
        for key, members in by_size[:_MAX_OTHERS]:
            path, text = first[key]
            noun = "rank" if len(members) == 1 else "ranks"
            title = f"{what} of {noun} {', '.join(number_ranges(members))}"
            found.append(self._admit(Attachment(title=title, path=path, text=text), budget))
        if len(by_size) > _MAX_OTHERS:
            left = sorted(rank for _, members in by_size[_MAX_OTHERS:] for rank in members)
            title = f"{what} of {count(len(left), 'other rank')}: {', '.join(number_ranges(left))}"
            found.append(Attachment(title=title, path=folder, why_not="left out here"))
        return found

    def _read(self, path: str, title: str, budget: list[int]) -> list[Attachment]:
        text = self._load(path, _FILE_BYTES)
        return [] if text is None else [self._admit(Attachment(title=title, path=path, text=text), budget)]

    def _admit(self, one: Attachment, budget: list[int]) -> Attachment:
        """Return the attachment, without its text if that exceeds the limits."""
        size = len(one.text)
        if size > min(budget[0], self._left_bytes):
            return Attachment(title=one.title, path=one.path, why_not="left out here: the report would grow too large")
        budget[0] -= size
        self._left_bytes -= size
        return one

    def _load(self, path: str, max_bytes: int) -> str | None:
        """Return a file's begin and end; ``None`` = unreadable, or outside of the run directory."""
        assert self._run_dir is not None
        whole = self._run_dir / path
        try:
            if not whole.resolve().is_relative_to(self._run_dir.resolve()) or not whole.is_file():
                return None
            with open(open_file(whole, follows_links=True), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= max_bytes:
                    return _decode(file.read(max_bytes))
                head = file.read(max_bytes // 2)
                file.seek(size - max_bytes // 2)
                tail = file.read(max_bytes // 2)
        except (OSError, RuntimeError):  # RuntimeError: links that lead in a circle
            return None
        return f"{_decode(head)}\n\n... {size - max_bytes} bytes are left out ...\n\n{_decode(tail)}"


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n").rstrip()


def _anonymous(text: str) -> str:
    """Return a stack without the parts that differ between ranks at the same place."""
    text = _WHO.sub("", text, count=1)
    return re.sub(r"0x[0-9a-f]+|\bpid \d+|\b\d\d:\d\d:\d\d[.,]\d+|\[rank \d+\]", "", text)
