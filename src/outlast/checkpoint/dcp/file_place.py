"""The global tier on a file system that every rank sees. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from outlast.checkpoint.dcp.manifest import METADATA, GlobalManifest, encode_global_manifest
from outlast.checkpoint.dcp.store import local_path
from outlast.checkpoint.directory import TRACKER, Directory, SaveAttempt
from outlast.checkpoint.manifest import MANIFEST
from outlast.errors import Incomplete
from outlast.runtime.files import fsync_folder

__all__ = ["FilePlace", "parse_tracker"]


class FilePlace:
    """A folder of generations; an attempt is a folder beside them, and becomes one by its rename.

    Args:
        url: A path, or ``file://`` and a path.
    """

    def __init__(self, url: str) -> None:
        self._directory = Directory(local_path(url))
        self.url = os.fspath(self._directory.path)

    def generations(self) -> list[int]:
        return self._directory.generations()

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.url))
        except FileNotFoundError:
            return []

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        with open(self._path(name), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def read_into(self, name: str, start: int, target: memoryview) -> int:
        fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(target) and (count := os.preadv(fd, [target[done:]], start + done)):
                done += count
            return done
        finally:
            os.close(fd)

    def sizes(self, folder: str) -> dict[str, int]:
        root = self._path(folder)
        return {os.path.relpath(path, root): path.stat().st_size for path in sorted(root.rglob("*")) if path.is_file()}

    def hint(self) -> str | None:
        return self._directory.hint()

    def named_runs(self) -> Iterator[str]:
        return self._directory.named_runs()

    def create_hint(self, run: str) -> bool:
        return self._directory.create_hint(run)

    def write_hint(self, run: str) -> None:
        self._directory.write_hint(run)

    def latest(self) -> int | None:
        try:
            return parse_tracker(self._path(TRACKER).read_bytes())
        except FileNotFoundError:
            return None

    def attempt_folder(self, iteration: int, attempt: SaveAttempt) -> str:
        return self._directory.temporary(iteration, attempt).name

    def file_name(self, rank: int, index: int, attempt: SaveAttempt) -> str:
        return f"__{rank}_{index}.distcp"

    def commit(self, iteration: int, attempt: SaveAttempt, manifest: GlobalManifest, metadata: bytes) -> None:
        folder = self._directory.temporary(iteration, attempt)
        check_files(manifest, self.sizes(folder.name))
        for name, data in ((METADATA, metadata), (MANIFEST, encode_global_manifest(manifest))):
            with open(folder / name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        fsync_folder(folder)
        self._directory.commit(iteration, attempt)

    def point_to(self, iteration: int) -> None:
        self._directory.point_to(iteration)

    def discard(self, iteration: int, attempt: SaveAttempt) -> None:
        self._directory.discard(iteration, attempt)

    def remove(self, iteration: int) -> None:
        self._directory.remove(iteration)

    def remove_stale(self, attempt: SaveAttempt) -> list[str]:
        return self._directory.remove_stale(attempt) if self._directory.path.is_dir() else []

    def _path(self, name: str) -> Path:
        return self._directory.path / name


def check_files(manifest: GlobalManifest, sizes: dict[str, int]) -> None:
    """Check that all files of a generation are there and as long as they should be.

    Raises:
        Incomplete: One is not.
    """
    for file in manifest.files:
        size = sizes.get(file.name)
        if size is None:
            raise Incomplete(f"{file.name} is missing; is it the same place for all ranks?")
        if size != file.num_bytes:
            raise Incomplete(f"{file.name} is {size} bytes long instead of {file.num_bytes}")


def parse_tracker(data: bytes) -> int | None:
    """Return the generation that a tracker names; ``None``: it cannot be read."""
    prefix, _, number = data.decode(errors="replace").strip().partition("-")
    return int(number) if prefix == "step" and number.isdecimal() else None
