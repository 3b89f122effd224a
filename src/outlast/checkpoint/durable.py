"""An image made a durable file: aligned writes past the page cache, by several threads, digested on the way.

The page cache would cost a copy and the memory that training needs; a disk that refuses such writes (``EINVAL``) gets
ordinary ones. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outlast.checkpoint.shard import CHUNK_BYTES, digest, num_chunks

__all__ = ["digest_image", "write_image"]

ALIGNMENT = 4096
NUM_THREADS = 3


def digest_image(image: memoryview, *, num_threads: int = NUM_THREADS) -> tuple[str, ...]:
    """Return the digest of every chunk.

    Args:
        image: The bytes.
        num_threads: How many digest at a time.
    """
    count = num_chunks(len(image))

    def digest_chunk(index: int) -> str:
        with image[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES] as chunk:
            return digest(chunk)

    if count < 2:
        return tuple(digest_chunk(index) for index in range(count))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="outlast-digest") as pool:
        return tuple(pool.map(digest_chunk, range(count)))


def write_image(image: memoryview, path: Path, *, num_threads: int = NUM_THREADS) -> tuple[str, ...]:
    """Write an image into a new file and make it durable; return the digest of every chunk.

    A file that cannot be finished is deleted: on a full disk its room is what the next save needs.

    Args:
        image: The bytes, beginning at a multiple of 4 KiB.
        path: The file; its folder exists.
        num_threads: How many digest and write at a time.

    Raises:
        OSError: The disk is full, the file exists, or whatever else the disk says.

    Blocks: until the disk says that everything is there.
    """
    try:
        with _new_file(path, direct=True) as fd:
            return _write(fd, image, num_threads, path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with _new_file(path, direct=False) as fd:
        return _write(fd, image, num_threads, path)


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


def _write(fd: int, image: memoryview, num_threads: int, path: Path) -> tuple[str, ...]:
    size = len(image)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)  # a full disk is said at once, and pieces lie side by side
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    count = num_chunks(size)
    chunks = [""] * count
    turns = itertools.count()

    def write_chunks() -> None:
        while (index := next(turns)) < count:
            start = index * CHUNK_BYTES
            with image[start : start + CHUNK_BYTES] as chunk:
                chunks[index] = digest(chunk)
                _write_at(fd, chunk, start)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="outlast-disk") as pool:
        writers = [pool.submit(write_chunks) for _ in range(min(num_threads, count))]
        try:
            for writer in writers:
                writer.result()
        except OSError as error:
            turns = itertools.count(count)  # the others need not go on
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    os.ftruncate(fd, size)
    os.fsync(fd)
    return tuple(chunks)


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
