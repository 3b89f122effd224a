"""The global tier's directory: its names, the commit and the deletion of checkpoints.

On a file system an attempt is a folder and its rename is the commit, as in the local tier. An object store has no
rename: an attempt's files are stored in the checkpoint's folder, under names with the attempt so that a late upload
changes nothing committed, and the manifest, written last, is the commit. ``.metadata``, the index for other readers,
follows it. The next owner repairs an index that a save did not complete, and changes the version of each manifest that
an earlier owner could be about to replace. Imports torch only to repair an index.
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
from outlast.checkpoint.directory import CheckpointFolder, ClaimedPlace, SaveAttempt, owner_of
from outlast.checkpoint.manifest import MANIFEST
from outlast.checkpoint.shard import digests
from outlast.decoding import from_json, open_file
from outlast.errors import CheckpointError, Incomplete
from outlast.runtime.files import fsync_folder, write_durably
from outlast.runtime.injection import reach
from outlast.runtime.lease import FOLDER, MAX_RECORD_BYTES, Records

log = logging.getLogger(__name__)
MAX_REMOVED = 20_000
"""Objects of old checkpoints deleted after one commit; the rest waits for the next commit."""
MAX_TRIES = 3
_RECORD = re.compile(r"(\d+)\.json")
_FILE = re.compile(
    r"__\d+_\d+\.(?P<job>.+)-(?P<cycle>\d+)-(?P<token>[0-9a-f]+)\.(?P<ordinal>\d+)(?:r(?P<retry>\d+))?\.distcp"
)


def is_attempt_file(name: str) -> bool:
    """Return whether a save wrote an object of this name in a checkpoint's folder."""
    return _FILE.fullmatch(name) is not None


class GlobalDirectory(ClaimedPlace):
    """Checkpoints at a path or any URL that fsspec supports. Thread: any."""

    @staticmethod
    def open(url: str | os.PathLike[str]) -> GlobalDirectory:
        """Return the directory at ``/path``, ``file:///path``, ``s3://bucket/run``, ``gs://bucket/run``, ..."""
        text = os.fspath(url)
        return ObjectDirectory(text) if is_remote(text) else FileDirectory(local_path(text))

    # -- contents ----------------------------------------------------------------------------------------------

    def manifest(self, iteration: int) -> GlobalManifest:
        """Read a checkpoint's manifest. Raises: CheckpointError (the manifest is missing or cannot be trusted)."""
        try:
            data = self.read(f"{self.folder(iteration)}/{MANIFEST}")
        except FileNotFoundError:
            raise Incomplete("there is no manifest") from None
        return decode_global_manifest(data)

    def run(self) -> str | None:
        """Return the run that owns the directory; ``None`` if it is new."""
        owner = owner_of(self)
        return None if owner is None else owner.run

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of a folder's files by relative name."""

    @abstractmethod
    def read_into(self, name: str, start: int, target: memoryview) -> int:
        """Fill ``target`` with a file's bytes from ``start``; return the number of bytes read.

        Raises: FileNotFoundError (the file does not exist).
        """

    @staticmethod
    def folder(iteration: int) -> str:
        return f"step-{iteration}"

    # -- saving ------------------------------------------------------------------------------------------------

    @abstractmethod
    def attempt_folder(self, iteration: int, attempt: SaveAttempt) -> str:
        """Return the folder for an attempt's files."""

    @abstractmethod
    def file_name(self, rank: int, index: int, attempt: SaveAttempt) -> str:
        """Return the name of a rank's file of an attempt."""

    @abstractmethod
    def commit(
        self, attempt: SaveAttempt, manifest: GlobalManifest, metadata: bytes, *, confirm: Callable[[], None]
    ) -> None:
        """Commit an attempt with all its files as the checkpoint of its iteration.

        An existing checkpoint is replaced atomically; on a file system it is set aside.

        Args:
            confirm: Raises if a later owner exists; called immediately before the commit.

        Raises: Incomplete (a file is missing or torn).
        """

    @abstractmethod
    def discard(self, iteration: int, attempt: SaveAttempt) -> None:
        """Delete the files of a failed attempt, so that the next one has the space."""

    @abstractmethod
    def remove(self, iteration: int) -> None:
        """Delete a checkpoint so that a partial deletion is never loaded."""


