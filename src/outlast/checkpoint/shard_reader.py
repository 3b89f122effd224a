"""One rank's shard, proven and then read.

First every byte is read through small buffers and compared with its digest: nothing is allocated, nothing is touched.
Once all ranks have proven theirs, the bytes are read straight into the tensors that take them, and digested again where
they lie: first touch of fresh memory costs several times the copy, and what is used must be what was proven.
"""

from __future__ import annotations

import bisect
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from outlast.checkpoint.manifest import Manifest, ShardEntry
from outlast.checkpoint.shard import (
    CHUNK_BYTES,
    DTYPE_NAMES,
    TREE,
    Identity,
    TensorSpan,
    read_head,
    read_header,
)
from outlast.errors import CheckpointError, Corrupt, Incomplete, Untrusted

__all__ = ["Proof", "check_shard", "prove", "read"]

NUM_THREADS = 2
PIECE_BYTES = 1 << 20
"""Small enough to be digested from the cache."""
MAX_BUFFERS = 512
"""Of one read; the system takes up to 1024."""
_TORCH_TYPES = {short: getattr(torch, name.removeprefix("torch.")) for name, short in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a shard whose bytes were all compared with their digests."""

    spans: dict[str, TensorSpan]
    """Where its tensors lie."""
    tree: bytes
    """The plain values."""
    head_bytes: int


def prove(fd: int, manifest: Manifest, rank: int, *, in_memory: bool = False) -> Proof:
    """Compare every byte of a rank's shard with its digest.

    Args:
        fd: The shard, readable at any offset.
        manifest: The generation that it should belong to.
        rank: Whose shard it should be.
        in_memory: It lies in shared memory that may be longer than the shard.

    Raises:
        CheckpointError: The shard is torn, changed, or another one.
        OSError: It cannot be read.

    Blocks: while all of it is read, by two threads.
    """
    entry = manifest.shards[rank]
    head, spans = _prove_head(fd, manifest, rank, in_memory=in_memory)
    _check_spans(spans, start=len(head), size=entry.num_bytes)
    again, tree = bytearray(len(head)), bytearray(spans[TREE].num_bytes)
    wanted = [(0, again), (spans[TREE].offset, tree)]
    if in_memory:
        with mmap.mmap(fd, entry.num_bytes, prot=mmap.PROT_READ) as image, memoryview(image) as view:
            _in_threads(lambda: None, lambda _, index: _digest_view(view, entry, index, wanted), entry)
    else:
        _in_threads(
            lambda: memoryview(mmap.mmap(-1, PIECE_BYTES)),
            lambda buffer, index: _digest_file(fd, buffer, entry, index, wanted),
            entry,
        )
    if again != head:
        raise Corrupt("the header changed while it was read")
    return Proof(spans, bytes(tree), len(head))


def read(
    fd: int, manifest: Manifest, rank: int, proof: Proof, into: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Read a proven shard's tensors.

    Args:
        fd: The shard.
        manifest: Its generation.
        rank: Whose it is.
        proof: What :func:`prove` returned.
        into: Contiguous CPU tensors of the right type and shape that take their bytes, by name; others are new.

    Returns:
        All tensors but the tree, by name; those of ``into`` are the given ones.

    Raises:
        CheckpointError: It is not what was proven; what ``into`` holds is of no use any more.
        OSError: It cannot be read.

    Blocks: while all of it is read, by two threads.
    """
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, memoryview] = {}
    for name, span in proof.spans.items():
        tensor = into.get(name)
        if tensor is None:
            tensor = torch.empty(span.shape, dtype=_TORCH_TYPES[span.dtype])
        tensors[name] = tensor
        parts[name] = _bytes_of(tensor)
    entry = manifest.shards[rank]
    target = _Target(bytearray(proof.head_bytes), parts, proof.spans)
    _in_threads(lambda: None, lambda _, index: _read_chunk(fd, target, entry, index), entry)
    del tensors[TREE]
    return tensors


def check_shard(path: Path, manifest: Manifest, rank: int) -> None:
    """Check cheaply, without its data, that a file can be a rank's shard of a generation.

    Raises:
        CheckpointError: It is missing, torn, or another one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Incomplete("the file is missing") from None
    except OSError as error:
        raise CheckpointError(f"the file cannot be read ({error.strerror})") from error
    try:
        if os.fstat(fd).st_size != manifest.shards[rank].num_bytes:
            _prove_head(fd, manifest, rank)
    except OSError as error:
        raise CheckpointError(f"the file cannot be read ({error.strerror})") from error
    finally:
        os.close(fd)


def _in_threads(
    prepare: Callable[[], memoryview | None],
    work: Callable[[memoryview, int], CheckpointError | None],
    entry: ShardEntry,
) -> None:
    """Work on every chunk, and raise the error of the first that has one."""
    turns = itertools.count()
    problems: list[tuple[int, CheckpointError]] = []

    def run() -> None:
        own = prepare()
        while not problems and (index := next(turns)) < len(entry.chunks):
            if (problem := work(own, index)) is not None:  # type: ignore[arg-type]
                problems.append((index, problem))

    if len(entry.chunks) < 2:
        run()
    else:
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-load") as pool:
            for done in [pool.submit(run) for _ in range(NUM_THREADS)]:
                done.result()
    if problems:
        raise min(problems, key=lambda problem: problem[0])[1]


def _prove_head(
    fd: int, manifest: Manifest, rank: int, *, in_memory: bool = False
) -> tuple[bytes, dict[str, TensorSpan]]:
    """Return a shard's head and what lies where, if it is the rank's of this generation and as long as it should be.

    A whole file in the wrong place differs in every digest, and perhaps in its length: what it is instead comes first.
    """
    size, expected_size = os.fstat(fd).st_size, manifest.shards[rank].num_bytes
    if in_memory:
        size = min(size, expected_size)
    try:
        head = read_head(fd, size)
        identity, spans = read_header(memoryview(head), size)
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
        raise Untrusted(f"is the shard of {_differences(identity, expected)}")
    if size != expected_size:
        raise Incomplete(f"is {size} bytes long instead of {expected_size}")
    return head, spans


class _Target:
    """Where the bytes of a file go: the places of its parts, in the file's order."""

    def __init__(self, head: bytearray, parts: Mapping[str, memoryview], spans: Mapping[str, TensorSpan]) -> None:
        ordered = sorted((span for span in spans.values() if span.num_bytes), key=lambda span: span.offset)
        self._starts = [0, *(span.offset for span in ordered)]
        self._views = [memoryview(head), *(parts[span.name] for span in ordered)]

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield what takes the file's bytes from ``start`` to ``end``."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            begin, view = self._starts[index], self._views[index]
            stop = min(end, begin + len(view))
            yield view[start - begin : stop - begin]
            start = stop
            index += 1


