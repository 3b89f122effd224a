"""Who writes what of a generation, and where in which file it lies. Pure; nothing here imports torch.

Each rank has an *inventory*; :func:`assign` gives each rank a *duty*, so that each part is written once and the work is
even; :class:`Packing` fills a rank's files; :func:`compose` makes the manifest's entries of what all ranks wrote.

A tensor lies in a file as ``torch.save`` writes it, made by hand around bytes that lie elsewhere: a stored zip archive
of four records, the pickled description, the byte order, the format's version and, last, the raw bytes, which begin at
a multiple of 64. So all but the raw bytes is known beforehand, and these are copied from where they lie without passing
through an interpreter. The records' checksums are zero: torch looks at none, and the file that the archive becomes part
of has digests of its own.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from outlast.checkpoint.dcp.assemble import Content, Range
from outlast.checkpoint.dcp.manifest import FileEntry, Item, OwnTensor, RankEntry, TensorPiece, Where
from outlast.checkpoint.manifest import TensorEntry
from outlast.checkpoint.shard import DTYPE_NAMES, ELEMENT_BYTES
from outlast.errors import CheckpointError


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a tensor."""

    name: str
    """In the rank's shard."""
    item: str
    """The name that it has for all ranks."""
    path: tuple[str | int, ...]
    """Keys and indices that lead to it in the state; empty: other readers of the format do not get to see it."""
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    num_bytes: int
    digest: str
    """xxh3_64, where another rank may have the same part; else empty."""


class PlainValue(msgspec.Struct, frozen=True, array_like=True):
    """A plain value."""

    item: str
    path: tuple[str | int, ...]


class Inventory(msgspec.Struct, frozen=True):
    """All that a rank has."""

    parts: tuple[TensorPart, ...]
    values: tuple[PlainValue, ...]


class Duty(msgspec.Struct, frozen=True):
    """What a rank writes, beside its tree: indices into its inventory."""

    parts: tuple[int, ...]
    """Under the names that all ranks share."""
    own: tuple[int, ...]
    """As this rank's alone: they differ from what has the name."""
    values: tuple[int, ...]


class WriteReport(msgspec.Struct, frozen=True):
    """What a rank wrote; places are in the order of its duty, files counted from its own first."""

    files: tuple[FileEntry, ...]
    finite: bool
    tree: Where
    parts: tuple[Where, ...]
    own: tuple[Where, ...]
    values: tuple[Where, ...]


@dataclass(slots=True)
class _PartGroup:
    """Equal parts of several ranks, the first's first."""

    first: TensorPart
    holders: list[tuple[int, int]] = field(default_factory=list)
    """Ranks, and the index that the part has for each."""


def assign(inventories: Sequence[Inventory]) -> tuple[Duty, ...]:
    """Share the writing out.

    A part that several ranks have alike is written by that one of them which has the least to write. Of a part that
    ranks have in different versions, the lowest rank's counts for all, the others write theirs as their own. A plain
    value is written by the lowest rank that has it.

    Args:
        inventories: What each rank has; equal arguments give equal results.

    Raises:
        CheckpointError: The parts of a tensor do not make up the whole; loaded by another number of ranks it would
            have holes.
    """
    groups, own = _group(inventories)
    _check_whole(groups)
    parts: list[list[int]] = [[] for _ in inventories]
    load = [sum(inventory.parts[index].num_bytes for index in own[rank]) for rank, inventory in enumerate(inventories)]
    # A part without elements is only listed; a tensor without elements is written.
    written = [group for group in groups if group.first.num_bytes or not math.prod(group.first.global_shape)]
    # Who has no choice first, then the largest: what is left evens out.
    for group in sorted(written, key=lambda group: (len(group.holders) > 1, -group.first.num_bytes)):
        rank, index = min(group.holders, key=lambda holder: (load[holder[0]], holder[0]))
        parts[rank].append(index)
        load[rank] += group.first.num_bytes
    values = _first_holders(inventories)
    return tuple(
        Duty(tuple(sorted(parts[rank])), tuple(own[rank]), tuple(values[rank])) for rank in range(len(inventories))
    )


def _group(inventories: Sequence[Inventory]) -> tuple[list[_PartGroup], list[list[int]]]:
    """Return the parts that count for all, and for each rank the indices of those that count for it alone."""
    firsts: dict[str, TensorPart] = {}
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], _PartGroup] = {}
    own: list[list[int]] = [[] for _ in inventories]
    for rank, inventory in enumerate(inventories):
        for index, part in enumerate(inventory.parts):
            first = firsts.setdefault(part.item, part)
            if (first.dtype, first.global_shape, first.path) != (part.dtype, part.global_shape, part.path):
                own[rank].append(index)
                continue
            group = groups.setdefault((part.item, part.offset, part.shape), _PartGroup(part))
            if group.first.digest == part.digest:
                group.holders.append((rank, index))
            else:
                own[rank].append(index)
    return list(groups.values()), own


