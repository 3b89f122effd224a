"""A saved state's structure: its containers and plain values, with a stand-in for each tensor."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch

from outlast.checkpoint.dcp.items import ROOT, TORCH_TYPES, Path
from outlast.checkpoint.dcp.manifest import Item
from outlast.checkpoint.dcp.regions import Wanted, fill
from outlast.checkpoint.dcp.stored_rank import read_tree, tensors_of
from outlast.checkpoint.dcp.verified_file import VerifiedFiles
from outlast.checkpoint.state import Wrapped, decode
from outlast.errors import CheckpointError

__all__ = ["Stored", "find_all", "replace_all", "saved_structure"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Stands for a tensor in the saved structure."""

    item: Item | None
    wrapped: Wrapped | None = None
    """What it is made of instead, if it is a tensor subclass of several parts; these are :class:`Stored`, too."""


def saved_structure(files: VerifiedFiles) -> dict[str, Any]:
    """Return the state as rank 0 saved it, with :class:`Stored` for its tensors."""
    tree = read_tree(files, 0)
    mine = tensors_of(files.manifest, 0, tree)
    shared = {item.name: item for item in files.manifest.items}
    _, entries = msgspec.msgpack.decode(tree)
    root = dict(entries).get(ROOT, ["d", []])

    def get(name: str) -> torch.Tensor:
        item = mine[name]
        if name in arrays:
            assert item.dtype is not None
            (piece,) = item.pieces
            tensor = torch.empty(piece.shape, dtype=TORCH_TYPES[item.dtype])
            fill(files, [Wanted(item, piece.offset, tensor)])
            return tensor
        return cast(torch.Tensor, Stored(shared.get(item.name, item)))

    arrays: set[str] = set()
    stripped = _without_layouts(root, arrays)
    return dict(decode(msgspec.msgpack.encode(stripped), get, rewrap=lambda wrapped: Stored(None, wrapped)))


def _without_layouts(node: Any, arrays: set[str]) -> Any:
    """Return a tree whose tensors are not distributed; note those that were arrays.

    Raises:
        CheckpointError: It holds a tensor subclass in shards, which have no meaning for another layout.
    """
    match node:
        case ["w", *_, [[_, tensor]], True, _]:
            return tensor
        case ["w", kind, dtype, shape, stride, context, parts, False, layout]:
            if layout is not None:
                name = str(parts[0][1][1]).removeprefix(f"{ROOT}.").rpartition(".")[0] if parts else ""
                raise CheckpointError(
                    f"tensor {name} was saved in shards of {kind.replace(':', '.')}, which only as many ranks with the "
                    "same parallelism can load; load it there, and save it dequantized"
                )
            stripped = [[key, _without_layouts(part, arrays)] for key, part in parts]
            return ["w", kind, dtype, shape, stride, context, stripped, False, None]
        case ["T", name, *_]:
            return ["T", name]
        case ["n", name]:
            arrays.add(name)
            return node
        case ["d" | "D" as kind, items, *rest]:
            return [kind, [[key, _without_layouts(item, arrays)] for key, item in items], *rest]
        case ["l" | "p" as kind, items]:
            return [kind, [_without_layouts(item, arrays) for item in items]]
    return node


def replace_all(value: Any, change: Callable[[Any, Path], Any], kind: type, path: Path) -> Any:
    """Return a copy of nested containers in which all of a kind are replaced."""
    if isinstance(value, kind):
        return change(value, path)
    if isinstance(value, dict | collections.OrderedDict):
        changed = copy.copy(value)
        for key, inner in value.items():
            changed[key] = replace_all(inner, change, kind, (*path, str(key)))
        return changed
    if type(value) in (list, tuple):
        return type(value)(replace_all(inner, change, kind, (*path, index)) for index, inner in enumerate(value))
    return value


def find_all(value: Any, path: Path, kind: type = torch.Tensor) -> list[tuple[Path, Any]]:
    """Return all of a kind in nested containers, with the paths that lead to them."""
    if isinstance(value, kind):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [found for key, inner in value.items() for found in find_all(inner, (*path, str(key)), kind)]
    if isinstance(value, list | tuple):
        return [found for index, inner in enumerate(value) for found in find_all(inner, (*path, index), kind)]
    return []
