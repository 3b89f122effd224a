"""Give a part to another node's writer, and get one from it.

What arrives lands in a mapped file or memfd. Mapping a page costs about as much as receiving it does: a thread maps the
pages ahead of what is being received, many at a time; where it is late, or the system does not know how, the receiving
call maps them itself. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.protocol import (
    Chunk,
    Data,
    Get,
    Keep,
    Kept,
    Ping,
    Proceed,
    Put,
    RefusedByPeer,
    ReplicaChannel,
)
from outlast.checkpoint.shard import CHUNK_BYTES, num_chunks
from outlast.runtime.wire import ProtocolError

__all__ = [
    "Landing",
    "ReplicaError",
    "ReplicaRefused",
    "Target",
    "connect",
    "describe",
    "fetch",
    "fetch_into",
    "ping",
    "push",
    "read_small",
]


_MADV_POPULATE_READ = 22  # for shared memory as good as POPULATE_WRITE and cheaper; Linux 5.14
STRIDE_BYTES = 4 << 20


class Landing:
    """A mapped file.

    Args:
        fd: File or memfd; not closed.
        num_bytes: To map, at least 1.

    Raises:
        OSError, ValueError: It cannot be mapped, or is shorter.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._mapped = mmap.mmap(fd, num_bytes)
        self.view = memoryview(self._mapped)
        """Its bytes. A receiving call that finds no memory for a page fails with ``EFAULT``, without a signal."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._map_pages, name="outlast-map", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop mapping ahead. The memory goes with the last view of it. Blocks: for some milliseconds."""
        self._stopping.set()
        self._thread.join()

    def _map_pages(self) -> None:
        """Thread: its own."""
        madvise = ctypes.CDLL(None).madvise  # releases the interpreter's lock, which mmap.madvise does not
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        for offset in range(0, self._num_bytes, STRIDE_BYTES):
            size = min(STRIDE_BYTES, self._num_bytes - offset)
            if self._stopping.is_set() or madvise(start + offset, size, _MADV_POPULATE_READ) != 0:
                return


