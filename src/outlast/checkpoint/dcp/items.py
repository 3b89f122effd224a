"""A shard image's contents, named and described as ``torch.distributed.checkpoint`` does.

Reads only the image, a snapshot, so any thread may use it while training continues. Names follow
``flatten_state_dict``: mappings are traversed, lists only if they contain tensors or mappings. The format's
``.metadata`` for planners and other readers is made here, too.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from outlast.checkpoint.dcp.layout import Inventory, PlainValue, TensorPart
from outlast.checkpoint.dcp.manifest import SCHEMA, FileEntry, GlobalManifest, Item, TensorPiece, Where
from outlast.checkpoint.layouts import Layout
from outlast.checkpoint.shard import DTYPE_NAMES, TREE, TensorSpan
from outlast.checkpoint.state import decode, decoded_tree, reading_tree

log = logging.getLogger(__name__)
Path = tuple[str | int, ...]
ROOT = "state"
"""Key of the training state in the tree; the rest belongs to outlast."""
OURS = "outlast/"
"""Name prefix of items hidden from other readers of the format."""
TORCH_TYPES = {short: getattr(torch, name.removeprefix("torch.")) for name, short in DTYPE_NAMES.items()}
"""safetensors' element type names to torch's types."""


class Items:
    """One rank's shard, item by item.

    Args:
        image: The shard's bytes; must not change.
        world_size: With more than one rank, parts that ranks may share are digested for comparison.

    Raises: CheckpointError (the tree is malformed).
    """

    def __init__(self, image: memoryview, tensors: Sequence[TensorSpan], *, world_size: int) -> None:
        self._image = image
        self._entries = {entry.name: entry for entry in tensors}
        self.tree = self._entries.pop(TREE)
        root = _root(bytes(image[self.tree.offset : self.tree.offset + self.tree.num_bytes]))
        self._values: dict[str, Any] = {}
        values, paths = list[PlainValue](), dict[str, tuple[str, Path]]()
        layouts: dict[str, Layout | None] = {}
        for item, path, node, is_first in _named(root):
            if node[0] == "T":
                layouts[node[1]] = node[2] if len(node) > 2 else None
                if is_first:
                    paths[node[1]] = item, path
            elif is_first and _can_be_dumped(node):
                self._values[item] = node
                values.append(PlainValue(item, path))
        parts = []
        for entry in self._entries.values():
            item, path = paths.get(entry.name, (OURS + entry.name, ()))
            digest, size = "", entry.num_bytes
            if world_size > 1 and _may_be_shared(layouts.get(entry.name), world_size):
                with self._image[entry.offset : entry.offset + size] as data:
                    digest = xxhash.xxh3_64_hexdigest(data)
            whole, offset = entry.global_shape, entry.global_offset
            parts.append(TensorPart(entry.name, item, path, entry.dtype, entry.shape, whole, offset, size, digest))
        self.inventory = Inventory.of(parts, values)

    def close(self) -> None:
        """Release the image, so that its memory can be unmapped while references to this object exist."""
        self._image.release()

    def value(self, item: str) -> bytes:
        node = self._values[item]
        if node[0] == "o":
            data: bytes = node[1]
            return data
        buffer = io.BytesIO()
        torch.save(decode(msgspec.msgpack.encode(node), self._tensor), buffer)
        return buffer.getvalue()

    @property
    def offsets(self) -> dict[str, int]:
        return {entry.name: entry.offset for entry in self._entries.values()}

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        dtype = TORCH_TYPES[entry.dtype]
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        data = bytearray(self._image[entry.offset : entry.offset + entry.num_bytes])
        return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


@reading_tree()
def named_tensors(tree: bytes) -> dict[str, str]:
    """Return all tensors of a tree: name in the shard to name shared by all ranks.

    Raises: CheckpointError (the tree is malformed).
    """
    root = _root(tree)
    found = {name: OURS + name for node in root.values() for name in _tensors(node)}
    return found | {node[1]: item for item, _, node, is_first in _named(root) if node[0] == "T" and is_first}


def _root(tree: bytes) -> dict[str, Any]:
    with reading_tree():
        kind, items = decoded_tree(tree)
        if kind != "d":
            raise ValueError("it is not a mapping")
        return dict(items)


def _named(root: dict[str, Any]) -> Iterator[tuple[str, Path, list[Any], bool]]:
    """Yield the training state's items: name, path, node, and whether it is the first of that name."""
    taken: set[str] = set()
    for path, node in _walk(root.get(ROOT, ["d", []]), ()):
        item = ".".join(map(str, path))
        yield item, path, node, item not in taken
        taken.add(item)


