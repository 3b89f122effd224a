"""The messages between agents and the coordinator; :mod:`outlast.launch.control` has the connection.

Limits on numbers and names are checked at decoding; a sender beyond them is disconnected, so that no broken agent can
make the coordinator loop over a trillion ranks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from outlast.incidents import Cause, Incident
from outlast.inprocess.protocol import Gone
from outlast.policy import inprocess_protocol as p
from outlast.policy.deadlines import Expired, Observation
from outlast.policy.recovery_point import Exclusion, Load
from outlast.policy.recovery_policy import Limits, RecoveryState
from outlast.policy.rerun import Replay
from outlast.policy.root_cause import Position

Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Of a node, an agent's life, or a host."""
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A cycle, a term or a heartbeat counter."""
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
"""Of a world or a part of it, or a place in it: loops run over it."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent's first message."""

    run_id: Text
    node: Name
    epoch: Name
    """Identifies this life of the agent."""
    command: Name
    """Digest of its workers' command."""
    command_text: Text
    """The command for people, shortened."""
    job: Name | None = None
    """The job that the agent takes part in; ``None``: it has just begun."""
    leader: Name = ""
    """The coordinator that the agent has obeyed last."""
    term: Number = 0
    """The highest term that the agent has obeyed."""
    version: Name = ""
    """Version of the package; empty: not reported."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator's answer to an accepted :class:`Hello`."""

    job: str
    host: str
    """Node of the coordinator."""
    leader: str
    """Identifies this life of the coordinator."""
    term: int
    version: str = ""
    """Version of the package; empty: not reported."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The coordinator's answer to a :class:`Hello` that does not match the job."""

    reason: str
    job: str | None = None
    """The other job of the run that the coordinator serves, so that the agent's own job is over here; ``None``: refused
    for another reason."""
    leads: bool = False
    """The coordinator leads that job; see :class:`outlast.policy.leadership.Leadership`."""
    successor: Name | None = None
    """Endpoint of the coordinator to which this one has yielded; ``None``: it has not yielded."""


class AgentHeartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent's heartbeat, and the coordinator's answer with the same counter."""

    count: Number
    """How often the agent's main loop has run its timer: a stuck loop shows."""


class Moving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent without answers connects to another coordinator: it is alive, and no longer obeys this one."""


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Query of the job's status; answered with :class:`LiveStatus`."""


class AskLeadership(msgspec.Struct, frozen=True, tag=True):
    """Query of one coordinator to another; answered with :class:`Leads`."""


