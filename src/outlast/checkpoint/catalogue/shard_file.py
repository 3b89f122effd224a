"""One rank's shard on a disk, looked at without its data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outlast.checkpoint.manifest import Manifest
from outlast.checkpoint.shard import Identity, read_head, read_header
from outlast.errors import CheckpointError, Corrupt, Incomplete, Untrusted

__all__ = ["PIECE_BYTES", "FileReader", "check_shard_file", "open_file"]

PIECE_BYTES = 1 << 20
"""Read at once from a disk: small enough to be digested from the cache."""


class FileReader:
    """A local file, read into one buffer that is used again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Return up to ``num_bytes`` from ``offset``; valid until the next read."""
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        with memoryview(self._buffer) as whole:
            room = whole[:num_bytes]
        return room[: os.preadv(self._fd, [room], offset)]


@contextmanager
def open_file(path: Path) -> Iterator[FileReader]:
    """Open a file for reading.

    Raises:
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield FileReader(fd)
    finally:
        os.close(fd)


def check_shard_file(path: Path, manifest: Manifest, rank: int) -> None:
    """Check a shard's length and header: that it is the one which the manifest describes, as far as they tell.

    Raises:
        CheckpointError: It is missing, torn, or another one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Incomplete("is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from error
    try:
        _check_head(fd, manifest, rank)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from error
    finally:
        os.close(fd)


def _check_head(fd: int, manifest: Manifest, rank: int) -> None:
    """Say what a whole shard in the wrong place is before how long it is."""
    size, expected_size = os.fstat(fd).st_size, manifest.shards[rank].num_bytes
    try:
        head = read_head(fd, size)
        identity, _ = read_header(memoryview(head), size)
    except Corrupt:
        if size != expected_size:
            raise Incomplete(f"is {size} bytes long instead of {expected_size}") from None
        raise
    expected = Identity(
        run=manifest.run,
        topology=manifest.topology,
        rank=rank,
        world_size=manifest.world_size,
        iteration=manifest.iteration,
        attempt=manifest.attempt,
    )
    if identity != expected:
        differences = (
            f"{name} {getattr(identity, name)} instead of {getattr(expected, name)}"
            for name in Identity.__struct_fields__
            if getattr(identity, name) != getattr(expected, name)
        )
        raise Untrusted(f"is the shard of {', '.join(differences)}")
    if size != expected_size:
        raise Incomplete(f"is {size} bytes long instead of {expected_size}")
