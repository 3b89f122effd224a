"""Distributed tensors: descriptions of their layouts, to recreate tensors or to detect other meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from outlast.errors import CheckpointError
from outlast.runtime.nested import find_nested

Layout: TypeAlias = list[Any]
"""Placements, shape and names of the mesh, shape and stride of the whole tensor. A placement is the sharded dimension,
``None`` for a replica, or ``[dimension, split factor]`` where other shards of the dimension were cut first (FSDP2 over
tensor parallelism)."""


class OtherLayout(CheckpointError):
    """The saved state is distributed over the ranks differently than the live state: it can only be resharded."""


def is_distributed(value: Any) -> bool:
    return hasattr(value, "to_local") and hasattr(value, "placements")


def describe_layout(value: Any, path: str) -> Layout:
    """Describe a distributed tensor's layout. Raises: CheckpointError, when its placement cannot be saved."""
    placements: list[Any] = []
    for placement in value.placements:
        match type(placement).__name__:
            case "Replicate":
                placements.append(None)
            case "Shard":
                placements.append(placement.dim)
            case "_StridedShard":
                placements.append([placement.dim, int(placement.split_factor)])
            case _:
                text = f"state {path!r}: a DTensor placed as {placement} cannot be saved; reduce it first"
                raise CheckpointError(text)
    return [placements, *_describe_mesh(value.device_mesh), list(value.shape), list(value.stride())]


def own_part(value: Any, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of this rank's part of a distributed tensor.

    Raises:
        CheckpointError: The part is not one contiguous block, or torch 2.8 cannot locate it.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = value.device_mesh
    if any(type(placement).__name__ == "_StridedShard" for placement in value.placements):
        if torch.__version__ < "2.9" and not _is_even(value.shape, value.placements, mesh.mesh.shape):
            raise CheckpointError(
                f"state {path!r}: torch {torch.__version__} loses rows of a DTensor of {tuple(value.shape)} placed as "
                f"{tuple(value.placements)}, which the ranks do not divide evenly; use torch 2.9 or newer"
            )
        coordinate = mesh.get_coordinate()
        rows = rows_of(value.shape, value.placements, mesh.mesh.shape, coordinate or [0] * mesh.mesh.dim())
        if any(len(found) and found[-1] - found[0] >= len(found) for found in rows.values()):
            raise CheckpointError(
                f"state {path!r}: a DTensor placed as {tuple(value.placements)} has parts that are not one block; "
                "redistribute() it to Shard or Replicate before it is saved or loaded"
            )
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, value.placements)
    return tuple(map(int, shape)), tuple(map(int, offset))


def rows_of(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> dict[int, Any]:
    """Return the ascending indices of each sharded dimension that belong to a coordinate of the mesh."""
    rows: dict[int, Any] = {}
    for placement, num_parts, index in zip(placements, mesh_shape, coordinate, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            blocks = _chunks(rows.get(dim, np.arange(shape[dim])), getattr(placement, "split_factor", 1))
            rows[dim] = np.concatenate([_chunks(block, num_parts)[index] for block in blocks])
    return rows


def _is_even(shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int]) -> bool:
    cuts: dict[int, int] = {}
    for placement, num_parts in zip(placements, mesh_shape, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            cuts[dim] = cuts.get(dim, 1) * num_parts
    strided = {placement.dim for placement in placements if hasattr(placement, "split_factor")}
    return all(shape[dim] % cuts[dim] == 0 for dim in strided)


def _chunks(rows: Any, count: int) -> list[Any]:
    """Split an array as ``torch.chunk`` does, padding the list with empty chunks."""
    length = -(-len(rows) // count)
    return [rows[number * length : (number + 1) * length] for number in range(count)]


def distribute(local: torch.Tensor, layout: Layout, meshes: Sequence[Any]) -> torch.Tensor:
    """Create the distributed tensor whose local part is given. Raises: OtherLayout, when no mesh matches."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def place(saved: Any) -> Any:
        if saved is None:
            return Replicate()
        return Shard(saved) if isinstance(saved, int) else _StridedShard(saved[0], split_factor=saved[1])

    placements, mesh_shape, mesh_names, shape, stride = layout
    for mesh in meshes:
        if _describe_mesh(mesh) == [mesh_shape, mesh_names]:
            return as_distributed(local, mesh, [place(saved) for saved in placements], shape, stride)
    raise OtherLayout(
        f"a tensor was saved as {in_words(layout)}, and nothing here is on such a mesh; build the model with the same "
        "parallelism, or load it from the global tier"
    )


def as_distributed(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(
        local.to(mesh.device_type), mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
    return cast(torch.Tensor, made)


def meshes_of(value: Any) -> list[Any]:
    return [tensor.device_mesh for _, tensor in find_nested(value, is_distributed)]


def _describe_mesh(mesh: Any) -> list[Any]:
    return [list(mesh.mesh.shape), list(mesh.mesh_dim_names or [])]


def in_words(layout: Layout | None) -> str:
    if layout is None:
        return "a whole"
    placements, mesh_shape, mesh_names, shape, _ = layout
    words = ["replica" if one is None else f"shard({one if isinstance(one, int) else one[0]})" for one in placements]
    names = mesh_names or [f"dim {number}" for number in range(len(mesh_shape))]
    mesh = ", ".join(f"{name} of {size}: {word}" for name, size, word in zip(names, mesh_shape, words, strict=True))
    return f"{tuple(shape)} over {mesh}"
