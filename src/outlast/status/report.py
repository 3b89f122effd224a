"""The report of ``outlast status``: what ``--json`` prints, field by field."""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = [
    "SCHEMA",
    "BudgetReport",
    "Budgets",
    "GenerationReport",
    "NodeReport",
    "NodeState",
    "RunState",
    "StatusReport",
    "Trouble",
    "WaitingReport",
]

SCHEMA = 1
"""Of what ``--json`` prints; raised when a field changes its meaning or goes."""


class RunState(StrEnum):
    """How a job is."""

    FORMING = "forming"
    """Its nodes come together, and its workers have not started yet, or are being started again."""
    WAITING = "waiting"
    """Nodes are missing; `waiting` says how many, and until when."""
    RUNNING = "running"
    """Its workers run."""
    OVER = "over"
    """It has ended; `exit_code` and `reason` say how."""
    NO_PROCESS = "no_process"
    """It has not ended in order, and none of its processes is left."""
    UNKNOWN = "unknown"
    """It has not ended in order, its processes are on other machines, and nothing was heard of them lately."""


class NodeState(StrEnum):
    """What a node does."""

    TRAINING = "training"
    """It runs workers."""
    SPARE = "spare"
    """It waits for a slot while others train."""
    READY = "ready"
    """It waits for the cycle to start."""
    JOINING = "joining"
    """Its agent has begun, and the coordinator has not taken it in yet."""
    EXCLUDED = "excluded"
    """It gets no slot: quarantined, held back, or unhealthy."""
    LOST = "lost"
    """Its agent is gone."""
    ENDED = "ended"
    """Its agent has ended in order."""
    UNKNOWN = "unknown"
    """Nothing is known of it any more, as its processes cannot be seen from here."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the job."""

    name: str
    """`--node-name`, or the machine's."""
    state: NodeState
    """See below."""
    host: str | None
    """The machine's name."""
    agent_pid: int | None
    """Process id of its agent, on its machine."""
    node_rank: int | None
    """Of the newest cycle that it took part in, if that is the job's newest."""
    ranks: list[int]
    """Global ranks in the job's newest cycle."""
    pids: list[int]
    """Process ids of these ranks, while they run."""
    lost_ranks: list[int]
    """Ranks of these that ended, and without which the others go on."""


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """One budget of the ladder."""

    used: int
    """What was taken of it."""
    limit: int | None
    """`null`: no limit."""
    left: int | None
    """`null`: no limit."""


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """What may still be tried."""

    restarts_in_a_row: BudgetReport
    """Restarts since the last progress, `--max-restarts`."""
    restarts_total: BudgetReport
    """Restarts of the whole run, `--max-restarts-total`."""
    cycles_without_progress: BudgetReport
    """Cycles in a row that made none, `max_no_progress_cycles`; counts only where `progress_known`."""
    progress_known: bool
    """A worker of this run reports its saves."""


class GenerationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest generation in one tier."""

    tier: str
    """`memory`, `local`, `replica` or `global`."""
    iteration: int
    """Optimizer steps that it has done."""
    time: str
    """When it was committed."""
    age_s: float
    """Seconds since then."""
    job: str
    """The job that saved it."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """An incident, with what followed."""

    time: str
    """When it was first reported."""
    age_s: float
    """Seconds since then."""
    cycle: int | None
    """The cycle in which it was."""
    kind: str
    """One of the journal's kinds of incidents."""
    node: str | None
    """`null`: no node is concerned, or none can be named."""
    rank: int | None
    """Global rank; `null`: a whole node is concerned, or no rank can be named."""
    iteration: int | None
    """Where the rank was."""
    text: str
    """The incident in one line."""
    remedy: str | None
    """Name of the ladder's rung that followed; `null`: none was needed, or it is not decided yet."""
    decision: str | None
    """What was decided, in words."""
    num_reports: int
    """How many ranks and nodes reported it, or what it did to them."""


class WaitingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that are waited for."""

    num_missing: int
    """Nodes that are missing."""
    num_needed: int
    """Nodes that the next cycle needs."""
    have: list[str]
    """Names of the nodes that are there."""
    gives_up_in_s: float | None
    """Seconds until the job gives up; `null`: not known."""


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    schema: int
    """1; raised when a field changes its meaning or goes."""
    time: str
    """When this was asked."""
    sources: list[str]
    """Where it comes from: `journal`, `coordinator`."""
    run: str
    """The run's id."""
    run_dir: str | None
    """The run directory."""
    job: str
    """Its newest job."""
    launcher: str | None
    """`outlast run`, or who started the workers else: `torchrun`, `srun`, `python`; `null`: not known."""
    command: list[str]
    """The script with its arguments."""
    state: RunState
    """See below."""
    summary: str
    """The state in one line."""
    exit_code: int | None
    """Of the job, once it is over."""
    reason: str | None
    """Why it is over."""
    started: str | None
    """When the job began."""
    last_seen: str | None
    """The newest line of the journal, word of the coordinator, or renewal by the run directory's owner."""
    last_seen_s: float | None
    """Its age."""
    waiting: WaitingReport | None
    """`null`: no node is waited for."""
    cycle: int | None
    """The newest cycle that has started."""
    num_cycles: int
    """Cycles of this job."""
    world_size: int | None
    """Ranks of the newest cycle."""
    iteration: int | None
    """Optimizer steps done, as far as the ranks told; a session tells every 5 s."""
    iteration_time: str | None
    """When that was told."""
    iteration_age_s: float | None
    """Seconds since then."""
    rate: float | None
    """Iterations a second, over at most the last minute in which some were told."""
    nodes: list[NodeReport]
    """Who runs where, in the order of the ranks."""
    spares: list[str]
    """Names of the nodes that wait for a slot."""
    excluded: list[str]
    """Names of the nodes that get none."""
    budgets: Budgets | None
    """`null`: nothing of ours restarts the workers, or it is not known."""
    generations: list[GenerationReport]
    """The newest of each tier, nearest tier first."""
    directory: str | None
    """Global tier."""
    local_directory: str | None
    """Local tier."""
    incidents: list[Trouble]
    """The newest ones of this job, newest first, at most 50."""
    num_incidents: int
    """How many were found."""
    problems: list[str]
    """What could not be read."""
