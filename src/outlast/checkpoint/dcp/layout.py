"""Who writes what of a generation, and where in which file it lies. Pure; nothing here imports torch.

Each rank has an *inventory*; :func:`assign` gives each rank a *duty*, so that each part is written once and the work is
even; :class:`Packing` fills a rank's files; :func:`compose` makes the manifest's entries of what all ranks wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from outlast.checkpoint.dcp.assemble import Content, Range
from outlast.checkpoint.dcp.blob import ALIGNMENT, tensor_blob
from outlast.checkpoint.dcp.manifest import FileEntry, Item, OwnTensor, RankEntry, TensorPiece, Where
from outlast.checkpoint.manifest import TensorEntry
from outlast.errors import CheckpointError

__all__ = [
    "FILE_BYTES",
    "Composed",
    "Duty",
    "Inventory",
    "Packing",
    "PlainValue",
    "TensorPart",
    "WriteReport",
    "assign",
    "compose",
]


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


_Holder: TypeAlias = tuple[int, int]
"""A rank, and the index of its part."""


@dataclass(slots=True)
class _PartGroup:
    """Equal parts of several ranks, the first's first."""

    first: TensorPart
    holders: list[_Holder] = field(default_factory=list)

    @property
    def is_written(self) -> bool:
        """Whether it has something to write: a part without elements is only listed, a tensor without is written."""
        return bool(self.first.num_bytes) or not math.prod(self.first.global_shape)


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
    written = [group for group in groups if group.is_written]
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


def _check_whole(groups: Iterable[_PartGroup]) -> None:
    have: dict[str, int] = {}
    whole: dict[str, int] = {}
    for group in groups:
        have[group.first.item] = have.get(group.first.item, 0) + math.prod(group.first.shape)
        whole[group.first.item] = math.prod(group.first.global_shape)
    for name, count in have.items():
        if count != whole[name]:
            raise CheckpointError(f"tensor {name!r}: the ranks' parts have {count} elements of {whole[name]}")


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
        blob = tensor_blob(entry.dtype, entry.shape, entry.num_bytes)
        raw = Range(entry.offset, entry.num_bytes, entry.dtype)
        return self._add((blob.prefix, raw, blob.suffix), len(blob.prefix), entry.num_bytes)

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


@dataclass(frozen=True, slots=True)
class Composed:
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
    firsts, num_files = [], 0
    for report in reports:
        firsts.append(num_files)
        num_files += len(report.files)
    own = [set(duty.own) for duty in duties]
    items: dict[str, Item] = {}
    written: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Where] = {}
    for rank, (inventory, duty, report) in enumerate(zip(inventories, duties, reports, strict=True)):
        for index, where in zip(duty.parts, report.parts, strict=True):
            part = inventory.parts[index]
            written[part.item, part.offset, part.shape] = _moved(where, firsts[rank])
        for index, where in zip(duty.values, report.values, strict=True):
            value = inventory.values[index]
            piece = TensorPiece((), (), _moved(where, firsts[rank]))
            items[value.item] = Item(name=value.item, path=value.path, dtype=None, shape=(), pieces=(piece,))
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    described: dict[str, TensorPart] = {}
    for rank, inventory in enumerate(inventories):
        for index, part in enumerate(inventory.parts):
            if index not in own[rank]:
                described.setdefault(part.item, part)
                holders.setdefault((part.item, part.offset, part.shape), []).append(rank)
    pieces: dict[str, list[TensorPiece]] = {}
    for (name, offset, shape), ranks in holders.items():
        piece = TensorPiece(offset, shape, written.get((name, offset, shape)), tuple(ranks))
        pieces.setdefault(name, []).append(piece)
    for name, (first, *others) in pieces.items():
        if not others:
            pieces[name] = [msgspec.structs.replace(first, ranks=())]
    for name, part in described.items():
        items[name] = Item(
            name=name, path=part.path, dtype=part.dtype, shape=part.global_shape, pieces=tuple(pieces[name])
        )
    return Composed(
        files=tuple(file for report in reports for file in report.files),
        items=tuple(items.values()),
        ranks=tuple(
            _rank_entry(inventory, duty, report, first)
            for inventory, duty, report, first in zip(inventories, duties, reports, firsts, strict=True)
        ),
        finite=all(report.finite for report in reports),
    )


def _rank_entry(inventory: Inventory, duty: Duty, report: WriteReport, first: int) -> RankEntry:
    tensors = []
    for index, where in zip(duty.own, report.own, strict=True):
        part = inventory.parts[index]
        place = _moved(where, first) if math.prod(part.shape) else None
        tensors.append(OwnTensor(name=part.name, dtype=part.dtype, shape=part.shape, where=place))
    return RankEntry(tree=_moved(report.tree, first), tensors=tuple(tensors))


def _moved(where: Where, first: int) -> Where:
    return msgspec.structs.replace(where, file=where.file + first)
