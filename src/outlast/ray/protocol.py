"""The messages between the driver and an actor's shell.

Nothing here imports torch or Ray. All of it travels pickled within Ray, which trusts its own cluster."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from outlast.config import CheckpointConfig, FaultToleranceConfig
from outlast.ray.mesh import Mesh

__all__ = [
    "Aborted",
    "ActorAssignment",
    "ActorIdentity",
    "ActorStatus",
    "Call",
    "CallFailed",
    "CallReturned",
    "FailureKind",
    "Joined",
    "ShellSettings",
]


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
    addr: str
    """Address at which other nodes reach it."""
    pid: int
    device: str
    """What it computes on, to order actors of a node by: ids of its GPUs; empty on a CPU."""


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is doing."""

    incarnation: int
    """The newest that it joined or is joining; -1 = none yet."""
    iteration: int | None
    """Optimizer steps that its state has done; ``None`` = torn, or it has none."""
    call: int | None
    """Id of the call that runs; ``None`` = none does."""
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

    pid: int
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


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a method of the user's."""

    id: int
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
    took_s: float
    waited_for: str = ""
    """What does not end; empty when all did."""
