"""The global tier's place: the names in it, what commits a generation, and how one is deleted.

On a file system an attempt is a folder of its own, and its rename the commit, as in the local tier. An object store
has no rename: an attempt's files, whose names carry the attempt, lie in the generation's folder, and the manifest, put
last, is the commit. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

from outlast.checkpoint.claim import owner_of
from outlast.checkpoint.dcp.file_place import FilePlace
from outlast.checkpoint.dcp.manifest import GlobalManifest, decode_global_manifest
from outlast.checkpoint.dcp.object_place import ObjectPlace, StoreRecords
from outlast.checkpoint.dcp.store import is_remote
from outlast.checkpoint.directory import SUSPECT, SaveAttempt
from outlast.errors import Incomplete
from outlast.runtime.lease import FolderRecords, Records

__all__ = ["GlobalDirectory"]


class GlobalPlace(Protocol):
    """What differs between a file system and an object store."""

    url: str

    def generations(self) -> list[int]: ...

    def names(self) -> list[str]: ...

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes: ...

    def read_into(self, name: str, start: int, target: memoryview) -> int: ...

    def sizes(self, folder: str) -> dict[str, int]: ...

    def hint(self) -> str | None: ...

    def named_runs(self) -> Iterator[str]: ...

    def create_hint(self, run: str) -> bool: ...

    def write_hint(self, run: str) -> None: ...

    def latest(self) -> int | None: ...

    def attempt_folder(self, iteration: int, attempt: SaveAttempt) -> str: ...

    def file_name(self, rank: int, index: int, attempt: SaveAttempt) -> str: ...

    def commit(self, iteration: int, attempt: SaveAttempt, manifest: GlobalManifest, metadata: bytes) -> None: ...

    def point_to(self, iteration: int) -> None: ...

    def discard(self, iteration: int, attempt: SaveAttempt) -> None: ...

    def remove(self, iteration: int) -> None: ...

    def remove_stale(self, attempt: SaveAttempt) -> list[str]: ...


class GlobalDirectory:
    """A path, or any URL that fsspec knows, with generations in it. Thread: any.

    Args:
        url: ``/path``, ``file:///path``, ``s3://bucket/run``, ``gs://bucket/run``, ``memory://run``, ...

    All methods raise CheckpointError where an object store, and OSError where a file system fails.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.fspath(url)
        self._place: GlobalPlace = ObjectPlace(text) if is_remote(text) else FilePlace(text)

    @property
    def url(self) -> str:
        """The place, as a path where it is one."""
        return self._place.url

    @property
    def is_remote(self) -> bool:
        """Whether it is reached through fsspec."""
        return is_remote(self.url)

    @property
    def owners(self) -> Records:
        """The records of the place's owners."""
        return StoreRecords(self.url) if self.is_remote else FolderRecords(self.url)

    @property
    def suspects(self) -> GlobalDirectory:
        """Where saves for diagnosis go; none of them is ever the newest generation."""
        return GlobalDirectory(f"{self.url}/{SUSPECT}")

    # -- what is there -----------------------------------------------------------------------------------------

    def generations(self) -> list[int]:
        """Return the iterations that have a folder of a committed name, newest first; whole or not."""
        return self._place.generations()

    def manifest(self, iteration: int) -> GlobalManifest:
        """Read a generation's manifest.

        Raises:
            CheckpointError: There is none, or it cannot be trusted.
        """
        try:
            data = self._place.read(f"{self.folder(iteration)}/manifest.json")
        except FileNotFoundError:
            raise Incomplete("there is no manifest") from None
        return decode_global_manifest(data)

    def run(self) -> str | None:
        """Return the run that the place belongs to; ``None`` when it is new."""
        owner = owner_of(self)
        return None if owner is None else owner.run

    def hint(self) -> str | None:
        """Return the run that ``run.json`` names; ``None``: it is not there, or cannot be read."""
        return self._place.hint()

    def named_runs(self) -> Iterator[str]:
        """Yield the runs that manifests name, newest generation first, those for diagnosis last."""
        return self._place.named_runs()

    def latest(self) -> int | None:
        """Return what the tracker names, a hint for people; ``None``: nothing that can be read."""
        return self._place.latest()

    def names(self) -> list[str]:
        """Return the names of all that lies directly in the place."""
        return self._place.names()

    def sizes(self, folder: str) -> dict[str, int]:
        """Return a folder's files, names relative to it, and their bytes."""
        return self._place.sizes(folder)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return a file, or its bytes from ``start`` up to ``end`` or the file's end.

        Raises:
            FileNotFoundError: There is none.
        """
        return self._place.read(name, start, end)

    def read_into(self, name: str, start: int, target: memoryview) -> int:
        """Fill ``target`` with a file's bytes from ``start`` on; return how many there were.

        Raises:
            FileNotFoundError: There is none.
        """
        return self._place.read_into(name, start, target)

    @staticmethod
    def folder(iteration: int) -> str:
        """Return the name of a generation's folder."""
        return f"step-{iteration}"

    # -- saving ------------------------------------------------------------------------------------------------

    def attempt_folder(self, iteration: int, attempt: SaveAttempt) -> str:
        """Return the folder that an attempt's files go to."""
        return self._place.attempt_folder(iteration, attempt)

    def file_name(self, rank: int, index: int, attempt: SaveAttempt) -> str:
        """Return the name of a rank's file of an attempt."""
        return self._place.file_name(rank, index, attempt)

    def create_hint(self, run: str) -> bool:
        """Name the run that the place belongs to, unless it is named; return whether this call did."""
        return self._place.create_hint(run)

    def write_hint(self, run: str) -> None:
        """Name the run that the place belongs to, whatever it was named before."""
        self._place.write_hint(run)

    def commit(self, iteration: int, attempt: SaveAttempt, manifest: GlobalManifest, metadata: bytes) -> None:
        """Make an attempt, all of whose files are there, the generation of its iteration.

        A generation that has its place already is replaced in one step; on a file system it is set aside.

        Args:
            iteration: Number of optimizer steps done.
            attempt: Whose files they are.
            manifest: What it consists of.
            metadata: What other readers of the format read.

        Raises:
            Incomplete: A file is not there, or is torn.
        """
        self._place.commit(iteration, attempt, manifest, metadata)

    def point_to(self, iteration: int) -> None:
        """Set the tracker."""
        self._place.point_to(iteration)

    def discard(self, iteration: int, attempt: SaveAttempt) -> None:
        """Delete what a failed attempt wrote: its room may be what the next one lacks."""
        self._place.discard(iteration, attempt)

    def remove(self, iteration: int) -> None:
        """Delete a generation, so that no half of it is ever taken for one."""
        self._place.remove(iteration)

    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        """Remove what earlier attempts of this job, and interrupted deletions, left; return the names.

        Only what is provably not in use. Another job's leftovers stay.
        """
        return self._place.remove_stale(attempt)
