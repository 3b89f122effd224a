"""The metrics of a node: from the heartbeat memory, the agent and the node's journal.

A scrape reads the heartbeat memory of the newest cycle, which is safe while others write, a snapshot of the agent
(:class:`AgentOutlook`), and the counts of this node's journal (:class:`NodeHistory`).
:mod:`outlast.launch.metrics_endpoint` serves them.

Rejected: gauges set by the agent's loop (values as old as its last event, and a cost for each event), and queries of
the coordinator in a scrape (each agent must answer while there is none, too).
"""

from __future__ import annotations

import platform
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outlast import clock
from outlast.decoding import convert
from outlast.errors import ExitReason
from outlast.incidents import EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.journal import JournalTail, name_file
from outlast.policy.durability import SurvivalLevel
from outlast.policy.goodput import RATE_WINDOW_S, IterationRate
from outlast.policy.recovery_point import Tier
from outlast.policy.run_view import RunView
from outlast.runtime.injection import reach
from outlast.runtime.processes import process_state
from outlast.version import __version__

if TYPE_CHECKING:
    from outlast.launch.cycle import Cycle
    from outlast.launch.protocol import LiveBudgets
    from outlast.launch.workers import WorkerProcess
    from outlast.policy.recovery_policy import RecoveryState
    from outlast.runtime.board import RankState

_MAX_CHUNKS = 16
"""Limit of one read per file; the next reads continue."""
Samples = Iterator[tuple[str, dict[str, str], float]]
"""Name, labels, value."""


@dataclass(frozen=True, slots=True)
class AgentMetric:
    name: str
    """Without the prefix ``outlast_``; a counter's name ends with ``_total``."""
    help: str
    labels: tuple[str, ...]
    """Labels in addition to ``run_id`` and ``node``."""

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


