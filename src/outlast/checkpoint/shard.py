"""One rank's file of a generation: safetensors with an identity, and a digest for every chunk.

The file is 8 bytes of header length, a JSON header padded with spaces so that the data begins at a multiple of
4 KiB, and the tensors without gaps, those of wide elements first, so that each is aligned to its element. Plain
values are one more tensor of bytes, ``outlast.tree``. Nothing here imports torch: the writer uses it too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from outlast.decoding import from_json
from outlast.errors import Corrupt

__all__ = [
    "CHUNK_BYTES",
    "DTYPE_NAMES",
    "ELEMENT_BYTES",
    "TREE",
    "Identity",
    "ShardLayout",
    "TensorSpan",
    "digest",
    "digest_pieces",
    "digests",
    "num_chunks",
    "read_head",
    "read_header",
    "shard_name",
]

CHUNK_BYTES = 8 << 20
ALIGNMENT = 4096
TREE = "outlast.tree"
"""Name of the tensor that holds the plain values."""
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
"""torch's name of an element type to safetensors'."""
ELEMENT_BYTES = {name: 1 if name == "BOOL" else int(re.findall(r"\d+", name)[0]) // 8 for name in DTYPE_NAMES.values()}
"""safetensors' name of an element type, which has its bits, to the bytes of an element."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose bytes a shard holds; a shard in the wrong place is as invalid as a torn one."""

    run: str
    topology: str
    rank: int
    world_size: int
    iteration: int
    attempt: str


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor lies."""

    name: str
    dtype: str
    """safetensors' name of the element type."""
    shape: tuple[int, ...]
    offset: int
    """In the file."""
    num_bytes: int


def shard_name(rank: int) -> str:
    """Return the file name of a rank's shard."""
    return f"rank-{rank:05d}.safetensors"


def num_chunks(num_bytes: int) -> int:
    """Return the number of chunks of a file."""
    return -(-num_bytes // CHUNK_BYTES)


def digest(chunk: bytes | memoryview) -> str:
    """Return a chunk's digest."""
    return xxhash.xxh3_64_hexdigest(chunk)


def digests(data: bytes) -> tuple[str, ...]:
    """Return the digest of every chunk of a small file."""
    return tuple(digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))


def digest_pieces(pieces: Iterable[memoryview]) -> str:
    """Return the digest of a chunk that is given piece by piece."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


class _HeaderEntry(msgspec.Struct, frozen=True, gc=False):
    """A tensor in the header."""

    dtype: str
    shape: Sequence[int]
    data_offsets: tuple[int, int]


class ShardLayout:
    """Where everything goes in a shard; worked out once for tensors of the same names, types and shapes.

    Args:
        tensors: Name, safetensors element type, shape, number of bytes, bytes of an element.
    """

    def __init__(self, tensors: Sequence[tuple[str, str, Sequence[int], int, int]]) -> None:
        kinds: dict[tuple[int, str], list[int]] = {}
        for index, (_, dtype, _, _, width) in enumerate(tensors):
            kinds.setdefault((-width, dtype), []).append(index)
        self.order = [index for kind in sorted(kinds) for index in kinds[kind]]
        """Indices of the tensors as they lie in the shard: wide elements first, so that each is aligned; those of one
        type side by side; else as given."""
        self.offsets: list[int] = []
        """Of the tensors, in that order, from where the data begins."""
        offset, entries = 0, {}
        for index in self.order:
            name, dtype, shape, num_bytes, _ = tensors[index]
            end = offset + num_bytes
            entries[name] = _HeaderEntry(dtype, shape, (offset, end))
            self.offsets.append(offset)
            offset = end
        self._text, self._num_bytes = msgspec.json.encode(entries)[1:-1], offset

    def place(self, identity: Identity, tree_bytes: int) -> tuple[bytes, TensorSpan, int]:
        """Return a shard's head up to where the data begins, where its plain values lie, and its size in bytes.

        Args:
            identity: Whose shard it is.
            tree_bytes: Length of its plain values, which come last.
        """
        metadata = msgspec.json.encode({"__metadata__": {"outlast": msgspec.json.encode(identity).decode()}})[1:-1]
        end = self._num_bytes + tree_bytes
        span = {TREE: _HeaderEntry("U8", (tree_bytes,), (self._num_bytes, end))}
        text = b"{" + b",".join(filter(None, (metadata, self._text, msgspec.json.encode(span)[1:-1]))) + b"}"
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        start = 8 + len(text)
        tree = TensorSpan(TREE, "U8", (tree_bytes,), start + self._num_bytes, tree_bytes)
        return len(text).to_bytes(8, "little") + text, tree, start + end


def read_head(fd: int, size: int) -> bytes:
    """Read the head of a shard, up to where its data begins.

    Raises:
        Corrupt: It cannot be one.
    """
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise Corrupt(f"the header cannot be read (it would take {length} bytes of {size})")
    head = b""
    while len(head) < 8 + length:
        part = os.pread(fd, 8 + length - len(head), len(head))
        if not part:
            raise Corrupt(f"the header ends after {len(head)} bytes instead of {8 + length}")
        head += part
    return head


def read_header(head: memoryview, size: int) -> tuple[Identity, dict[str, TensorSpan]]:
    """Take the head of a shard apart; every field is checked against the file's size.

    Args:
        head: As read by :func:`read_head`.
        size: Bytes of the file.

    Raises:
        Corrupt: It is not a shard of ours.
    """
    try:
        header = json.loads(bytes(head[8:]))
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
