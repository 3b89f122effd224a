"""Give parts to other nodes' writers, whole or as blocks of parities, and get them back or rebuild them.

What arrives lands in a mapped file or memfd. Mapping a page costs about as much as receiving it does: a thread maps the
pages ahead of what is being received, many at a time; where it is late, or the system does not know how, the receiving
call maps them itself.

A node that failed costs its timeout once: :class:`Replicator` leaves it out from then on, until a probe in the
background finds that it takes parts again. A node refuses probes while its disk does not respond. If a node responds to
probes and then fails again, the probes come at growing intervals (:data:`RETRY_AFTER_S`). Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import msgspec

from outlast import clock
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.parity import PARITY_PART, blocks_of, holders_of, xor_into
from outlast.checkpoint.replica.protocol import (
    SLICE_BYTES,
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
from outlast.checkpoint.shard import CHUNK_BYTES, digest, num_chunks
from outlast.runtime.wire import ProtocolError

log = logging.getLogger(__name__)
_MADV_POPULATE_READ = 22  # for shared memory as good as POPULATE_WRITE and cheaper; Linux 5.14
STRIDE_BYTES = 4 << 20
CHUNKS_IN_FLIGHT = 4
"""Chunks that a receiver may be behind with its digests."""
NUM_CONNECTIONS = max(1, min(2, len(os.sched_getaffinity(0)) // 2))
"""One stream does not fill a fast network; but each busies a core, here or there."""
RANGE_CHUNKS = 4
"""Chunks that a connection asks for at a time; it asks for the next range before it has read one."""
CHUNKS_AHEAD = 2
"""Chunks of a shard that is rebuilt whose pieces are asked for at a time."""
PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 2.0
RETRY_AFTER_S = (0.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds until the first probe of a node, by the number of its failures in a row; the last one repeats."""
KEEP_FACTOR = 3
"""So many times the timeout without progress may pass until a node has made a small part durable."""
MIN_DISK_BYTES_PER_S = 100 << 20
"""A large part may take as much longer as a disk of this rate needs for it."""
MAX_TARGETS_AT_ONCE = 8


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
        timeout_s: Seconds without progress; also how long the node may take to make room for the part.
        contributor: Rank whose block of a shard this is, to be XORed into the parity ``copy``; -1: no parity.

    Raises:
        ReplicaError: It did not take it.

    Blocks: until the node has made it durable, as far as its place is.
    """
    begin, end = chunks.start * CHUNK_BYTES, min(num_bytes, chunks.stop * CHUNK_BYTES)
    keep_s = KEEP_FACTOR * timeout_s + max(0, end - begin) / MIN_DISK_BYTES_PER_S
    digests: list[str] = []
    with connect(target, key, timeout_s=timeout_s) as channel:
        channel.send(Put(copy, max(0, end - begin), contributor, num_contributors))
        channel.expect(Proceed, disk_s=timeout_s)
        for number, offset in enumerate(range(begin, end, CHUNK_BYTES)):
            channel.send_file(fd, offset, min(CHUNK_BYTES, end - offset))
            if number >= CHUNKS_IN_FLIGHT:
                digests.append(channel.expect(Chunk).digest)
        while len(digests) < len(chunks):
            digests.append(channel.expect(Chunk).digest)
        channel.send(Keep())
        channel.expect(Kept, disk_s=keep_s)
    return tuple(digests)


def fetch(target: Target, key: bytes, copy: CopyKey, fd: int, num_bytes: int, *, timeout_s: float) -> tuple[str, ...]:
    """Get a part from another node into a file; return the digests of what arrived.

    Args:
        fd: File or memfd of at least ``num_bytes``, to write it to.

    Raises:
        ReplicaError: It does not hold it, holds one of another size, or stopped answering; ``fd`` may hold some of it.

    Blocks: until all of it arrived.
    """
    if not num_bytes:
        return ()
    with _mapped(copy, fd, num_bytes) as view:
        return fetch_into(target, key, copy, view, timeout_s=timeout_s)


@contextmanager
def _mapped(copy: CopyKey, fd: int, num_bytes: int) -> Iterator[memoryview]:
    """Map a file for a part that arrives, and map its pages ahead of what is received.

    A receiving call that finds no memory for a page fails with ``EFAULT``, without a signal. The memory goes with the
    last view of it.

    Raises:
        ReplicaError: It cannot be mapped, or is shorter.
    """
    try:
        mapped = mmap.mmap(fd, num_bytes)
    except (OSError, ValueError) as error:
        raise ReplicaError(f"no room for the {num_bytes} bytes of {copy}: {error}") from error
    stopping = threading.Event()
    mapper = threading.Thread(target=_map_pages, args=(mapped, stopping), name="outlast-map", daemon=True)
    mapper.start()
    try:
        yield memoryview(mapped)
    finally:
        stopping.set()
        mapper.join()


def _map_pages(mapped: mmap.mmap, stopping: threading.Event) -> None:
    """Thread: its own."""
    madvise = ctypes.CDLL(None).madvise  # releases the interpreter's lock, which mmap.madvise does not
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, num_bytes = ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped)
    for offset in range(0, num_bytes, STRIDE_BYTES):
        size = min(STRIDE_BYTES, num_bytes - offset)
        if stopping.is_set() or madvise(start + offset, size, _MADV_POPULATE_READ) != 0:
            return


def fetch_into(target: Target, key: bytes, copy: CopyKey, into: memoryview, *, timeout_s: float) -> tuple[str, ...]:
    """Get a part from another node into memory of its size; otherwise as :func:`fetch`."""
    num_bytes = len(into)
    digests = [""] * num_chunks(num_bytes)
    starts = range(0, len(digests), RANGE_CHUNKS)
    ranges = iter([range(first, min(first + RANGE_CHUNKS, len(digests))) for first in starts])
    errors: list[str] = []

    def work() -> None:
        try:
            with connect(target, key, timeout_s=timeout_s) as channel:
                _fetch_ranges(channel, copy, into, ranges, digests)
        except ReplicaError as error:
            errors.append(str(error))
            deque(ranges, maxlen=0)  # the other connection need not continue

    num_others = min(NUM_CONNECTIONS, len(starts)) - 1
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

    Raises:
        ReplicaError: It does not hold it, it is larger, or it stopped answering.
    """
    with connect(target, key, timeout_s=timeout_s) as channel:
        channel.send(Get(copy, 0, max_bytes))
        data = channel.expect(Data)
        if data.total > max_bytes:
            raise ProtocolError(f"{copy} has {data.total} bytes, more than the {max_bytes} that are accepted")
        if data.num_bytes != data.total:
            raise ProtocolError(f"it sends {data.num_bytes} bytes of {data.total}")
        into = bytearray(data.num_bytes)
        channel.receive_into(memoryview(into))
    return bytes(into)


