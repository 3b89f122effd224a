"""The global tier's place: the names in it, what commits a generation, and how one is deleted.

On a file system an attempt is a folder of its own, and its rename the commit, as in the local tier. An object store
has no rename: an attempt's files, whose names carry the attempt so that no late upload changes what is committed, lie
in the generation's folder, and the manifest, put after them, is the commit. ``.metadata``, the index that only other
readers of the format read, follows it; whoever takes the place over puts it right where a save ended between the two.
That one also changes the version of each manifest that an earlier owner could be about to replace.

Nothing here imports torch but what puts an index right.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from outlast.checkpoint.dcp.manifest import (
    METADATA,
    GlobalManifest,
    decode_global_manifest,
    encode_global_manifest,
    find_torn,
)
from outlast.checkpoint.dcp.store import is_remote, local_path, open_store, without_slash
from outlast.checkpoint.directory import ClaimedPlace, GenerationFolder, SaveAttempt, owner_of
from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.shard import digests
from outlast.decoding import from_json, open_file
from outlast.errors import CheckpointError, Incomplete
from outlast.runtime.files import fsync_folder, write_durably
from outlast.runtime.injection import reach
from outlast.runtime.lease import FOLDER, MAX_RECORD_BYTES, Records

log = logging.getLogger(__name__)
MAX_REMOVED = 20_000
"""Objects of old generations that are deleted after one commit; more wait for the next one."""
MAX_TRIES = 3
_RECORD = re.compile(r"(\d+)\.json")
_FILE = re.compile(
    r"__\d+_\d+\.(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)(?:r(?P<retry>\d+))?\.distcp"
)


def is_attempt_file(name: str) -> bool:
    """Return whether an object of this name, in a generation's folder, is one that a save has put there."""
    return _FILE.fullmatch(name) is not None


class GlobalDirectory(ClaimedPlace):
    """A path, or any URL that fsspec knows, with generations in it. Thread: any."""

    @staticmethod
    def open(url: str | os.PathLike[str]) -> GlobalDirectory:
        """Return the directory at ``/path``, ``file:///path``, ``s3://bucket/run``, ``gs://bucket/run``, ..."""
        text = os.fspath(url)
        return ObjectDirectory(text) if is_remote(text) else FileDirectory(local_path(text))

    # -- what is there -----------------------------------------------------------------------------------------

    def manifest(self, iteration: int) -> GlobalManifest:
        """Read a generation's manifest.

        Raises:
            CheckpointError: There is none, or it cannot be trusted.
        """
        try:
            data = self.read(f"{self.folder(iteration)}/{MANIFEST}")
        except FileNotFoundError:
            raise Incomplete("there is no manifest") from None
        return decode_global_manifest(data)

    def run(self) -> str | None:
        """Return the run that the place belongs to; ``None`` when it is new."""
        owner = owner_of(self)
        return None if owner is None else owner.run

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Return a folder's files, names relative to it, and their bytes."""

    @abstractmethod
    def read_into(self, name: str, start: int, target: memoryview) -> int:
        """Fill ``target`` with a file's bytes from ``start`` on; return how many there were.

        Raises:
            FileNotFoundError: There is none.
        """

    @staticmethod
    def folder(iteration: int) -> str:
        return f"step-{iteration}"

    # -- saving ------------------------------------------------------------------------------------------------

    @abstractmethod
    def attempt_folder(self, iteration: int, attempt: SaveAttempt) -> str:
        """Return the folder that an attempt's files go to."""

    @abstractmethod
    def file_name(self, rank: int, index: int, attempt: SaveAttempt) -> str:
        """Return the name of a rank's file of an attempt."""

    @abstractmethod
    def commit(
        self, attempt: SaveAttempt, manifest: GlobalManifest, metadata: bytes, *, confirm: Callable[[], None]
    ) -> None:
        """Make an attempt, all of whose files are there, the generation of its iteration.

        A generation that has its place already is replaced in one step; on a file system it is set aside.

        Args:
            confirm: Raises when a later owner has come; called immediately before the commit.

        Raises:
            Incomplete: A file is not there, or is torn.
        """

    @abstractmethod
    def discard(self, iteration: int, attempt: SaveAttempt) -> None:
        """Delete what a failed attempt wrote: its room may be what the next one lacks."""

    @abstractmethod
    def remove(self, iteration: int) -> None:
        """Delete a generation, so that no half of it is ever taken for one."""