_TABLE = f"""
agent_info `job version python`: 1; the labels have the job and the versions.
agent_state `state`: 1 for the state that the agent is in.
agent_is_coordinator: Whether this node's agent hosts the coordinator.
cycle: The newest cycle that this node took part in; -1 before the first one.
cycles_started_total: Cycles that this node has started in this job.
world_size: Ranks of that cycle; 0 while none runs here.
num_nodes: Nodes of that cycle; 0 while none runs here.
spares: Nodes that waited for a slot at the last update from the coordinator.
node_iteration: Optimizer steps done: the maximum over this node's ranks.
iterations_per_second: Mean of the last {RATE_WINDOW_S:g} s without a step back; 0 if none.
durable_iteration: Highest iteration that survives the end of the job, as known to the ranks of this node.
checkpoint_lag_iterations `failure`: Iterations that would be lost by the failure of a worker, the loss of a node, or
    the end of the job now.
durable_checkpoint_age_seconds: Seconds since the newest checkpoint that survives the end of the job was committed, or
    loaded.
durable_checkpoint_due_seconds: Seconds for which a commit that survives the end of the job has been due; 0 if none is.
rank_exit_code `rank`: Exit code of a rank that has ended in the newest cycle; negative: the signal that ended it.
rank_iteration `rank`: Optimizer steps that a rank has done.
rank_state `rank state`: 1 for the state that a rank is in: starting, running, restarting, spare, stopped, finished,
    ended.
rank_section_info `rank section`: 1 for the path of the open sections of a rank.
rank_section_seconds `rank`: Seconds that a rank has been in its innermost section.
rank_heartbeat_age_seconds `rank`: Seconds since the last heartbeat of a rank.
restarts_total `recovery_level`: Restarts of the run, in all of its jobs, by recovery level; the same on all nodes.
budget_left `budget`: Remaining budget before the job ends: restarts, restarts_total, no_progress_cycles.
missing_nodes: Nodes for which the job waits; 0 while a cycle runs here.
excluded_nodes: Nodes that get no slot, permanently or in this cycle.
excluded_node_info `excluded_node`: 1 for each excluded node.
timeout_seconds `timeout`: Timeouts in effect, by setting; those of sections as rank_section_timeouts:NAME.
last_incident_info `kind root_cause_node root_cause_rank exit_code cause recovery_level`: 1 for the newest
    incident on which the coordinator decided; on the coordinator's node.
last_incident_timestamp_seconds: Time of that decision, in seconds since the epoch.
job_exit_code `reason`: Exit code of the job, once it has ended on this node; see --metrics-linger.
steps_rerun_total: Steps that ranks of this node ran again in place.
incidents_total `kind`: Incidents that this node's processes reported.
committed_iteration `tier`: Iteration of the newest checkpoint that a rank of this node committed, by tier.
committed_timestamp_seconds `tier`: Time of that commit, in seconds since the epoch.
saves_total: Saves that ranks of this node began.
save_failures_total `tier`: Saves that failed in a tier: memory, local or global; each rank of this node counts.
save_stall_seconds: Seconds for which the newest save blocked this node's slowest rank.
save_stall_seconds_total: The same, summed over the saves of all ranks of this node.
straggler_score `basis stat`: Scores of all ranks: basis relative or individual, stat min, median or max; on rank 0's
    node alone.
job_goodput: Goodput of this job, as computed by the ranks of this node.
journal_age_seconds: Seconds since this node's journal was last read.
"""
"""Each metric as ``NAME `LABEL...`: HELP``; indented lines continue a row."""
METRICS = {
    name: AgentMetric(name, text, tuple(labels))
    for head, text in (row.split(": ", 1) for row in _TABLE.strip().replace("\n    ", " ").splitlines())
    for name, *labels in [head.replace("`", "").split()]
}
"""All metrics of the endpoint, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutlook:
    """A snapshot of an agent for other threads."""

    job: str = ""
    state: str = "starting"
    is_host: bool = False
    cycle: Cycle | None = None
    """The newest cycle, also after its end."""
    num_spares: int = 0
    num_missing: int = 0
    """Nodes for which the job waits, as reported last."""
    recovery_state: RecoveryState | None = None
    """State of the recovery policy; ``None``: not yet known."""
    budgets: LiveBudgets | None = None
    """``None``: not yet known."""
    timeouts: Mapping[str, float | None] = field(default_factory=dict)
    """Enforced timeouts in seconds, by setting."""
    exit_code: int | None = None
    """Exit code of the job once it has ended on this node."""


def collect(outlook: AgentOutlook, history: NodeHistory) -> Samples:
    """Yield the metrics of an agent and of its node."""
    cycle, states = outlook.cycle, read_states(outlook)
    runs = cycle is not None and not cycle.over
    python = platform.python_version()
    yield "agent_info", {"job": outlook.job, "version": __version__, "python": python}, 1
    yield "agent_state", {"state": outlook.state}, 1
    yield "agent_is_coordinator", {}, outlook.is_host
    yield "cycle", {}, -1 if cycle is None else cycle.number
    yield "world_size", {}, cycle.start.world_size if cycle is not None and runs else 0
    yield "num_nodes", {}, cycle.start.num_nodes if cycle is not None and runs else 0
    yield "spares", {}, outlook.num_spares
    yield "missing_nodes", {}, outlook.num_missing
    if (done := farthest(states)) is not None:
        yield "node_iteration", {}, done
    yield from _show_durability(states, now_ns=clock.now_ns())
    now_ns = clock.now_ns()
    for worker in cycle.workers.values() if cycle is not None else ():
        state = states[worker.local_rank] if states else None
        yield from _show_rank(worker, state, now_ns=now_ns)
    yield from _show_policy(outlook)
    for name, seconds in outlook.timeouts.items():
        if seconds is not None:
            yield "timeout_seconds", {"timeout": name}, seconds
    if (code := outlook.exit_code) is not None:
        yield "job_exit_code", {"reason": _reason(code)}, code
    yield from history.show()


def _show_policy(outlook: AgentOutlook) -> Samples:
    """Yield the recovery policy's decisions and remaining budgets, once they are known."""
    recovery_state, budgets = outlook.recovery_state, outlook.budgets
    if recovery_state is None or budgets is None:
        return
    for recovery_level in sorted(_RESTARTING):
        yield (
            "restarts_total",
            {"recovery_level": recovery_level.name.lower()},
            recovery_state.restarts_by_level.get(recovery_level.name, 0),
        )
    for budget, used, most in (
        ("restarts", budgets.restarts_without_progress, budgets.max_restarts),
        ("restarts_total", budgets.restarts_total, budgets.max_restarts_total),
        ("no_progress_cycles", budgets.cycles_without_progress, budgets.max_no_progress_cycles),
    ):
        if most is not None:
            yield "budget_left", {"budget": budget}, max(0, most - used)
    excluded = sorted(set(recovery_state.barred))
    yield "excluded_nodes", {}, len(excluded)
    for node in excluded:
        yield "excluded_node_info", {"excluded_node": node}, 1


