"""What an agent shows Prometheus: an HTTP endpoint of the node, which lives as long as its agent.

:class:`MetricsEndpoint` listens and answers in threads of its own. What a scrape shows it takes from three places: the
board of the newest cycle, which is made to be read while others write; what the agent shows of itself
(:class:`AgentOutlook`, single attributes that the agent replaces as a whole); and what this node's processes have
written to the journal, which one thread reads on, every :data:`LOOK_S`. So the agent's loop waits for nobody: a scraper
that does not read, and a disk that hangs, each keep one of these threads waiting, and no other.

The number of connections is bounded, and so is the time of each. What comes beyond is closed at once.

Rejected: gauges that the agent's loop sets, since a figure would be as old as the loop's last event, and each event
would cost; asking the coordinator in a scrape, since each agent has to answer also while there is none.
"""

from __future__ import annotations

import logging
import platform
import signal
import socketserver
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outlast import clock
from outlast.decoding import convert
from outlast.env import clean_name
from outlast.errors import ConfigError, ExitReason
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung
from outlast.journal import read_on
from outlast.policy.durability import SurvivalLevel
from outlast.policy.recovery_point import Tier
from outlast.runtime.addresses import Endpoint
from outlast.runtime.injection import reach
from outlast.runtime.processes import process_state
from outlast.version import __version__

if TYPE_CHECKING:
    from outlast.launch.cycle import Cycle
    from outlast.launch.protocol import LiveBudgets
    from outlast.launch.workers import WorkerProcess
    from outlast.policy.ladder import LadderState
    from outlast.runtime.board import RankState

log = logging.getLogger(__name__)
LOOK_S = 2.0
"""How often the journal is read on, and the iterations are noted of which the rate is made."""
FIRST_LOOK_S = 0.2
"""The same until the journal has been read: counters must be there, at 0, before the first incident."""
RATE_WINDOW_S = 60.0
MAX_CONNECTIONS = 16
"""Scrapes at the same time."""
SCRAPE_S = 10.0
"""How long a connection may wait for its other side."""
_MAX_CHUNKS = 16
"""Of one file at one look; the rest is read at the next ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMetric:
    """One metric of the endpoint."""

    name: str
    """Without the prefix ``outlast_``; a counter's name ends with ``_total``."""
    help: str
    labels: tuple[str, ...] = ()
    """Beside ``run_id`` and ``node``, which all have."""

    @property
    def is_counter(self) -> bool:
        """Whether it only grows while the agent lives."""
        return self.name.endswith("_total")


