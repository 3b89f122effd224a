"""Sends parts to other nodes' writers, whole or as parity blocks, and fetches or rebuilds them.

Received data goes into a mapped file or memfd. Mapping a page costs about as much as receiving it, so a thread maps the
pages ahead of the data; pages that it has not reached are mapped by the receiving call.

A failed node costs its timeout once: :class:`Replicator` skips it until a background probe finds that it accepts parts.
A node refuses probes while its disk does not respond. A node that fails again after probes is probed at growing
intervals (:data:`RETRY_AFTER_S`). Must not import torch.
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
_MADV_POPULATE_READ = 22  # as good as POPULATE_WRITE for shared memory, and cheaper; Linux 5.14
STRIDE_BYTES = 4 << 20
CHUNKS_IN_FLIGHT = 4
"""Chunks whose digests the receiver may still owe."""
NUM_CONNECTIONS = max(1, min(2, len(os.sched_getaffinity(0)) // 2))
"""One stream does not fill a fast network, but each stream occupies a core on one side."""
RANGE_CHUNKS = 4
"""Chunks requested at a time; the next range is requested before the current one is read."""
CHUNKS_AHEAD = 2
"""Chunks of a rebuilt shard whose pieces are requested ahead."""
PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 2.0
RETRY_AFTER_S = (0.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds until the first probe of a node, by its failures in a row; the last value repeats."""
KEEP_FACTOR = 3
"""Timeouts without progress until a node must have made a small part durable."""
MIN_DISK_BYTES_PER_S = 100 << 20
"""Disk rate that extends the time limit of a large part."""
MAX_TARGETS_AT_ONCE = 8


class ReplicaError(Exception):
    """A node did not accept or provide a part; one line with the node and the reason."""


class ReplicaRefused(ReplicaError):
    """A node responded, but could not carry out the request."""


class Target(msgspec.Struct, frozen=True):
    node: str
    host: str
    port: int


@contextmanager
def connect(target: Target, key: bytes, *, timeout_s: float) -> Iterator[ReplicaChannel]:
    """Open an authenticated connection; errors within the context become :class:`ReplicaError`.

    Raises: ReplicaRefused (the node could not carry out the request); ReplicaError (the node cannot be reached, has
    another key, or stopped responding).
    """
    address = target.host, target.port
    with naming(target), ReplicaChannel(socket.create_connection(address, timeout_s), timeout_s) as channel:
        channel.prove_key(key, is_server=False, within_s=timeout_s)
        yield channel


@contextmanager
def naming(target: Target) -> Iterator[None]:
    """Convert connection errors into a :class:`ReplicaError` that names the node."""
    try:
        yield
    except RefusedByPeer as error:
        raise ReplicaRefused(f"node {target.node}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise ReplicaError(f"node {target.node} ({target.host}:{target.port}): {reason}") from error


def ping(target: Target, key: bytes, *, timeout_s: float) -> None:
    """Check that a node's writer accepts parts. Raises ReplicaError if it does not."""
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
    """Send chunks of a part to another node; return the digests of the bytes that it received.

    Args:
        timeout_s: Seconds without progress; also how long the node may take to make room for the part.
        contributor: Rank whose block of a shard is XORed into the parity ``copy``; -1: no parity.

    Raises: ReplicaError (the node did not store the part). Blocks: until the node has stored the part durably (in
    memory where that is its folder).
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
    """Fetch a part from another node into a file; return the digests of the received bytes.

    Args:
        fd: File or memfd of at least ``num_bytes``.

    Raises: ReplicaError (the node lacks the part, has another size, or stopped responding; ``fd`` may be partly
    written). Blocks: until the whole part is received.
    """
    if not num_bytes:
        return ()
    with _mapped(copy, fd, num_bytes) as view:
        return fetch_into(target, key, copy, view, timeout_s=timeout_s)


@contextmanager
def _mapped(copy: CopyKey, fd: int, num_bytes: int) -> Iterator[memoryview]:
    """Map a file and fault its pages in ahead of the received data. Raises ReplicaError if it cannot be mapped.

    A receiving call that gets no memory for a page fails with ``EFAULT``, without a signal. The mapping is released
    with the last view of it.
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
    """Fault in the pages. Thread: its own."""
    madvise = ctypes.CDLL(None).madvise  # releases the interpreter lock, which mmap.madvise does not
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, num_bytes = ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped)
    for offset in range(0, num_bytes, STRIDE_BYTES):
        size = min(STRIDE_BYTES, num_bytes - offset)
        if stopping.is_set() or madvise(start + offset, size, _MADV_POPULATE_READ) != 0:
            return