class FileDirectory(GenerationFolder, GlobalDirectory):
    """A folder of generations; an attempt is a folder beside them, and becomes one by its rename."""

    def manifest(self, iteration: int) -> GlobalManifest:
        try:
            return super().manifest(iteration)
        except Incomplete:
            if (aside := self.wait_for_names().get(iteration)) is not None:
                raise Incomplete(
                    f"its replacement was interrupted before the final rename; it is stored in {aside} until a run "
                    "that saves there resumes"
                ) from None
            if not self.generation(iteration).exists():
                raise
        return super().manifest(iteration)

    def read_into(self, name: str, start: int, target: memoryview) -> int:
        with open(open_file(self.path / name), "rb", buffering=0) as file:
            file.seek(start)
            done = 0
            while done < len(target) and (count := file.readinto(target[done:]) or 0):
                done += count
            return done

    def sizes(self, folder: str) -> dict[str, int]:
        root, found = self.path / folder, dict[str, int]()
        for above, folders, names in os.walk(root, onerror=_raise_unless_gone):
            folders.sort()
            for name in sorted(names):
                path = Path(above, name)
                with contextlib.suppress(FileNotFoundError):  # a run is at work there
                    found[path.relative_to(root).as_posix()] = path.stat().st_size
        return found

    def temporary(self, iteration: int, attempt: SaveAttempt | str) -> Path:
        return super().temporary(iteration, attempt.label if isinstance(attempt, SaveAttempt) else attempt)

    def attempt_folder(self, iteration: int, attempt: SaveAttempt) -> str:
        return self.temporary(iteration, attempt).name

    def file_name(self, rank: int, index: int, attempt: SaveAttempt) -> str:
        return f"__{rank}_{index}.distcp"

    def commit(
        self, attempt: SaveAttempt, manifest: GlobalManifest, metadata: bytes, *, confirm: Callable[[], None]
    ) -> None:
        folder = self.temporary(manifest.iteration, attempt)
        _check_files(manifest, self.sizes(folder.name))
        for name, data in ((METADATA, metadata), (MANIFEST, encode_global_manifest(manifest))):
            write_durably(folder / name, data)
        fsync_folder(folder)
        confirm()
        reach("checkpoint.fenced", attempt=str(attempt))
        self.promote(manifest.iteration, attempt)