def _check_whole(groups: Sequence[_PartGroup]) -> None:
    have = Counter[str]()
    for group in groups:
        have[group.first.item] += math.prod(group.first.shape)
    for name, shape in {group.first.item: group.first.global_shape for group in groups}.items():
        if have[name] != (whole := math.prod(shape)):
            raise CheckpointError(f"tensor {name!r}: the ranks' parts have {have[name]} elements of {whole}")


def _first_holders(inventories: Sequence[Inventory]) -> list[list[int]]:
    taken: set[str] = set()
    values: list[list[int]] = [[] for _ in inventories]
    for rank, inventory in enumerate(inventories):
        for index, value in enumerate(inventory.values):
            if value.item not in taken:
                taken.add(value.item)
                values[rank].append(index)
    return values


FILE_BYTES = 256 << 20
"""A file that has reached it is full; several files are written at once."""


@dataclass(slots=True)
class Packing:
    """A rank's files, filled one after the other.

    Args:
        file_bytes: A file that has reached it is full.
    """

    file_bytes: int = FILE_BYTES
    files: list[list[Content]] = field(default_factory=list)
    """What each file consists of."""
    _used: int = 0

    def add_tensor(self, entry: TensorEntry) -> Where:
        """Add a tensor of the image, as ``torch.load`` reads it; return where it lies."""
        prefix, suffix = tensor_blob(entry.dtype, entry.shape, entry.num_bytes)
        raw = Range(entry.offset, entry.num_bytes, entry.dtype)
        return self._add((prefix, raw, suffix), len(prefix), entry.num_bytes)

    def add_range(self, offset: int, num_bytes: int) -> Where:
        """Add bytes of the image; return where they lie."""
        return self._add((Range(offset, num_bytes),), 0, num_bytes)

    def add_bytes(self, data: bytes) -> Where:
        """Add bytes; return where they lie."""
        return self._add((data,), 0, len(data))

    def _add(self, contents: Iterable[Content], lead: int, data_bytes: int) -> Where:
        if not self.files or self._used >= self.file_bytes:
            self.files.append([])
            self._used = 0
        if padding := -self._used % ALIGNMENT:
            self.files[-1].append(bytes(padding))
        start = self._used = self._used + padding
        for content in contents:
            self.files[-1].append(content)
            self._used += len(content) if isinstance(content, bytes) else content.num_bytes
        return Where(len(self.files) - 1, start, self._used - start, start + lead, data_bytes)


class Composed(NamedTuple):
    """What of a manifest comes from the ranks."""

    files: tuple[FileEntry, ...]
    items: tuple[Item, ...]
    ranks: tuple[RankEntry, ...]
    finite: bool


def compose(inventories: Sequence[Inventory], duties: Sequence[Duty], reports: Sequence[WriteReport]) -> Composed:
    """Put together what lies where.

    Args:
        inventories: What each rank had.
        duties: What each had to write.
        reports: What each wrote.
    """
    items: dict[str, Item] = {}
    written: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Where] = {}
    shared: dict[str, tuple[TensorPart, dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]]] = {}
    files, entries = list[FileEntry](), list[RankEntry]()
    for rank, (inventory, duty, report) in enumerate(zip(inventories, duties, reports, strict=True)):

        def find(wheres: Iterable[Where], first: int = len(files)) -> list[Where]:
            return [msgspec.structs.replace(where, file=first + where.file) for where in wheres]

        files += report.files
        for index, where in zip(duty.parts, find(report.parts), strict=True):
            part = inventory.parts[index]
            written[part.item, part.offset, part.shape] = where
        for index, where in zip(duty.values, find(report.values), strict=True):
            value = inventory.values[index]
            piece = TensorPiece((), (), where)
            items[value.item] = Item(name=value.item, path=value.path, dtype=None, shape=(), pieces=(piece,))
        own = dict(zip(duty.own, find(report.own), strict=True))
        tensors = []
        for index, part in enumerate(inventory.parts):
            if index in own:
                place = own[index] if math.prod(part.shape) else None
                tensors.append(OwnTensor(name=part.name, dtype=part.dtype, shape=part.shape, where=place))
            else:
                _, holders = shared.setdefault(part.item, (part, {}))
                holders.setdefault((part.offset, part.shape), []).append(rank)
        entries.append(RankEntry(tree=find([report.tree])[0], tensors=tuple(tensors)))
    for name, (part, holders) in shared.items():
        pieces = []
        for (offset, shape), ranks in holders.items():
            listed = tuple(ranks) if len(holders) > 1 else ()
            pieces.append(TensorPiece(offset, shape, written.get((name, offset, shape)), listed))
        items[name] = Item(name=name, path=part.path, dtype=part.dtype, shape=part.global_shape, pieces=tuple(pieces))
    return Composed(tuple(files), tuple(items.values()), tuple(entries), all(report.finite for report in reports))