def fetch_into(target: Target, key: bytes, copy: CopyKey, into: memoryview, *, timeout_s: float) -> tuple[str, ...]:
    """Fetch a part from another node into memory of its size; otherwise as :func:`fetch`."""
    num_bytes = len(into)
    digests = [""] * num_chunks(num_bytes)
    starts = range(0, len(digests), RANGE_CHUNKS)
    ranges = iter([range(first, min(first + RANGE_CHUNKS, len(digests))) for first in starts])
    errors: list[str] = []

    def work() -> None:
        try:
            with connect(target, key, timeout_s=timeout_s) as channel:
                fetch_ranges(channel, copy, into, ranges, digests)
        except ReplicaError as error:
            errors.append(str(error))
            deque(ranges, maxlen=0)  # stops the other connection

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
    """Fetch a small part into memory.

    Raises:
        ReplicaError: The node lacks the part, the part is larger than ``max_bytes``, or the node stopped responding.
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


def fetch_ranges(
    channel: ReplicaChannel, copy: CopyKey, into: memoryview, ranges: Iterator[range], digests: list[str]
) -> None:
    """Fetch ranges until none is left, requesting one range ahead of the one being received.

    The empty request at the end fails if the peer's memory has changed meanwhile.
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
    rank: int
    num_bytes: int
    """Size of the rank's shard."""
    target: Target
    """The node's writer; the lost member's is not used."""


def rebuild(
    lost: CopyKey, members: Sequence[ParityMember], key: bytes, fd: int, *, timeout_s: float
) -> tuple[str, ...]:
    """Rebuild a shard; return its digests, which are correct only if all inputs were.

    Raises: ReplicaError (another member lacks its parity or shard, or stopped responding). Blocks: until all is read;
    each other member sends as many bytes as the shard has.
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
        return _combine(plan_rebuild(lost, members), members, channels, view)


def plan_rebuild(lost: CopyKey, members: Sequence[ParityMember]) -> list[list[tuple[int, Get]]]:
    """Return for each chunk of the lost shard the pieces to XOR, with their members; the first piece is full-length."""
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
                if place < len(theirs):  # otherwise the block has ended there: only zeros went in
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
    """Request the pieces of a few chunks ahead, and XOR them as they arrive."""
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
    node: str
    chunks: tuple[str, ...] | None
    """Digests that the target computed of the received bytes; ``None`` = no copy was stored."""
    error: str | None
    """Why no copy was stored, in one line."""
    is_new: bool
    """Whether this is the target's first failure since its last success."""


class Holder(msgspec.Struct, frozen=True):
    """A member of a parity group that receives a block."""

    rank: int
    target: Target


class Replicator:
    """Copies parts to other nodes' writers. Thread: any.

    Args:
        probe_interval_s: Seconds between two probes of a failed node.
    """

    def __init__(self, key: bytes, *, probe_interval_s: float = PROBE_INTERVAL_S) -> None:
        self._key, self._probe_interval_s = key, probe_interval_s
        self._lock = threading.Lock()
        self._failed: dict[Target, tuple[str, float]] = {}
        """Targets that are skipped until a probe succeeds: the reason, and the monotonic time of the first probe."""
        self._num_failures: dict[Target, int] = {}
        """Failures in a row."""
        self._prober: threading.Thread | None = None
        self._stopping = threading.Event()

    def close(self) -> None:
        """Stop probing. Idempotent. Blocks: at most two probe timeouts."""
        self._stopping.set()
        with self._lock:
            prober = self._prober
        if prober is not None:
            prober.join(2 * PROBE_TIMEOUT_S)

    def replicate(
        self, copy: CopyKey, fd: int, num_bytes: int, takers: Sequence[Target | Holder], *, timeout_s: float
    ) -> tuple[CopyOutcome, ...]:
        """Send a part to several nodes at once: the whole part, or each node's block of a parity.

        Args:
            fd: File or memfd with the part; must not change before this call returns.
            takers: Nodes for whole copies; or all other members of a parity group, in the order of
                :func:`parity.holders_of`.
            timeout_s: Seconds without progress after which a taker fails.

        Returns:
            The outcomes in the order of ``takers``. A block's chunks are those of :func:`parity.blocks_of`; a shard is
            protected once all blocks of all members of its group are stored.

        Blocks: until each taker has stored its part or failed.
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
            return CopyOutcome(target.node, None, f"skipped until it responds again: {known[0]}", False)
        try:
            chunks = push_to(target)
        except ReplicaError as error:
            with self._lock:
                num = self._num_failures.get(target, 0)
                is_new = num == 0
                self._num_failures[target] = num + 1
                if not isinstance(error, ReplicaRefused):  # a node that refuses at once need not be skipped
                    after_s = RETRY_AFTER_S[min(num, len(RETRY_AFTER_S) - 1)]
                    self._failed[target] = str(error), clock.now_s() + after_s
                    if self._prober is None and not self._stopping.is_set():
                        self._prober = threading.Thread(target=self._probe, name="outlast-probe", daemon=True)
                        self._prober.start()
            return CopyOutcome(target.node, None, str(error), is_new)
        with self._lock:
            self._num_failures.pop(target, None)
        return CopyOutcome(target.node, chunks, None, False)

    def _probe(self) -> None:
        """Probe the failed targets until all respond. Thread: the prober's."""
        while not self._stopping.wait(self._probe_interval_s):
            now_s = clock.now_s()
            with self._lock:
                if not self._failed:
                    self._prober = None
                    return
                due = [target for target, (_, retry_s) in self._failed.items() if now_s >= retry_s]
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
