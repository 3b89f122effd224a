"""Assembles one file of the global tier from a shard's image, in the writer process. Must not import torch.

A request lists literal bytes and ranges of the image, which are digested while they are written. A file on a file
system is new and durable; an object is uploaded in several parts at once.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import xxhash

from outlast.checkpoint.dcp.store import is_remote, local_path, open_store
from outlast.checkpoint.shard import CHUNK_BYTES, MAY_BE_INFINITE, Digested, is_finite, new_file, num_chunks
from outlast.errors import CheckpointError, Corrupt

PART_BYTES = CHUNK_BYTES
"""Upload part size; with at most 10,000 parts the largest object is 80 GB."""
MAX_PARTS = 10_000
NUM_PARTS_AT_ONCE = 2
"""Parts of one file that are in memory at the same time."""


class Range(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    num_bytes: int
    numbers: str = ""
    """safetensors' name of the element type, for the check for infinities and NaN; empty = not checked."""


Content: TypeAlias = bytes | Range


class Assemble(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a file of the global tier from the image whose descriptor is attached. Reply: :class:`Assembled`."""

    url: str
    """The global tier: a path, or a URL that fsspec supports."""
    folder: str
    """Folder below ``url``; created if missing."""
    name: str
    pieces: tuple[Content, ...]
    timeout_s: float
    """Time limit for the whole upload; unused on a file system."""


class Assembled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    num_bytes: int = 0
    chunks: tuple[str, ...] = ()
    """xxh3_64 of every 8 MiB, hexadecimal."""
    finite: bool = True
    error: str | None = None
    """Why the file was not written; one line."""


def assemble(
    request: Assemble, image: memoryview, *, digested: Callable[[], Digested | None] = lambda: None
) -> Assembled:
    """Write one file.

    The file is rejected if the image no longer matches the digests of the node-local tiers: changed memory would
    otherwise be stored with matching digests.

    Args:
        digested: Returns the digests of the node-local copy; ``None`` = not written yet.

    Blocks: until the file is complete; for an object store at most ``request.timeout_s``.
    """
    source = _Source(request.pieces, image)
    try:
        source.check()
        if is_remote(request.url):
            store, name = open_store(request.url), f"{request.folder}/{request.name}"
            if len(source) > MAX_PARTS * PART_BYTES:
                raise CheckpointError(f"{store.describe(name)}: {len(source)} bytes are too many for one object")
            upload = {"part_bytes": PART_BYTES, "concurrency": NUM_PARTS_AT_ONCE}
            store.put(name, source, timeout_s=request.timeout_s, **upload)
        else:
            folder = Path(local_path(request.url)) / request.folder
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / request.name, source)
        source.check_unchanged(digested())
        return Assembled(num_bytes=len(source), chunks=source.digests(), finite=source.is_finite())
    except OSError as error:
        where = error.filename or f"{request.url}/{request.folder}/{request.name}"
        return Assembled(error=f"{where}: {error.strerror or error}")
    except (CheckpointError, MemoryError) as error:
        return Assembled(error=str(error) or type(error).__name__)
    finally:
        source.close()


class _Source:
    """The bytes of a file in several places, digested as they are read. Thread: any."""

    def __init__(self, pieces: Sequence[Content], image: memoryview) -> None:
        self._pieces, self._image = pieces, image
        sizes = (len(piece) if isinstance(piece, bytes) else piece.num_bytes for piece in pieces)
        self._ends = list(itertools.accumulate(sizes))
        self._num_bytes = self._ends[-1] if self._ends else 0
        self._chunks: dict[int, str] = {}
        self._closed = False

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, where: slice) -> bytes:
        """Return bytes that start at a chunk boundary and record their chunks' digests."""
        start, stop, _ = where.indices(self._num_bytes)
        taken = b"".join(self.views(start, stop))
        for offset in range(0, len(taken), CHUNK_BYTES):
            chunk = memoryview(taken)[offset : offset + CHUNK_BYTES]
            self._chunks[(start + offset) // CHUNK_BYTES] = xxhash.xxh3_64_hexdigest(chunk)
        return taken

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            piece, end = self._pieces[index], self._ends[index]
            last = min(stop, end)
            if self._closed:
                raise CheckpointError("writing the file was abandoned")
            if isinstance(piece, bytes):
                begin = end - len(piece)
                yield memoryview(piece)[start - begin : last - begin]
            else:
                shift = piece.offset - (end - piece.num_bytes)
                yield self._image[start + shift : last + shift]
            start, index = last, index + 1

    def digest_chunk(self, index: int) -> Iterator[memoryview]:
        """Yield the views of a chunk and record its digest."""
        start = index * CHUNK_BYTES
        found = xxhash.xxh3_64()
        for view in self.views(start, min(start + CHUNK_BYTES, self._num_bytes)):
            found.update(view)
            yield view
        self._chunks[index] = found.hexdigest()

    def check(self) -> None:
        for piece in self._pieces:
            if isinstance(piece, Range) and not 0 <= piece.offset <= piece.offset + piece.num_bytes <= len(self._image):
                raise CheckpointError(f"bytes {piece.offset} to {piece.offset + piece.num_bytes} are not in the image")

    def check_unchanged(self, digested: Digested | None) -> None:
        """Raise Corrupt if the source memory has changed since it was digested."""
        ranges = (piece for piece in self._pieces if isinstance(piece, Range) and piece.num_bytes)
        spans = (range(one.offset // CHUNK_BYTES, num_chunks(one.offset + one.num_bytes)) for one in ranges)
        indices = sorted({index for span in spans for index in span})
        changed = [] if digested is None else digested.find_changed(self._image, indices)
        if changed:
            raise Corrupt(
                f"chunk {changed[0]} of the staged copy has changed in memory since it was written to the node-local "
                "tiers; the file is not used"
            )

    def digests(self) -> tuple[str, ...]:
        return tuple(self._chunks[index] for index in range(len(self._chunks)))

    def is_finite(self) -> bool:
        for piece in self._pieces:
            if isinstance(piece, Range) and piece.numbers in MAY_BE_INFINITE:
                with self._image[piece.offset : piece.offset + piece.num_bytes] as data:
                    if not is_finite(data, piece.numbers):
                        return False
        return True

    def close(self) -> None:
        """Release the image; a running upload fails instead of reading reused memory."""
        self._closed = True
        self._image = memoryview(b"")


def _write(path: Path, source: _Source) -> None:
    """Write a new durable file; an incomplete one is deleted."""
    try:
        with new_file(path, len(source)) as fd:
            for index in range(num_chunks(len(source))):
                for view in source.digest_chunk(index):
                    while view:
                        view = view[os.write(fd, view) :]
            os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
