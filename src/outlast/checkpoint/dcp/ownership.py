"""Which rank writes what to the global tier: each part once, the work shared evenly. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from outlast.checkpoint.dcp.inventory import Duty, Inventory, TensorPart
from outlast.errors import CheckpointError

__all__ = ["assign"]

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
