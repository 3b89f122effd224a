"""The manifest of a generation, composed of what all ranks had and wrote. Pure; nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from outlast.checkpoint.dcp.inventory import Duty, Inventory, TensorPart, WriteReport
from outlast.checkpoint.dcp.manifest import FileEntry, Item, OwnTensor, RankEntry, TensorPiece, Where

__all__ = ["Composed", "compose"]


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