def _reason(exit_code: int) -> str:
    """Return the name of a job's exit code."""
    with suppress(ValueError):
        return ExitReason(exit_code).name.lower()
    with suppress(ValueError):
        return signal.Signals(exit_code - 128).name.lower()
    return "other"


def _show_durability(states: Sequence[RankState], *, now_ns: int) -> Samples:
    """Yield the iterations of the checkpoints that survive each kind of failure."""
    by_level = {
        SurvivalLevel.WORKER: max(_known(one.committed_iteration for one in states), default=None),
        # A rank without a replica is lost with its node, whatever the others have.
        SurvivalLevel.NODE: min(_known(one.node_durable_iteration for one in states), default=None),
        SurvivalLevel.JOB: max(_known(one.durable_iteration for one in states), default=None),
    }
    done = farthest(states)
    for level, iteration in by_level.items():
        if done is not None and any(one.reports_progress for one in states):
            yield "checkpoint_lag_iterations", {"failure": str(level)}, max(0, done - (iteration or 0))
    if (durable := by_level[SurvivalLevel.JOB]) is not None:
        yield "durable_iteration", {}, durable
    committed_ns = [one.kept.durable_at_ns for one in states if one.kept.durable_at_ns > 0]
    if committed_ns and durable is not None:
        yield "durable_checkpoint_age_seconds", {}, max(0.0, (now_ns - max(committed_ns)) / 1e9)
    due_ns = [one.kept.owed_since_ns for one in states if one.kept.owed_since_ns > 0]
    if any(one.reports_progress for one in states):
        yield "durable_checkpoint_due_seconds", {}, max(0.0, (now_ns - min(due_ns)) / 1e9) if due_ns else 0.0


def _known(iterations: Iterable[int | None]) -> list[int]:
    return [one for one in iterations if one is not None]


# -- the heartbeat memory ----------------------------------------------------------------------------------------


def read_states(outlook: AgentOutlook) -> list[RankState]:
    """Return the ranks' records of the newest cycle; none once its heartbeat memory is freed."""
    if outlook.cycle is None:
        return []
    try:
        return outlook.cycle.board.read_all()
    except ValueError:  # the agent has just freed it
        return []


def farthest(states: Sequence[RankState]) -> int | None:
    return max((state.iteration for state in states if state.reports_iteration), default=None)


def _show_rank(worker: WorkerProcess, state: RankState | None, *, now_ns: int) -> Samples:
    """Yield a rank's state; ``state``: its heartbeat record, ``None`` once the memory is freed."""
    labels, exit_code = {"rank": str(worker.global_rank)}, worker.exit_code
    has_ended = exit_code is not None
    if exit_code is not None:
        yield "rank_exit_code", labels, exit_code
    if state is None:
        return
    is_stopped = not has_ended and process_state(state.pid or worker.pid) in ("T", "t")
    standing = "ended" if has_ended else "stopped" if is_stopped else state.standing
    yield "rank_state", labels | {"state": standing}, 1
    if state.reports_iteration:
        yield "rank_iteration", labels, state.iteration
    if has_ended:
        return
    if state.sections:
        path = "/".join(section.name for section in state.sections)
        yield "rank_section_info", labels | {"section": path}, 1
        yield "rank_section_seconds", labels, max(0, now_ns - state.sections[-1].start_ns) / 1e9
    if state.last_heartbeat_ns:
        yield "rank_heartbeat_age_seconds", labels, max(0, now_ns - state.last_heartbeat_ns) / 1e9


# -- the journal -------------------------------------------------------------------------------------------------


