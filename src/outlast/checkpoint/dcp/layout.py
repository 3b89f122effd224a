"""Which rank writes which part of a checkpoint, and at which offset of which file. Pure; must not import torch.

Each rank has an *inventory*; :func:`assign` gives each rank a *duty*, so that each part is written once and the work is
balanced; :func:`pack` fills a rank's files; :func:`compose` makes the manifest's entries. Equal data of several ranks,
such as an inventory's table, is one object; the work grows with the distinct objects.

A tensor is stored as ``torch.save`` writes it: an uncompressed zip archive with the pickled description, the byte
order, the format's version and the raw bytes, 64-byte aligned. All but the raw bytes is generated here; the writer
process copies the raw bytes. Record checksums are zero: torch ignores them, and the file has digests.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from outlast.checkpoint.dcp.assemble import Content, Range
from outlast.checkpoint.dcp.manifest import FileEntry, Item, OwnTensor, RankEntry, TensorPiece, Where
from outlast.checkpoint.shard import DIGEST_BYTES, DTYPE_NAMES, ELEMENT_BYTES, unpack_digests
from outlast.errors import CheckpointError


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    name: str
    """Name in the rank's shard."""
    item: str
    """Name shared by all ranks."""
    path: tuple[str | int, ...]
    """Keys and indices that lead to the tensor in the state; empty: hidden from other readers of the format."""
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    num_bytes: int
    digest: str
    """xxh3_64 if another rank may have the same part; otherwise empty."""


class PlainValue(msgspec.Struct, frozen=True, array_like=True):
    item: str
    path: tuple[str | int, ...]


class TableRow(msgspec.Struct, frozen=True, array_like=True):
    """The part of a tensor's description that ranks share."""

    name: str
    item: str
    path: tuple[str | int, ...]
    dtype: str
    num_bytes: int
    box: int
    """Index into the table's boxes and each rank's offsets."""
    is_digested: bool


class InventoryTable(msgspec.Struct, frozen=True, array_like=True):
    """The inventory data that many ranks share: names, types and shapes, but not offsets."""

    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Distinct (part shape, whole shape); the parts of one box have the same offset."""
    rows: tuple[TableRow, ...]
    values: tuple[PlainValue, ...]


class Inventory(msgspec.Struct, frozen=True):
    table: InventoryTable
    offsets: tuple[tuple[int, ...], ...]
    """One for each box of the table."""
    digests: bytes
    """Concatenated digests of the digested rows of the training state."""
    private: bytes
    """Concatenated digests of the other digested rows, such as random number states, which differ between ranks."""

    @classmethod
    def of(cls, parts: Iterable[TensorPart], values: Iterable[PlainValue]) -> Inventory:
        boxes: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], int] = {}
        rows, digests = list[TableRow](), {True: "", False: ""}
        for part in parts:
            box = boxes.setdefault((part.shape, part.global_shape, part.offset), len(boxes))
            digests[bool(part.path)] += part.digest
            is_digested = part.digest != ""
            rows.append(TableRow(part.name, part.item, part.path, part.dtype, part.num_bytes, box, is_digested))
        table = InventoryTable(tuple(box[:2] for box in boxes), tuple(rows), tuple(values))
        offsets = tuple(box[2] for box in boxes)
        return cls(table, offsets, bytes.fromhex(digests[True]), bytes.fromhex(digests[False]))

    def rows(self, *, private: bool) -> Iterator[tuple[int, TableRow, bytes]]:
        """Yield index, row and digest (or empty) of the training state's rows, or of the other (private) rows."""
        digests, at = self.private if private else self.digests, 0
        for index, row in enumerate(self.table.rows):
            if bool(row.path) != private:
                end = at + DIGEST_BYTES if row.is_digested else at
                yield index, row, digests[at:end]
                at = end


