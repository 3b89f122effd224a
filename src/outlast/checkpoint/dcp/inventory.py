"""What a rank has to save to the global tier, and what it wrote of it. Nothing here imports torch."""

from __future__ import annotations

import msgspec

from outlast.checkpoint.dcp.manifest import FileEntry, Where

__all__ = ["Duty", "Inventory", "TensorPart", "WriteReport", "PlainValue"]


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