CHUNKS_IN_FLIGHT = 4
"""Chunks that a receiver may be behind with its digests."""
NUM_CONNECTIONS = max(1, min(2, len(os.sched_getaffinity(0)) // 2))
"""One stream does not fill a fast network; but each busies a core, here or there."""
RANGE_CHUNKS = 4
"""Chunks that a connection asks for at a time; it asks for the next range before it has read one."""


class ReplicaError(Exception):
    """Another node did not take or give a part; the text names the node and the reason, in one line."""


class ReplicaRefused(ReplicaError):
    """Another node answers, but could not do what it was asked."""


class Target(msgspec.Struct, frozen=True):
    """Another node's writer."""

    node: str
    host: str
    port: int


@contextmanager
def connect(target: Target, key: bytes, *, timeout_s: float) -> Iterator[ReplicaChannel]:
    """Open an authenticated connection; errors within become :class:`ReplicaError`.

    Args:
        target: Whom to ask.
        key: The run's key.
        timeout_s: Seconds without progress.

    Raises:
        ReplicaRefused: It could not do what it was asked.
        ReplicaError: It cannot be reached, does not know the key, or stopped answering.
    """
    address = target.host, target.port
    with naming(target), ReplicaChannel(socket.create_connection(address, timeout_s), timeout_s) as channel:
        channel.prove_key(key, is_server=False, within_s=timeout_s)
        yield channel


@contextmanager
def naming(target: Target) -> Iterator[None]:
    """Turn what goes wrong with a connection into a :class:`ReplicaError` that names the node."""
    try:
        yield
    except RefusedByPeer as error:
        raise ReplicaRefused(f"node {target.node}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise ReplicaError(f"node {target.node} ({target.host}:{target.port}): {reason}") from error


def ping(target: Target, key: bytes, *, timeout_s: float) -> None:
    """Find out whether a node's writer answers.

    Raises:
        ReplicaError: It does not.
    """
    with connect(target, key, timeout_s=timeout_s) as channel:
        channel.send(Ping())
        channel.expect(Proceed)


def push(
    target: Target,
    key: bytes,
    copy: CopyKey,
    fd: int,
    chunks: range,
    num_bytes: int,
    *,
    timeout_s: float,
    contributor: int = -1,
    num_contributors: int = 0,
) -> tuple[str, ...]:
    """Give chunks of a part to another node; return the digests that it computed of what it received.

    Args:
        target: Who takes it.
        key: The run's key.
        copy: What it is called there.
        fd: File or memfd that holds the whole part.
        chunks: Numbers of the chunks to give.
        num_bytes: Of the whole part.
        timeout_s: Seconds without progress.
        contributor: Rank whose block of a shard this is, to be XORed into the parity ``copy``; -1: no parity.
        num_contributors: Blocks that make the parity whole.

    Raises:
        ReplicaError: It did not take it.

    Blocks: until the node has made it durable, as far as its place is.
    """
    begin, end = chunks.start * CHUNK_BYTES, min(num_bytes, chunks.stop * CHUNK_BYTES)
    digests: list[str] = []
    with connect(target, key, timeout_s=timeout_s) as channel:
        channel.send(Put(copy, max(0, end - begin), contributor, num_contributors))
        channel.expect(Proceed)
        for number, offset in enumerate(range(begin, end, CHUNK_BYTES)):
            channel.send_file(fd, offset, min(CHUNK_BYTES, end - offset))
            if number >= CHUNKS_IN_FLIGHT:
                digests.append(channel.expect(Chunk).digest)
        while len(digests) < len(chunks):
            digests.append(channel.expect(Chunk).digest)
        channel.send(Keep())
        channel.expect(Kept)
    return tuple(digests)


def fetch(target: Target, key: bytes, copy: CopyKey, fd: int, num_bytes: int, *, timeout_s: float) -> tuple[str, ...]:
    """Get a part from another node into a file; return the digests of what arrived.

    Args:
        target: Who holds it.
        key: The run's key.
        copy: The part.
        fd: File or memfd of at least ``num_bytes``, to write it to.
        num_bytes: Of the part.
        timeout_s: Seconds without progress.

    Raises:
        ReplicaError: It does not hold it, holds one of another size, or stopped answering; ``fd`` may hold some of it.

    Blocks: until all of it arrived.
    """
    if not num_bytes:
        return ()
    try:
        landing = Landing(fd, num_bytes)
    except (OSError, ValueError) as error:
        raise ReplicaError(f"no room for the {num_bytes} bytes of {describe(copy)}: {error}") from error
    try:
        return fetch_into(target, key, copy, landing.view, timeout_s=timeout_s)
    finally:
        landing.close()


def fetch_into(target: Target, key: bytes, copy: CopyKey, into: memoryview, *, timeout_s: float) -> tuple[str, ...]:
    """Get a part from another node into memory of its size; otherwise as :func:`fetch`."""
    num_bytes = len(into)
    digests = [""] * num_chunks(num_bytes)
    ranges: queue.SimpleQueue[range] = queue.SimpleQueue()
    for first in range(0, len(digests), RANGE_CHUNKS):
        ranges.put(range(first, min(first + RANGE_CHUNKS, len(digests))))
    errors: list[str] = []

    def work() -> None:
        try:
            with connect(target, key, timeout_s=timeout_s) as channel:
                _fetch_ranges(channel, copy, into, ranges, digests)
        except ReplicaError as error:
            errors.append(str(error))
            _empty(ranges)  # the other connection need not go on

    num_others = min(NUM_CONNECTIONS, ranges.qsize()) - 1
    threads = [threading.Thread(target=work, name="outlast-fetch", daemon=True) for _ in range(num_others)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise ReplicaError(errors[0])
    assert all(digests), "every range was fetched or an error noted"
    return tuple(digests)


def read_small(target: Target, key: bytes, copy: CopyKey, *, max_bytes: int, timeout_s: float) -> bytes:
    """Get a part that fits into this process's memory.

    Args:
        target: Who holds it.
        key: The run's key.
        copy: The part.
        max_bytes: More are refused.
        timeout_s: Seconds without progress.

    Raises:
        ReplicaError: It does not hold it, it is larger, or it stopped answering.
    """
    with connect(target, key, timeout_s=timeout_s) as channel:
        channel.send(Get(copy, 0, max_bytes))
        data = channel.expect(Data)
        if data.total > max_bytes:
            raise ProtocolError(f"{describe(copy)} has {data.total} bytes, more than the {max_bytes} that are let in")
        if data.num_bytes != data.total:
            raise ProtocolError(f"it sends {data.num_bytes} bytes of {data.total}")
        into = bytearray(data.num_bytes)
        channel.receive_into(memoryview(into))
    return bytes(into)


def describe(key: CopyKey) -> str:
    """Return what people call a part."""
    return f"{key.part or 'the shard'} of rank {key.rank} of generation {key.iteration} ({key.attempt})"


def _fetch_ranges(
    channel: ReplicaChannel, copy: CopyKey, into: memoryview, ranges: queue.SimpleQueue[range], digests: list[str]
) -> None:
    """Fetch ranges until none is left; always one is asked for ahead of the one that is being received.

    In the end nothing more is asked for, which is refused if the peer's memory has changed meanwhile.
    """
    num_bytes, is_used = len(into), False
    asked: deque[range] = deque()
    while True:
        while len(asked) < 2 and (chunks := _next(ranges)) is not None:
            offset = chunks.start * CHUNK_BYTES
            channel.send(Get(copy, offset, min(num_bytes, chunks.stop * CHUNK_BYTES) - offset))
            asked.append(chunks)
        if not asked:
            break
        is_used = True
        chunks = asked.popleft()
        begin, end = chunks.start * CHUNK_BYTES, min(num_bytes, chunks.stop * CHUNK_BYTES)
        data = channel.expect(Data)
        if (data.total, data.num_bytes) != (num_bytes, end - begin):
            raise ProtocolError(f"it holds {data.total} bytes of {describe(copy)} instead of {num_bytes}")
        for number in chunks:
            start = number * CHUNK_BYTES
            chunk = into[start : min(end, start + CHUNK_BYTES)]
            digests[number] = channel.receive_chunk(len(chunk), chunk.__getitem__)
    if is_used:
        channel.send(Get(copy, num_bytes, 0))
        channel.expect(Data)


def _next(ranges: queue.SimpleQueue[range]) -> range | None:
    try:
        return ranges.get_nowait()
    except queue.Empty:
        return None


def _empty(ranges: queue.SimpleQueue[range]) -> None:
    while _next(ranges) is not None:
        pass