class InventoryRoot(msgspec.Struct, frozen=True, array_like=True):
    """An inventory as sent: data that other ranks may share is sent once and referenced by its digest."""

    table: str
    """Digest of the :class:`InventoryTable`."""
    digests: str
    """Digest of the :class:`PartDigests`."""
    offsets: tuple[tuple[int, ...], ...]
    private: bytes = b""


class PartDigests(msgspec.Struct, frozen=True, array_like=True):
    """An inventory's digests of the training state."""

    packed: bytes


def join(
    roots: Sequence[InventoryRoot], tables: Mapping[str, InventoryTable], digests: Mapping[str, PartDigests]
) -> list[Inventory]:
    """Return the ranks' inventories; equal data is one object.

    Raises: CheckpointError (a rank's message contradicts its table).
    """
    forms = {}
    for name, table in tables.items():
        num_digests = Counter(bool(row.path) for row in table.rows if row.is_digested)
        dimensions = [len(shape) for shape, _ in table.boxes]
        forms[name] = dimensions, DIGEST_BYTES * num_digests[True], DIGEST_BYTES * num_digests[False]
    found, offsets = list[Inventory](), dict[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]()
    for rank, root in enumerate(roots):
        packed = digests[root.digests].packed
        if (list(map(len, root.offsets)), len(packed), len(root.private)) != forms[root.table]:
            raise CheckpointError(f"rank {rank}: what it has contradicts its table; do all ranks run one version?")
        same = offsets.setdefault(root.offsets, root.offsets)
        found.append(Inventory(tables[root.table], same, packed, root.private))
    return found


class Duty(msgspec.Struct, frozen=True):
    """The inventory indices that a rank writes, in addition to its tree."""

    parts: tuple[int, ...]
    """Written under the names that all ranks share."""
    own: tuple[int, ...]
    """Written as this rank's own, because the value differs from the shared one."""
    values: tuple[int, ...]


Spans: TypeAlias = tuple[tuple[int, int], ...]


class Order(msgspec.Struct, frozen=True, array_like=True):
    """A duty as sent: runs of indices as (first, last + 1)."""

    parts: Spans
    own: Spans
    values: Spans

    @classmethod
    def of(cls, duty: Duty) -> Order:
        return cls(_spans(duty.parts), _spans(duty.own), _spans(duty.values))

    @property
    def duty(self) -> Duty:
        return Duty(
            *(tuple(i for span in spans for i in range(*span)) for spans in (self.parts, self.own, self.values))
        )


def _spans(indices: Sequence[int]) -> Spans:
    ends = [at for at in range(1, len(indices)) if indices[at] != indices[at - 1] + 1]
    edges = [0, *ends, len(indices)] if indices else []
    return tuple((indices[begin], indices[end - 1] + 1) for begin, end in itertools.pairwise(edges))


class WrittenFile(msgspec.Struct, frozen=True, array_like=True):
    num_bytes: int
    digests: bytes
    """Concatenated xxh3_64 of every 8 MiB."""


class WriteReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wrote; offsets follow from its inventory and duty, see :func:`pack`."""

    files: tuple[WrittenFile, ...]
    finite: bool
    tree_bytes: int
    value_bytes: tuple[int, ...]
    """In the order of the duty."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Locations of a rank's parts, in the order of its duty; files are counted from the rank's first."""

    parts: tuple[Where, ...]
    own: tuple[Where, ...]
    tree: Where
    values: tuple[Where, ...]
    sizes: tuple[int, ...]


def kinds_of(inventories: Sequence[Inventory]) -> list[tuple[Inventory, list[int]]]:
    """Return the distinct training states with their ranks, by lowest rank.

    Inventories are equal if their objects are identical; private rows are ignored.
    """
    found: dict[tuple[int, int, int], tuple[Inventory, list[int]]] = {}
    for rank, one in enumerate(inventories):
        found.setdefault((id(one.table), id(one.offsets), id(one.digests)), (one, []))[1].append(rank)
    return list(found.values())