def _fetch_ranges(
    channel: ReplicaChannel, copy: CopyKey, into: memoryview, ranges: Iterator[range], digests: list[str]
) -> None:
    """Fetch ranges until none is left; always one is asked for ahead of the one that is being received.

    In the end nothing more is asked for, which is refused if the peer's memory has changed meanwhile.
    """
    num_bytes = len(into)

    def ask(chunks: range) -> tuple[range, int]:
        offset = chunks.start * CHUNK_BYTES
        size = min(num_bytes, chunks.stop * CHUNK_BYTES) - offset
        channel.send(Get(copy, offset, size))
        return chunks, size

    asked = [ask(chunks) for chunks in itertools.islice(ranges, 1)]
    if not asked:
        return
    while asked:
        asked += [ask(chunks) for chunks in itertools.islice(ranges, 1)]
        chunks, size = asked.pop(0)
        data = channel.expect(Data)
        if (data.total, data.num_bytes) != (num_bytes, size):
            raise ProtocolError(f"it holds {data.total} bytes of {copy} instead of {num_bytes}")
        for number in chunks:
            chunk = into[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            digests[number] = channel.receive_chunk(len(chunk), chunk)
    channel.send(Get(copy, num_bytes, 0))
    channel.expect(Data)


class ParityMember(msgspec.Struct, frozen=True):
    """A rank of a parity group."""

    rank: int
    num_bytes: int
    """Of its shard."""
    target: Target
    """Its node's writer; that of the lost one is not asked."""


def rebuild(
    lost: CopyKey, members: Sequence[ParityMember], key: bytes, fd: int, *, timeout_s: float
) -> tuple[str, ...]:
    """Rebuild a shard; return the digests of what came out, which are right only if all that went in was.

    Raises:
        ReplicaError: Another member does not hold its parity or its shard, or stopped answering.

    Blocks: until all is read; the other members give as many bytes each as the shard has.
    """
    num_bytes = next(member.num_bytes for member in members if member.rank == lost.rank)
    if not num_bytes:
        return ()
    with _mapped(lost, fd, num_bytes) as view, ExitStack() as stack:
        channels = {
            number: stack.enter_context(connect(member.target, key, timeout_s=timeout_s))
            for number, member in enumerate(members)
            if member.rank != lost.rank
        }
        return _combine(_plan(lost, members), members, channels, view)


def _plan(lost: CopyKey, members: Sequence[ParityMember]) -> list[list[tuple[int, Get]]]:
    """Return the pieces whose XOR is each chunk of the lost shard, and which member has them.

    The first one of a chunk is as long as the chunk.
    """
    group = [member.rank for member in members]
    sizes = {member.rank: member.num_bytes for member in members}
    plan = []
    holders = holders_of(group, lost.rank)
    for holder, block in zip(holders, blocks_of(sizes[lost.rank], len(holders)), strict=True):
        others = {}
        for rank in group:
            if rank not in (lost.rank, holder):
                others[rank] = blocks_of(sizes[rank], len(holders))[holders_of(group, rank).index(holder)]
        parity = CopyKey(lost.iteration, lost.attempt, holder, PARITY_PART)
        for place, chunk in enumerate(block):
            size = min(CHUNK_BYTES, sizes[lost.rank] - chunk * CHUNK_BYTES)
            pieces = [(group.index(holder), Get(parity, place * CHUNK_BYTES, size))]
            for rank, theirs in others.items():
                offset = (theirs.start + place) * CHUNK_BYTES
                if place < len(theirs):  # else it has ended there: nothing but zeros went in
                    shard = CopyKey(lost.iteration, lost.attempt, rank)
                    pieces.append((group.index(rank), Get(shard, offset, min(size, sizes[rank] - offset))))
            plan.append(pieces)
    return plan


def _combine(
    plan: list[list[tuple[int, Get]]],
    members: Sequence[ParityMember],
    channels: dict[int, ReplicaChannel],
    view: memoryview,
) -> tuple[str, ...]:
    """Ask for the pieces of a few chunks ahead, and XOR them as they come."""
    scratch = memoryview(bytearray(SLICE_BYTES))
    digests = []
    to_ask = iter(plan)
    for number, pieces in enumerate(plan):
        for asked in itertools.islice(to_ask, 1 if number else CHUNKS_AHEAD):
            for member, request in asked:
                with naming(members[member].target):
                    channels[member].send(request)
        chunk = view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        for place, (member, request) in enumerate(pieces):
            with naming(members[member].target):
                channel = channels[member]
                data = channel.expect(Data)
                if data.num_bytes != request.num_bytes:
                    raise ProtocolError(f"it holds only {data.total} bytes of {request.key}")
                if place == 0:
                    channel.receive_into(chunk)
                    continue
                for start in range(0, request.num_bytes, SLICE_BYTES):
                    part = scratch[: min(SLICE_BYTES, request.num_bytes - start)]
                    channel.receive_into(part)
                    xor_into(chunk[start:], part)
        digests.append(digest(chunk))
    return tuple(digests)


class CopyOutcome(msgspec.Struct, frozen=True):
    """What became of one target's copy."""

    node: str
    chunks: tuple[str, ...] | None
    """Digests that the target computed of what it received; ``None`` = it has no copy."""
    error: str | None
    """Why not, in one line."""
    is_new: bool
    """Whether it is this target's first failure since it last took one."""


class Holder(msgspec.Struct, frozen=True):
    """A member of a parity group that takes a block."""

    rank: int
    target: Target


class _Failure(msgspec.Struct, frozen=True):
    """Why a target is left out."""

    reason: str
    retry_s: float
    """When it is probed first, by the monotonic clock."""


class Replicator:
    """Copy parts to other nodes' writers.

    Args:
        probe_interval_s: Seconds between two attempts to reach a node that failed.

    Thread: any.
    """

    def __init__(self, key: bytes, *, probe_interval_s: float = PROBE_INTERVAL_S) -> None:
        self._key, self._probe_interval_s = key, probe_interval_s
        self._lock = threading.Lock()
        self._failed: dict[Target, _Failure] = {}
        """Left out until a probe finds that they take parts again."""
        self._num_failures: dict[Target, int] = {}
        """Failures in a row of those that took no copy when last asked."""
        self._prober: threading.Thread | None = None
        self._stopping = threading.Event()

    def close(self) -> None:
        """Stop probing. Idempotent. Blocks: at most for a probe's timeout."""
        self._stopping.set()
        with self._lock:
            prober = self._prober
        if prober is not None:
            prober.join(2 * PROBE_TIMEOUT_S)

    def replicate(
        self, copy: CopyKey, fd: int, num_bytes: int, takers: Sequence[Target | Holder], *, timeout_s: float
    ) -> tuple[CopyOutcome, ...]:
        """Give a part to several nodes at once, to each the whole of it or its block of a parity.

        Args:
            fd: File or memfd that holds it; must not change before this returns.
            takers: Nodes that take a copy; or all other members of a parity group, in the order of
                :func:`parity.holders_of`, each of which takes a block.
            timeout_s: Seconds without progress after which a taker is given up.

        Returns:
            What became of each, in the order of ``takers``. A block's chunks are those that :func:`parity.blocks_of`
            names; a shard is protected once all blocks of all members of its group are in.

        Blocks: until each has it or failed.
        """
        if not takers:
            return ()
        push_to = partial(push, key=self._key, fd=fd, num_bytes=num_bytes, timeout_s=timeout_s)

        def give(taker: Target | Holder, block: range) -> CopyOutcome:
            if isinstance(taker, Target):
                return self._give(taker, partial(push_to, copy=copy, chunks=range(num_chunks(num_bytes))))
            parity = CopyKey(copy.iteration, copy.attempt, taker.rank, PARITY_PART)
            contribution = {"contributor": copy.rank, "num_contributors": len(takers)}
            return self._give(taker.target, partial(push_to, copy=parity, chunks=block, **contribution))

        with ThreadPoolExecutor(min(len(takers), MAX_TARGETS_AT_ONCE), thread_name_prefix="outlast-push") as pool:
            return tuple(pool.map(give, takers, blocks_of(num_bytes, len(takers))))

    def _give(self, target: Target, push_to: Callable[[Target], tuple[str, ...]]) -> CopyOutcome:
        with self._lock:
            known = self._failed.get(target)
        if known is not None:
            return CopyOutcome(target.node, None, f"skipped until it responds again: {known.reason}", False)
        try:
            chunks = push_to(target)
        except ReplicaError as error:
            with self._lock:
                num = self._num_failures.get(target, 0)
                is_new = num == 0
                self._num_failures[target] = num + 1
                if not isinstance(error, ReplicaRefused):  # a node that refuses at once need not be left out
                    after_s = RETRY_AFTER_S[min(num, len(RETRY_AFTER_S) - 1)]
                    self._failed[target] = _Failure(str(error), clock.now_s() + after_s)
                    if self._prober is None and not self._stopping.is_set():
                        self._prober = threading.Thread(target=self._probe, name="outlast-probe", daemon=True)
                        self._prober.start()
            return CopyOutcome(target.node, None, str(error), is_new)
        with self._lock:
            self._num_failures.pop(target, None)
        return CopyOutcome(target.node, chunks, None, False)

    def _probe(self) -> None:
        """Ask the failed targets again and again until all answer. Thread: the prober's."""
        while not self._stopping.wait(self._probe_interval_s):
            now_s = clock.now_s()
            with self._lock:
                if not self._failed:
                    self._prober = None
                    return
                due = [target for target, failure in self._failed.items() if now_s >= failure.retry_s]
            for target in due:
                if self._stopping.is_set():
                    return
                try:
                    ping(target, self._key, timeout_s=PROBE_TIMEOUT_S)
                except ReplicaError as error:
                    log.debug("still no response: %s", error)
                    continue
                with self._lock:
                    self._failed.pop(target, None)
                log.warning("node %s responds again and receives copies", target.node)
