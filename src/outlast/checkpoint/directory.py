"""The folder of a node's generations: its names, and what lies in it. Nothing here imports torch.

``step-<n>`` is a committed generation, ``step-<n>.tmp-...`` an attempt, ``step-<n>.aside-...`` what stood in the way
of a newer lineage, ``latest`` a hint for people, and ``run.json`` a hint that names the run that the folder belongs to;
see ``claim``. In ``owner`` lie the records of who writes there; see ``outlast.runtime.lease``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outlast.checkpoint.claim import RUN, decode_hint, encode_hint
from outlast.checkpoint.manifest import MANIFEST, SHARD_PART, CopyKey, Manifest, decode_manifest, run_of
from outlast.checkpoint.shard import shard_name
from outlast.env import clean_name
from outlast.errors import CheckpointError, Incomplete
from outlast.runtime.files import create_atomically, fsync_folder, write_atomically
from outlast.runtime.lease import FolderRecords

__all__ = ["SUSPECT", "TRACKER", "Directory", "GenerationFolder", "SaveAttempt", "part_name"]

SUSPECT = "suspect"
"""Folder of what was saved for diagnosis."""
TRACKER = "latest"
_GENERATION = re.compile(r"step-(\d+)")
_DOOMED = re.compile(r"step-\d+\.doomed")
_PASSED = re.compile(r"step-\d+\.(?:tmp|aside)-(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAttempt:
    """Names one attempt to save, among all attempts of all processes."""

    job: str
    cycle: int
    token: str
    """Random, agreed by the ranks of one set of processes."""
    ordinal: int

    def makes_stale(self, match: re.Match[str] | None) -> bool:
        """Return whether a name is of an attempt of this job that is decided, or whose processes are gone.

        Args:
            match: The groups ``job``, ``cycle``, ``token`` and ``ordinal`` of the name; ``None`` = it names no attempt.
        """
        if match is None or match["job"] != clean_name(self.job):
            return False
        if match["token"] == self.token:
            return int(match["ordinal"]) < self.ordinal
        return int(match["cycle"]) <= self.cycle

    def __str__(self) -> str:
        return f"{clean_name(self.job)}-{self.cycle}-{self.token}.{self.ordinal}"


def part_name(key: CopyKey) -> str:
    """Return the name of a part's file."""
    return shard_name(key.rank) if key.part == SHARD_PART else f"{clean_name(key.part)}-{key.rank:05d}.bin"


class GenerationFolder:
    """A folder of generations, as this rank sees it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))

    def generation(self, iteration: int) -> Path:
        """Return the folder of a committed generation."""
        return self.path / f"step-{iteration}"

    def temporary(self, iteration: int, attempt: SaveAttempt | str) -> Path:
        """Return the folder of an attempt."""
        return self.path / f"step-{iteration}.tmp-{attempt}"

    def generations(self) -> list[int]:
        """Return the iterations that have a folder of a committed name, newest first; whole or not."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted((int(match[1]) for name in names if (match := _GENERATION.fullmatch(name))), reverse=True)

    @property
    def url(self) -> str:
        """The folder, as people are told of it."""
        return os.fspath(self.path)

    @property
    def owners(self) -> FolderRecords:
        """The records of the folder's owners."""
        return FolderRecords(self.path)

    def hint(self) -> str | None:
        """Return the run that ``run.json`` names; ``None``: it is not there, or cannot be read."""
        try:
            return decode_hint((self.path / RUN).read_bytes())
        except OSError:
            return None  # manifests tell it too; a disk that fails fails the save

    def named_runs(self) -> Iterator[str]:
        """Yield the runs that manifests name, newest generation first, those for diagnosis last."""
        for folder in (self, GenerationFolder(self.path / SUSPECT)):
            for iteration in folder.generations():
                try:
                    run = run_of((folder.generation(iteration) / MANIFEST).read_bytes(), iteration)
                except OSError:
                    continue
                if run is not None:
                    yield run

    def create_hint(self, run: str) -> bool:
        """Name the run that the folder belongs to, unless it is named; return whether this call did.

        Raises:
            OSError: It cannot be written, or there is a name that cannot be read: it may be another run's.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if create_atomically(self.path / RUN, encode_hint(run)):
            return True
        with contextlib.suppress(FileNotFoundError):
            (self.path / RUN).read_bytes()
        return False

    def write_hint(self, run: str) -> None:
        """Name the run that the folder belongs to, whatever it was named before."""
        write_atomically(self.path / RUN, encode_hint(run))

    def promote(self, iteration: int, attempt: SaveAttempt) -> None:
        """Give an attempt its final name; what has that name already is set aside, not written to."""
        final = self.generation(iteration)
        if final.exists():
            os.rename(final, self.path / f"step-{iteration}.aside-{attempt}")
        os.rename(self.temporary(iteration, attempt), final)
        fsync_folder(self.path)

    def point_to(self, iteration: int) -> None:
        """Set the tracker."""
        write_atomically(self.path / TRACKER, f"step-{iteration}\n".encode())

    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        """Remove what earlier attempts of this job, and interrupted deletions, left; return the names.

        Only what is provably not in use: of these processes' earlier attempts, which are decided, and of earlier
        cycles and processes of this job, which are gone. Another job's leftovers stay.
        """
        removed = []
        for name in os.listdir(self.path) if self.path.is_dir() else ():
            if _DOOMED.fullmatch(name) or attempt.makes_stale(_PASSED.fullmatch(name)):
                shutil.rmtree(self.path / name, ignore_errors=True)
                removed.append(name)
        return removed

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


class Directory(GenerationFolder):
    """The folder of a node's generations in the local tier."""

    def manifest(self, iteration: int) -> tuple[Manifest, str]:
        """Read a generation's manifest; return it and its SHA-256.

        Raises:
            CheckpointError: There is none, or it cannot be trusted.
        """
        path = self.generation(iteration) / MANIFEST
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise Incomplete("there is no manifest") from None
        except OSError as error:
            raise CheckpointError(f"the manifest cannot be read ({error.strerror})") from error
        return decode_manifest(data)
