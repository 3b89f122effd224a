"""The mesh of actors, and the messages between the driver and an actor's shell.

Ranks count as in ``torch.distributed.init_device_mesh(device, mesh.sizes, mesh_dim_names=AXES)``: row-major, so that
tensor-parallel peers, who talk most, are neighbours. Nothing here imports torch or Ray. All messages travel pickled
within Ray, which trusts its own cluster.
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
"""The same ranks as a model's experts see them: pipeline, expert data, expert and expert tensor parallelism."""
_ALL_AXES = (*AXES, *EXPERT_AXES[1:])


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
    ep: int = 0
    """Which of the experts are its own."""
    etp: int = 0
    """Which slice of each of its experts is its own."""
    edp: int = 0
    """Which replica of its experts it has."""
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
    """Say how many actors lie along each axis.

    The expert axes add no actors: they lie over ``dp``, ``cp`` and ``tp`` of each stage, the expert tensor axis
    fastest, as in Megatron-Core's default order ``tp-cp-ep-dp-pp``. What ``ep`` and ``etp`` leave is ``edp``, the
    replicas of each expert: ``pp * edp * ep * etp`` is the number of actors.

    Raises:
        ConfigError: A size is not a whole number of at least 1, or the expert axes do not fit.
    """

    dp: int = 1
    """Data parallel: each batch is cut into so many shards."""
    cp: int = 1
    """Context parallel: each sequence is cut into so many slices by the model."""
    tp: int = 1
    """Tensor parallel: each layer is cut into so many slices by the model."""
    pp: int = 1
    """Pipeline parallel: the model is cut into so many stages."""
    ep: int = 0
    """Expert parallel: the experts of each layer are divided among so many actors; 0 = no experts, unless ``etp`` is
    given."""
    etp: int = 0
    """Expert tensor parallel: each expert is cut into so many slices; 0 = as many as ``tp``, as in Megatron-Core."""

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
        """Return the mesh that is meant, from sizes by axis; an axis that is left out has size 1.

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
        """Actors in the mesh."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def has_experts(self) -> bool:
        """Whether there are expert axes."""
        return bool(self.ep or self.etp)

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """Sizes in the order of ``EXPERT_AXES``; without experts as for one expert parallel actor."""
        return self.pp, self.size // (self.pp * self._expert_size), self.ep or 1, self.etp or self.tp

    @property
    def by_axis(self) -> dict[str, int]:
        """Sizes by axis; those of the expert axes where there are any."""
        sizes = dict(zip(AXES, self.sizes, strict=True))
        return sizes | dict(zip(EXPERT_AXES, self.expert_sizes, strict=True)) if self.has_experts else sizes

    @property
    def _expert_size(self) -> int:
        return (self.ep or 1) * (self.etp or self.tp)

    def place(self, rank: int) -> MeshRank:
        """Return where ``rank`` works.

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
        """Return all ranks with these coordinates, in rising order; without any, all ranks.

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
    """Return the coordinates of a rank, the last axis being the fastest."""
    coordinates = {}
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        rank, coordinates[axis] = divmod(rank, size)
    return coordinates


def shrunk(mesh: Mesh, num_actors: int) -> Mesh | None:
    """Return the largest smaller mesh that ``num_actors`` can fill, ``None`` if there is none.

    Only the data axis gets shorter: the others cut the model itself, which the state that is kept could not follow.
    What is left of it must have room for all experts.
    """
    model = mesh.size // mesh.dp
    for dp in range(min(mesh.dp - 1, num_actors // model), 0, -1):
        with contextlib.suppress(ConfigError):  # the expert axes do not fit
            return msgspec.structs.replace(mesh, dp=dp)
    return None


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
    version: str = __version__
    """Of the driver's package."""


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
