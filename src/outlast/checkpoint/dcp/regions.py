"""Rectangular regions of tensors, read from wherever their pieces lie."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from outlast.checkpoint.dcp.items import TORCH_TYPES
from outlast.checkpoint.dcp.manifest import Item, TensorPiece
from outlast.checkpoint.dcp.threads import in_threads
from outlast.checkpoint.dcp.verified_file import VerifiedFile, VerifiedFiles
from outlast.errors import Incomplete

__all__ = ["Wanted", "fill", "read_region"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A region of a tensor, and what takes it."""

    item: Item
    offset: tuple[int, ...]
    into: torch.Tensor
    """A contiguous CPU tensor of the region's shape and the item's type."""


@dataclass(frozen=True, slots=True)
class _Overlap:
    piece: TensorPiece
    item: Item
    offset: tuple[int, ...]
    """Within the piece."""
    into: torch.Tensor


def fill(files: VerifiedFiles, wanted: Iterable[Wanted]) -> None:
    """Read regions of tensors, whatever pieces they are stored in.

    Raises:
        CheckpointError: A chunk differs from its digest, a file is torn or missing, or no piece has what is wanted.

    Blocks: until everything is read, several files at once.
    """
    by_file: dict[int, list[_Overlap]] = {}
    for one in wanted:
        found = [overlap for piece in one.item.pieces if (overlap := _overlap(one, piece)) is not None]
        if (have := sum(overlap.into.numel() for overlap in found)) != one.into.numel():
            raise Incomplete(f"item {one.item.name!r}: {have} of {one.into.numel()} elements are stored")
        for overlap in found:
            assert overlap.piece.where is not None
            by_file.setdefault(overlap.piece.where.file, []).append(overlap)

    def read_file(index: int) -> None:
        file = files.open(index)
        for one in sorted(by_file[index], key=_start):
            read_region(file, one.item, one.piece, one.offset, tuple(one.into.shape), into=one.into)

    in_threads(read_file, sorted(by_file), is_remote=files.directory.is_remote)


def read_region(
    file: VerifiedFile,
    item: Item,
    piece: TensorPiece,
    offset: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    into: torch.Tensor,
) -> None:
    """Read a region of a piece.

    Args:
        file: Where the piece lies.
        item: The tensor.
        piece: Of it.
        offset: Of the region within the piece.
        lengths: Of the region.
        into: What takes it: of the same shape, on any device, of any type that it can be cast to.

    Raises:
        CheckpointError: A chunk differs from its digest, or the file is torn or missing.
    """
    if not into.numel():
        return
    assert item.dtype is not None
    assert piece.where is not None
    dtype = TORCH_TYPES[item.dtype]
    # Rows that are not asked for are not read.
    rows, first = (lengths[0], offset[0]) if lengths else (1, 0)
    row = math.prod(piece.shape[1:])
    start = piece.where.data_start + first * row * dtype.itemsize
    is_plain = into.device.type == "cpu" and into.dtype == dtype and into.is_contiguous()
    if is_plain and lengths[1:] == piece.shape[1:]:
        file.read_into(start, _bytes_of(into))
        return
    source = torch.empty((rows, *piece.shape[1:]) if lengths else (), dtype=dtype)
    file.read_into(start, _bytes_of(source))
    for dim in range(1, len(lengths)):
        source = source.narrow(dim, offset[dim], lengths[dim])
    into.copy_(source)


def _overlap(wanted: Wanted, piece: TensorPiece) -> _Overlap | None:
    into, offset = wanted.into, []
    if piece.where is None:
        return None
    for dim, (begin, length, stored, extent) in enumerate(
        zip(wanted.offset, wanted.into.shape, piece.offset, piece.shape, strict=True)
    ):
        first, last = max(begin, stored), min(begin + length, stored + extent)
        if first >= last:
            return None
        into = into.narrow(dim, first - begin, last - first)
        offset.append(first - stored)
    return _Overlap(piece, wanted.item, tuple(offset), into)


def _start(overlap: _Overlap) -> int:
    assert overlap.piece.where is not None
    return overlap.piece.where.start


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
