"""One rank's file of a checkpoint: safetensors with an identity and a digest per chunk, written durably.

The file consists of 8 bytes of header length, a JSON header padded with spaces so that the data begins at a multiple of
4 KiB, and the tensors without gaps, wide elements first, so that each is aligned. Plain values are one more tensor of
bytes, ``outlast.tree``.

It is written past the page cache, with aligned writes by several threads, and digested concurrently: the cache would
cost a copy and the memory that training needs. A disk that refuses such writes (``EINVAL``) gets ordinary ones. Each
piece is examined for infinities and NaN while it is in the CPU cache. Nothing here imports torch: the writer process
uses it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from outlast.decoding import from_json, parse_json
from outlast.errors import Corrupt
from outlast.runtime.injection import reach

CHUNK_BYTES = 8 << 20
ALIGNMENT = 4096
DIGEST_BYTES = 8
TREE = "outlast.tree"
MAX_HEADER_BYTES = 1 << 30

DTYPE_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.complex64": "C64",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
ELEMENT_BYTES = {name: 1 if name == "BOOL" else int(re.findall(r"\d+", name)[0]) // 8 for name in DTYPE_NAMES.values()}
"""Bytes per element, by safetensors' name of the type, which contains its bits."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a shard's content; a shard in the wrong place is as invalid as a torn one."""

    run: str
    topology: str
    rank: int
    world_size: int
    iteration: int
    attempt: str


class TensorSpan(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    """safetensors' name of the element type."""
    shape: tuple[int, ...]
    """Shape of this rank's part."""
    offset: int
    num_bytes: int
    global_shape: tuple[int, ...] = ()
    """Shape of the whole tensor; empty, like the next field, if unknown, as in a shard's header."""
    global_offset: tuple[int, ...] = ()
    """Offset of this rank's part in the whole, in elements of each dimension."""


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def digest(chunk: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(chunk)


def digests(data: bytes) -> tuple[str, ...]:
    return tuple(digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))


def pack_digests(chunks: Iterable[str]) -> bytes:
    return bytes.fromhex("".join(chunks))


def unpack_digests(packed: bytes) -> tuple[str, ...]:
    text, width = packed.hex(), 2 * DIGEST_BYTES
    return tuple(text[at : at + width] for at in range(0, len(text), width))


class _HeaderEntry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: Sequence[int]
    data_offsets: tuple[int, int]


class ShardLayout:
    """The layout of a shard, computed once for tensors of the same names, types and shapes.

    Args:
        tensors: Name, safetensors element type, shape, number of bytes, bytes of an element.
    """

    def __init__(self, tensors: Sequence[tuple[str, str, Sequence[int], int, int]]) -> None:
        kinds: dict[tuple[int, str], list[int]] = {}
        for index, (_, dtype, _, _, width) in enumerate(tensors):
            kinds.setdefault((-width, dtype), []).append(index)
        self.order = [index for kind in sorted(kinds) for index in kinds[kind]]
        """Indices of the tensors in the order of the shard: wide elements first, for alignment; then by type; then as
        given."""
        self.offsets: list[int] = []
        offset, entries = 0, {}
        for index in self.order:
            name, dtype, shape, num_bytes, _ = tensors[index]
            end = offset + num_bytes
            entries[name] = _HeaderEntry(dtype, shape, (offset, end))
            self.offsets.append(offset)
            offset = end
        self._text, self._num_bytes = msgspec.json.encode(entries)[1:-1], offset

    def place(self, identity: Identity, tree_bytes: int) -> tuple[bytes, TensorSpan, int]:
        """Return a shard's head up to the start of its data, the span of its plain values, and its size in bytes."""
        metadata = msgspec.json.encode({"__metadata__": {"outlast": msgspec.json.encode(identity).decode()}})[1:-1]
        end = self._num_bytes + tree_bytes
        span = {TREE: _HeaderEntry("U8", (tree_bytes,), (self._num_bytes, end))}
        text = b"{" + b",".join(filter(None, (metadata, self._text, msgspec.json.encode(span)[1:-1]))) + b"}"
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        start = 8 + len(text)
        tree = TensorSpan(TREE, "U8", (tree_bytes,), start + self._num_bytes, tree_bytes)
        return len(text).to_bytes(8, "little") + text, tree, start + end