class Leads(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a coordinator stands; see :class:`outlast.policy.leadership.Leadership`."""

    job: str
    term: int
    leads: bool
    order: int


class CycleFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node's report on a cycle that ended for it."""

    cycle: Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
    incident: Incident | None = None
    """The incident on this node; ``None``: the node only followed others."""
    durable_iteration: int | None = None
    """Iteration of the newest checkpoint that survives the end of the job."""
    committed_iteration: int | None = None
    """Iteration of the newest checkpoint in any tier."""
    progress_known: bool = False
    had_session: bool = False
    """A worker of the node had a session or a monitor."""
    has_trained: bool = False
    """A rank of the node completed a step, or may have."""
    positions: tuple[Position, ...] = ()
    """Positions of the node's ranks when a hang was examined."""
    observation: Observation | None = None
    """Longest durations observed by the node's ranks, for learned timeouts."""
    load: Load | None = None
    """The checkpoint that the node's ranks reported as loaded."""
    permanent: Cause | None = None
    """The same cause with which all ranks of the node failed before their first step, if a restart cannot help."""


class FromNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of an agent's messages; the link fills in the sender."""

    node: Name = ""
    epoch: Name = ""
    """Identifies one life of the node's agent."""


class JoinRequest(FromNode, frozen=True, kw_only=True, tag=True):
    """A node requests a slot in the next cycle."""

    addr: Name
    nproc: Size
    """Workers per node; 0: not known (torch's own agent)."""
    wish: Size | None = None
    ended: CycleFacts | None = None
    """The cycle that ended for this node, if it took part in one."""


class SlotPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A node's place in a cycle."""

    term: Number = 0
    """Term of the coordinator that formed the cycle; two coordinators can use the same cycle number."""
    cycle: Number
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    slot: Size | None = None
    """``None``: a spare."""
    num_spares: Size = 0
    """Number of waiting spares when the cycle began."""
    spare: Size | None = None
    """The node's number among the spares."""
    num_kept: Size = 0
    """Holders of slots that also held one in the last cycle that ran."""
    host_slot: Size | None = None
    """Slot of the coordinator's node; ``None``: it holds none."""
    host_spare: Size | None = None
    """The coordinator node's number among the spares; ``None``: it is not a spare."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of places in different cycles."""
        return self.term, self.cycle


class Register(FromNode, frozen=True, kw_only=True, tag=True):
    """A node of a job in progress registers with a coordinator that was just reached."""

    addr: Name
    nproc: Size
    wish: Size | None = None
    place: SlotPlace | None = None
    """Its place in the last cycle that it started or was a spare of; ``None``: none."""
    ran: SlotPlace | None = None
    """Its place in the last cycle known to have started on all of its nodes."""
    running: bool = False
    """Its workers of that cycle run, or have finished."""
    recovery_state: RecoveryState | None = None
    """From the last :class:`Decided` that it received."""


class Running(FromNode, frozen=True, kw_only=True, tag=True):
    """This node has started its workers of a cycle."""

    cycle: Number


class Stepped(FromNode, frozen=True, kw_only=True, tag=True):
    """A rank of this node has completed a step of a cycle, or may have."""

    cycle: Number


class Counted(FromNode, frozen=True, kw_only=True, tag=True):
    """This node knows its place as a spare, or that a cycle ran, and the number of its spares."""

    cycle: Number
    term: Number
    """Term of the coordinator that formed the cycle."""
    num_spares: Size


class Hung(FromNode, frozen=True, kw_only=True, tag=True):
    """A rank of this node exceeded a timeout: all nodes must examine their ranks and end the cycle."""

    cycle: Number
    incident: Incident
    expired: tuple[Expired, ...] = ()


class Master(FromNode, frozen=True, kw_only=True, tag=True):
    cycle: Number
    addr: Name
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Finished(FromNode, frozen=True, kw_only=True, tag=True):
    """Every worker of this node exited with 0, or was spared.

    If all were lost, and their peers may continue elsewhere, the facts contain the incident.
    """

    facts: CycleFacts


class Restarted(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's workers restarted in process, and the cycle continues."""

    cycle: Number
    call: Number
    """Number of the workers' call of a wrapped function, from 0."""
    restart_count: Number
    """Number of the restart in that call."""
    incident: Incident
    """The cause of the restart."""
    durable_iteration: int | None = None
    committed_iteration: int | None = None
    progress_known: bool = False


class KnownRank(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """A rank in a wrapped function, as the relay of its node knows it."""

    initial_rank: int
    standing: p.MemberStanding
    labels: dict[str, str] = {}
    """Labels that the rank reports, such as its rack."""
    last_words: Gone | p.Left | None = None
    """The final report; ``None``: the rank is alive, or may be."""


class RankStandings(FromNode, frozen=True, kw_only=True, tag=True):
    """Ranks of this node began a call of a wrapped function, or the coordinator was just reached."""

    cycle: int
    call: int
    """Number of the workers' call of a wrapped function, from 0."""
    world_size: int
    limits: p.RestartLimits
    ranks: tuple[KnownRank, ...]
    end: p.Finish | p.Abort | None = None
    """The last order of the call, which the ranks have received."""


_SHORT = {"term": "t", "cycle": "c", "call": "k", "reports": "r", "runs": "n", "order": "o"}
"""Short names in messages that each rank or node causes in each restart."""


class RankReports(FromNode, frozen=True, kw_only=True, tag="rr", rename=_SHORT):
    """Reports of this node's ranks from a wrapped function, in this order."""

    cycle: int
    call: int
    """-1: any call; the ranks ended before they joined one."""
    reports: tuple[tuple[int, Gone | p.Report], ...]
    """By initial rank."""


class ScriptSettings(FromNode, frozen=True, kw_only=True, tag=True):
    """The settings of the script's config; the coordinator uses those that no option and no file sets."""

    fault_tolerance: str
    """As ``FaultToleranceConfig.to_json`` writes it; empty: none."""


class Detected(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's agent received a shutdown signal; its workers are ending, and others follow them."""

    signal: Annotated[int, msgspec.Meta(ge=1, le=127)]


class Leave(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's agent was requested to shut down, and its workers are gone."""

    saved: bool = False
    signal: Annotated[int, msgspec.Meta(ge=0, le=127)] = 0
    """The signal that the agent received; 0: none, as its workers followed others or were requested elsewhere."""
    facts: CycleFacts | None = None
    whole_job: bool = True
    """The shutdown is for the job; otherwise only this node exits."""


class Unhealthy(FromNode, frozen=True, kw_only=True, tag=True):
    """This node failed a health check, before it joined or while it trains."""

    incident: Incident
    stays: bool
    """Its agent keeps running even if the node does not join."""


class Bye(FromNode, frozen=True, kw_only=True, tag=True):
    """This node received its :class:`Stop` and no longer needs the coordinator."""


class Dead(FromNode, frozen=True, kw_only=True, tag=True):
    """From the coordinator's host: a node's agent died, or connected to another coordinator."""

    reason: str
    is_known: bool = True
    """The agent is certainly dead; otherwise it may take part elsewhere."""


class NameClaim(FromNode, frozen=True, kw_only=True, tag=True):
    """From the coordinator's host: a new agent requests this name."""


class CoordinatorTick(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Time to check the nodes' heartbeats."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node has no slot and waits."""

    reason: str
    place: SlotPlace | None = None
    """Its place as a spare of the cycle that has just begun; ``None``: none began."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the node of a new cycle's first slot: open the cycle's store and report its address."""

    cycle: int


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Start the workers of a cycle."""

    cycle: int
    term: int
    """Term of the coordinator that formed the cycle."""
    node_rank: int
    num_nodes: int
    base_rank: int
    """Global rank of the node's first worker."""
    world_size: int
    master_addr: str
    master_port: int
    excluded: tuple[Exclusion, ...] = ()
    """Checkpoints that must not be loaded."""
    replay: Replay | None = None
    """The replay that the workers run first; ``None``: none."""
    has_checkpoint: bool = False
    """Earlier cycles or jobs of the run have committed a checkpoint."""
    durable_iteration: int | None = None
    """See :class:`~outlast.env.WorkerEnv`."""
    place: SlotPlace
    """The node's place, for later registrations."""


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All nodes of a cycle have started it."""

    cycle: int
    num_spares: int


class CycleOver(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The cycle failed on some node: end the workers and join the next cycle."""

    cycle: int
    reason: str
    examine: bool = False
    """Examine the ranks first: the root cause of a hang is searched."""
    awaits_exits: bool = False
    """Wait a moment for the ranks to exit by themselves: all failed elsewhere and a restart cannot help, or one exited
    with a decision for the whole job."""


class NodesMissing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reminder of the missing nodes and of the time limit."""

    reason: str
    missing: int = 1
    """Slots without a node; at least 1 while most nodes of the last cycle are missing."""


class RankOrder(msgspec.Struct, frozen=True, kw_only=True, tag="ro", rename=_SHORT):
    """An order to ranks of this node that are in a wrapped function."""

    term: int
    cycle: int
    call: int
    runs: tuple[tuple[int, int], ...]
    """Ranges of initial ranks: the first and the number."""
    order: p.Order


class PeersFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every worker of another node exited with 0; this node's are expected to exit, too."""

    cycle: Number


class Decided(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The recovery policy's state after a decision, for a coordinator that takes over: ``ladder.json`` may be on
    another machine or a full disk."""

    recovery_state: RecoveryState


class Remark(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A line on another node, to be logged here, too."""

    text: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The job is over."""

    exit_code: int
    reason: str
    is_replaced: bool = False
    """The job continues: another agent has taken this node's name."""


FromAgent = (
    JoinRequest
    | Register
    | Running
    | Stepped
    | Counted
    | Hung
    | Master
    | Restarted
    | RankStandings
    | RankReports
    | Finished
    | ScriptSettings
    | Detected
    | Leave
    | Unhealthy
    | Bye
)
ToCoordinator = FromAgent | NameClaim | Dead | CoordinatorTick
"""Messages to the coordinator."""
ToNode = Wait | NodesMissing | Prepare | Start | Ran | CycleOver | RankOrder | PeersFinished | Decided | Remark | Stop
"""Messages from the coordinator."""
Question = AskStatus | AskLeadership
OnControl = FromAgent | Hello | AgentHeartbeat | Moving | Question
"""Messages at the coordinator's listener."""


# -- live status ------------------------------------------------------------------------------------------------


class JobPhase(StrEnum):
    """The phase of a job; see :mod:`outlast.launch.coordinator`."""

    ADOPTING = "adopting"
    FORMING = "forming"
    PREPARING = "preparing"
    RUNNING = "running"
    OVER = "over"


class LiveNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One connected node."""

    name: str
    slot: int | None = None
    """The slot that it holds; ``None``: none."""
    first_rank: int | None = None
    nproc: int = 0
    ready: bool = False
    """The node waits for a cycle; otherwise it is in one."""


class LiveLack(msgspec.Struct, frozen=True, kw_only=True):
    """Missing nodes, and the time limit."""

    num_missing: int
    num_needed: int
    waited_s: float
    gives_up_in_s: float


class LiveBudgets(msgspec.Struct, frozen=True, kw_only=True):
    """Used and allowed restarts."""

    restarts_without_progress: int = 0
    max_restarts: int = 0
    restarts_total: int = 0
    max_restarts_total: int | None = None
    cycles_without_progress: int = 0
    max_no_progress_cycles: int = 0
    progress_known: bool = False

    @classmethod
    def of(cls, state: RecoveryState, limits: Limits) -> LiveBudgets:
        """Return the budgets in a recovery policy's state."""
        return cls(
            restarts_without_progress=state.restarts_without_progress,
            max_restarts=limits.max_restarts,
            restarts_total=state.restarts_total,
            max_restarts_total=limits.max_restarts_total,
            cycles_without_progress=state.cycles_without_progress,
            max_no_progress_cycles=limits.max_no_progress_cycles,
            progress_known=state.progress_known,
        )


class LiveStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A job at one moment."""

    time: str
    """Time of the status, ISO 8601 in UTC."""
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
    """``None``: no node is missing."""
    budgets: LiveBudgets = LiveBudgets()
    best_durable: int | None = None
    """Iteration of the newest checkpoint that survives the end of the job, at the last decision."""
    best_committed: int | None = None
    """Iteration of the newest checkpoint in any tier, at the last decision."""
    quarantined: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()
    exit_code: int | None = None
    """Exit code of the job once it is over."""
    reason: str | None = None


Answer = LiveStatus | Leads | Refused
"""To a :data:`Question`."""
OnAgent = ToNode | Welcome | Refused | AgentHeartbeat
"""Messages at an agent."""
