"""Which place a rank has in a mesh of actors: pipeline stage, data shard, context slice, tensor slice.

Nothing here imports torch or Ray. Ranks count as in ``torch.distributed.init_device_mesh(device, mesh.sizes,
mesh_dim_names=AXES)``: row-major, so that tensor-parallel peers, who talk most, are neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import msgspec

from outlast.errors import ConfigError

__all__ = ["AXES", "Mesh", "MeshRank", "shrunk"]

AXES = ("pp", "dp", "cp", "tp")
"""Pipeline, data, context and tensor parallelism; the first changes slowest with the rank."""


class MeshRank(msgspec.Struct, frozen=True, kw_only=True):
    """Tell where in the mesh one actor works."""

    rank: int
    """Global rank, from 0."""
    world_size: int
    """Actors in the mesh."""
    dp: int
    """Which shard of each batch it gets."""
    cp: int
    """Which slice of each sequence is its own."""
    tp: int
    """Which slice of each layer is its own."""
    pp: int
    """Which stage of the model is its own; the last has the results."""
    dp_size: int
    """Actors along the data axis."""
    cp_size: int
    """Actors along the context axis."""
    tp_size: int
    """Actors along the tensor axis."""
    pp_size: int
    """Stages of the pipeline."""

    @property
    def gives_result(self) -> bool:
        """Whether this actor speaks for its data shard: first of its slices, last stage."""
        return self.tp == 0 and self.cp == 0 and self.pp == self.pp_size - 1

    def __str__(self) -> str:
        axes = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, f"{axis}_size") > 1]
        return f"rank {self.rank} ({', '.join(axes)})" if axes else f"rank {self.rank}"


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """Say how many actors lie along each axis.

    Raises:
        ConfigError: A size is not a whole number of at least 1.
    """

    dp: int = 1
    """Data parallel: each batch is cut into so many shards."""
    cp: int = 1
    """Context parallel: each sequence is cut into so many slices by the model."""
    tp: int = 1
    """Tensor parallel: each layer is cut into so many slices by the model."""
    pp: int = 1
    """Pipeline parallel: the model is cut into so many stages."""

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"mesh: {axis}={size!r} must be a whole number of at least 1")

    @classmethod
    def of(cls, sizes: Mapping[str, int] | Mesh) -> Mesh:
        """Return the mesh that is meant, from sizes by axis; an axis that is left out has size 1.

        Raises:
            ConfigError: An axis is unknown, or a size is not a whole number of at least 1.
        """
        if isinstance(sizes, Mesh):
            return sizes
        if not isinstance(sizes, Mapping):
            raise ConfigError(f'mesh={sizes!r} must name its axes, such as {{"dp": 2, "tp": 2}}')
        for axis in sizes:
            if axis not in AXES:
                raise ConfigError(f"mesh: unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        return cls(**sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of ``AXES``, as ``init_device_mesh`` takes them."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Actors in the mesh."""
        return self.pp * self.dp * self.cp * self.tp

    def place(self, rank: int) -> MeshRank:
        """Return where ``rank`` works.

        Raises:
            IndexError: The mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not in a mesh of {self.size} actors")
        rest, coordinates = rank, {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rest, coordinates[axis] = divmod(rest, size)
        return MeshRank(
            rank=rank,
            world_size=self.size,
            dp_size=self.dp,
            cp_size=self.cp,
            tp_size=self.tp,
            pp_size=self.pp,
            **coordinates,
        )

    def ranks(self, **coordinates: int) -> list[int]:
        """Return all ranks with these coordinates, in rising order; without any, all ranks.

        Example:
            ``mesh.ranks(pp=0, dp=1, cp=0)`` are the tensor-parallel peers of one data shard in the first stage.

        Raises:
            ConfigError: An axis is unknown.
        """
        for axis in coordinates:
            if axis not in AXES:
                raise ConfigError(f"mesh: unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        points = itertools.product(*map(range, self.sizes))
        wanted = [coordinates.get(axis) for axis in AXES]
        return [
            rank
            for rank, point in enumerate(points)
            if all(want is None or want == have for want, have in zip(wanted, point, strict=True))
        ]

    def __str__(self) -> str:
        axes = [f"{axis}{size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return " x ".join(axes) or "1 actor"


def shrunk(mesh: Mesh, num_actors: int) -> Mesh | None:
    """Return the largest smaller mesh that ``num_actors`` can fill, ``None`` if there is none.

    Only the data axis gets shorter: the others cut the model itself, which the state that is kept could not follow.
    """
    dp = min(mesh.dp - 1, num_actors // (mesh.size // mesh.dp))
    return Mesh(dp=dp, cp=mesh.cp, tp=mesh.tp, pp=mesh.pp) if dp >= 1 else None
