"""What agents and the coordinator send each other; how it travels is :mod:`outlast.launch.control`'s.

Numbers and names have limits, which hold where a message is decoded: whoever sends one beyond them is disconnected. So
no agent, however broken, can have the coordinator count to a trillion.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from outlast.incidents import Cause, Incident
from outlast.inprocess.protocol import Gone
from outlast.policy import inprocess_protocol as p
from outlast.policy.culprit import Position
from outlast.policy.deadlines import Expired, Observation
from outlast.policy.ladder import LadderState, Limits
from outlast.policy.recovery_point import Distrusted, Load
from outlast.policy.rerun import Replay

Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Of a node, a life of one, a host."""
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Of a cycle, a term, a beat."""
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
"""Of a world or a part of one, or a place in it: there is a loop over so many somewhere."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent's first message: who it is."""

    run_id: Text
    node: Name
    epoch: Name
    """Names this life of the agent."""
    command: Name
    """Digest of what its workers run."""
    command_text: Text
    """The same for people, shortened."""
    job: Name | None = None
    """The job that it takes part in; ``None``: it has just begun."""
    leader: Name = ""
    """The coordinator that it has obeyed last."""
    term: Number = 0
    """The highest that it has obeyed."""
    version: Name = ""
    """Of the package; empty: it reports none."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator's answer to a :class:`Hello`."""

    job: str
    host: str
    """Node of the coordinator."""
    leader: str
    """Names this life of the coordinator."""
    term: int
    version: str = ""
    """Of the package; empty: it reports none."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The coordinator's answer to a :class:`Hello` that does not fit."""

    reason: str
    job: str | None = None
    """Another job of the run, which the coordinator serves: the agent's own is over here; ``None``: the reason is
    another one."""
    leads: bool = False
    """That job's coordinator leads it; see :class:`outlast.policy.leadership.Leadership`."""
    successor: Name | None = None
    """Endpoint of the coordinator to which this one has yielded; ``None``: it has not."""


class AgentBeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent's sign of life, and the coordinator's answer with the same count."""

    count: Number
    """How often the agent's main loop has run its timer: a stuck one shows."""


class Moving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent that had no answer for long goes to another coordinator: it lives, and obeys this one no more."""


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """How is the job? Answered with a :class:`LiveStatus`."""


class AskLeadership(msgspec.Struct, frozen=True, tag=True):
    """How does this coordinator stand? Asked by another one; answered with :class:`Leads`."""


class Leads(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a coordinator stands; see :class:`outlast.policy.leadership.Leadership`."""

    job: str
    term: int
    leads: bool
    order: int


class CycleFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one node knows of a cycle that ended for it."""

    cycle: Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
    incident: Incident | None = None
    """What went wrong here; ``None`` when the node only followed the others."""
    durable_iteration: int | None = None
    """The newest checkpoint that survives the end of the job."""
    committed_iteration: int | None = None
    """The newest one in any tier."""
    progress_known: bool = False
    had_session: bool = False
    """A worker of the node had a session, or a monitor."""
    has_trained: bool = False
    """A rank of the node completed a step, or may have."""
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

    node: Name = ""
    epoch: Name = ""
    """Names one life of the node's agent."""


class JoinRequest(FromNode, frozen=True, kw_only=True, tag=True):
    """A node wants to take part in the next cycle."""

    addr: Name
    nproc: Size
    """Workers per node; 0 = not known (an agent that is not ours)."""
    wish: Size | None = None
    ended: CycleFacts | None = None
    """The cycle that ended for this node, if it took part in one."""


class SlotPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A node's place in a cycle."""

    term: Number = 0
    """Of the coordinator when it formed the cycle; two coordinators can give the same number to a cycle."""
    cycle: Number
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    slot: Size | None = None
    """``None``: a spare."""
    num_spares: Size = 0
    """Spares that waited when it began."""
    spare: Size | None = None
    """Its number among them."""
    num_kept: Size = 0
    """Holders of slots that held one in the last cycle before it that ran, too."""
    host_slot: Size | None = None
    """Slot of the coordinator's node, if it holds one."""
    host_spare: Size | None = None
    """Its number among the spares, if it is one."""

    @property
    def order(self) -> tuple[int, int]:
        """By which places of different cycles are ordered."""
        return self.term, self.cycle