METRICS = {
    metric.name: metric
    for metric in (
        AgentMetric(name="agent_info", help="1; versions, and the job.", labels=("job", "version", "python")),
        AgentMetric(name="agent_state", help="1 for the state that the agent is in.", labels=("state",)),
        AgentMetric(name="agent_is_coordinator", help="Whether this node's agent hosts the coordinator."),
        AgentMetric(name="cycle", help="The newest cycle that this node took part in; -1 before the first one."),
        AgentMetric(name="cycles_started_total", help="Cycles that this node has started in this job."),
        AgentMetric(name="world_size", help="Ranks of that cycle; 0 while none runs here."),
        AgentMetric(name="num_nodes", help="Nodes of that cycle; 0 while none runs here."),
        AgentMetric(name="spares", help="Nodes that waited for a slot, as this node was told last."),
        AgentMetric(name="node_iteration", help="Optimizer steps done: the most of this node's ranks."),
        AgentMetric(
            name="iterations_per_second", help=f"Mean of the last {RATE_WINDOW_S:g} s without a step back; 0 if none."
        ),
        AgentMetric(
            name="durable_iteration",
            help="Highest iteration that a rank of this node knows to survive the end of the job.",
        ),
        AgentMetric(
            name="checkpoint_lag_iterations",
            help="Iterations that the failure of a worker, the loss of a node, or the end of the job would lose now.",
            labels=("failure",),
        ),
        AgentMetric(
            name="durable_checkpoint_age_seconds",
            help="Seconds since the newest checkpoint that survives the end of the job was committed, or loaded.",
        ),
        AgentMetric(
            name="durable_checkpoint_due_seconds",
            help="Seconds for which a commit that survives the end of the job has been due; 0 if none is.",
        ),
        AgentMetric(
            name="rank_exit_code",
            help="Exit code of a rank that has ended in the newest cycle; negative: the signal that ended it.",
            labels=("rank",),
        ),
        AgentMetric(name="rank_iteration", help="Optimizer steps that a rank has done.", labels=("rank",)),
        AgentMetric(
            name="rank_state",
            help="1 for the state that a rank is in: starting, running, restarting, spare, stopped, finished, ended.",
            labels=("rank", "state"),
        ),
        AgentMetric(
            name="rank_section_info",
            help="1 for the path of the sections that a rank is in.",
            labels=("rank", "section"),
        ),
        AgentMetric(
            name="rank_section_seconds", help="Seconds that a rank has been in its innermost section.", labels=("rank",)
        ),
        AgentMetric(
            name="rank_heartbeat_age_seconds", help="Seconds since the last heartbeat of a rank.", labels=("rank",)
        ),
        AgentMetric(
            name="restarts_total",
            help="Restarts of the run, in all of its jobs, by remedy; the same on all nodes.",
            labels=("rung",),
        ),
        AgentMetric(
            name="budget_left",
            help="What may still be tried before the job ends: restarts, restarts_total, no_progress_cycles.",
            labels=("budget",),
        ),
        AgentMetric(name="missing_nodes", help="Nodes for which the job waits; 0 while a cycle runs here."),
        AgentMetric(name="excluded_nodes", help="Nodes that get no slot any more, or not in this cycle."),
        AgentMetric(name="excluded_node_info", help="1 for each of them.", labels=("excluded_node",)),
        AgentMetric(
            name="timeout_seconds",
            help="Timeouts in force, by the setting; those of sections as rank_section_timeouts:NAME.",
            labels=("timeout",),
        ),
        AgentMetric(
            name="last_incident_info",
            help="1 for the newest incident that the coordinator decided about; on its node.",
            labels=("kind", "culprit_node", "culprit_rank", "exit_code", "cause", "rung"),
        ),
        AgentMetric(name="last_incident_timestamp_seconds", help="When it decided, in seconds since the epoch."),
        AgentMetric(
            name="job_exit_code",
            help="Exit code of the job, once it has ended on this node; see --metrics-linger.",
            labels=("reason",),
        ),
        AgentMetric(name="steps_rerun_total", help="Steps that ranks of this node ran again in place."),
        AgentMetric(name="incidents_total", help="Incidents that this node's processes reported.", labels=("kind",)),
        AgentMetric(
            name="committed_iteration",
            help="Newest generation that a rank of this node committed, by tier.",
            labels=("tier",),
        ),
        AgentMetric(
            name="committed_timestamp_seconds", help="When that was, in seconds since the epoch.", labels=("tier",)
        ),
        AgentMetric(name="saves_total", help="Saves that ranks of this node began."),
        AgentMetric(
            name="save_failures_total",
            help="Saves that failed in a tier: memory, local or global; each rank of this node counts.",
            labels=("tier",),
        ),
        AgentMetric(name="save_stall_seconds", help="How long the newest save kept this node's slowest rank waiting."),
        AgentMetric(
            name="save_stall_seconds_total", help="The same, added up over the saves of all ranks of this node."
        ),
        AgentMetric(
            name="straggler_score",
            help="Scores of all ranks: basis relative or individual, stat min, median or max; on rank 0's node alone.",
            labels=("basis", "stat"),
        ),
        AgentMetric(
            name="job_goodput",
            help="Share of this job's time that the steps took which were done first; on nodes with ranks.",
        ),
        AgentMetric(name="journal_age_seconds", help="Seconds since this node's journal was read on."),
    )
}
"""All that the endpoint shows, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutlook:
    """An agent at one moment, as far as other threads may see it."""

    job: str = ""
    state: str = "starting"
    is_host: bool = False
    cycle: Cycle | None = None
    """The newest one, also after its end."""
    num_spares: int = 0
    num_missing: int = 0
    """Nodes for which the job waits, as this node was told last."""
    ladder: LadderState | None = None
    """What the recovery policy remembers of the run; ``None`` = not yet known."""
    budgets: LiveBudgets | None = None
    """What may still be tried; ``None`` = not yet known."""
    timeouts: Mapping[str, float | None] = field(default_factory=dict)
    """In force, in seconds, by the setting."""
    exit_code: int | None = None
    """Of the job, once it has ended on this node."""


class MetricsEndpoint:
    """Listen, and show what is asked for.

    Args:
        where: Address and port; port 0 = a free one.
        run_id: Name of the run.
        node: Name of the node.
        run_dir: The run directory.

    Raises:
        ConfigError: The package is not installed, or nothing can listen there; one line with the remedy.

    Thread: any; no method waits for a scraper.
    """

    def __init__(self, where: Endpoint, *, run_id: str, node: str, run_dir: Path) -> None:
        try:
            from prometheus_client import CollectorRegistry, MetricsHandler
        except ImportError:
            raise ConfigError(
                "--metrics-port needs prometheus-client, which is not installed: pip install 'outlast[prometheus]'"
            ) from None
        self._outlook: Callable[[], AgentOutlook] = AgentOutlook
        self.history = NodeHistory(run_dir, node)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector({"run_id": run_id, "node": node}, self._collect))
        self._has_final, self._was_scraped = threading.Event(), threading.Event()
        """What the job ended with is shown completely; and a scraper has received that."""

        def answer(handler: Any) -> None:
            is_final = self._has_final.is_set()
            MetricsHandler.do_GET(handler)
            if is_final:
                self._was_scraped.set()

        members = {"registry": self._registry, "timeout": SCRAPE_S, "do_GET": answer}
        handler = type("_ScrapeHandler", (MetricsHandler,), members)
        try:
            self._server = _ScrapeServer(where, handler)
        except OSError as error:
            raise ConfigError(
                f"nothing can listen at {where} for --metrics-port ({error.strerror or error}); give each agent of a "
                "machine a port of its own, or 0 for a free one"
            ) from None
        self.url = f"http://{Endpoint(where.host, self._server.server_port)}/metrics"
        """Where it is."""
        self._ends = threading.Event()
        serve = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="outlast-metrics-endpoint", daemon=True
        )
        look = threading.Thread(target=self._look_on, name="outlast-metrics-journal", daemon=True)
        for thread in (serve, look):
            thread.start()
        log.info("figures of this node for Prometheus are at %s", self.url)

    def show(self, outlook: Callable[[], AgentOutlook]) -> None:
        """Show an agent from now on.

        Args:
            outlook: Returns how it is; called in other threads.
        """
        self._outlook = outlook

    def await_scrape(self, timeout_s: float) -> None:
        """Wait until a scraper has received the metrics of the job's end. Blocks: up to ``timeout_s`` seconds."""
        if timeout_s > 0 and not self._was_scraped.wait(timeout_s):
            log.warning("no scrape within %g s after the job's end: its exit code is in no metric", timeout_s)

    def close(self) -> None:
        """Stop listening. Idempotent. Blocks: some 0.1 s; scrapes that are under way end by themselves."""
        if not self._ends.is_set():
            self._ends.set()
            self._server.shutdown()
            self._server.server_close()

    # -- in threads of its own ---------------------------------------------------------------------------------

    def _look_on(self) -> None:
        while not self._ends.wait(LOOK_S if self.history.has_read else min(FIRST_LOOK_S, LOOK_S)):
            try:
                outlook = self._outlook()
                self.history.note_iteration(outlook.cycle.number if outlook.cycle else -1, _farthest(_states(outlook)))
                self.history.read_on(outlook.job, [state.global_rank for state in _states(outlook)])
                if outlook.exit_code is not None:
                    self._has_final.set()
            except OSError as error:
                log.debug("the journal of this node cannot be read: %s", error)
            except Exception:
                log.exception("the figures of this node's journal cannot be read; those of its board are still shown")
                return

    def _collect(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield what is shown: name, labels, value."""
        outlook = self._outlook()
        cycle, states = outlook.cycle, _states(outlook)
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
        if (farthest := _farthest(states)) is not None:
            yield "node_iteration", {}, farthest
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
        yield from self.history.show()


def _show_policy(outlook: AgentOutlook) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield what the recovery policy has decided, and what it may still decide; nothing until that is known."""
    ladder, budgets = outlook.ladder, outlook.budgets
    if ladder is None or budgets is None:
        return
    for rung in sorted(_RESTARTING):
        yield "restarts_total", {"rung": rung.name.lower()}, ladder.restarts_by_rung.get(rung.name, 0)
    for budget, used, most in (
        ("restarts", budgets.restarts_without_progress, budgets.max_restarts),
        ("restarts_total", budgets.restarts_total, budgets.max_restarts_total),
        ("no_progress_cycles", budgets.cycles_without_progress, budgets.max_no_progress_cycles),
    ):
        if most is not None:
            yield "budget_left", {"budget": budget}, max(0, most - used)
    excluded = sorted(set(ladder.barred))
    yield "excluded_nodes", {}, len(excluded)
    for node in excluded:
        yield "excluded_node_info", {"excluded_node": node}, 1


def _reason(exit_code: int) -> str:
    """Return what an exit code of a job means, in a word."""
    with suppress(ValueError):
        return ExitReason(exit_code).name.lower()
    with suppress(ValueError):
        return signal.Signals(exit_code - 128).name.lower()
    return "other"


def _show_durability(states: Sequence[RankState], *, now_ns: int) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield how far the checkpoints go that survive each failure."""
    by_level = {
        SurvivalLevel.WORKER: max(_known(one.committed_iteration for one in states), default=None),
        # A rank whose copy is missing is lost with its node, whatever the others have.
        SurvivalLevel.NODE: min(_known(one.node_durable_iteration for one in states), default=None),
        SurvivalLevel.JOB: max(_known(one.durable_iteration for one in states), default=None),
    }
    done = _farthest(states)
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


class _Collector:
    """Make families of figures, as the client of Prometheus wants them."""

    def __init__(self, own: dict[str, str], figures: Callable[[], Iterator[tuple[str, dict[str, str], float]]]) -> None:
        self._own, self._figures = own, figures

    def collect(self) -> Iterator[Any]:
        """Yield the families of a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, labels, value in self._figures():
            metric = METRICS[name]
            if name not in families:
                kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
                families[name] = kind(f"outlast_{name}", metric.help, labels=[*self._own, *metric.labels])
            values = [*self._own.values(), *(labels[label] for label in metric.labels)]
            families[name].add_metric(values, float(value))
        yield from families.values()


class _ScrapeServer(ThreadingHTTPServer):
    """Serve each connection in a thread, but not more than :data:`MAX_CONNECTIONS`.

    Raises:
        OSError: Nothing can listen there.
    """

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, where: Endpoint, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = where.family
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((where.host, where.port), handler)

    def server_bind(self) -> None:
        """Bind; the base class would ask a name server for the address's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if one may still be begun."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be had
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what ended a connection before its time; the base class prints a traceback."""
        log.debug("a scrape from %s ended before its time", client_address, exc_info=True)


# -- the board ---------------------------------------------------------------------------------------------------


def _states(outlook: AgentOutlook) -> list[RankState]:
    """Return the pages of the newest cycle; none once its board is freed."""
    if outlook.cycle is None:
        return []
    try:
        return outlook.cycle.board.read_all()
    except ValueError:  # the agent has freed it meanwhile
        return []


def _farthest(states: Sequence[RankState]) -> int | None:
    return max((state.iteration for state in states if state.reports_iteration), default=None)


def _show_rank(
    worker: WorkerProcess, state: RankState | None, *, now_ns: int
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield what a rank does; ``state``: its page of the board, ``None`` once the board is freed."""
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
    """What this node's processes have written to the journal of the newest job, counted; and the rate of its ranks.

    Args:
        run_dir: The run directory.
        node: Name of the node.

    Thread: :meth:`read_on` and :meth:`note_iteration` one; :meth:`show` any.
    """

    def __init__(self, run_dir: Path, node: str) -> None:
        self._folder, self._node = run_dir / "journal", node
        self._lock = threading.Lock()
        """Held only while figures change or are copied, never while a disk is waited for."""
        self._samples: deque[tuple[int, int]] = deque()
        self._sampled_cycle = -1
        self._forget("")

    def _forget(self, job: str) -> None:
        """Begin with another job."""
        self._job = job
        self._offsets: dict[str, int] = {}
        self._read_ns = 0
        self._began_s: float | None = None
        """When the job began here, on the monotonic clock."""
        self._num_cycles = self._num_reruns = self._num_saves = 0
        self._incidents = Counter[str](dict.fromkeys(map(str, IncidentKind), 0))
        self._save_failures = Counter[str](dict.fromkeys(map(str, (Tier.MEMORY, Tier.LOCAL, Tier.GLOBAL)), 0))
        self._last_incident: tuple[dict[str, str], float] | None = None
        """The newest one with a decision, as labels, and when that was."""
        self._committed: dict[str, tuple[int, float]] = {}
        self._stalls: dict[int, tuple[int, float]] = {}
        self._stall_s = 0.0
        self._scores: dict[tuple[str, str], float] = {}
        self._credited_rank: int | None = None
        self._reported = self._highest = -1
        self._productive_s = 0.0

    def note_iteration(self, cycle: int, iteration: int | None) -> None:
        """Note how far this node is."""
        now_ns = clock.now_ns()
        with self._lock:
            samples = self._samples
            if cycle != self._sampled_cycle or iteration is None or (samples and iteration < samples[-1][1]):
                samples.clear()
            self._sampled_cycle = cycle
            if iteration is not None:
                samples.append((now_ns, iteration))
            while len(samples) > 2 and samples[1][0] < now_ns - RATE_WINDOW_S * 1e9:
                samples.popleft()

    def read_on(self, job: str, ranks: list[int]) -> None:
        """Read what was written since the last look.

        Args:
            job: The job; what another one counted is dropped.
            ranks: Global ranks of this node.

        Raises:
            OSError: A file cannot be read.

        Blocks: as long as the disk does.
        """
        if not job:
            return
        if job != self._job:
            with self._lock:
                self._forget(job)
        names = ["agent", "coordinator", *(f"rank-{rank}" for rank in sorted(ranks) if rank >= 0)]
        names += [name for name in self._offsets if name not in names]  # ranks that another cycle had here
        for name in names:
            self._read_file(name)
        with self._lock:
            self._read_ns = clock.now_ns()

    def _read_file(self, name: str) -> None:
        path = self._folder / f"{clean_name(self._job)}-{clean_name(self._node)}-{name}.jsonl"
        for _ in range(_MAX_CHUNKS):
            reach("journal.read", path=path)
            try:
                events, end, has_more = read_on(path, self._offsets.get(name, 0))
            except FileNotFoundError:
                return
            with self._lock:
                self._offsets[name] = end
                for event in events:
                    if event.job == self._job and event.node == self._node:
                        self._take(event)
            if not has_more:
                return

    def _take(self, event: Event) -> None:
        data, verdict = event.data, event.data.get("verdict") or {}
        match event.kind:
            case EventKind.JOB_STARTED if self._began_s is None:
                self._began_s = clock.now_s() + clock.seconds_until(event.wall_ns / 1e9)
                self._began_s -= float(data.get("start_up_s") or 0.0)
            case EventKind.CYCLE_STARTED:
                self._num_cycles += 1
            case EventKind.VERDICT if "incident" in data:
                self._last_incident = _describe_incident(data["incident"], verdict), event.wall_ns / 1e9
            case EventKind.INCIDENT:
                incident = data.get("incident") or {}
                self._incidents[str(incident.get("kind"))] += 1
                if incident.get("kind") == IncidentKind.SAVE_FAILED:
                    self._save_failures[str((incident.get("evidence") or {}).get("tier", "unknown"))] += 1
                self._num_reruns += verdict.get("rung") == Rung.RERUN_STEP
            case EventKind.SAVE_SCHEDULED if event.rank is not None:
                stall_s = float(data.get("stall_s") or 0.0)
                self._num_saves += 1
                self._stall_s += stall_s
                self._stalls[event.rank] = event.iteration or 0, stall_s
            case EventKind.SAVE_COMMITTED if event.iteration is not None:
                for tier in data.get("tiers") or ():
                    self._committed[str(tier)] = event.iteration, event.wall_ns / 1e9
            case EventKind.STRAGGLER_REPORT:
                for name, score in (data.get("metrics") or {}).items():
                    measure, _, stat = str(name).partition("/")
                    basis = measure.removeprefix("gpu_").removesuffix("_perf")
                    self._scores[basis, stat] = float(score)
            case EventKind.STEPS_STARTED | EventKind.PROGRESS if event.iteration is not None:
                self._credit(event)

    def _credit(self, event: Event) -> None:
        """Add up what new steps took; one rank stands for all, and steps that are done again do not count."""
        assert event.iteration is not None
        if self._credited_rank is None or event.kind == EventKind.STEPS_STARTED:
            lower = self._credited_rank is None or (event.rank or 0) <= self._credited_rank
            self._credited_rank = event.rank if lower else self._credited_rank
        if event.rank != self._credited_rank:
            return
        if event.kind == EventKind.STEPS_STARTED:
            self._reported = event.iteration
            self._highest = max(self._highest, event.iteration)
            return
        new = event.iteration - max(self._reported, self._highest, 0)
        self._productive_s += max(0, new) * float(event.data.get("step_s") or 0.0)
        self._reported, self._highest = event.iteration, max(self._highest, event.iteration)

    @property
    def has_read(self) -> bool:
        """Whether the journal of the job has been read."""
        return self._read_ns > 0

    def show(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield the figures: name, labels, value."""
        with self._lock:
            figures = list(self._figures())
        yield from figures

    def _figures(self) -> Iterator[tuple[str, dict[str, str], float]]:
        yield "iterations_per_second", {}, self._rate()
        if not self._read_ns:
            return
        yield "journal_age_seconds", {}, (clock.now_ns() - self._read_ns) / 1e9
        yield "cycles_started_total", {}, self._num_cycles
        yield "steps_rerun_total", {}, self._num_reruns
        for kind, number in self._incidents.items():
            yield "incidents_total", {"kind": kind}, number
        for tier, number in self._save_failures.items():
            yield "save_failures_total", {"tier": tier}, number
        if self._last_incident is not None:
            labels, at_s = self._last_incident
            yield "last_incident_info", labels, 1
            yield "last_incident_timestamp_seconds", {}, at_s
        for tier, (iteration, at_s) in self._committed.items():
            yield "committed_iteration", {"tier": tier}, iteration
            yield "committed_timestamp_seconds", {"tier": tier}, at_s
        yield "saves_total", {}, self._num_saves
        yield "save_stall_seconds_total", {}, self._stall_s
        if self._stalls:
            newest = max(iteration for iteration, _ in self._stalls.values())
            yield "save_stall_seconds", {}, max(s for iteration, s in self._stalls.values() if iteration == newest)
        for (basis, stat), score in self._scores.items():
            yield "straggler_score", {"basis": basis, "stat": stat}, score
        if self._credited_rank is not None and self._began_s is not None:
            passed_s = max(clock.now_s() - self._began_s, 1e-9)
            yield "job_goodput", {}, min(1.0, self._productive_s / passed_s)

    def _rate(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (first_ns, first), (last_ns, last) = self._samples[0], self._samples[-1]
        return (last - first) / ((last_ns - first_ns) / 1e9) if last_ns > first_ns else 0.0


def _describe_incident(data: Any, verdict: Mapping[str, Any]) -> dict[str, str]:
    """Return an incident, and the decision about it, as labels."""
    try:
        incident = convert(data, Incident)
        rung = Rung(verdict.get("rung", -1)).name.lower()
    except (msgspec.ValidationError, ValueError):  # of another version
        return dict.fromkeys(METRICS["last_incident_info"].labels, "unknown")
    return {
        "kind": incident.kind,
        "culprit_node": incident.node,
        "culprit_rank": "" if incident.rank is None else str(incident.rank),
        "exit_code": "" if incident.exit_code is None else str(incident.exit_code),
        "cause": "" if incident.cause is None else incident.cause.type,
        "rung": rung,
    }


_RESTARTING = frozenset({Rung.RESTART_IN_PROCESS, Rung.RESTART_WORKERS, Rung.REPLACE_NODE})
