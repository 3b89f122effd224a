"""One rank's shard read and proven, straight into the memory that its tensors keep.

First touch of fresh memory costs several times the copy, so nothing is read into one place and copied to another.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from outlast.checkpoint.manifest import Manifest, ShardEntry
from outlast.checkpoint.shard import (
    CHUNK_BYTES,
    DTYPE_NAMES,
    TREE,
    Identity,
    Span,
    read_head,
    read_header,
    shard_name,
)
from outlast.errors import CheckpointError, Corrupt, Incomplete, Untrusted

__all__ = ["Shard", "check_shard", "read_shard"]

NUM_THREADS = 2
MAX_BUFFERS = 512
"""Of one read; the system takes up to 1024."""


class Shard:
    """The verified bytes of one shard, as tensors."""

    def __init__(self, parts: dict[str, torch.Tensor], spans: dict[str, Span]) -> None:
        self._parts, self._spans = parts, spans

    def release(self) -> None:
        """Let go of the memory; tensors that were taken out keep theirs."""
        self._parts = {}

    @property
    def tree(self) -> bytes:
        """The plain values."""
        return self._parts[TREE].numpy().tobytes()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor; it is nobody else's.

        Raises:
            CheckpointError: There is no such tensor.
        """
        if name not in self._spans:
            raise CheckpointError(f"tensor {name!r} is missing")
        span = self._spans[name]
        return self._parts[name].view(_dtypes()[span.dtype]).reshape(span.shape)


def read_shard(folder: Path, manifest: Manifest, rank: int) -> Shard:
    """Read a rank's shard of a generation and compare every byte with its digest.

    Raises:
        CheckpointError: The shard is torn, changed, or another one.
        OSError: It cannot be read.

    Blocks: while the file is read, by two threads.
    """
    entry = manifest.shards[rank]
    fd = os.open(folder / shard_name(rank), os.O_RDONLY | os.O_CLOEXEC)
    try:
        head, spans = _prove_head(fd, manifest, rank)
        size = entry.num_bytes
        _check_spans(spans, start=len(head), size=size)
        parts = {span.name: torch.empty(span.num_bytes, dtype=torch.uint8) for span in spans.values()}
        again = bytearray(len(head))
        target = _Target(again, parts, spans)
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="outlast-load") as pool:
            problems = list(pool.map(lambda index: _read_chunk(fd, target, entry, index), range(len(entry.chunks))))
    finally:
        os.close(fd)
    if (problem := next((problem for problem in problems if problem is not None), None)) is not None:
        raise problem
    if again != head:
        raise Corrupt("the header changed while it was read")
    return Shard(parts, spans)


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


def _prove_head(fd: int, manifest: Manifest, rank: int) -> tuple[bytes, dict[str, Span]]:
    """Return a shard's head and what lies where, if it is the rank's of this generation and as long as it should be.

    A whole file in the wrong place differs in every digest, and perhaps in its length: what it is instead comes first.
    """
    size, expected_size = os.fstat(fd).st_size, manifest.shards[rank].num_bytes
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

    def __init__(self, head: bytearray, parts: dict[str, torch.Tensor], spans: dict[str, Span]) -> None:
        ordered = sorted((span for span in spans.values() if span.num_bytes), key=lambda span: span.offset)
        self._starts = [0, *(span.offset for span in ordered)]
        self._views = [memoryview(head), *(memoryview(parts[span.name].numpy()) for span in ordered)]  # type: ignore[arg-type]

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield what takes the file's bytes from ``start`` to ``end``."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            begin, view = self._starts[index], self._views[index]
            stop = min(end, begin + len(view))
            yield view[start - begin : stop - begin]
            start = stop
            index += 1


def _check_spans(spans: dict[str, Span], *, start: int, size: int) -> None:
    """Check that the tensors fill the file without gaps, and that each is what it takes.

    Raises:
        Corrupt: They do not.
    """
    unknown = {span.dtype for span in spans.values()} - set(_dtypes())
    if unknown or TREE not in spans:
        raise Corrupt(f"has no {TREE}, or elements of unknown types {sorted(unknown)}")
    for span in sorted(spans.values(), key=lambda span: (span.offset, span.num_bytes)):
        count = 1
        for length in span.shape:
            count *= length
        if span.offset != start or count * _dtypes()[span.dtype].itemsize != span.num_bytes:
            raise Corrupt(f"the header contradicts itself about tensor {span.name!r}")
        start += span.num_bytes
    if start != size:
        raise Corrupt(f"the header describes {start} bytes of {size}")


def _differences(found: Identity, expected: Identity) -> str:
    fields = [name for name in Identity.__struct_fields__ if getattr(found, name) != getattr(expected, name)]
    return ", ".join(f"{name} {getattr(found, name)} instead of {getattr(expected, name)}" for name in fields)


def _read_chunk(fd: int, target: _Target, entry: ShardEntry, index: int) -> CheckpointError | None:
    start = index * CHUNK_BYTES
    end = min(start + CHUNK_BYTES, entry.num_bytes)
    position = start
    while position < end:
        buffers = []
        for piece in target.pieces(position, end):
            buffers.append(piece)
            if len(buffers) == MAX_BUFFERS:
                break
        count = os.preadv(fd, buffers, position)
        if not count:
            return Incomplete(f"ends after {position} bytes instead of {entry.num_bytes}")
        position += count
    found = xxhash.xxh3_64()
    for piece in target.pieces(start, end):
        found.update(piece)
    if found.hexdigest() != entry.chunks[index]:
        tensors = [
            tensor.name for tensor in entry.tensors if tensor.offset < end and tensor.offset + tensor.num_bytes > start
        ]
        within = f" (tensors {', '.join(tensors[:3])}{', ...' if len(tensors) > 3 else ''})" if tensors else ""
        return Corrupt(f"chunk {index}, bytes {start} to {end}{within}, differs from its digest")
    return None


def _dtypes() -> dict[str, torch.dtype]:
    return {
        short: getattr(torch, name.removeprefix("torch."))
        for name, short in DTYPE_NAMES.items()
        if hasattr(torch, name.removeprefix("torch."))
    }
