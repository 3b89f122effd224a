"""An image made a durable file: aligned writes past the page cache, by several threads, digested beside.

The page cache would cost a copy and the memory that training needs; a disk that refuses such writes (``EINVAL``) gets
ordinary ones. While a piece is in the cache, its numbers are examined for infinities and NaN. Nothing here imports
torch: the writer process uses it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from outlast.checkpoint.shard import CHUNK_BYTES, digest, digest_pieces, num_chunks
from outlast.runtime.injection import reach

__all__ = ["MAY_BE_INFINITE", "Numbers", "digest_image", "is_finite", "write_image"]


PIECE_BYTES = 1 << 20
"""Small enough to stay in the cache."""

_SUMMED = {"F64": np.float64, "F32": np.float32, "C64": np.float32}
"""Types whose sum is finite only if all elements are."""

_MASKED = {
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
}
"""Types that numpy adds slowly or not at all: a mask, and what of an infinity or NaN is left under it."""

MAY_BE_INFINITE = frozenset({*_SUMMED, *_MASKED})
"""safetensors' names of the element types that have infinities or NaN."""


def is_finite(data: memoryview, dtype: str) -> bool:
    """Return whether no element is infinite or NaN.

    Args:
        data: The tensor's bytes.
        dtype: One of :data:`MAY_BE_INFINITE`.
    """
    return all(_is_piece_finite(data[start : start + PIECE_BYTES], dtype) for start in range(0, len(data), PIECE_BYTES))


def _is_piece_finite(data: memoryview, dtype: str) -> bool:
    if dtype in _MASKED:
        kind, mask, bad = _MASKED[dtype]
        bits = np.frombuffer(data, dtype=kind)
        return not bool(((bits & mask) == bad).any())
    numbers = np.frombuffer(data, dtype=_SUMMED[dtype])
    with np.errstate(all="ignore"):
        # A sum of finite numbers may overflow: then each one is looked at.
        return bool(np.isfinite(numbers.sum())) or bool(np.isfinite(numbers).all())


class Numbers:
    """Where in an image the numbers lie that may be infinite or NaN.

    Args:
        spans: Element type (one of :data:`MAY_BE_INFINITE`), offset and bytes of each tensor; none overlap.
    """

    def __init__(self, spans: Iterable[tuple[str, int, int]]) -> None:
        self._spans: list[tuple[str, int, int]] = []
        for dtype, start, num_bytes in sorted(spans, key=lambda span: span[1]):
            first, end = start, start + num_bytes
            if self._spans and (self._spans[-1][0], self._spans[-1][2]) == (dtype, start):
                first = self._spans.pop()[1]  # many small tensors side by side are looked at as one
            self._spans.append((dtype, first, end))
        self._ends = [end for _, _, end in self._spans]

    def are_finite(self, piece: memoryview, start: int) -> bool:
        """Return whether no number in a piece of the image is infinite or NaN.

        Args:
            piece: Bytes of the image.
            start: Where they begin; neither this nor their end is inside of a number.
        """
        end = start + len(piece)
        for dtype, first, last in self._spans[bisect_right(self._ends, start) :]:
            if first >= end:
                return True
            with piece[max(first, start) - start : min(last, end) - start] as numbers:
                if not is_finite(numbers, dtype):
                    return False
        return True


ALIGNMENT = 4096
NUM_DISK_THREADS = 2
"""Beside the one that digests, which costs the disk less time than threads that do both in turns."""
NUM_DIGEST_THREADS = 3
Look = Callable[[memoryview, int], None]


def digest_image(
    image: memoryview, *, look: Look | None = None, num_threads: int = NUM_DIGEST_THREADS
) -> tuple[str, ...]:
    """Return the digest of every chunk.

    Args:
        image: The bytes.
        look: Called with each piece of the image, and where it begins, while it is in the cache; by several threads.
        num_threads: How many digest at a time.
    """
    digest_chunk, count = partial(_digest, image, look), num_chunks(len(image))
    if count < 2:
        return tuple(map(digest_chunk, range(count)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="outlast-digest") as pool:
        return tuple(pool.map(digest_chunk, range(count)))


def write_image(
    image: memoryview, path: Path, *, look: Look | None = None, num_threads: int = NUM_DISK_THREADS
) -> tuple[str, ...]:
    """Write an image into a new file and make it durable; return the digest of every chunk.

    A file that cannot be finished is deleted: on a full disk its room is what the next save needs.

    Args:
        image: The bytes, beginning at a multiple of 4 KiB.
        path: The file; its folder exists.
        look: Called with each piece of the image, and where it begins, while it is in the cache, by one thread; and
            again from the beginning where the disk takes no direct writes.
        num_threads: How many write at a time; one more digests.

    Raises:
        OSError: The disk is full, the file exists, or whatever else the disk says.

    Blocks: until the disk says that everything is there.
    """
    try:
        with _new_file(path, direct=True) as fd:
            return _write(fd, image, look, num_threads, path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with _new_file(path, direct=False) as fd:
        return _write(fd, image, look, num_threads, path)


@contextlib.contextmanager
def _new_file(path: Path, *, direct: bool) -> Iterator[int]:
    """Open a new file, and delete it when the block fails."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            path.unlink(missing_ok=True)  # some systems make the file before they refuse the flag
        raise
    try:
        yield fd
    except BaseException:  # whatever ends it, half a file is unusable
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write(fd: int, image: memoryview, look: Look | None, num_threads: int, path: Path) -> tuple[str, ...]:
    size = len(image)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)  # a full disk is said at once, and pieces lie side by side
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None

    def write_chunk(index: int) -> None:
        if index == num_chunks(size) // 2:
            reach("checkpoint.file.halfway", path=path)
        start = index * CHUNK_BYTES
        with image[start : start + CHUNK_BYTES] as chunk:
            _write_at(fd, chunk, start)

    with (
        ThreadPoolExecutor(1, thread_name_prefix="outlast-digest") as digesting,
        ThreadPoolExecutor(num_threads, thread_name_prefix="outlast-disk") as writing,
    ):
        digests = digesting.map(partial(_digest, image, look), range(num_chunks(size)))
        try:
            for _ in writing.map(write_chunk, range(num_chunks(size))):
                pass
        except OSError as error:
            digesting.shutdown(wait=False, cancel_futures=True)  # nobody needs the rest
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        os.ftruncate(fd, size)
        os.fsync(fd)
        return tuple(digests)


def _digest(image: memoryview, look: Look | None, index: int) -> str:
    """Return the digest of a chunk, looking at it on the way."""
    start = index * CHUNK_BYTES
    with image[start : start + CHUNK_BYTES] as chunk:
        return digest(chunk) if look is None else digest_pieces(_looked_at(chunk, start, look))


def _looked_at(chunk: memoryview, start: int, look: Look) -> Iterator[memoryview]:
    for offset in range(0, len(chunk), PIECE_BYTES):
        with chunk[offset : offset + PIECE_BYTES] as piece:
            yield piece
            look(piece, start + offset)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the last piece of a page is padded, which is cut off in the end."""
    whole = len(data) // ALIGNMENT * ALIGNMENT
    written = 0
    while written < whole:
        with data[written:whole] as rest:
            written += os.pwrite(fd, rest, offset + written)
    if whole < len(data):
        with mmap.mmap(-1, ALIGNMENT) as page:
            page[: len(data) - whole] = data[whole:]
            if os.pwrite(fd, page, offset + whole) != ALIGNMENT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
