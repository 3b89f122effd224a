"""The files of a global directory, on a disk or in an object store: listed, read and deleted alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from outlast.checkpoint.catalogue.entries import Leftover, ListedLeftover, Reader, list_leftovers
from outlast.checkpoint.catalogue.shard_file import PIECE_BYTES, open_file
from outlast.checkpoint.dcp.store import ObjectStore
from outlast.checkpoint.directory import Directory
from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.shard import CHUNK_BYTES

__all__ = ["Bucket", "Disk", "Files"]


class Files(Protocol):
    """What lies below a directory. Thread: any."""

    piece_bytes: int
    """What is read at once."""

    def sizes(self) -> dict[str, int]:
        """Return all files below it, by relative name, and their bytes."""

    def read(self, name: str) -> bytes:
        """Return a small file. Raises: OSError, CheckpointError."""

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a large file. Raises: OSError, CheckpointError."""

    def remains(self, above: str) -> Iterator[ListedLeftover]:
        """Yield the leftovers of a folder of generations."""

    def unfinished(self, folder: str, iteration: int, names: list[str], num_bytes: int) -> ListedLeftover | None:
        """Return what a generation's folder without a manifest is here: a leftover, or ``None``: a damaged one."""

    def remove(self, above: str, iteration: int) -> None:
        """Delete a generation: first what makes it one. Raises: OSError, CheckpointError."""


class Disk:
    """On a path. A folder gets its name once all is in it."""

    piece_bytes = PIECE_BYTES

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def sizes(self) -> dict[str, int]:
        """Return all files, by relative name, and their bytes."""
        found = {}
        for folder, _, names in os.walk(self._path, onerror=_raise):
            for name in names:
                path = Path(folder, name)
                try:
                    found[path.relative_to(self._path).as_posix()] = path.lstat().st_size
                except FileNotFoundError:
                    continue  # a run is at work there
        return found

    def read(self, name: str) -> bytes:
        """Return a small file."""
        return (self._path / name).read_bytes()

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a large file."""
        return open_file(self._path / name)

    def remains(self, above: str) -> Iterator[ListedLeftover]:
        """Yield the leftovers of a folder of generations."""
        return list_leftovers(self._path / above, f"{above}/" if above else "")

    def unfinished(self, folder: str, iteration: int, names: list[str], num_bytes: int) -> ListedLeftover | None:
        """Return ``None``: what has its final name had a manifest."""
        return None

    def remove(self, above: str, iteration: int) -> None:
        """Delete a generation: first its name."""
        try:
            Directory(self._path / above).remove(iteration)
        except FileNotFoundError:
            pass  # the run that it belongs to was quicker


class Bucket:
    """In an object store. The manifest, written last, makes a generation."""

    piece_bytes = CHUNK_BYTES

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def sizes(self) -> dict[str, int]:
        """Return all objects, by relative name, and their bytes."""
        return self._store.sizes()

    def read(self, name: str) -> bytes:
        """Return a small object."""
        return self._store.read(name)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        """Give ranges of a large object."""
        yield _Object(self._store, name)

    def remains(self, above: str) -> Iterator[ListedLeftover]:
        """Yield nothing: what is unfinished has its final name already."""
        return iter(())

    def unfinished(self, folder: str, iteration: int, names: list[str], num_bytes: int) -> ListedLeftover:
        """Return an attempt: nothing tells whether it is under way but its age."""
        entry = Leftover(
            name=folder,
            kind="attempt",
            iteration=iteration,
            num_bytes=num_bytes,
            modified_ns=self._store.modified_ns(folder),
        )
        return ListedLeftover(entry=entry, remove=lambda: self._store.remove(names))

    def remove(self, above: str, iteration: int) -> None:
        """Delete a generation: first its manifest."""
        folder = f"{above}/step-{iteration}" if above else f"step-{iteration}"
        names = sorted(self._store.sizes(folder), key=lambda name: name != MANIFEST)
        self._store.remove(f"{folder}/{name}" for name in names)


class _Object:
    """An object, read in ranges."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._name = store, name

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return up to ``num_bytes`` from ``offset``."""
        return self._store.read(self._name, offset, offset + num_bytes)


def _raise(error: OSError) -> None:
    raise error
