"""The report of ``outlast status``: its fields, as ``--json`` prints them, and its lines for people.

The most important lines come first.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from outlast.wording import count, duration, number_ranges, one_line

SCHEMA = 1
"""Version of the ``--json`` output; raised when the meaning of a field changes or a field is removed."""


class RunState(StrEnum):
    """State of a job."""

    FORMING = "forming"
    """Its nodes are joining, and its workers have not started yet, or are being restarted."""
    WAITING = "waiting"
    """Nodes are missing; `waiting` has their number and the deadline."""
    RUNNING = "running"
    """Its workers run."""
    OVER = "over"
    """It has ended; see `exit_code` and `reason`."""
    NO_PROCESS = "no_process"
    """It ended without reporting a result, and all of its processes are gone."""
    UNKNOWN = "unknown"
    """It did not end properly. Its processes are on other machines and have not reported recently."""


class NodeState(StrEnum):
    """State of a node."""

    TRAINING = "training"
    """It runs workers."""
    SPARE = "spare"
    """It waits for a slot while others train."""
    READY = "ready"
    """It waits for the cycle to start."""
    JOINING = "joining"
    """Its agent has started, and the coordinator has not admitted it yet."""
    EXCLUDED = "excluded"
    """It gets no slot: quarantined, held back, or unhealthy."""
    LOST = "lost"
    """Its agent exited unexpectedly or cannot be reached."""
    ENDED = "ended"
    """Its agent has exited in order."""
    UNKNOWN = "unknown"
    """Not known, because its processes cannot be seen from here."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the job."""

    name: str
    """`--node-name`, or the name of the machine."""
    state: NodeState
    """See below."""
    host: str | None = None
    """Name of the machine."""
    agent_pid: int | None = None
    """Process id of its agent, on its machine."""
    node_rank: int | None = None
    """Node rank in the newest cycle that it took part in, if that is the job's newest."""
    ranks: list[int] = []
    """Global ranks in the job's newest cycle."""
    pids: list[int] = []
    """Process ids of these ranks, while they run."""
    lost_ranks: list[int] = []
    """Ranks among these that ended, and without which the others continue."""


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """One budget of the recovery policy."""

    used: int
    """Number used up."""
    limit: int | None
    """`null`: no limit."""
    left: int | None
    """`null`: no limit."""


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """The budgets of the recovery policy."""

    restarts_in_a_row: BudgetReport
    """Restarts since the last progress, `--max-restarts`."""
    restarts_total: BudgetReport
    """Restarts of the whole run, `--max-restarts-total`."""
    cycles_without_progress: BudgetReport
    """Consecutive cycles without progress, `max_no_progress_cycles`; counts only if `progress_known`."""
    progress_known: bool
    """A worker of this run reports its saves."""


class CheckpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint in one tier."""

    tier: str
    """`memory`, `local`, `replica` or `global`."""
    iteration: int
    """Optimizer steps done."""
    time: str
    """When it was committed."""
    age_s: float
    """Seconds since then."""
    job: str
    """The job that saved it."""


class DurabilityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint that survives each failure."""

    worker: int | None
    """Iteration of the newest one in any tier; it survives the failure of workers. `null`: none."""
    node: int | None
    """Iteration of the newest one that survives the loss of a node."""
    job: int | None
    """Iteration of the newest one that survives the end of the job; the next job resumes from it."""
    job_age_s: float | None
    """Seconds since that one was committed."""
    lag_iterations: int | None
    """Iterations done beyond it, which are lost if the job ends now; `null`: not known."""


class IncidentReport(msgspec.Struct, frozen=True, kw_only=True):
    """An incident, with what followed."""

    time: str
    """When it was first reported."""
    age_s: float
    """Seconds since then."""
    cycle: int | None
    """The cycle in which it occurred."""
    kind: str
    """One of the journal's kinds of incidents."""
    node: str | None
    """`null`: no node is concerned, or none can be identified."""
    rank: int | None
    """Global rank; `null`: a whole node is concerned, or no rank can be identified."""
    iteration: int | None
    """Iteration of the rank at the incident."""
    text: str
    """The incident in one line."""
    remedy: str | None
    """Name of the recovery level that followed; `null`: none was needed, or it is not decided yet."""
    decision: str | None
    """The decision in words."""
    num_reports: int
    """Number of ranks and nodes that reported the incident or a consequence of it."""


class WaitingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that are waited for."""

    num_missing: int
    """Nodes that are missing."""
    num_needed: int
    """Nodes that the next cycle needs."""
    have: list[str]
    """Names of the nodes that have joined."""
    gives_up_in_s: float | None
    """Seconds until the job gives up; `null`: not known."""


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    schema: int
    """1; increased when the meaning of a field changes or a field is removed."""
    time: str
    """Time of the report."""
    sources: list[str]
    """Sources of the report: `journal`, `coordinator`."""
    run: str
    """The run's id."""
    run_dir: str | None
    """The run directory."""
    job: str
    """Its newest job."""
    launcher: str | None
    """`outlast run`, or another launcher that started the workers: `torchrun`, `srun`, `python`; `null`: not known."""
    command: list[str]
    """The script with its arguments."""
    state: RunState
    """See below."""
    summary: str
    """The state in one line."""
    exit_code: int | None
    """Exit code of the job, once it is over."""
    reason: str | None
    """Why it is over."""
    started: str | None
    """When the job began."""
    last_seen: str | None
    """The newest line of the journal, report of the coordinator, or renewal by the run directory's owner."""
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
    """Optimizer steps done, as far as the ranks reported; a session reports every 5 s."""
    iteration_time: str | None
    """When that iteration was reported."""
    iteration_age_s: float | None
    """Seconds since then."""
    rate: float | None
    """Iterations per second, over at most the last minute in which iterations were reported."""
    nodes: list[NodeReport]
    """The nodes of the job, in the order of the ranks."""
    spares: list[str]
    """Names of the nodes that wait for a slot."""
    excluded: list[str]
    """Names of the nodes that get no slot."""
    budgets: Budgets | None
    """`null`: the workers are not restarted by outlast, or it is not known."""
    checkpoints: list[CheckpointReport]
    """The newest checkpoint of each tier, nearest tier first."""
    durability: DurabilityReport | None
    """`null`: no information about saves."""
    directory: str | None
    """Global tier."""
    local_directory: str | None
    """Local tier."""
    incidents: list[IncidentReport]
    """The newest ones of this job, newest first, at most 50."""
    num_incidents: int
    """Number of incidents found."""
    problems: list[str]
    """Sources that could not be read."""


MAX_NODES = 16
MAX_SHOWN = 5
_LABEL = 11