def _check_spans(spans: dict[str, TensorSpan], *, start: int, size: int) -> None:
    """Check that the tensors fill the file without gaps, and that each is what it takes.

    Raises:
        Corrupt: They do not.
    """
    unknown = {span.dtype for span in spans.values()} - set(_TORCH_TYPES)
    if unknown or TREE not in spans:
        raise Corrupt(f"has no {TREE}, or elements of unknown types {sorted(unknown)}")
    for span in sorted(spans.values(), key=lambda span: (span.offset, span.num_bytes)):
        count = math.prod(span.shape)
        if span.offset != start or count * _TORCH_TYPES[span.dtype].itemsize != span.num_bytes:
            raise Corrupt(f"the header contradicts itself about tensor {span.name!r}")
        start += span.num_bytes
    if start != size:
        raise Corrupt(f"the header describes {start} bytes of {size}")


def _differences(found: Identity, expected: Identity) -> str:
    fields = [name for name in Identity.__struct_fields__ if getattr(found, name) != getattr(expected, name)]
    return ", ".join(f"{name} {getattr(found, name)} instead of {getattr(expected, name)}" for name in fields)


def _digest_view(
    view: memoryview, entry: ShardEntry, index: int, wanted: list[tuple[int, bytearray]]
) -> CheckpointError | None:
    start = index * CHUNK_BYTES
    with view[start : start + CHUNK_BYTES] as chunk:
        _copy_out(chunk, start, wanted)
        return _compare(xxhash.xxh3_64_hexdigest(chunk), entry, index)


def _digest_file(
    fd: int, buffer: memoryview, entry: ShardEntry, index: int, wanted: list[tuple[int, bytearray]]
) -> CheckpointError | None:
    position = index * CHUNK_BYTES
    end = min(position + CHUNK_BYTES, entry.num_bytes)
    found = xxhash.xxh3_64()
    while position < end:
        with buffer[: end - position] as room:
            count = os.preadv(fd, [room], position)
        if not count:
            return Incomplete(f"ends after {position} bytes instead of {entry.num_bytes}")
        with buffer[:count] as piece:
            found.update(piece)
            _copy_out(piece, position, wanted)
        position += count
    return _compare(found.hexdigest(), entry, index)


def _copy_out(piece: memoryview, position: int, wanted: list[tuple[int, bytearray]]) -> None:
    """Copy what of a piece belongs to the parts that are kept."""
    for offset, kept in wanted:
        begin, end = max(position, offset), min(position + len(piece), offset + len(kept))
        if begin < end:
            kept[begin - offset : end - offset] = piece[begin - position : end - position]


def _read_chunk(fd: int, target: _Target, entry: ShardEntry, index: int) -> CheckpointError | None:
    position = index * CHUNK_BYTES
    end = min(position + CHUNK_BYTES, entry.num_bytes)
    found = xxhash.xxh3_64()
    while position < end:
        buffers = list(itertools.islice(target.pieces(position, min(position + PIECE_BYTES, end)), MAX_BUFFERS))
        left = count = os.preadv(fd, buffers, position)
        if not count:
            return Incomplete(f"ends after {position} bytes instead of {entry.num_bytes}")
        for buffer in buffers:
            found.update(buffer[:left])
            left -= min(left, len(buffer))
        position += count
    return _compare(found.hexdigest(), entry, index)


def _compare(found: str, entry: ShardEntry, index: int) -> Corrupt | None:
    if found == entry.chunks[index]:
        return None
    start = index * CHUNK_BYTES
    end = min(start + CHUNK_BYTES, entry.num_bytes)
    tensors = [
        tensor.name for tensor in entry.tensors if tensor.offset < end and tensor.offset + tensor.num_bytes > start
    ]
    within = f" (tensors {', '.join(tensors[:3])}{', ...' if len(tensors) > 3 else ''})" if tensors else ""
    return Corrupt(f"chunk {index}, bytes {start} to {end}{within}, differs from its digest")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]