class FileDirectory(CheckpointFolder, GlobalDirectory):
    """A folder of checkpoints; an attempt is a sibling folder that its commit renames."""

    def manifest(self, iteration: int) -> GlobalManifest:
        try:
            return super().manifest(iteration)
        except Incomplete:
            if (aside := self.wait_for_names().get(iteration)) is not None:
                raise Incomplete(
                    f"its replacement was interrupted before the final rename; it is stored in {aside} until a run "
                    "that saves there resumes"
                ) from None
            if not self.checkpoint(iteration).exists():
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
                with contextlib.suppress(FileNotFoundError):  # a run changes the folder
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
            # Only versions from before this owner's confirmation are replaced.
            version, index_version = self._store.version(name), self._store.version(index)
            replaced = self._committed_files(folder)
            confirm()
            reach("checkpoint.fenced", attempt=str(attempt))
            if self._store.replace(name, data, version):
                break
        else:
            raise CheckpointError(f"{self.url}/{folder} is written by another process all the time")
        reach("checkpoint.indexed", attempt=str(attempt))
        try:  # after the commit, so that a former owner changes nothing committed
            self._store.replace(index, metadata, index_version)
        except CheckpointError as error:
            log.warning(
                "checkpoint %d is committed, but without the metadata that other readers need: %s",
                manifest.iteration,
                error,
            )
        # Files of an earlier committed attempt are obsolete; those of another attempt may still be uploading.
        self._remove(folder, (replaced or set()) - {file.name for file in manifest.files})

    def discard(self, iteration: int, attempt: SaveAttempt) -> None:
        folder = self.folder(iteration)
        names = {name for name in self._store.sizes(folder) if name.endswith(f".{attempt.label}.distcp")}
        if (committed := self._committed_files(folder)) is not None:  # the commit may have succeeded
            self._remove(folder, names - committed)

    def remove(self, iteration: int) -> None:
        folder = self.folder(iteration)
        names = set(self._store.sizes(folder))
        self._store.remove([f"{folder}/{MANIFEST}"])  # first: without its manifest it is not a checkpoint
        self._remove(folder, names - {MANIFEST})

    def fence(self, number: int, token: str) -> None:
        """See :class:`ClaimedPlace`; a manifest whose files are missing is not a checkpoint."""
        self._store.check_fencing(f"{FOLDER}/{number}.probe")
        retiring = f"{FOLDER}/{number - 1}.retiring"
        with contextlib.suppress(FileNotFoundError):  # the last owner may still be deleting these
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
                continue  # unknown which files belong to the checkpoint
            if not names <= committed:
                committed = self._keep_from_replacing(folder)
                self._remove(folder, names - committed)
            elif f"{folder}/{METADATA}" in sizes:
                continue
            self._mend_index(folder)

    def _keep_from_replacing(self, folder: str) -> set[str]:
        """Change a manifest's version so that no earlier owner can replace it; return the files that it names.

        Raises: CheckpointError (the manifest cannot be trusted, or the store does not respond).
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
            # A trailing newline does not change the manifest for readers. A store without versions gains nothing.
            if not version or self._store.replace(name, data + b"\n", version):
                return committed
        raise CheckpointError(f"{self.url}/{folder} is written by another process all the time")

    def _mend_index(self, folder: str) -> None:
        """Write the index for other readers if the committing owner did not."""
        from outlast.checkpoint.dcp.items import dump_metadata  # imports torch, and is seldom needed

        try:
            manifest, name = decode_global_manifest(self._store.read(f"{folder}/{MANIFEST}")), f"{folder}/{METADATA}"
            version, metadata = self._store.version(name), dump_metadata(manifest)
            entry = manifest.metadata
            if entry is None or (len(metadata), digests(metadata)) != (entry.num_bytes, entry.chunks):
                return  # saved with another version of torch
            if version is None or self._store.read(name) != metadata:
                self._store.replace(name, metadata, version)
        except (CheckpointError, FileNotFoundError):
            return  # a load reports the error

    def retire(self, iterations: Sequence[int], number: int, confirm: Callable[[], None]) -> None:
        self._store.write(f"{FOLDER}/{number}.retiring", msgspec.json.encode(list(iterations)))
        confirm()
        reach("checkpoint.retire")
        self._store.remove(f"{self.folder(iteration)}/{MANIFEST}" for iteration in iterations)
        num_removed = 0
        for iteration in iterations:
            if num_removed >= MAX_REMOVED:
                return  # without a manifest it is not a checkpoint; the rest is deleted after the next commit
            names = set(self._store.sizes(self.folder(iteration)))
            self._remove(self.folder(iteration), names)
            num_removed += len(names)

    def is_own(self, iteration: int) -> bool:
        names = self._store.sizes(self.folder(iteration))  # no manifest if its deletion was interrupted
        return not names or any(map(is_attempt_file, names))

    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        removed = []
        for iteration in self.checkpoints():
            folder = self.folder(iteration)
            stale = {name for name in self._store.sizes(folder) if attempt.makes_stale(_FILE.fullmatch(name))}
            committed = self._committed_files(folder) if stale else None
            if committed is None:
                continue  # unknown which files belong to the checkpoint
            stale -= committed
            self._remove(folder, stale)
            removed += [f"{folder}/{name}" for name in sorted(stale)]
        return removed

    def _committed_files(self, folder: str) -> set[str] | None:
        """Return the files that a checkpoint's manifest names; ``None`` if the manifest cannot be trusted."""
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
    """Ownership records as objects in the directory; see :mod:`outlast.runtime.lease`."""

    renew_s = 10.0
    """Seconds between renewals, each a request that stores charge for."""

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
        pass  # object stores have no folders


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _check_files(manifest: GlobalManifest, sizes: dict[str, int]) -> None:
    """Raise Incomplete if a file of a checkpoint is missing or has the wrong size."""
    for file, error in find_torn(manifest.files, sizes):
        question = "" if file.name in sizes else "; is it the same place for all ranks?"
        raise Incomplete(f"{file.name} {error}{question}")
