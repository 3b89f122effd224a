"""The global tier in an object store. Nothing here imports torch.

There is no rename: files of an attempt carry its name, so that nobody's late upload changes what is committed, and the
manifest is put last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlast.checkpoint.claim import RUN, decode_hint, encode_hint
from outlast.checkpoint.dcp.file_place import check_files, parse_tracker
from outlast.checkpoint.dcp.manifest import METADATA, GlobalManifest, decode_global_manifest, encode_global_manifest
from outlast.checkpoint.dcp.store import open_store
from outlast.checkpoint.directory import SUSPECT, TRACKER, SaveAttempt
from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.seal import run_of
from outlast.env import clean_name
from outlast.errors import CheckpointError
from outlast.runtime.lease import FOLDER

__all__ = ["ObjectPlace", "StoreRecords"]

_GENERATION = re.compile(r"step-(\d+)")
_RECORD = re.compile(r"(\d+)\.json")
_FILE = re.compile(r"__\d+_\d+\.(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)\.distcp")


class ObjectPlace:
    """Objects below a URL.

    Args:
        url: As fsspec takes it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = open_store(self.url)

    def generations(self) -> list[int]:
        found = (_GENERATION.fullmatch(name) for name in self._store.names())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def names(self) -> list[str]:
        return self._store.names()

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._store.read(name, start, end)

    def read_into(self, name: str, start: int, target: memoryview) -> int:
        data = self._store.read(name, start, start + len(target))
        target[: len(data)] = data
        return len(data)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._store.sizes(folder)

    def hint(self) -> str | None:
        try:
            return decode_hint(self._store.read(RUN))
        except FileNotFoundError:
            return None

    def named_runs(self) -> Iterator[str]:
        for place in (self, ObjectPlace(f"{self.url}/{SUSPECT}")):
            for iteration in place.generations():
                try:
                    run = run_of(place.read(f"step-{iteration}/{MANIFEST}"), iteration)
                except FileNotFoundError:
                    continue
                if run is not None:
                    yield run

    def create_hint(self, run: str) -> bool:
        return self._store.create(RUN, encode_hint(run))

    def write_hint(self, run: str) -> None:
        self._store.write(RUN, encode_hint(run))

    def latest(self) -> int | None:
        try:
            return parse_tracker(self._store.read(TRACKER))
        except FileNotFoundError:
            return None

    def attempt_folder(self, iteration: int, attempt: SaveAttempt) -> str:
        return f"step-{iteration}"

    def file_name(self, rank: int, index: int, attempt: SaveAttempt) -> str:
        return f"__{rank}_{index}.{attempt}.distcp"

    def commit(self, iteration: int, attempt: SaveAttempt, manifest: GlobalManifest, metadata: bytes) -> None:
        folder = f"step-{iteration}"
        check_files(manifest, self._store.sizes(folder))
        replaced = self._committed_files(folder)
        self._store.write(f"{folder}/{METADATA}", metadata)
        self._store.write(f"{folder}/{MANIFEST}", encode_global_manifest(manifest))
        # What an earlier attempt at this iteration had committed is nobody's any more; another's upload may go on.
        self._remove(folder, (replaced or set()) - {file.name for file in manifest.files})

    def point_to(self, iteration: int) -> None:
        self._store.write(TRACKER, f"step-{iteration}\n".encode())

    def discard(self, iteration: int, attempt: SaveAttempt) -> None:
        folder = f"step-{iteration}"
        self._remove(folder, {name for name in self._store.sizes(folder) if name.endswith(f".{attempt}.distcp")})

    def remove(self, iteration: int) -> None:
        folder = f"step-{iteration}"
        names = set(self._store.sizes(folder))
        self._store.remove([f"{folder}/{MANIFEST}"])  # first: what is left then is no generation
        self._remove(folder, names - {MANIFEST})

    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        removed = []
        for iteration in self.generations():
            folder = f"step-{iteration}"
            stale = {name for name in self._store.sizes(folder) if _is_stale(name, attempt)}
            committed = self._committed_files(folder) if stale else None
            if committed is None:
                continue  # nobody knows what belongs to it
            stale -= committed
            self._remove(folder, stale)
            removed += [f"{folder}/{name}" for name in sorted(stale)]
        return removed

    def _committed_files(self, folder: str) -> set[str] | None:
        """Return the files that a generation's manifest names; ``None`` when it cannot be trusted."""
        try:
            data = self._store.read(f"{folder}/{MANIFEST}")
        except FileNotFoundError:
            return set()
        try:
            return {file.name for file in decode_global_manifest(data).files}
        except CheckpointError:
            return None

    def _remove(self, folder: str, names: set[str]) -> None:
        self._store.remove(f"{folder}/{name}" for name in sorted(names))


class StoreRecords:
    """Records of a place's owners, as objects in it; see :mod:`outlast.runtime.lease`.

    Args:
        url: Of the place, as fsspec takes it.
    """

    renew_s = 10.0
    """A request each time, which stores charge for."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store = open_store(self.url)

    def numbers(self) -> list[int]:
        found = (_RECORD.fullmatch(name) for name in self._store.sizes(FOLDER))
        return [int(match[1]) for match in found if match]

    def read(self, number: int) -> bytes:
        return self._store.read(f"{FOLDER}/{number}.json")

    def create(self, number: int, data: bytes) -> bool:
        return self._store.create(f"{FOLDER}/{number}.json", data)

    def renew(self, number: int, data: bytes) -> None:
        self._store.write(f"{FOLDER}/{number}.json", data)

    def remove(self, number: int) -> None:
        self._store.remove([f"{FOLDER}/{number}.json"])

    def forget(self) -> None:
        pass  # a folder is nothing but the names of its objects


def _is_stale(name: str, attempt: SaveAttempt) -> bool:
    """Whether a file is of an attempt of this job that is decided or whose processes are gone."""
    match = _FILE.fullmatch(name)
    if match is None or match["job"] != clean_name(attempt.job):
        return False
    if match["token"] == attempt.token:
        return int(match["ordinal"]) < attempt.ordinal
    return int(match["cycle"]) <= attempt.cycle
