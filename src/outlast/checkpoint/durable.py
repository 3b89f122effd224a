"""An image made a durable file: aligned writes past the page cache, by several threads, digested beside.

The page cache would cost a copy and the memory that training needs; a disk that refuses such writes (``EINVAL``) gets
ordinary ones. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from outlast.checkpoint.finite import PIECE_BYTES
from outlast.checkpoint.shard import CHUNK_BYTES, digest, digest_pieces, num_chunks

__all__ = ["digest_image", "write_image"]

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
    except BaseException:  # whatever ends it, half a file is of no use to anyone
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