def _may_be_shared(layout: Layout | None, world_size: int) -> bool:
    """Whether another rank may have the same part: the tensor is replicated, or its mesh covers only some ranks."""
    return layout is None or None in layout[0] or math.prod(layout[1]) < world_size


def _walk(node: list[Any], path: Path) -> list[tuple[Path, list[Any]]]:
    """Return the paths and nodes of a tree's tensors and plain values.

    The parts of a sharded tensor subclass are left out: they cannot be combined into a whole.
    """
    match node:
        case ["w", *_, [[_, tensor]], True, layout]:
            return [(path, tensor if layout is None else [*tensor, layout])]
        case ["w", *_, parts, False, layout]:
            return [found for key, part in parts for found in _walk(part, (*path, key))] if layout is None else []
        case ["d" | "D", items, *_]:
            return [found for key, item in items for found in _walk(item, (*path, str(key)))]
        case ["l", items] if not _is_plain(node):
            return [found for index, item in enumerate(items) for found in _walk(item, (*path, index))]
    return [(path, node)]


def _is_plain(node: list[Any]) -> bool:
    """Whether a list contains neither tensors nor mappings at any depth."""
    return all(item[0] not in ("T", "d", "D", "w") and (item[0] != "l" or _is_plain(item)) for item in node[1])


def _tensors(node: list[Any]) -> list[str]:
    """Return the names of all tensors below a node, including former arrays."""
    return [node[1]] if node[0] in ("T", "n") else [name for inner in _inner(node) for name in _tensors(inner)]


def _inner(node: list[Any]) -> list[Any]:
    match node:
        case ["d" | "D", items, *_]:
            return [item for _, item in items]
        case ["l" | "p", items]:
            return list(items)
        case ["w", _, _, _, _, context, parts, *_]:
            return [context, *(part for _, part in parts)]
    return []


def _can_be_dumped(node: list[Any]) -> bool:
    """Whether the format can hold a plain value; it has no distributed tensors or subclasses within a tuple."""
    is_unknown = node[0] == "w" or (node[0] == "T" and len(node) == 3)
    return not is_unknown and all(map(_can_be_dumped, _inner(node)))


def make_metadata(manifest: GlobalManifest) -> Metadata:
    """Return the format's metadata, without outlast's own items."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored, paths = {}, {}
    for item in manifest.items:
        if not item.path:
            continue
        paths[item.name] = tuple(item.path)
        chunks = []
        for piece in item.pieces:
            if piece.where is None:
                continue
            where = piece.where
            is_tensor = item.dtype is not None
            index = MetadataIndex(item.name, piece.offset) if is_tensor else MetadataIndex(item.name)
            stored[index] = _StorageInfo(manifest.files[where.file].name, where.start, where.num_bytes)
            chunks.append(ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)))
        if item.dtype is None:
            described[item.name] = BytesStorageMetadata()
        else:
            properties = TensorProperties(dtype=TORCH_TYPES[item.dtype])
            described[item.name] = TensorStorageMetadata(properties, torch.Size(item.shape), chunks)
    return Metadata(described, planner_data=paths, storage_data=stored, storage_meta=StorageMeta())


def dump_metadata(manifest: GlobalManifest) -> bytes:
    """Return the content of ``.metadata``: the pickle of :func:`make_metadata`.

    The pickle is assembled by hand, because pickling four objects for each rank and tensor takes ten times as long and
    holds the interpreter lock. With unknown versions of torch's classes the pickler is used.
    """
    return _put_together(manifest) if knows_classes() else pickle.dumps(make_metadata(manifest), _PROTOCOL)


@functools.cache
def knows_classes() -> bool:
    """Return whether the hand-made pickle of a sample manifest equals torch's objects."""
    where = Where(0, 1, 2, 1, 2)
    pieces = (TensorPiece((0, 1), (1, 2), where),)
    items = (
        Item(name="a.w", path=("a", "w"), dtype="F32", shape=(1, 3), pieces=pieces),
        Item(name="v", path=("v",), dtype=None, shape=(), pieces=(TensorPiece((), (), where),)),
    )
    sample = GlobalManifest(
        schema=SCHEMA,
        run="",
        topology="",
        world_size=1,
        iteration=0,
        attempt="",
        restored_from=None,
        finite=True,
        files=(FileEntry(name="f", num_bytes=3, chunks=()),),
        items=items,
        ranks=(),
    )
    try:
        return bool(pickle.loads(_put_together(sample)) == make_metadata(sample))
    except Exception as error:  # noqa: BLE001  any error means an unknown version of torch
        log.info("the index for other readers is pickled by torch's own classes: %s", error)
        return False


