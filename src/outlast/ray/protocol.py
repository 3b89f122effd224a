"""The mesh of actors, and the messages between the driver and an actor's shell.

Ranks are ordered as by ``torch.distributed.init_device_mesh(device, mesh.sizes, mesh_dim_names=AXES)``: row-major, so
that tensor-parallel peers, which communicate most, are neighbours. Must not import torch or Ray. Messages are pickled
by Ray, which trusts its cluster.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import msgspec

from outlast import clock
from outlast.config import CheckpointConfig, FaultToleranceConfig
from outlast.errors import ConfigError
from outlast.version import __version__

AXES = ("pp", "dp", "cp", "tp")
"""Pipeline, data, context and tensor parallelism; the first changes slowest with the rank."""
EXPERT_AXES = ("pp", "edp", "ep", "etp")
"""The same ranks by expert axis: pipeline, expert data, expert and expert tensor parallelism."""
_ALL_AXES = (*AXES, *EXPERT_AXES[1:])


class MeshRank(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's place in the mesh."""

    rank: int
    """Global rank, from 0."""
    world_size: int
    """Actors in the mesh."""
    dp: int
    """Index of the actor's shard of each batch."""
    cp: int
    """Index of the actor's slice of each sequence."""
    tp: int
    """Index of the actor's slice of each layer."""
    pp: int
    """The actor's pipeline stage; the last stage has the results."""
    dp_size: int
    """Actors along the data axis."""
    cp_size: int
    """Actors along the context axis."""
    tp_size: int
    """Actors along the tensor axis."""
    pp_size: int
    """Stages of the pipeline."""
    ep: int = 0
    """Index of the actor's group of experts."""
    etp: int = 0
    """Index of the actor's slice of each of its experts."""
    edp: int = 0
    """Index of the actor's replica of its experts."""
    ep_size: int = 1
    """Actors along the expert axis; 1 without experts."""
    etp_size: int = 1
    """Actors along the expert tensor axis."""
    edp_size: int = 1
    """Replicas of each expert."""

    def __str__(self) -> str:
        axes = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, f"{axis}_size") > 1]
        axes += [f"ep {self.ep}"] if self.ep_size > 1 else []
        return f"rank {self.rank} ({', '.join(axes)})" if axes else f"rank {self.rank}"


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """The number of actors along each axis.

    The expert axes add no actors: they divide ``dp``, ``cp`` and ``tp`` of each stage, the expert tensor axis fastest,
    as in Megatron-Core's default order ``tp-cp-ep-dp-pp``. The remaining axis ``edp`` is the number of replicas of each
    expert: ``pp * edp * ep * etp`` is the number of actors.

    Raises:
        ConfigError: A size is not a whole number of at least 1, or the expert axes do not fit.
    """

    dp: int = 1
    """Data parallel: number of shards of each batch."""
    cp: int = 1
    """Context parallel: number of slices of each sequence, cut by the model."""
    tp: int = 1
    """Tensor parallel: number of slices of each layer, cut by the model."""
    pp: int = 1
    """Pipeline parallel: number of stages of the model."""
    ep: int = 0
    """Expert parallel: number of actors that share the experts of a layer; 0 = no experts, unless ``etp`` is given."""
    etp: int = 0
    """Expert tensor parallel: number of slices of each expert; 0 = as many as ``tp``, as in Megatron-Core."""

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep", "etp"):
            size, least = getattr(self, axis), 0 if axis in ("ep", "etp") else 1
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ConfigError(f"mesh: {axis}={size!r} must be a whole number of at least {least}")
        if self.has_experts and self.size % (self.pp * self._expert_size):
            ep, etp = self.expert_sizes[2:]
            raise ConfigError(
                f"mesh: ep={ep} times etp={etp} does not divide the {self.size // self.pp} actors of a stage "
                f"(dp={self.dp} * cp={self.cp} * tp={self.tp}): the expert axes lie over dp, cp and tp"
            )

    @classmethod
    def of(cls, sizes: Mapping[str, int] | Mesh) -> Mesh:
        """Return the mesh for sizes by axis; a missing axis has size 1.

        Raises:
            ConfigError: An axis is unknown, or a size is not a whole number of at least 1.
        """
        if isinstance(sizes, Mesh):
            return sizes
        if not isinstance(sizes, Mapping):
            raise ConfigError(f'mesh={sizes!r} must name its axes, such as {{"dp": 2, "tp": 2}}')
        for axis in sizes:
            if axis == "edp":
                raise ConfigError("mesh: edp is what ep and etp leave of dp * cp * tp; leave it out")
            if axis not in _ALL_AXES:
                raise ConfigError(f"mesh: unknown axis {axis!r}; the axes are {', '.join(AXES)}, ep, etp")
        return cls(**sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of ``AXES``, as ``init_device_mesh`` takes them."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Number of actors."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def has_experts(self) -> bool:
        """Whether the mesh has expert axes."""
        return bool(self.ep or self.etp)

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """Sizes in the order of ``EXPERT_AXES``; without experts as for ``ep=1``."""
        return self.pp, self.size // (self.pp * self._expert_size), self.ep or 1, self.etp or self.tp

    @property
    def by_axis(self) -> dict[str, int]:
        """Sizes by axis, including expert axes if there are any."""
        sizes = dict(zip(AXES, self.sizes, strict=True))
        return sizes | dict(zip(EXPERT_AXES, self.expert_sizes, strict=True)) if self.has_experts else sizes

    @property
    def _expert_size(self) -> int:
        return (self.ep or 1) * (self.etp or self.tp)

    def place(self, rank: int) -> MeshRank:
        """Return the place of ``rank``.

        Raises:
            IndexError: The mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not in a mesh of {self.size} actors")
        point = _point(rank, AXES, self.sizes) | _point(rank, EXPERT_AXES, self.expert_sizes)
        sizes = {f"{axis}_size": size for axis, size in zip(EXPERT_AXES, self.expert_sizes, strict=True)}
        sizes |= {f"{axis}_size": size for axis, size in zip(AXES, self.sizes, strict=True)}
        return MeshRank(rank=rank, world_size=self.size, **point, **sizes)

    def ranks(self, **coordinates: int) -> list[int]:
        """Return the ranks with these coordinates in ascending order; without any, all ranks.

        Example:
            ``mesh.ranks(pp=0, dp=1, cp=0)`` are the tensor-parallel peers of one data shard in the first stage.

        Raises:
            ConfigError: An axis is unknown.
        """
        for axis in coordinates:
            if axis not in _ALL_AXES:
                raise ConfigError(f"mesh: unknown axis {axis!r}; the axes are {', '.join(_ALL_AXES)}")
        points, expert_points = (itertools.product(*map(range, sizes)) for sizes in (self.sizes, self.expert_sizes))
        wanted = [coordinates.get(axis) for axis in (*AXES, *EXPERT_AXES)]
        return [
            rank
            for rank, point in enumerate(zip(points, expert_points, strict=True))
            if all(want is None or want == have for want, have in zip(wanted, point[0] + point[1], strict=True))
        ]

    def __str__(self) -> str:
        axes = [f"{axis}{size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        text = " x ".join(axes) or "1 actor"
        if self.has_experts:
            edp, ep, etp = self.expert_sizes[1:]
            text += f" (experts: edp{edp} x ep{ep} x etp{etp})"
        return text


def _point(rank: int, axes: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """Return the coordinates of a rank; the last axis changes fastest."""
    coordinates = {}
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        rank, coordinates[axis] = divmod(rank, size)
    return coordinates


def shrunk(mesh: Mesh, num_actors: int) -> Mesh | None:
    """Return the largest smaller mesh that ``num_actors`` can fill; ``None`` if there is none.

    Only the data axis shrinks: the other axes cut the model, so kept state would no longer fit. The expert axes must
    fit into the smaller mesh.
    """
    model = mesh.size // mesh.dp
    for dp in range(min(mesh.dp - 1, num_actors // model), 0, -1):
        with contextlib.suppress(ConfigError):  # the expert axes do not fit
            return msgspec.structs.replace(mesh, dp=dp)
    return None


class ShellSettings(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    """Name of the group; unique in the Ray cluster and never reused, because saved copies carry it."""
    backend: str = "gloo"
    """Backend of the process groups, as ``torch.distributed`` takes it; empty = by the actor's device."""
    use_gpu: bool = False
    """Whether the actors train on GPUs."""
    checkpoint: CheckpointConfig | None = None
    """Where state is saved; ``None`` = nowhere."""
    fault_tolerance: FaultToleranceConfig | None = None
    """Timeouts of sections; ``None`` = none."""
    run_dir: str | None = None
    """Directory of the journal; ``None`` = no journal."""


class ActorIdentity(msgspec.Struct, frozen=True, kw_only=True):
    node_id: str
    """Ray's node id."""
    node: str
    """Node name in tiers and logs: the host name, with part of the node id if several nodes share the host."""
    pid: int
    device: str
    """GPU ids, for ordering the actors of a node; empty on a CPU."""


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    iteration: int | None
    """Optimizer steps of the state; ``None`` = torn, or no state."""
    sections: tuple[tuple[str, float], ...] = ()
    """Open sections, outermost first, with the seconds since each was opened."""
    exceeded: tuple[str, ...] = ()
    """One line for each exceeded timeout, the longest overdue first."""
    due_in_s: float | None = None
    """Seconds until the next timeout is exceeded; negative = exceeded, ``None`` = no timeout runs."""


class ActorAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's place in an incarnation of the group."""

    incarnation: int
    """Increases with each incarnation; no two share TCPStore keys."""
    rank: int
    mesh: Mesh
    local_rank: int
    local_world_size: int
    node_rank: int
    store_addr: str
    store_port: int
    timeout_s: float
    """Timeout of collectives in seconds."""
    has: int | None = None
    """The iteration of this actor's state according to the driver; the actor keeps the state if its tracker agrees and
    all ranks agree on that checkpoint. ``None`` = it loads.
    """
    writer: str | None = None
    """Address of the checkpoint writer of the actor's node; ``None`` = no writer, so no memory tier."""
    version: str = __version__
    """Version of the driver's package."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    iteration: int | None
    """Optimizer steps of the state, the same on every rank; ``None`` = no state."""
    checkpoint: int | None
    """The checkpoint that all ranks agreed on; ``None`` = none: all begin at 0, or all kept their state."""
    loaded: bool
    """Whether state was read; ``False`` = it was kept, or begins at 0."""
    origin: str
    """``kept``, ``new``, or the tier that was read: ``memory``, ``local``, ``replica``, ``global``."""
    phases: dict[str, float]
    """Seconds by phase: ``groups``, ``setup``, ``load``."""


@contextmanager
def timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds spent in the context to a phase, unless it raises."""
    begin_s = clock.now_s()
    yield
    phases_s[name] = phases_s.get(name, 0.0) + clock.now_s() - begin_s


class Call(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: int
    method: str
    wants_result: bool = True
    """Whether the method's result is returned."""


class CallReturned(msgspec.Struct, frozen=True, kw_only=True):
    iteration: int | None
    """Optimizer steps of the state after the call; ``None`` = no state."""
    value: Any = None
    """The method's result; ``None`` if not wanted."""


class FailureKind(StrEnum):
    """Why a call or join failed."""

    RAISED = "raised"
    """The user's code raised."""
    PEER = "peer"
    """A peer was lost: a connection closed, or a collective timed out."""
    ABORTED = "aborted"
    """The incarnation was aborted meanwhile."""
    REFUSED = "refused"
    """The call was for another incarnation; nothing was run."""


class CallFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A failed call or join; a reply instead of an exception, so that Ray changes nothing."""

    kind: FailureKind
    summary: str
    """The exception in one line, with its location."""
    traceback: str = ""
    iteration: int | None = None
    """Optimizer steps of the state; ``None`` = torn, or no state."""
    error: bytes | None = None
    """The exception as a cloudpickle; ``None`` if it cannot be pickled or is not the user's."""


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to an abort."""

    call_ended: bool
    """``False`` = the call or a collective does not end; the actor is unusable."""
    iteration: int | None
    """Optimizer steps of the state; ``None`` = torn, or no state."""
    waited_for: str = ""
    """What does not end; empty if all did."""