@dataclass(slots=True)
class _PartGroup:
    """Equal parts of several ranks; the first one's description."""

    first: TableRow
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    digest: bytes
    holders: list[tuple[int, int]] = field(default_factory=list)
    """(holder, index of the part in the holder's inventory)."""

    @property
    def is_written(self) -> bool:
        """Whether the part needs writing: an empty part of a non-empty tensor is only listed."""
        return self.first.num_bytes > 0 or not math.prod(self.whole)


def assign(inventories: Sequence[Inventory]) -> tuple[Duty, ...]:
    """Distribute the writing.

    A part that several ranks have is written by the one with the least to write. If ranks have different versions of a
    part, the lowest rank's counts for all and the others write theirs as their own. A plain value is written by the
    lowest rank that has it. Equal arguments give equal results. Raises: CheckpointError (the parts of a tensor do not
    cover it, so another world size would load holes).
    """
    kinds, single = kinds_of(inventories), find_single(inventories)
    groups, own_of_kind = _group([(one, one.rows(private=False)) for one, _ in kinds], single)
    private, own = _group([(one, one.rows(private=True)) for one in inventories], single)
    _check_whole([*groups, *private], single.values())
    load = [0] * len(inventories)
    for (inventory, ranks), mine in zip(kinds, own_of_kind, strict=True):
        num_bytes = sum(inventory.table.rows[index].num_bytes for index in mine)
        for rank in ranks:
            load[rank] = num_bytes + sum(inventory.table.rows[index].num_bytes for index in own[rank])
            own[rank] = sorted(own[rank] + mine)
    parts: list[list[int]] = [[] for _ in inventories]
    for rank, inventory in enumerate(inventories):
        load[rank] += single[id(inventory.table)].num_bytes
    for group in private:
        if group.is_written:
            rank, index = min(group.holders, key=lambda holder: (load[holder[0]], holder[0]))
            parts[rank].append(index)
            load[rank] += group.first.num_bytes
    # Of each kind the rank with the least to write comes first; a rank has one kind.
    least = [sorted((load[rank], rank) for rank in ranks) for _, ranks in kinds]

    def has_choice(group: _PartGroup) -> bool:
        return len(group.holders) > 1 or len(least[group.holders[0][0]]) > 1

    # Parts without a choice first, then the largest, so that the small ones balance the load.
    for group in sorted(groups, key=lambda group: (has_choice(group), -group.first.num_bytes)):
        if group.is_written:
            kind, index = min(group.holders, key=lambda holder: least[holder[0]][0])
            num_bytes, rank = least[kind][0]
            parts[rank].append(index)
            heapq.heapreplace(least[kind], (num_bytes + group.first.num_bytes, rank))
    values = _first_holders(kinds)
    duties = []
    for rank, found in enumerate(parts):
        of_table = single[id(inventories[rank].table)].rows
        written = tuple(sorted((*found, *of_table))) if found else of_table
        duties.append(Duty(written, tuple(own[rank]), tuple(values.get(rank, ()))))
    return tuple(duties)


@dataclass(slots=True)
class SingleRows:
    """The rows of a table that no other rank shares: distinct parts of a distributed tensor."""

    table: InventoryTable
    rows: tuple[int, ...]
    num_bytes: int
    num_ranks: int = 0


def find_single(inventories: Sequence[Inventory]) -> dict[int, SingleRows]:
    """Return, by ``id(table)``, the rows that need no comparison with other ranks.

    They have no digest, because the layout gives each rank a different part.
    """
    found: dict[int, SingleRows] = {}
    firsts: dict[str, tuple[TableRow, tuple[int, ...]]] = {}
    for inventory in inventories:
        table = inventory.table
        if id(table) not in found:
            rows = []
            for index, row in enumerate(table.rows):
                whole = table.boxes[row.box][1]
                first, first_whole = firsts.setdefault(row.item, (row, whole))
                if not row.is_digested and row.num_bytes and _is_same(row, whole, first, first_whole):
                    rows.append(index)
            found[id(table)] = SingleRows(table, tuple(rows), sum(table.rows[index].num_bytes for index in rows))
        found[id(table)].num_ranks += 1
    return found