def read_head(fd: int, size: int) -> bytes:
    """Read the head of a shard, up to the start of its data. Raises: Corrupt, when it cannot be a shard."""
    end, head = _head_bytes(os.pread(fd, 8, 0), size), b""
    while len(head) < end:
        part = os.pread(fd, end - len(head), len(head))
        if not part:
            raise Corrupt(f"the header ends after {len(head)} bytes instead of {end}")
        head += part
    return head


def head_of(image: memoryview) -> memoryview:
    """Return the head of a shard's image, up to the start of its data. Raises: Corrupt, when it cannot be a shard."""
    return image[: _head_bytes(image[:8], len(image))]


def _head_bytes(begin: bytes | memoryview, size: int) -> int:
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise Corrupt(f"the header cannot be read (it would take {length} bytes of {size})")
    return 8 + length


def read_header(head: memoryview, size: int) -> tuple[Identity, dict[str, TensorSpan]]:
    """Parse the head of a shard, checking every field. Raises: Corrupt, when outlast did not write it."""
    try:
        header = parse_json(bytes(head[8:]))
        identity = from_json(header.pop("__metadata__")["outlast"], Identity)
        spans = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - len(head):
                raise ValueError(f"tensor {name!r} lies outside the file")
            spans[name] = TensorSpan(name, entry["dtype"], tuple(entry["shape"]), len(head) + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        raise Corrupt(f"the header cannot be read ({error})") from error
    return identity, spans


PIECE_BYTES = 1 << 20
"""Small enough to stay in the cache."""

_SUMMED = {"F64": "f8", "F32": "f4", "C64": "f4"}
"""Types whose sum is finite only if all elements are."""

_MASKED = {
    "F16": ("u2", 0x7C00, 0x7C00),
    "BF16": ("u2", 0x7F80, 0x7F80),
    "F8_E5M2": ("u1", 0x7C, 0x7C),
    "F8_E4M3": ("u1", 0x7F, 0x7F),
    "F8_E5M2FNUZ": ("u1", 0xFF, 0x80),
    "F8_E4M3FNUZ": ("u1", 0xFF, 0x80),
    "F8_E8M0": ("u1", 0xFF, 0xFF),
}
"""Types that numpy adds slowly or not at all: numpy type, a mask, and the masked value of an infinity or NaN."""

MAY_BE_INFINITE = frozenset({*_SUMMED, *_MASKED})
"""safetensors' names of the element types that have infinities or NaN."""


def is_finite(data: memoryview, dtype: str) -> bool:
    return all(_is_piece_finite(data[start : start + PIECE_BYTES], dtype) for start in range(0, len(data), PIECE_BYTES))


def _is_piece_finite(data: memoryview, dtype: str) -> bool:
    import numpy as np  # not at the top: ``outlast ckpt`` works without numpy

    if dtype in _MASKED:
        kind, mask, bad = _MASKED[dtype]
        bits = np.frombuffer(data, dtype=kind)
        return not bool(((bits & mask) == bad).any())
    numbers = np.frombuffer(data, dtype=_SUMMED[dtype])
    with np.errstate(all="ignore"):
        # A sum of finite numbers may overflow: then each one is checked.
        return bool(np.isfinite(numbers.sum())) or bool(np.isfinite(numbers).all())


class Numbers:
    """The locations of numbers in an image that may be infinite or NaN.

    Args:
        spans: Element type (one of :data:`MAY_BE_INFINITE`), offset and bytes of each tensor; none overlap.
    """

    def __init__(self, spans: Iterable[tuple[str, int, int]]) -> None:
        self._spans: list[tuple[str, int, int]] = []
        for dtype, start, num_bytes in sorted(spans, key=lambda span: span[1:]):  # empty ones first
            first, end = start, start + num_bytes
            if self._spans and (self._spans[-1][0], self._spans[-1][2]) == (dtype, start):
                first = self._spans.pop()[1]  # adjacent small tensors are examined as one
            self._spans.append((dtype, first, end))
        self._ends = [end for _, _, end in self._spans]

    def are_finite(self, piece: memoryview, start: int) -> bool:
        """Return whether a piece at offset ``start``, which splits no number, is free of infinities and NaN."""
        end = start + len(piece)
        for dtype, first, last in self._spans[bisect_right(self._ends, start) :]:
            if first >= end:
                return True
            with piece[max(first, start) - start : min(last, end) - start] as numbers:
                if not is_finite(numbers, dtype):
                    return False
        return True


NUM_DISK_THREADS = 2
"""In addition to the digesting thread; threads that alternate between both would keep the disk less busy."""
NUM_DIGEST_THREADS = 3
Look = Callable[[memoryview, int], None]


class Digested(NamedTuple):
    num_bytes: int
    chunks: tuple[str, ...]
    finite: bool = True

    def find_changed(self, image: memoryview, indices: Iterable[int]) -> list[int]:
        with image[: self.num_bytes] as data:
            return [index for index in indices if self.chunks[index : index + 1] != (_digest(data, None, index),)]


def digest_image(image: memoryview, *, look: Look | None = None) -> tuple[str, ...]:
    """Return every chunk's digest; several threads call ``look`` with each piece and its offset while it is cached."""
    digest_chunk, count = partial(_digest, image, look), num_chunks(len(image))
    if count < 2:
        return tuple(map(digest_chunk, range(count)))
    with ThreadPoolExecutor(NUM_DIGEST_THREADS, thread_name_prefix="outlast-digest") as pool:
        return tuple(pool.map(digest_chunk, range(count)))


def write_image(image: memoryview, path: Path, *, look: Look | None = None) -> tuple[str, ...]:
    """Write an image into a new file and make it durable; return the digest of every chunk.

    A file that cannot be finished is deleted: the next save may need the space.

    Args:
        image: The bytes, beginning at a multiple of 4 KiB.
        look: Called with each piece of the image and its offset, while it is in the cache, by one thread; and again
            from the beginning if the disk refuses direct writes.

    Raises:
        OSError: The disk is full, the file exists, or the disk fails otherwise.

    Blocks: until the disk has confirmed everything.
    """
    try:
        with new_file(path, len(image), direct=True) as fd:
            return _write(fd, image, look, path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with new_file(path, len(image)) as fd:
        return _write(fd, image, look, path)


@contextlib.contextmanager
def new_file(path: Path, num_bytes: int, *, direct: bool = False) -> Iterator[int]:
    """Open a new file with space for its bytes, and delete it when the block fails.

    Raises:
        OSError: The file exists, the disk is full, or it refuses direct writes (EINVAL).
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            path.unlink(missing_ok=True)  # some systems create the file before they refuse the flag
        raise
    try:
        try:
            reach("checkpoint.file.made", path=path)
            if num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)  # a full disk fails at once, and the file is contiguous
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        yield fd
    except BaseException:  # an incomplete file is unusable
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write(fd: int, image: memoryview, look: Look | None, path: Path) -> tuple[str, ...]:
    size = len(image)

    def write_chunk(index: int) -> None:
        if index == num_chunks(size) // 2:
            reach("checkpoint.file.halfway", path=path)
        start = index * CHUNK_BYTES
        with image[start : start + CHUNK_BYTES] as chunk:
            _write_at(fd, chunk, start)

    with (
        ThreadPoolExecutor(1, thread_name_prefix="outlast-digest") as digesting,
        ThreadPoolExecutor(NUM_DISK_THREADS, thread_name_prefix="outlast-disk") as writing,
    ):
        digests = digesting.map(partial(_digest, image, look), range(num_chunks(size)))
        try:
            for _ in writing.map(write_chunk, range(num_chunks(size))):
                pass
        except OSError as error:
            digesting.shutdown(wait=False, cancel_futures=True)  # the rest is not needed
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        os.ftruncate(fd, size)
        os.fsync(fd)
        return tuple(digests)


def _digest(image: memoryview, look: Look | None, index: int) -> str:
    start = index * CHUNK_BYTES
    with image[start : start + CHUNK_BYTES] as chunk:
        if look is None:
            return digest(chunk)
        state = xxhash.xxh3_64()
        for offset in range(0, len(chunk), PIECE_BYTES):
            with chunk[offset : offset + PIECE_BYTES] as piece:
                state.update(piece)
                look(piece, start + offset)
        return state.hexdigest()


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the last page is padded, and the padding is cut off at the end."""
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
