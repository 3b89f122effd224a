"""What no save can beat by much: a copy of the same bytes in warm memory, and bare writes of them to the disk."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from outlast.bench.checkpoint_state import CheckpointState
from outlast.bench.measuring import timed
from outlast.bench.state_size import TENSOR_BYTES

__all__ = ["Floors"]

_CHUNK_BYTES = 8 << 20


class Floors:
    """Copy and write with two threads, from and into memory that is warm.

    Args:
        saved: What is copied, and as much of it is written.
        folder: Where.
    """

    def __init__(self, saved: CheckpointState, folder: Path) -> None:
        self._path = folder / "bare"
        self._memory = mmap.mmap(-1, saved.num_bytes)
        self._target = np.frombuffer(self._memory, dtype=np.uint8)
        self._sources = [tensor.numpy().reshape(-1).view(np.uint8) for tensor in saved.tensors().values()]
        self._other = ThreadPoolExecutor(1)
        self.copy()

    def copy(self) -> float:
        """Return the seconds of a copy."""

        def half(first: int) -> None:
            for number in range(first, len(self._sources), 2):
                start = number * TENSOR_BYTES
                np.copyto(self._target[start : start + TENSOR_BYTES], self._sources[number])

        return timed(lambda: self._twice(half))[0]

    def write(self) -> float:
        """Return the seconds of bare writes past the page cache, and of an fsync."""
        seconds, _ = timed(self._write)
        self._path.unlink()
        return seconds

    def close(self) -> None:
        """End the thread."""
        self._other.shutdown()

    def _write(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._path.unlink(missing_ok=True)
            fd = os.open(self._path, flags)
        size = len(self._memory)

        def half(first: int) -> None:
            with memoryview(self._memory) as view:
                for start in range(first * _CHUNK_BYTES, size, 2 * _CHUNK_BYTES):
                    with view[start : start + _CHUNK_BYTES] as chunk:
                        written = 0
                        while written < len(chunk):
                            with chunk[written:] as rest:
                                written += os.pwrite(fd, rest, start + written)

        try:
            os.posix_fallocate(fd, 0, size)
            self._twice(half)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _twice(self, half: object) -> None:
        assert callable(half)
        beside = self._other.submit(half, 1)
        half(0)
        beside.result()
