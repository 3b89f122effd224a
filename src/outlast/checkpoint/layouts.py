"""How a distributed tensor lies on its ranks: described for a file, compared, and made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from outlast.errors import CheckpointError

__all__ = [
    "Layout",
    "OtherLayout",
    "blocks_of",
    "check_same_layouts",
    "describe_layout",
    "distribute",
    "is_distributed",
    "meshes_of",
    "own_part",
]

Layout: TypeAlias = list[Any]
"""Placements, shape and names of the mesh, shape and stride of the whole. A placement is the dimension that is sharded,
``None`` for a replica, or ``[dimension, split factor]`` where other shards of the dimension were cut first (FSDP2 over
tensor parallelism)."""


class OtherLayout(CheckpointError):
    """What was saved is laid out over the ranks in another way than the live state: it can only be resharded."""


def is_distributed(value: Any) -> bool:
    """Return whether a value is a ``DTensor``."""
    return hasattr(value, "to_local") and hasattr(value, "placements")


def describe_layout(value: Any, path: str) -> Layout:
    """Describe a distributed tensor's layout.

    Raises:
        CheckpointError: It is placed in a way that cannot be saved.
    """
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
                raise CheckpointError(
                    f"state {path!r}: a DTensor placed as {placement} cannot be saved; reduce it first"
                )
    return [placements, *_describe_mesh(value.device_mesh), list(value.shape), list(value.stride())]


def own_part(value: Any, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of this rank's part of a distributed tensor.

    Raises:
        CheckpointError: The part is not one block of the whole.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = value.device_mesh
    if any(type(placement).__name__ == "_StridedShard" for placement in value.placements):
        coordinate = mesh.get_coordinate()
        blocks = blocks_of(value.shape, value.placements, mesh.mesh.shape, coordinate or [0] * mesh.mesh.dim())
        if any(len(found) > 1 for found in blocks.values()):
            raise CheckpointError(
                f"state {path!r}: a DTensor placed as {tuple(value.placements)} has parts that are not one block; "
                "redistribute() it to Shard or Replicate before it is saved or loaded"
            )
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, value.placements)
    return tuple(map(int, shape)), tuple(map(int, offset))


def blocks_of(
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> dict[int, list[range]]:
    """Return which indices of each sharded dimension lie at a place of the mesh."""
    rows: dict[int, list[range]] = {}
    for placement, num_parts, index in zip(placements, mesh_shape, coordinate, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        found = rows.get(dim, [range(shape[dim])])
        blocks = _chunks(found, getattr(placement, "split_factor", 1))
        rows[dim] = _joined([piece for block in blocks for piece in _chunks(block, num_parts)[index]])
    return rows


def _chunks(rows: list[range], count: int) -> list[list[range]]:
    """Cut rows as ``torch.chunk`` does, with empty chunks at the end where there are too few."""
    length = -(-sum(map(len, rows)) // count)
    chunks: list[list[range]] = []
    for number in range(count):
        chunk, skip, left = list[range](), number * length, length
        for piece in rows:
            taken = piece[skip : skip + left]
            skip, left = max(0, skip - len(piece)), left - len(taken)
            chunk.append(taken)
        chunks.append(_joined(chunk))
    return chunks


def _joined(rows: list[range]) -> list[range]:
    joined: list[range] = []
    for piece in filter(None, rows):
        if joined and joined[-1].stop == piece.start:
            joined[-1] = range(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


def distribute(local: torch.Tensor, layout: Layout, meshes: Sequence[Any]) -> torch.Tensor:
    """Make the distributed tensor of which this rank has ``local``.

    Args:
        local: This rank's part.
        layout: As it was saved.
        meshes: Device meshes in use by the live state.

    Raises:
        OtherLayout: None of them is the one that the tensor was saved on.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def place(saved: Any) -> Any:
        if saved is None:
            return Replicate()
        return Shard(saved) if isinstance(saved, int) else _StridedShard(saved[0], split_factor=saved[1])

    placements, mesh_shape, mesh_names, shape, stride = layout
    for mesh in meshes:
        if _describe_mesh(mesh) == [mesh_shape, mesh_names]:
            made = DTensor.from_local(
                local.to(mesh.device_type),
                mesh,
                [place(saved) for saved in placements],
                run_check=False,
                shape=torch.Size(shape),
                stride=tuple(stride),
            )
            return cast(torch.Tensor, made)
    raise OtherLayout(
        f"a tensor was saved as {_in_words(layout)}, and nothing here is on such a mesh; build the model with the same "
        "parallelism, or load it from the global tier"
    )


def meshes_of(value: Any) -> list[Any]:
    """Return the device meshes of all distributed tensors in a captured state."""
    if isinstance(value, torch.Tensor):
        return [cast(Any, value).device_mesh] if is_distributed(value) else []
    if isinstance(value, Mapping):
        return [mesh for inner in value.values() for mesh in meshes_of(inner)]
    if isinstance(value, list | tuple):
        return [mesh for inner in value for mesh in meshes_of(inner)]
    return []


def check_same_layouts(saved: Mapping[str, Layout | None], live: Mapping[str, Layout | None]) -> None:
    """Check that tensors were saved in the layout that they have now; those that are not there yet do not count.

    Args:
        saved: The layouts by name; ``None`` = not distributed.
        live: The same of the live state.

    Raises:
        OtherLayout: One was not.
    """
    for name in sorted(saved.keys() & live.keys()):
        before, now = saved[name], live[name]
        if (before and before[:4]) != (now and now[:4]):
            raise OtherLayout(
                f"tensor {name!r} was saved as {_in_words(before)}, here it is {_in_words(now)}; build the model with "
                "the same parallelism, or load it from the global tier"
            )


def _describe_mesh(mesh: Any) -> list[Any]:
    return [list(mesh.mesh.shape), list(mesh.mesh_dim_names or [])]


def _in_words(layout: Layout | None) -> str:
    if layout is None:
        return "a whole"
    placements, mesh_shape, mesh_names, shape, _ = layout
    words = ["replica" if one is None else f"shard({one if isinstance(one, int) else one[0]})" for one in placements]
    names = mesh_names or [f"dim {number}" for number in range(len(mesh_shape))]
    mesh = ", ".join(f"{name} of {size}: {word}" for name, size, word in zip(names, mesh_shape, words, strict=True))
    return f"{tuple(shape)} over {mesh}"
