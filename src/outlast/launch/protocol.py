"""What agents and the coordinator send each other, as JSON, never pickle; how it travels is not decided here."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

from outlast.decoding import from_json, json_decoder
from outlast.errors import RendezvousError
from outlast.incidents import Cause, Incident
from outlast.policy.causes import Position
from outlast.policy.deadlines import Expired, Observation
from outlast.policy.ladder import LadderState, Limits
from outlast.policy.recovery_point import Distrusted, Load
from outlast.policy.rerun import Replay

T = TypeVar("T")


class CycleFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one node knows of a cycle that ended for it."""

    cycle: int
    incident: Incident | None = None
    """What went wrong here; ``None`` when the node only followed the others."""
    durable_iteration: int | None = None
    progress_known: bool = False
    had_session: bool = False
    """A worker of the node had a session, or a monitor."""
    positions: tuple[Position, ...] = ()
    """Where the node's ranks were when a hang was examined."""
    observation: Observation | None = None
    """Longest durations seen by the node's ranks, for learned timeouts."""
    load: Load | None = None
    """What the ranks had loaded, as far as the node's ranks reported."""
    permanent: Cause | None = None
    """What all ranks of the node failed with alike, before their first step, if a restart cannot help."""


class FromNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose message it is; the link fills this in."""

    node: str = ""
    epoch: str = ""
    """Names one life of the node's agent."""


class JoinRequest(FromNode, frozen=True, kw_only=True, tag=True):
    """A node wants to take part in the next cycle."""

    addr: str
    nproc: int
    """Workers per node; 0 = not known (an agent that is not ours)."""
    wish: int | None = None
    ended: CycleFacts | None = None
    """The cycle that ended for this node, if it took part in one."""


class SlotPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A node's place in a cycle."""

    cycle: int
    slot: int
    num_slots: int


class Register(FromNode, frozen=True, kw_only=True, tag=True):
    """A node of a job in progress reached the control store again, perhaps another one than before."""

    addr: str
    nproc: int
    wish: int | None = None
    place: SlotPlace | None = None
    """Its place in the last cycle that it started; ``None`` for a spare."""
    running: bool = False
    """Its workers of that cycle run, or have finished."""
    distrusted: tuple[Distrusted, ...] = ()
    """What it must not load: a coordinator on another machine may not know it."""


class Hung(FromNode, frozen=True, kw_only=True, tag=True):
    """A rank of this node exceeded a timeout: all nodes shall look at their ranks and end the cycle."""

    cycle: int
    incident: Incident
    expired: tuple[Expired, ...] = ()


class Master(FromNode, frozen=True, kw_only=True, tag=True):
    """The first node opened the cycle's store."""

    cycle: int
    addr: str
    port: int


class Finished(FromNode, frozen=True, kw_only=True, tag=True):
    """Every worker of this node ended with exit code 0, or could be spared.

    Where every one of them was lost, and their peers may continue elsewhere, the facts name the incident.
    """

    facts: CycleFacts