def _is_same(row: TableRow, whole: tuple[int, ...], first: TableRow, first_whole: tuple[int, ...]) -> bool:
    return row is first or (row.dtype, row.path, whole) == (first.dtype, first.path, first_whole)


def _group(
    holders: Sequence[tuple[Inventory, Iterable[tuple[int, TableRow, bytes]]]], single: Mapping[int, SingleRows]
) -> tuple[list[_PartGroup], list[list[int]]]:
    """Return the groups of shared parts and, for each holder, the indices of its own parts.

    Rows in ``single`` are left out.
    """
    firsts: dict[str, tuple[TableRow, tuple[int, ...]]] = {}
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], _PartGroup] = {}
    own: list[list[int]] = [[] for _ in holders]
    left_out = {table: frozenset(one.rows) for table, one in single.items()}
    for holder, (inventory, rows) in enumerate(holders):
        boxes, offsets, skipped = inventory.table.boxes, inventory.offsets, left_out[id(inventory.table)]
        for index, row, digest in rows:
            shape, whole = boxes[row.box]
            first, first_whole = firsts.setdefault(row.item, (row, whole))
            if index in skipped:
                continue
            if not _is_same(row, whole, first, first_whole):
                own[holder].append(index)
                continue
            key = row.item, offsets[row.box], shape
            group = groups.get(key)
            if group is None:
                group = groups[key] = _PartGroup(row, shape, whole, digest)
            if group.digest == digest:
                group.holders.append((holder, index))
            else:
                own[holder].append(index)
    return list(groups.values()), own


def _check_whole(groups: Iterable[_PartGroup], single: Iterable[SingleRows]) -> None:
    have, wholes = Counter[str](), dict[str, tuple[int, ...]]()
    for one in single:
        for index in one.rows:
            row = one.table.rows[index]
            shape, wholes[row.item] = one.table.boxes[row.box]
            have[row.item] += one.num_ranks * math.prod(shape)
    for group in groups:
        have[group.first.item] += math.prod(group.shape)
        wholes[group.first.item] = group.whole
    for name, whole in wholes.items():
        if have[name] != math.prod(whole):
            raise CheckpointError(f"tensor {name!r}: the ranks' parts have {have[name]} elements of {math.prod(whole)}")


def _first_holders(kinds: Sequence[tuple[Inventory, Sequence[int]]]) -> dict[int, list[int]]:
    taken: set[str] = set()
    values: dict[int, list[int]] = {}
    for inventory, ranks in kinds:
        for index, value in enumerate(inventory.table.values):
            if value.item not in taken:
                taken.add(value.item)
                values.setdefault(ranks[0], []).append(index)
    return values


FILE_BYTES = 256 << 20
"""Size from which a file takes no more tensors; several files are written at once."""