class NodeHistory:
    """Counts of the journal events of this node's processes in the newest job, and the rate of its ranks.

    Thread: :meth:`read_on` and :meth:`note_iteration` one; :meth:`show` any.
    """

    def __init__(self, run_dir: Path, node: str) -> None:
        self._run_dir, self._node = run_dir, node
        self._lock = threading.Lock()
        """Held only while values change or are copied, never during disk access."""
        self._rate, self._rated_cycle = IterationRate(), -1
        self._forget("")

    def _forget(self, job: str) -> None:
        self._job = job
        self._procs: dict[str, None] = {}
        """Processes whose files are read, including ranks that an earlier cycle had here."""
        self._tail, self._view = JournalTail(self._run_dir), RunView(keeps_samples=False)
        self._read_ns = 0

    def note_iteration(self, cycle: int, iteration: int | None) -> None:
        """Note this node's iteration for the rate."""
        with self._lock:
            if cycle != self._rated_cycle or iteration is None:
                self._rate.clear()
            self._rated_cycle = cycle
            if iteration is not None:
                self._rate.note(clock.now_ns(), iteration)

    def read_on(self, job: str, ranks: list[int]) -> None:
        """Read the events since the last call; those of another job than ``job`` are dropped.

        Blocks: as long as the disk does.
        """
        if not job:
            return
        if job != self._job:
            with self._lock:
                self._forget(job)
        names = ["agent", "coordinator", *(f"rank-{rank}" for rank in sorted(ranks) if rank >= 0)]
        self._procs |= dict.fromkeys(names)
        files = [name_file(self._run_dir, job=job, node=self._node, proc=proc) for proc in self._procs]
        reach("journal.read", path=files[0].parent)
        events = self._tail.read_new(files, max_chunks=_MAX_CHUNKS)
        with self._lock:
            for event in events:
                if event.job == job and event.node == self._node:
                    self._view.take(event)
            if not self._tail.refused:
                self._read_ns = clock.now_ns()

    @property
    def has_read(self) -> bool:
        return self._read_ns > 0

    def show(self) -> Samples:
        with self._lock:
            samples = list(self._samples())
        yield from samples

    def _samples(self) -> Samples:
        yield "iterations_per_second", {}, self._rate.value or 0.0
        if not self._read_ns:
            return
        job = self._view.job(self._job)
        yield "journal_age_seconds", {}, (clock.now_ns() - self._read_ns) / 1e9
        yield "cycles_started_total", {}, job.counts[EventKind.CYCLE_STARTED]
        yield "steps_rerun_total", {}, job.num_reruns
        for kind, number in (dict.fromkeys(map(str, IncidentKind), 0) | job.incident_counts).items():
            yield "incidents_total", {"kind": kind}, number
        tiers = map(str, (Tier.MEMORY, Tier.LOCAL, Tier.GLOBAL))
        for tier, number in (dict.fromkeys(tiers, 0) | job.failed_saves).items():
            yield "save_failures_total", {"tier": tier}, number
        if (decided := job.decided) is not None:
            labels = _describe_incident(decided.data["incident"], decided.data.get("verdict") or {})
            yield "last_incident_info", labels, 1
            yield "last_incident_timestamp_seconds", {}, decided.wall_ns / 1e9
        for tier, event in job.committed.items():
            yield "committed_iteration", {"tier": tier}, event.iteration or 0
            yield "committed_timestamp_seconds", {"tier": tier}, event.wall_ns / 1e9
        yield "saves_total", {}, job.counts[EventKind.SAVE_SCHEDULED]
        yield "save_stall_seconds_total", {}, job.stall_s
        stalls = [one.stall for one in job.ranks.values() if one.stall is not None]
        if stalls:
            newest = max(iteration for iteration, _ in stalls)
            yield "save_stall_seconds", {}, max(seconds for iteration, seconds in stalls if iteration == newest)
        scores = [event.data.get("metrics") or {} for _, event in job.of(EventKind.STRAGGLER_REPORT)]
        for name, score in (scores[-1] if scores else {}).items():
            measure, _, stat = str(name).partition("/")
            basis = measure.removeprefix("gpu_").removesuffix("_perf")
            yield "straggler_score", {"basis": basis, "stat": stat}, float(score)
        if (share := job.goodput(job.began_s - clock.seconds_until(job.began_s))) is not None:
            yield "job_goodput", {}, share


def _describe_incident(data: Any, decision: Mapping[str, Any]) -> dict[str, str]:
    """Return an incident, and the decision about it, as labels."""
    try:
        incident = convert(data, Incident)
        recovery_level = RecoveryLevel(decision.get("rung", -1)).name.lower()
    except (msgspec.ValidationError, ValueError):  # written by another version
        return dict.fromkeys(METRICS["last_incident_info"].labels, "unknown")
    return {
        "kind": incident.kind,
        "root_cause_node": incident.node,
        "root_cause_rank": "" if incident.rank is None else str(incident.rank),
        "exit_code": "" if incident.exit_code is None else str(incident.exit_code),
        "cause": "" if incident.cause is None else incident.cause.type,
        "recovery_level": recovery_level,
    }


_RESTARTING = frozenset({RecoveryLevel.RESTART_IN_PROCESS, RecoveryLevel.RESTART_WORKERS, RecoveryLevel.REPLACE_NODE})