def _put_together(manifest: GlobalManifest) -> bytes:
    pickled = _Pickled()
    described, stored, paths = list[bytes](), list[bytes](), list[bytes]()
    files = [pickled.shared(file.name) for file in manifest.files]
    chunk, index, info = (pickled.shared(kind) for kind in (ChunkStorageMetadata, MetadataIndex, _StorageInfo))
    chunk_head = chunk + b")\x81}(" + pickled.shared("offsets")
    sizes, fqn, at = pickled.shared("sizes"), pickled.shared("fqn"), b"N" + pickled.shared("offset")
    index_head, no_index = index + b")\x81}(" + fqn, pickled.shared("index")
    info_head, length = info + b")\x81}(" + pickled.shared("relative_path"), pickled.shared("length")
    start = pickled.shared("offset")
    for item in manifest.items:
        if not item.path:
            continue
        name, shapes = pickled.shared(item.name), dict[tuple[int, ...], bytes]()
        chunks, places = list[bytes](), list[bytes]()
        paths += (name, pickled.value(tuple(item.path)))
        begin = index_head + name + no_index + at
        for piece in item.pieces:
            where = piece.where
            if where is None:
                continue
            shape = shapes.get(piece.shape)
            if shape is None:
                shape = shapes[piece.shape] = pickled.shared(torch.Size(piece.shape))
            offset = pickled.size(piece.offset)
            chunks += (chunk_head, offset, sizes, shape, b"ub")
            place = info_head + files[where.file] + start + _pickled_int(where.start) + length
            places += (begin, offset if item.dtype is not None else b"N", b"ub", place)
            places += (_pickled_int(where.num_bytes), b"ub")
        stored.append(b"".join(places))
        described.append(name)
        if item.dtype is None:
            described.append(pickled.value(BytesStorageMetadata()))
        else:
            properties = pickled.value(TensorProperties(dtype=TORCH_TYPES[item.dtype]))
            head = pickled.shared(TensorStorageMetadata) + b")\x81}(" + pickled.shared("properties") + properties
            size = pickled.shared("size") + pickled.value(torch.Size(item.shape))
            described += (head, size, pickled.shared("chunks"), b"](", b"".join(chunks), b"eub")
    fields = {
        "state_dict_metadata": b"}(" + b"".join(described) + b"u",
        "planner_data": b"}(" + b"".join(paths) + b"u",
        "storage_data": b"}(" + b"".join(stored) + b"u",
        "storage_meta": pickled.value(StorageMeta()),
    }
    body = b"".join(pickled.value(name) + data for name, data in fields.items())
    return pickled.end(pickled.shared(Metadata) + b")\x81}(" + body + b"ub")


class _Pickled:
    """Parts of one pickle, with references to shared values."""

    def __init__(self) -> None:
        self._shared: dict[Any, bytes] = {}
        self._prefix: list[bytes] = []
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._size = self.shared(torch.Size)

    def value(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, _PROTOCOL)
        pickler.fast = True  # without references to earlier values
        pickler.dump(value)
        return buffer.getvalue()[2:-1]  # without the protocol and stop opcodes

    def shared(self, value: Any) -> bytes:
        """Return a reference to an immutable value, pickled once."""
        found = self._shared.get(value)
        if found is None:
            number = struct.pack("<I", len(self._shared))
            self._prefix.append(self.value(value) + b"r" + number + b"0")
            found = self._shared[value] = b"j" + number
        return found

    def size(self, lengths: tuple[int, ...]) -> bytes:
        found = self._sizes.get(lengths)
        if found is None:
            found = self._size + b"(" + b"".join(map(_pickled_int, lengths)) + b"t\x85R"
            self._sizes[lengths] = found
        return found

    def end(self, body: bytes) -> bytes:
        return bytes((0x80, _PROTOCOL)) + b"".join(self._prefix) + body + b"."


_PROTOCOL = 3
"""Protocol 3 has no frames, so parts can be concatenated."""


def _pickled_int(number: int) -> bytes:
    return b"J" + number.to_bytes(4, "little") if number < 1 << 31 else b"\x8a\x09" + number.to_bytes(9, "little")