def render(report: StatusReport, *, width: int | None = None) -> Iterator[str]:
    """Yield the lines of a report.

    Args:
        report: The report.
        width: Columns at which lines are wrapped between words; ``None`` = not wrapped.
    """
    for label, text in ((label, one_line(text)) for label, text in _entries(report)):
        if width is None:
            yield f"{label:<{_LABEL}}{text}".rstrip()
            continue
        yield from textwrap.wrap(
            text,
            max(width, 40),
            initial_indent=f"{label:<{_LABEL}}",
            subsequent_indent=" " * _LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [label]


def _entries(report: StatusReport) -> Iterator[tuple[str, str]]:
    started_by = f", started by {report.launcher}" if report.launcher else ""
    yield "run", f"{report.run}, job {report.job}{started_by}"
    if report.run_dir is not None:
        yield "directory", report.run_dir
    yield "state", str(report.state) if report.state == RunState.RUNNING else report.summary
    if report.state == RunState.RUNNING and (report.iteration_age_s or 0) > 60:
        yield "", f"no iteration was reported for {duration(report.iteration_age_s or 0)}"
    if report.iteration is not None:
        rate = "" if report.rate is None else f", {report.rate:.3g} iterations/s"
        yield "iteration", f"{report.iteration}{rate}, {duration(report.iteration_age_s or 0)} ago"
    if report.cycle is not None:
        cycles = f", {count(report.num_cycles, 'cycle')} in this job" if report.num_cycles > 1 else ""
        ranks = "" if report.world_size is None else f", {count(report.world_size, 'rank')}"
        yield "cycle", f"{report.cycle}{ranks}{cycles}"
    yield from _nodes(report.nodes)
    yield from describe_safety(report)
    places = [f"{tier} {place}" for tier, place in (("local", report.local_directory), ("global", report.directory))]
    if any((report.local_directory, report.directory)):
        yield "", "in " + ", ".join(place for place in places if not place.endswith("None"))
    yield from describe_incidents(report, MAX_SHOWN)
    for problem in report.problems:
        yield "problem", problem


def describe_safety(report: StatusReport) -> Iterator[tuple[str, str]]:
    """Yield labels and texts on the remaining budgets and on saves."""
    if (budgets := report.budgets) is not None:
        progress = _budget(budgets.cycles_without_progress) if budgets.progress_known else "not known"
        yield (
            "budgets",
            f"restarts in a row {_budget(budgets.restarts_in_a_row)}, in the whole run "
            f"{_budget(budgets.restarts_total)}; cycles without progress {progress}",
        )
    saved = [f"{one.tier} {one.iteration} ({duration(one.age_s)} ago)" for one in report.checkpoints]
    if saved or report.directory or report.local_directory:
        yield "saved", ", ".join(saved) or "nothing yet"
    if text := describe_durability(report):
        yield "durable", text


def describe_waiting(waiting: WaitingReport) -> str:
    have = ", ".join(waiting.have[:8]) + (", ..." if len(waiting.have) > 8 else "")
    ends = "" if waiting.gives_up_in_s is None else f"; gives up in {waiting.gives_up_in_s:.0f} s"
    return f"{waiting.num_missing} of {count(waiting.num_needed, 'node')} (have: {have or 'none'}){ends}"


def count_nodes(nodes: Sequence[NodeReport]) -> str:
    """Return the number of nodes in each state as text."""
    return ", ".join(f"{number} {state}" for state, number in Counter(str(node.state) for node in nodes).items())


def describe_durability(report: StatusReport) -> str:
    """Return which work survives the end of the job, for people; empty = nothing is known of saves."""
    known = report.durability
    if known is None:
        return ""
    if report.state in (RunState.OVER, RunState.NO_PROCESS):
        if report.exit_code == 0:
            return ""
        following = "the next job resumes " + ("from the start" if known.job is None else f"from iteration {known.job}")
        first, done = (known.job or 0) + 1, report.iteration
        if not known.lag_iterations or done is None:
            return following
        lost = f"iteration {done} is lost" if first >= done else f"iterations {first} to {done} are lost"
        return f"{following}; {lost}"
    if known.job is None:
        return "no checkpoint survives the end of the job yet"
    text = f"iteration {known.job} survives the end of the job"
    if known.node is None or known.node < known.job:
        text += ", but not the loss of a node"
    elif known.node > known.job:
        text += f", iteration {known.node} the loss of a node"
    return f"{text}; {count(known.lag_iterations, 'iteration')} behind" if known.lag_iterations else text


def _nodes(nodes: Sequence[NodeReport]) -> Iterator[tuple[str, str]]:
    if len(nodes) > 1:
        yield "nodes", count_nodes(nodes)
    width = max((len(node.name) for node in nodes[:MAX_NODES]), default=0)
    for node in nodes[:MAX_NODES]:
        label = "node" if len(nodes) == 1 else ""
        yield label, _node(node, width)
    if len(nodes) > MAX_NODES:
        yield "", f"and {len(nodes) - MAX_NODES} more; --json names all"


def _node(node: NodeReport, width: int) -> str:
    parts = [str(node.state)]
    if node.ranks:
        parts.append(f"{'rank' if len(node.ranks) == 1 else 'ranks'} {', '.join(number_ranges(node.ranks))}")
    if node.pids:
        shown = ", ".join(str(pid) for pid in node.pids[:8]) + (", ..." if len(node.pids) > 8 else "")
        parts.append(f"{'pid' if len(node.pids) == 1 else 'pids'} {shown}")
    if node.lost_ranks:
        parts.append(f"without {', '.join(number_ranges(node.lost_ranks))}")
    if node.agent_pid is not None and node.state not in (NodeState.ENDED, NodeState.LOST):
        parts.append(f"agent pid {node.agent_pid}")
    if node.host is not None and node.host.split(".")[0] != node.name:
        parts.append(f"on {node.host}")
    return f"{node.name:<{width}}  {', '.join(parts)}"


def describe_incidents(report: StatusReport, num: int) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of the newest incidents."""
    if not report.num_incidents:
        yield "incidents", "none"
        return
    shown = report.incidents[:num]
    more = "" if len(shown) == report.num_incidents else f", the newest {len(shown)}"
    yield "incidents", f"{report.num_incidents}{more}"
    for one in shown:
        where = "" if one.cycle is None else f", cycle {one.cycle}"
        times = "" if one.num_reports == 1 else f" (reported {one.num_reports} times)"
        decision = "" if one.decision is None else f"; {one.decision}"
        yield "", f"{duration(one.age_s)} ago{where}: {one.text}{times}{decision}"


def _budget(budget: BudgetReport) -> str:
    return f"{budget.used} of {budget.limit}" if budget.limit is not None else f"{budget.used} (no limit)"