@dataclass(slots=True)
class Packing:
    file_bytes: int = FILE_BYTES
    files: list[list[Content]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add_tensor(self, dtype: str, shape: tuple[int, ...], raw: Range) -> Where:
        """Add a tensor of the image in ``torch.load`` format; return its location."""
        prefix, suffix = tensor_blob(dtype, shape, raw.num_bytes)
        return self.add((prefix, raw, suffix), len(prefix), raw.num_bytes)

    def add(self, contents: Iterable[Content], lead: int, data_bytes: int) -> Where:
        """Add a blob whose raw bytes begin after ``lead``; return its location."""
        if not self.files or self.sizes[-1] >= self.file_bytes:
            self.files.append([])
            self.sizes.append(0)
        if padding := -self.sizes[-1] % ALIGNMENT:
            self.files[-1].append(bytes(padding))
        start = used = self.sizes[-1] + padding
        for content in contents:
            self.files[-1].append(content)
            used += len(content) if isinstance(content, bytes) else content.num_bytes
        self.sizes[-1] = used
        return Where(len(self.files) - 1, start, used - start, start + lead, data_bytes)


def pack(
    packing: Packing,
    inventory: Inventory,
    duty: Duty,
    tree: Range,
    values: Iterable[bytes],
    offsets: Mapping[str, int],
    examined: Container[str] | None = None,
) -> Packed:
    """Fill a rank's files in a fixed order, so that rank 0 can derive all locations from a few sizes.

    Args:
        values: The plain values of the duty, as bytes.
        examined: Names of the tensors to check for infinities and NaN; ``None`` = all.
    """
    rows, boxes = inventory.table.rows, inventory.table.boxes

    def add(index: int) -> Where:
        row = rows[index]
        raw = Range(offsets[row.name], row.num_bytes, row.dtype if examined is None or row.name in examined else "")
        return packing.add_tensor(row.dtype, boxes[row.box][0], raw)

    return Packed(
        parts=tuple(add(index) for index in duty.parts),
        own=tuple(add(index) for index in duty.own),
        tree=packing.add((tree,), 0, tree.num_bytes),
        values=tuple(packing.add((value,), 0, len(value)) for value in values),
        sizes=tuple(packing.sizes),
    )


_Shared: TypeAlias = dict[str, tuple[TableRow, tuple[int, ...], list[TensorPiece]]]
"""Tensors by their shared name: row, shape of the whole, pieces so far."""


class Composed(NamedTuple):
    """The manifest fields that come from the ranks."""

    files: tuple[FileEntry, ...]
    items: tuple[Item, ...]
    ranks: tuple[RankEntry, ...]
    finite: bool


def compose(
    inventories: Sequence[Inventory],
    duties: Sequence[Duty],
    reports: Sequence[WriteReport],
    *,
    file_bytes: int,
    name_of: Callable[[int, int], str],
) -> Composed:
    """Combine the ranks' reports into manifest entries.

    Args:
        name_of: Returns a file's name from its rank and number.

    Raises: CheckpointError (a rank's files do not match its duty).
    """
    single, known = find_single(inventories), dict[tuple[int, Duty, int, tuple[int, ...]], Packed]()
    left_out = {table: frozenset(one.rows) for table, one in single.items()}
    items: dict[str, Item] = {}
    shared: _Shared = {}
    written: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Where] = {}
    files, entries = list[FileEntry](), list[RankEntry]()
    for rank, (inventory, duty, report) in enumerate(zip(inventories, duties, reports, strict=True)):
        first, table = len(files), inventory.table
        key = id(table), duty, report.tree_bytes, report.value_bytes
        if (packed := known.get(key)) is None:  # once for all ranks that wrote the same layout
            nowhere = dict.fromkeys((row.name for row in table.rows), 0)
            values = map(bytes, report.value_bytes)
            packed = pack(Packing(file_bytes), inventory, duty, Range(0, report.tree_bytes), values, nowhere)
            known[key] = packed
        if packed.sizes != tuple(file.num_bytes for file in report.files):
            raise CheckpointError(
                "the files of a rank are not as long as they should be; do all ranks run one version?"
            )
        rows, boxes, offsets, is_single = table.rows, table.boxes, inventory.offsets, left_out[id(table)]

        def move(where: Where, first: int = first) -> Where:
            return Where(first + where.file, where.start, where.num_bytes, where.data_start, where.data_bytes)

        files += [
            FileEntry(name=name_of(rank, number), num_bytes=file.num_bytes, chunks=unpack_digests(file.digests))
            for number, file in enumerate(report.files)
        ]
        ranks = (rank,)
        for index, where in zip(duty.parts, packed.parts, strict=True):
            row = rows[index]
            shape, whole = boxes[row.box]
            if index in is_single:
                piece = TensorPiece(offsets[row.box], shape, move(where), ranks)
                shared.setdefault(row.item, (row, whole, []))[2].append(piece)
            else:
                written[row.item, offsets[row.box], shape] = move(where)
        for index, where in zip(duty.values, packed.values, strict=True):
            value = table.values[index]
            piece = TensorPiece((), (), move(where))
            items[value.item] = Item(name=value.item, path=value.path, dtype=None, shape=(), pieces=(piece,))
        tensors = []
        for index, where in zip(duty.own, packed.own, strict=True):
            row, shape = table.rows[index], table.boxes[table.rows[index].box][0]
            place = move(where) if math.prod(shape) else None
            tensors.append(OwnTensor(name=row.name, dtype=row.dtype, shape=shape, where=place))
        entries.append(RankEntry(tree=move(packed.tree), tensors=tuple(tensors)))
    _add_compared(shared, inventories, duties, left_out, written)
    for name, (row, whole, found) in shared.items():
        # A single piece lists no ranks.
        pieces = found if len(found) > 1 else [msgspec.structs.replace(found[0], ranks=())]
        items[name] = Item(name=name, path=row.path, dtype=row.dtype, shape=whole, pieces=tuple(pieces))
    return Composed(tuple(files), tuple(items.values()), tuple(entries), all(report.finite for report in reports))