class Restarted(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's workers restarted inside their processes, and the cycle continues."""

    cycle: int
    call: int
    """Which of the workers' calls of a wrapped function it was, from 0."""
    restart_count: int
    """Which restart of that call began."""
    incident: Incident
    """What the workers restarted after."""
    durable_iteration: int | None = None
    progress_known: bool = False


class ScriptSettings(FromNode, frozen=True, kw_only=True, tag=True):
    """What the config of this node's script sets; the coordinator uses what no option and no file sets."""

    fault_tolerance: str
    """As ``FaultToleranceConfig.to_json`` writes it; empty = nothing."""


class Leave(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's agent was requested to shut down, and its workers are gone."""

    saved: bool = False
    signal: int = 0
    facts: CycleFacts | None = None
    whole_job: bool = True
    """The notice is for the job; otherwise only this node goes."""


class Unhealthy(FromNode, frozen=True, kw_only=True, tag=True):
    """This node failed its health check: before it joined, and it does not; or while it trains."""

    incident: Incident
    stays: bool
    """Its agent keeps running, also if the node does not join."""


class Bye(FromNode, frozen=True, kw_only=True, tag=True):
    """This node got its :class:`Stop` and needs the control store no more."""


class Dead(FromNode, frozen=True, kw_only=True, tag=True):
    """The coordinator's process saw that a node's agent died."""

    reason: str


class CoordinatorTick(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Time to look at the nodes' signs of life."""


class Quit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator's own agent ends it."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node is a spare (or quarantined) and waits."""

    reason: str


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node carries the first slot of a new cycle: open its store and report where."""

    cycle: int


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Start the workers of a cycle."""

    cycle: int
    node_rank: int
    num_nodes: int
    base_rank: int
    """Global rank of the node's first worker."""
    world_size: int
    master_addr: str
    master_port: int
    distrusted: tuple[Distrusted, ...] = ()
    """What is not to be loaded."""
    replay: Replay | None = None
    """What the workers run again before anything else; ``None`` = they train as usual."""


class CycleOver(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The cycle failed somewhere: end your workers and join the next one."""

    cycle: int
    reason: str
    examine: bool = False
    """Look where your ranks are before you end them: a hang's culprit is searched."""
    awaits_alike: bool = False
    """Let your ranks fail by themselves for a moment: elsewhere all did, and a restart cannot help."""


class NodesMissing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nodes are missing: who, and how long they are waited for."""

    reason: str


class Remark(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something about another node that belongs into this one's log too."""

    text: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job is over."""

    exit_code: int
    reason: str


ToCoordinator = (
    JoinRequest
    | Register
    | Hung
    | Master
    | Restarted
    | Finished
    | ScriptSettings
    | Leave
    | Unhealthy
    | Bye
    | Dead
    | CoordinatorTick
    | Quit
)
ToNode = Wait | NodesMissing | Prepare | Start | CycleOver | Remark | Stop

encode = msgspec.json.Encoder().encode
"""A message as bytes."""
_to_coordinator: msgspec.json.Decoder[ToCoordinator] = json_decoder(ToCoordinator)
_to_node: msgspec.json.Decoder[ToNode] = json_decoder(ToNode)


def decode_to_coordinator(data: bytes) -> ToCoordinator:
    """Return the message that an agent sent.

    Raises:
        RendezvousError: It is not one that this version sends.
    """
    return _decode(_to_coordinator, data, "unreadable message from an agent")


def decode_to_node(data: bytes) -> ToNode:
    """Return the message that the coordinator sent.

    Raises:
        RendezvousError: It is not one that this version sends.
    """
    return _decode(_to_node, data, "unreadable message from the coordinator")


def _decode(decoder: msgspec.json.Decoder[T], data: bytes, fault: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RendezvousError(f"{fault}: {error}; do all nodes run the same outlast?") from error


# -- how a job is, for whoever asks -----------------------------------------------------------------------------

STATUS_KEY = "status"
"""Where the coordinator keeps a :class:`LiveStatus`, in the control store."""


class JobPhase(StrEnum):
    """Where the job is; see :mod:`outlast.launch.coordinator`."""

    ADOPTING = "adopting"
    FORMING = "forming"
    PREPARING = "preparing"
    RUNNING = "running"
    OVER = "over"


class LiveNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node that is there."""

    name: str
    slot: int | None = None
    """The slot that it holds; ``None``: it holds none."""
    first_rank: int | None = None
    nproc: int = 0
    ready: bool = False
    """It waits for a cycle; otherwise it is in one."""


class LiveLack(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are waited for."""

    num_missing: int
    num_needed: int
    waited_s: float
    gives_up_in_s: float


class LiveBudgets(msgspec.Struct, frozen=True, kw_only=True):
    """What was tried, and what is allowed."""

    restarts_without_progress: int = 0
    max_restarts: int = 0
    restarts_total: int = 0
    max_restarts_total: int | None = None
    cycles_without_progress: int = 0
    max_no_progress_cycles: int = 0
    progress_known: bool = False

    @classmethod
    def of(cls, state: LadderState, limits: Limits) -> LiveBudgets:
        """Return the budgets in a ladder's state."""
        return cls(
            restarts_without_progress=state.restarts_without_progress,
            max_restarts=limits.max_restarts,
            restarts_total=state.restarts_total,
            max_restarts_total=limits.max_restarts_total,
            cycles_without_progress=state.cycles_without_progress,
            max_no_progress_cycles=limits.max_no_progress_cycles,
            progress_known=state.progress_known,
        )


class LiveStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job at one moment."""

    time: str
    """When this was written, ISO 8601 in UTC."""
    run_id: str
    job: str
    host: str
    """Node that hosts the coordinator."""
    run_dir: str | None = None
    """Run directory, as the host names it."""
    phase: str
    """One of :class:`JobPhase`."""
    cycle: int
    nodes: tuple[LiveNode, ...] = ()
    num_slots: int = 0
    lack: LiveLack | None = None
    """``None``: no node is waited for."""
    budgets: LiveBudgets = LiveBudgets()
    best_durable: int | None = None
    quarantined: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()
    exit_code: int | None = None
    """Of the job, once it is over."""
    reason: str | None = None


def decode_live(data: bytes) -> LiveStatus:
    """Return what a coordinator wrote.

    Raises:
        RendezvousError: It is something else.
    """
    try:
        return from_json(data, LiveStatus)
    except msgspec.DecodeError as error:
        raise RendezvousError(f"its status cannot be read ({error}); use the version of outlast that runs it") from None