ALIGNMENT = 64
"""Raw bytes begin at a multiple of it, in the blob as in the file."""

_STORAGES = {
    "F64": "Double",
    "F32": "Float",
    "F16": "Half",
    "BF16": "BFloat16",
    "C64": "ComplexFloat",
    "I64": "Long",
    "I32": "Int",
    "I16": "Short",
    "I8": "Char",
    "U8": "Byte",
    "BOOL": "Bool",
}
"""Element types with a storage class of their own in torch; the others are made of untyped storage."""
_TORCH_NAMES = {short: name.removeprefix("torch.") for name, short in DTYPE_NAMES.items()}
_ZIP64_LIMIT = 0xFFFFFFFF
_DATE = 33
"""1 January 1980, the earliest that the format knows."""


def tensor_blob(dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[bytes, bytes]:
    """Return what precedes, up to a multiple of 64, and what follows the raw bytes of a contiguous tensor.

    Args:
        dtype: safetensors' name of the element type.
        shape: Of the tensor.
        num_bytes: Of the raw bytes.

    Raises:
        ValueError: There is no such type, or the tensor has another number of bytes.
    """
    if math.prod(shape) * ELEMENT_BYTES.get(dtype, -1) != num_bytes:
        raise ValueError(f"a tensor of {dtype} {shape} does not take {num_bytes} bytes")
    prefix, records = bytearray(), []
    for name, content in (
        ("data.pkl", _pickle(dtype, shape, num_bytes)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        record = _ZipRecord(f"archive/{name}".encode(), len(content), len(prefix))
        records.append(record)
        prefix += record.header() + content
    raw = _ZipRecord(b"archive/data/0", num_bytes, len(prefix))
    unpadded = len(prefix) + len(raw.header(padding=4))
    prefix += raw.header(padding=4 + -unpadded % ALIGNMENT)
    return bytes(prefix), _directory([*records, raw], len(prefix) + num_bytes)


@dataclass(frozen=True, slots=True)
class _ZipRecord:
    path: bytes
    size: int
    offset: int

    @property
    def fields(self) -> tuple[int, int, bytes]:
        """Which version of the format it needs, its size for 32 bits, and its size again where these are too few."""
        if self.size < _ZIP64_LIMIT:
            return 10, self.size, b""
        return 45, _ZIP64_LIMIT, struct.pack("<HHQQ", 1, 16, self.size, self.size)

    def header(self, *, padding: int = 0) -> bytes:
        """Return what precedes it.

        Args:
            padding: Bytes that an extra field fills, at least 4, or 0.
        """
        version, size, extra = self.fields
        if padding:
            extra += b"FB" + struct.pack("<H", padding - 4) + b"Z" * (padding - 4)
        lengths = size, size, len(self.path), len(extra)
        return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", version, 0, 0, 0, _DATE, 0, *lengths) + self.path + extra


def _directory(records: list[_ZipRecord], start: int) -> bytes:
    """Return the archive's directory, which lies at ``start``."""
    entries = bytearray()
    for record in records:
        version, size, extra = record.fields
        sizes = (0, size, size, len(record.path), len(extra))
        entries += struct.pack("<4sHHHHHHIIIHH", b"PK\1\2", version, version, 0, 0, 0, _DATE, *sizes)
        entries += struct.pack("<HHHII", 0, 0, 0, 0, record.offset) + record.path + extra
    end = b""
    if start >= _ZIP64_LIMIT:
        counts = (len(records), len(records), len(entries), start)
        end += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, *counts)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, start + len(entries), 1)
    place = min(start, _ZIP64_LIMIT)
    end += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, len(records), len(records), len(entries), place, 0)
    return bytes(entries) + end


def _pickle(dtype: str, shape: tuple[int, ...], num_bytes: int) -> bytes:
    """Return the description of a tensor: which function of torch makes it of which storage, protocol 2."""
    strides, step = list[int](), 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(1, length)
    if dtype in _STORAGES:
        rebuild, storage = "_rebuild_tensor_v2", _global("torch", f"{_STORAGES[dtype]}Storage")
        length, tail = num_bytes // ELEMENT_BYTES[dtype], b""
    else:
        rebuild, storage = "_rebuild_tensor_v3", _global("torch.storage", "UntypedStorage")
        length, tail = num_bytes, _global("torch", _TORCH_NAMES[dtype])
    stored = b"(" + _text("storage") + storage + _text("0") + _text("cpu") + _int(length) + b"tQ"
    hooks = _global("collections", "OrderedDict") + b")R"
    arguments = stored + _int(0) + _ints(shape) + _ints(tuple(strides)) + b"\x89" + hooks + tail
    return b"\x80\x02" + _global("torch._utils", rebuild) + b"(" + arguments + b"tR."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _int(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


def _ints(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, numbers)) + b"t"