class Register(FromNode, frozen=True, kw_only=True, tag=True):
    """A node of a job in progress reached the coordinator again, perhaps another one than before."""

    addr: Name
    nproc: Size
    wish: Size | None = None
    place: SlotPlace | None = None
    """Its place in the last cycle that it started, or began to wait beside; ``None``: in none."""
    ran: SlotPlace | None = None
    """Its place in the last cycle that is known to have started on all of its nodes."""
    running: bool = False
    """Its workers of that cycle run, or have finished."""
    ladder: LadderState | None = None
    """As in the last :class:`Decided` that it received."""


class Running(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's workers of a cycle have been started."""

    cycle: Number


class Stepped(FromNode, frozen=True, kw_only=True, tag=True):
    """A rank of this node has completed a step of a cycle, or may have."""

    cycle: Number


class Counted(FromNode, frozen=True, kw_only=True, tag=True):
    """This node knows its place beside a cycle, or that it ran, and how many spares wait beside it."""

    cycle: Number
    term: Number
    """In which it was formed."""
    num_spares: Size


class Hung(FromNode, frozen=True, kw_only=True, tag=True):
    """A rank of this node exceeded a timeout: all nodes shall look at their ranks and end the cycle."""

    cycle: Number
    incident: Incident
    expired: tuple[Expired, ...] = ()


class Master(FromNode, frozen=True, kw_only=True, tag=True):
    """The first node opened the cycle's store."""

    cycle: Number
    addr: Name
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Finished(FromNode, frozen=True, kw_only=True, tag=True):
    """Every worker of this node ended with exit code 0, or could be spared.

    Where every one of them was lost, and their peers may continue elsewhere, the facts name the incident.
    """

    facts: CycleFacts


class Restarted(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's workers restarted inside their processes, and the cycle continues."""

    cycle: Number
    call: Number
    """Which of the workers' calls of a wrapped function it was, from 0."""
    restart_count: Number
    """Which restart of that call began."""
    incident: Incident
    """What the workers restarted after."""
    durable_iteration: int | None = None
    committed_iteration: int | None = None
    progress_known: bool = False


class KnownRank(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """A rank in a wrapped function, as the relay of its node knows it."""

    initial_rank: int
    standing: p.MemberStanding
    labels: dict[str, str] = {}
    """What it reports of its place beyond its node."""
    last_words: Gone | p.Left | None = None
    """``None``: it lives, or may."""


class RankStandings(FromNode, frozen=True, kw_only=True, tag=True):
    """Ranks of this node came to a call of a wrapped function, or the coordinator is reached again."""

    cycle: int
    call: int
    """Which of the workers' calls of a wrapped function it is, from 0."""
    world_size: int
    limits: p.RestartLimits
    ranks: tuple[KnownRank, ...]
    end: p.Finish | p.Abort | None = None
    """The last order of the call, which they have."""


_SHORT = {"term": "t", "cycle": "c", "call": "k", "reports": "r", "runs": "n", "order": "o"}
"""Names on the wire of what each rank, or each node, causes in each restart."""


class RankReports(FromNode, frozen=True, kw_only=True, tag="rr", rename=_SHORT):
    """What ranks of this node report from a wrapped function, in this order."""

    cycle: int
    call: int
    """-1: any; they ended before they had a duty."""
    reports: tuple[tuple[int, Gone | p.Report], ...]
    """By initial rank."""


class ScriptSettings(FromNode, frozen=True, kw_only=True, tag=True):
    """What the config of this node's script sets; the coordinator uses what no option and no file sets."""

    fault_tolerance: str
    """As ``FaultToleranceConfig.to_json`` writes it; empty = nothing."""


class Noticed(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's agent received a signal that requests a shutdown; its workers are ending, and others follow them."""

    signal: Annotated[int, msgspec.Meta(ge=1, le=127)]


class Leave(FromNode, frozen=True, kw_only=True, tag=True):
    """This node's agent was requested to shut down, and its workers are gone."""

    saved: bool = False
    signal: Annotated[int, msgspec.Meta(ge=0, le=127)] = 0
    """What its agent received; 0 = nothing: its workers followed others, or got the request from elsewhere."""
    facts: CycleFacts | None = None
    whole_job: bool = True
    """The notice is for the job; otherwise only this node goes."""


class Unhealthy(FromNode, frozen=True, kw_only=True, tag=True):
    """This node failed its health check: before it joined, and it does not; or while it trains."""

    incident: Incident
    stays: bool
    """Its agent keeps running, also if the node does not join."""


class Bye(FromNode, frozen=True, kw_only=True, tag=True):
    """This node got its :class:`Stop` and needs the coordinator no more."""


class Dead(FromNode, frozen=True, kw_only=True, tag=True):
    """The coordinator's process saw that a node's agent died, or went to another coordinator."""

    reason: str
    is_known: bool = True
    """It is dead for certain; otherwise it may take part elsewhere."""


class NameClaim(FromNode, frozen=True, kw_only=True, tag=True):
    """The coordinator's process got the first message of an agent that has just begun: may it have this name?"""


class CoordinatorTick(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Time to look at the nodes' signs of life."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node is a spare (or quarantined) and waits."""

    reason: str
    place: SlotPlace | None = None
    """Its place beside the cycle that has just begun, if one has."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node carries the first slot of a new cycle: open its store and report where."""

    cycle: int


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Start the workers of a cycle."""

    cycle: int
    term: int
    """Of the coordinator that formed it."""
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
    has_checkpoint: bool = False
    """Earlier cycles of the run, or earlier jobs of it, have committed a checkpoint."""
    durable_iteration: int | None = None
    """See :class:`~outlast.env.WorkerEnv`."""
    place: SlotPlace
    """The same as the node keeps it."""


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All nodes of a cycle have started it, and so many spares wait beside it."""

    cycle: int
    num_spares: int


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
    missing: int = 1
    """Slots without a node; at least 1 while most nodes of the last cycle are missing."""


class RankOrder(msgspec.Struct, frozen=True, kw_only=True, tag="ro", rename=_SHORT):
    """An order to ranks of this node that are in a wrapped function."""

    term: int
    """Of the coordinator."""
    cycle: int
    call: int
    runs: tuple[tuple[int, int], ...]
    """Runs of the first initial rank and how many."""
    order: p.Order


class PeersFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every worker of another node exited with 0; this node's are expected to exit, too."""

    cycle: Number


class Decided(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the recovery policy remembers now. A coordinator that takes over gets it from the agents: ``ladder.json``
    may be on another machine, or on a full disk."""

    ladder: LadderState


class Remark(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something about another node that belongs into this one's log too."""

    text: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The job is over."""

    exit_code: int
    reason: str
    is_replaced: bool = False
    """The job continues: another agent has this node's name in it."""


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
    | Noticed
    | Leave
    | Unhealthy
    | Bye
)
"""What an agent reports."""
ToCoordinator = FromAgent | NameClaim | Dead | CoordinatorTick
"""What the coordinator takes."""
ToNode = Wait | NodesMissing | Prepare | Start | Ran | CycleOver | RankOrder | PeersFinished | Decided | Remark | Stop
"""What the coordinator sends."""
Question = AskStatus | AskLeadership
OnControl = FromAgent | Hello | AgentBeat | Moving | Question
"""What comes in at the coordinator's listener."""


# -- how a job is, for whoever asks -----------------------------------------------------------------------------


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


class LiveStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
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
    """The newest checkpoint that survives the end of the job, when the coordinator last decided."""
    best_committed: int | None = None
    """The newest one in any tier, then."""
    quarantined: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()
    exit_code: int | None = None
    """Of the job, once it is over."""
    reason: str | None = None


Answer = LiveStatus | Leads | Refused
"""To a :data:`Question`."""
OnAgent = ToNode | Welcome | Refused | AgentBeat
"""What comes in at an agent."""
