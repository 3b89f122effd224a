"""The mesh of actors, and the messages between the driver and an actor's shell.

Ranks count as in ``torch.distributed.init_device_mesh(device, mesh.sizes, mesh_dim_names=AXES)``: row-major, so that
tensor-parallel peers, who talk most, are neighbours. Nothing here imports torch or Ray. All messages travel pickled
within Ray, which trusts its own cluster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import msgspec

from outlast import clock
from outlast.config import CheckpointConfig, FaultToleranceConfig
from outlast.errors import ConfigError

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


class ShellSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor gets once, when it is made."""

    group: str
    """Names the group; unique in the Ray cluster, and never used again: copies that are saved bear it."""
    backend: str = "gloo"
    """Backend of the process groups, as ``torch.distributed`` takes it; empty = what fits the actor's device."""
    use_gpu: bool = False
    """Whether the actors train on GPUs."""
    checkpoint: CheckpointConfig | None = None
    """Where state is kept; ``None`` = nowhere."""
    fault_tolerance: FaultToleranceConfig | None = None
    """Timeouts of sections; ``None`` = none."""
    run_dir: str | None = None
    """Where the journal is written; ``None`` = nowhere."""


class ActorIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who an actor is."""

    node_id: str
    """Ray's id of its node."""
    node: str
    """Name of its node in tiers and logs: the machine's, with part of the id where several nodes share a machine."""
    pid: int
    device: str
    """What it computes on, to order actors of a node by: ids of its GPUs; empty on a CPU."""


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is doing."""

    iteration: int | None
    """Optimizer steps that its state has done; ``None`` = torn, or it has none."""
    sections: tuple[tuple[str, float], ...] = ()
    """Open sections, outermost first, and for how many seconds each has been open."""
    exceeded: tuple[str, ...] = ()
    """One line for each timeout that is exceeded, the longest overdue first."""
    due_in_s: float | None = None
    """Seconds until the soonest timeout that runs now is exceeded; negative = it is, ``None`` = none runs."""


class ActorAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's place in an incarnation of the group."""

    incarnation: int
    """Grows with each; two never share a store's keys."""
    rank: int
    mesh: Mesh
    local_rank: int
    local_world_size: int
    node_rank: int
    store_addr: str
    store_port: int
    timeout_s: float
    """Timeout of collectives, in seconds."""
    has: int | None = None
    """The iteration that the driver took for the one of this actor's state; it keeps it if the generation that all
    agree on is the same, and if its own tracker agrees. ``None`` = it loads in any case."""
    writer: str | None = None
    """Address of the checkpoint writer of the actor's node; ``None`` = there is none, so no memory tier."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """An actor that has its place, its groups and its state."""

    iteration: int | None
    """Optimizer steps that its state has done, the same on every rank; ``None`` = it has no state."""
    generation: int | None
    """The generation that all agreed on; ``None`` = there is none: all begin at 0, or all kept what they had."""
    loaded: bool
    """Whether state was read; ``False`` = it was kept, or begins at 0."""
    origin: str
    """``kept``, ``new``, or the tier that it was read from: ``memory``, ``local``, ``replica``, ``global``."""
    phases: dict[str, float]
    """Seconds by phase: ``groups``, ``setup``, ``load``."""


@contextmanager
def timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds within to those of a phase, unless an exception ends it."""
    begin_s = clock.now_s()
    yield
    phases_s[name] = phases_s.get(name, 0.0) + clock.now_s() - begin_s


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a method of the user's."""

    incarnation: int
    method: str
    wants_result: bool = True
    """Whether what it returns is to come back."""


class CallReturned(msgspec.Struct, frozen=True, kw_only=True):
    """A call that ended well."""

    iteration: int | None
    """Optimizer steps that the state has done now; ``None`` = there is no state."""
    value: Any = None
    """What the method returned; ``None`` where it was not wanted."""


class FailureKind(StrEnum):
    """Why a call, or a join, did not end well."""

    RAISED = "raised"
    """The user's code raised by itself."""
    PEER = "peer"
    """It only shows that a peer is gone: a connection ended, a collective timed out."""
    ABORTED = "aborted"
    """The incarnation was given up meanwhile."""
    REFUSED = "refused"
    """It was for another incarnation than the actor is in; nothing was run."""


class CallFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A call or a join that did not end well; an answer, not an exception, so that nothing of it is lost on the way."""

    kind: FailureKind
    summary: str
    """The exception in one line, with where it was raised."""
    traceback: str = ""
    iteration: int | None = None
    """Optimizer steps that the state has done; ``None`` = torn, or there is no state."""
    error: bytes | None = None
    """The exception, pickled by Ray's pickler; ``None`` where it cannot be, or is not the user's."""


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """An actor whose groups of an incarnation are gone."""

    call_ended: bool
    """``False`` = it does not leave its call, or a collective does not end: it is unusable."""
    iteration: int | None
    """Optimizer steps that its state has done; ``None`` = torn, or it has none."""
    waited_for: str = ""
    """What does not end; empty when all did."""