def _add_compared(
    shared: _Shared,
    inventories: Sequence[Inventory],
    duties: Sequence[Duty],
    left_out: Mapping[int, frozenset[int]],
    written: Mapping[tuple[str, tuple[int, ...], tuple[int, ...]], Where],
) -> None:
    found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[TableRow, tuple[int, ...], list[int]]] = {}
    of_all = [(one, one.rows(private=False), ranks) for one, ranks in kinds_of(inventories)]
    of_each = [(one, one.rows(private=True), [rank]) for rank, one in enumerate(inventories)]
    for inventory, rows, ranks in (*of_all, *of_each):
        # In the training state, a rank's own parts are the same for all ranks of a kind.
        skipped = left_out[id(inventory.table)].union(duties[ranks[0]].own)
        for index, row, _ in rows:
            if index not in skipped:
                shape, whole = inventory.table.boxes[row.box]
                found.setdefault((row.item, inventory.offsets[row.box], shape), (row, whole, []))[2].extend(ranks)
    for key, (row, whole, holders) in found.items():
        piece = TensorPiece(key[1], key[2], written.get(key), tuple(sorted(holders)))
        shared.setdefault(row.item, (row, whole, []))[2].append(piece)


ALIGNMENT = 64
"""Alignment of raw bytes, in the blob and in the file."""

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
"""Element types with a typed storage class in torch; the others use untyped storage."""
_TORCH_NAMES = {short: name.removeprefix("torch.") for name, short in DTYPE_NAMES.items()}
_ZIP64_LIMIT = 0xFFFFFFFF
_DATE = 33
"""1 January 1980, the format's earliest date."""


@functools.lru_cache(4096)
def tensor_blob(dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes before (padded to 64) and after the raw bytes of a contiguous tensor.

    Raises: ValueError (the type is unknown, or the tensor has another size).
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
        """Format version, 32-bit size field, and the zip64 extra field if the size exceeds 32 bits."""
        if self.size < _ZIP64_LIMIT:
            return 10, self.size, b""
        return 45, _ZIP64_LIMIT, struct.pack("<HHQQ", 1, 16, self.size, self.size)

    def header(self, *, padding: int = 0) -> bytes:
        """Return the local header.

        Args:
            padding: Bytes of an extra padding field; 0 or at least 4.
        """
        version, size, extra = self.fields
        if padding:
            extra += b"FB" + struct.pack("<H", padding - 4) + b"Z" * (padding - 4)
        lengths = size, size, len(self.path), len(extra)
        return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", version, 0, 0, 0, _DATE, 0, *lengths) + self.path + extra


def _directory(records: list[_ZipRecord], start: int) -> bytes:
    """Return the archive's central directory, located at ``start``."""
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
    """Return the pickled tensor description, protocol 2."""
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