class ObjectDirectory(GlobalDirectory):
    """Objects below a URL."""

    is_remote = True

    def __init__(self, url: str) -> None:
        self.url = without_slash(url)
        self._store = open_store(self.url)

    @property
    def owners(self) -> Records:
        return StoreRecords(self.url)

    def names(self) -> list[str]:
        return self._store.names()

    def read(self, name: str) -> bytes:
        return self._store.read(name)

    def write(self, name: str, data: bytes) -> None:
        self._store.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        return self._store.create(name, data)

    def read_into(self, name: str, start: int, target: memoryview) -> int:
        data = self._store.read_range(name, start, start + len(target))
        target[: len(data)] = data
        return len(data)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._store.sizes(folder)

    def attempt_folder(self, iteration: int, attempt: SaveAttempt) -> str:
        return self.folder(iteration)

    def file_name(self, rank: int, index: int, attempt: SaveAttempt) -> str:
        return f"__{rank}_{index}.{attempt.label}.distcp"

    def commit(
        self, attempt: SaveAttempt, manifest: GlobalManifest, metadata: bytes, *, confirm: Callable[[], None]
    ) -> None:
        folder = self.folder(manifest.iteration)
        _check_files(manifest, self._store.sizes(folder))
        name, data = f"{folder}/{MANIFEST}", encode_global_manifest(manifest)
        index = f"{folder}/{METADATA}"
        for _ in range(MAX_TRIES):
            # Only what was there before this owner was sure that no later one had come is replaced.
            version, index_version = self._store.version(name), self._store.version(index)
            replaced = self._committed_files(folder)
            confirm()
            reach("checkpoint.fenced", attempt=str(attempt))
            if self._store.replace(name, data, version):
                break
        else:
            raise CheckpointError(f"{self.url}/{folder} is written by another process all the time")
        reach("checkpoint.indexed", attempt=str(attempt))
        try:  # after the commit, so that an owner that is none any more changes nothing of what is committed
            self._store.replace(index, metadata, index_version)
        except CheckpointError as error:
            log.warning(
                "checkpoint %d is committed, but without the metadata that other readers need: %s",
                manifest.iteration,
                error,
            )
        # What an earlier attempt at this iteration had committed belongs to nothing now; another's upload may continue.
        self._remove(folder, (replaced or set()) - {file.name for file in manifest.files})

    def discard(self, iteration: int, attempt: SaveAttempt) -> None:
        folder = self.folder(iteration)
        names = {name for name in self._store.sizes(folder) if name.endswith(f".{attempt.label}.distcp")}
        if (committed := self._committed_files(folder)) is not None:  # a commit whose answer was lost is one
            self._remove(folder, names - committed)

    def remove(self, iteration: int) -> None:
        folder = self.folder(iteration)
        names = set(self._store.sizes(folder))
        self._store.remove([f"{folder}/{MANIFEST}"])  # first: what is left then is no generation
        self._remove(folder, names - {MANIFEST})

    def fence(self, number: int, token: str) -> None:
        """See :class:`ClaimedPlace`; a manifest whose files are gone is no generation."""
        self._store.check_fencing(f"{FOLDER}/{number}.probe")
        retiring = f"{FOLDER}/{number - 1}.retiring"
        with contextlib.suppress(FileNotFoundError):  # what the last owner was deleting it may continue to delete
            try:
                doomed = from_json(self._store.read(retiring), list[int])
            except msgspec.DecodeError as error:
                raise CheckpointError(
                    f"{self.url}/{retiring} is malformed ({error}): the last owner may still delete checkpoints; end "
                    "its job and remove the file"
                ) from error
            self._store.remove([*(f"{self.folder(iteration)}/{MANIFEST}" for iteration in doomed), retiring])
        sizes, found = self._store.sizes(), dict[str, set[str]]()
        for path in sizes:
            folder, _, name = path.rpartition("/")
            match = _FILE.fullmatch(name)
            if match is not None and match["token"] != token:
                found.setdefault(folder, set()).add(name)
        for folder, names in found.items():
            if (committed := self._committed_files(folder)) is None:
                continue  # nobody knows what belongs to it
            if not names <= committed:
                committed = self._keep_from_replacing(folder)
                self._remove(folder, names - committed)
            elif f"{folder}/{METADATA}" in sizes:
                continue
            self._mend_index(folder)

    def _keep_from_replacing(self, folder: str) -> set[str]:
        """Make a generation one that no earlier owner replaces: each of them knows another version of its manifest.

        Returns:
            The files that the manifest names.

        Raises:
            CheckpointError: It cannot be trusted any more, or the store does not answer.
        """
        name = f"{folder}/{MANIFEST}"
        for _ in range(MAX_TRIES):
            if (version := self._store.version(name)) is None:
                return set()
            try:
                data = self._store.read(name)
            except FileNotFoundError:
                continue
            committed = {file.name for file in decode_global_manifest(data).files}
            # To a reader it is the same manifest with a line end more. A store that knows no versions gains nothing.
            if not version or self._store.replace(name, data + b"\n", version):
                return committed
        raise CheckpointError(f"{self.url}/{folder} is written by another process all the time")

    def _mend_index(self, folder: str) -> None:
        """Write what other readers read of a generation, if the owner that committed it did not get that far."""
        from outlast.checkpoint.dcp.items import dump_metadata  # imports torch, and is seldom needed

        try:
            manifest, name = decode_global_manifest(self._store.read(f"{folder}/{MANIFEST}")), f"{folder}/{METADATA}"
            version, metadata = self._store.version(name), dump_metadata(manifest)
            entry = manifest.metadata
            if entry is None or (len(metadata), digests(metadata)) != (entry.num_bytes, entry.chunks):
                return  # another version of torch saved it
            if version is None or self._store.read(name) != metadata:
                self._store.replace(name, metadata, version)
        except (CheckpointError, FileNotFoundError):
            return  # whoever loads the generation names what is wrong with it

    def retire(self, iterations: Sequence[int], number: int, confirm: Callable[[], None]) -> None:
        self._store.write(f"{FOLDER}/{number}.retiring", msgspec.json.encode(list(iterations)))
        confirm()
        reach("checkpoint.retire")
        self._store.remove(f"{self.folder(iteration)}/{MANIFEST}" for iteration in iterations)
        num_removed = 0
        for iteration in iterations:
            if num_removed >= MAX_REMOVED:
                return  # without a manifest it is no generation; the rest goes after the next commit
            names = set(self._store.sizes(self.folder(iteration)))
            self._remove(self.folder(iteration), names)
            num_removed += len(names)

    def is_own(self, iteration: int) -> bool:
        names = self._store.sizes(self.folder(iteration))  # without a manifest where its removal was cut short
        return not names or any(map(is_attempt_file, names))

    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        removed = []
        for iteration in self.generations():
            folder = self.folder(iteration)
            stale = {name for name in self._store.sizes(folder) if attempt.makes_stale(_FILE.fullmatch(name))}
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
    """Records of a place's owners, as objects in it; see :mod:`outlast.runtime.lease`."""

    renew_s = 10.0
    """A request each time, which stores charge for."""

    def __init__(self, url: str) -> None:
        self.url = without_slash(url)
        self._store = open_store(self.url)

    def numbers(self) -> list[int]:
        found = (_RECORD.fullmatch(name) for name in self._store.sizes(FOLDER))
        return [int(match[1]) for match in found if match]

    def read(self, number: int) -> bytes:
        return self._store.read(f"{FOLDER}/{number}.json", max_bytes=MAX_RECORD_BYTES)

    def create(self, number: int, data: bytes) -> bool:
        return self._store.create(f"{FOLDER}/{number}.json", data)

    def renew(self, number: int, data: bytes) -> None:
        self._store.write(f"{FOLDER}/{number}.json", data)

    def remove(self, number: int) -> None:
        self._store.remove([f"{FOLDER}/{number}.json"])

    def forget(self) -> None:
        pass  # a folder is nothing but the names of its objects


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _check_files(manifest: GlobalManifest, sizes: dict[str, int]) -> None:
    """Check that all files of a generation are there and as long as they should be.

    Raises:
        Incomplete: One is not.
    """
    for file, error in find_torn(manifest.files, sizes):
        question = "" if file.name in sizes else "; is it the same place for all ranks?"
        raise Incomplete(f"{file.name} {error}{question}")
