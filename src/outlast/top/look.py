"""The data of ``outlast top``: a run's status and each rank's activity, refreshed periodically.

:class:`Looker` has one thread for each source that can block: the run directory, whose disk may hang, the coordinator,
which may be stopped, and the goodput account, which takes long for a long run. Another thread combines their results.
So the screen never blocks, and sources that do not respond are listed with their duration.

The status is that of ``outlast status``. A rank's current activity is in its node's heartbeat memory, which the agent
holds: on this machine it is read by any process of the job's user. The progress of ranks elsewhere comes from the
journal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from outlast import clock
from outlast.errors import ConfigError, RendezvousError
from outlast.goodput import Ledger
from outlast.launch.protocol import LiveStatus
from outlast.policy.goodput import IterationRate
from outlast.policy.run_view import JobView
from outlast.runtime.board import RankState, held_pages
from outlast.runtime.processes import is_alive, process_state
from outlast.runtime.run_key import find_known_keys
from outlast.status.evidence import Evidence, ask_coordinator, ask_job, endpoint_of, gather, may_have_coordinator
from outlast.status.facts import judge
from outlast.status.report import NodeReport, NodeState, RunState, StatusReport

log = logging.getLogger(__name__)
SCHEMA = 1
"""Version of the ``--json`` output; raised when the meaning of a field changes or a field is removed."""
FIRST_S, SCREEN_S = 60.0, 3.0
"""Limit of the first read, and how long the screen waits for it; with thousands of ranks it takes seconds."""
ASKED_S, READ_S, COUNTED_S = 5.0, 5.0, 2.0
"""How long ``--once`` waits for the coordinator, then for the run directory, and then for the goodput."""
UNANSWERED_S = 3.0
"""A source that has not responded for this long is listed."""
ASK_AGAIN_S = 1.0
"""Shortest time between two queries to the coordinator, whatever the interval."""
FRESH_S = 5.0
"""An older response of the coordinator is not used; the journal is."""
GOODPUT_S = 30.0
"""Shortest time between two computations of the goodput."""


class RankLine(msgspec.Struct, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    """Global rank."""
    node: str
    """Name of its node."""
    pid: int | None
    """Process id, on its machine; `null`: not known."""
    state: str
    """`starting` (no session yet, or none at all), `running`, `restarting` and `spare` (in process), `stopped` (by a
    signal), `finished`, `ended`; for a rank of a node that is not training, the state of the node."""
    iteration: int | None
    """Optimizer steps done."""
    section: str | None
    """The open sections, outermost first, joined by `/`; `null`: none, or the rank is on another machine."""
    section_s: float | None
    """Seconds since the innermost one was entered."""
    heartbeat_age_s: float | None
    """Seconds since the last heartbeat; for a rank on another machine: since it reported its iteration."""
    source: str
    """`board`: read from the heartbeat memory of the node, current; `journal`: the rank's last report."""


class Unanswered(msgspec.Struct, frozen=True, kw_only=True):
    """A source that does not respond."""

    what: str
    """`the coordinator` or `the run directory`."""
    for_s: float
    """Seconds without a response."""
    reason: str | None
    """The reason, if known."""


class TopReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment, with its ranks."""

    schema: int
    """1; increased when the meaning of a field changes or a field is removed."""
    iteration: int | None
    """Optimizer steps done: the maximum over the ranks."""
    total: int | None
    """Number of steps of the complete run; `null`: not known (a loop without `run.steps(total=...)`)."""
    rate: float | None
    """Iterations per second, over at most the last minute."""
    left_s: float | None
    """Seconds until the run is complete at this rate."""
    goodput: float | None
    """Productive share of the run's time so far, 0 to 1, as computed by `outlast report`; `null`: not computed."""
    ranks: list[RankLine]
    """All ranks of the newest cycle."""
    unanswered: list[Unanswered]
    """Sources that do not respond."""
    status: StatusReport
    """What `outlast status --json` prints."""


@dataclass(slots=True)
class _AskedPlace:
    """State of one source."""

    name: str
    begun_ns: int = 0
    """Start of the current query; 0 = none."""
    answered_ns: int = 0
    """Last response; 0 = never."""
    wanted_ns: int = 0
    """Since when a response is wanted; 0 = not wanted."""
    reason: str | None = None
    """Why the last query failed."""

    def unanswered(self, now_ns: int, patience_s: float) -> Unanswered | None:
        """Return the entry for the report if a wanted response has been missing for longer than the patience."""
        since_ns = max(self.answered_ns, self.wanted_ns) if self.reason is not None else self.begun_ns
        for_s = (now_ns - since_ns) / 1e9
        if not self.wanted_ns or not since_ns or for_s < patience_s:
            return None
        return Unanswered(what=self.name, for_s=round(for_s, 1), reason=self.reason)


class Looker:
    """Observe a run in background threads.

    Args:
        target: A run directory, or ``HOST:PORT`` of its coordinator.
        interval_s: Seconds between refreshes.
        key_file: File of the run key, if the key is not in the environment or the directory.

    Raises:
        ConfigError: The target is neither.

    Thread: any; no method blocks longer than documented.
    """

    def __init__(self, target: str, *, interval_s: float, key_file: str | None = None) -> None:
        self._endpoint = endpoint_of(target)
        self._target, self._interval_s, self._key_file = target, interval_s, key_file
        self._run_dir = Path(target) if self._endpoint is None else None
        self._disk, self._coordinator = _AskedPlace("the run directory"), _AskedPlace("the coordinator")
        self._evidence: Evidence | None = None
        self._live: LiveStatus | None = None
        self._goodput: float | None = None
        self._lock = threading.Lock()
        """Held while a report is compiled, without blocking calls."""
        self._board_rate = IterationRate()
        self._job = ""
        self.newest: TopReport | None = None
        """The newest report."""
        self.error: BaseException | None = None
        """The target cannot be observed, or a thread failed."""
        self._ends, self._has_first, self._has_asked = threading.Event(), threading.Event(), threading.Event()
        self._has_read, self._has_counted = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        if self._run_dir is not None:
            self._begin(self._read_on, self._count_goodput)
        self._begin(self._ask_on, self._put_together)

    def wait_for_first(self, *, for_all: bool = False) -> None:
        """Wait for the first report.

        Args:
            for_all: Wait for the coordinator, the run directory and the goodput too.

        Raises:
            ConfigError: The target cannot be observed or, with ``for_all``, does not respond.

        Blocks: up to :data:`SCREEN_S`; with ``for_all`` :data:`FIRST_S` and then :data:`ASKED_S`, :data:`READ_S` and
        :data:`COUNTED_S`.
        """
        if not self._has_first.wait(FIRST_S if for_all else SCREEN_S) and for_all:
            raise ConfigError(
                f"{self._target} did not respond within {FIRST_S:g} s; its disk may hang: use another machine, or "
                "specify HOST:PORT of its --rdzv-endpoint"
            )
        self.check()
        if for_all:
            self._has_asked.wait(ASKED_S)
            if self._run_dir is not None:  # the coordinator may have reported it
                self._has_read.wait(READ_S)
                self._has_counted.wait(COUNTED_S)
            with self._lock:
                self.newest = self._compile(patience_s=0.5)

    def check(self) -> None:
        """Raise the error of a failed thread; otherwise the view would silently freeze.

        Raises:
            ConfigError: The target cannot be observed.
        """
        if self.error is not None:
            raise self.error

    def close(self, timeout_s: float = 0.5) -> bool:
        """Stop; return whether all threads have ended. Blocks: up to ``timeout_s``."""
        self._ends.set()
        until_s = clock.now_s() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - clock.now_s()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the threads -------------------------------------------------------------------------------------------

    def _begin(self, *works: Callable[[], None]) -> None:
        for work in works:
            thread = threading.Thread(target=self._do, args=(work,), name="outlast-top", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by check() in the thread that shows the view
            self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        self.error = error
        self._has_first.set()

    def _read_on(self) -> None:
        """Read the run directory repeatedly; less often if that takes long."""
        source = self._disk
        source.wanted_ns = clock.now_ns()
        while not self._ends.is_set():
            assert self._run_dir is not None
            source.begun_ns = clock.now_ns()
            try:
                self._evidence = gather(self._run_dir, asks=False, key_file=self._key_file)
                source.answered_ns, source.reason = clock.now_ns(), None
            except ConfigError as error:
                source.reason = str(error)
                if self._endpoint is not None:
                    source.wanted_ns = 0  # not shared with this machine: only the coordinator's status is available
                elif self.newest is None:
                    self._refuse(error)
                    return
            self._has_read.set()
            took_s = (clock.now_ns() - source.begun_ns) / 1e9
            source.begun_ns = 0
            self._ends.wait(max(self._interval_s, 4 * took_s))

    def _ask_on(self) -> None:
        """Query the coordinator repeatedly while the job has one."""
        source = self._coordinator
        while not self._ends.is_set():
            evidence = self._evidence
            if self._endpoint is None and evidence is None:
                self._ends.wait(0.05)
                continue
            if self._endpoint is not None or (
                evidence is not None and may_have_coordinator(evidence.view.job(evidence.job), evidence.living)
            ):
                source.wanted_ns = source.wanted_ns or clock.now_ns()
                source.begun_ns = clock.now_ns()
                live, reason = self._ask(evidence)
                if live is not None:
                    self._live, source.answered_ns = live, clock.now_ns()
                elif self._endpoint is not None and self.newest is None:
                    self._refuse(ConfigError(reason or "no coordinator responds"))
                    return
                source.reason, source.begun_ns = reason, 0
            else:
                source.wanted_ns, source.reason = 0, None
            self._has_asked.set()
            self._ends.wait(max(self._interval_s, ASK_AGAIN_S))

    def _ask(self, evidence: Evidence | None) -> tuple[LiveStatus | None, str | None]:
        try:
            keys = find_known_keys(self._run_dir, key_file=self._key_file)
            if self._endpoint is None:
                assert evidence is not None
                return ask_job(evidence.view.job(evidence.job), keys)
            live = ask_coordinator(self._endpoint, keys[0] if keys else None)
        except (RendezvousError, ConfigError) as error:
            return None, str(error)
        if live.run_dir is not None and self._run_dir is None:
            self._run_dir = Path(live.run_dir)
            self._begin(self._read_on, self._count_goodput)
        return live, None

    def _count_goodput(self) -> None:
        """Compute the goodput repeatedly, once a first report without it exists."""
        while not self._has_first.wait(0.1) and not self._ends.is_set():
            pass
        while not self._ends.is_set():
            began_s = clock.now_s()
            try:
                assert self._run_dir is not None
                self._goodput = Ledger.read(self._run_dir).ettr
            except Exception as error:  # noqa: BLE001  the status says what cannot be read; the rest is shown without it
                log.debug("the goodput cannot be counted: %s", error)
                self._goodput = None
            self._has_counted.set()
            self._ends.wait(max(GOODPUT_S, 20 * (clock.now_s() - began_s)))

    def _put_together(self) -> None:
        while not self._ends.is_set():
            began_s = clock.now_s()
            with self._lock:
                report = self._compile()
            if report is not None:
                self.newest = report
                self._has_first.set()
            took_s = clock.now_s() - began_s
            self._ends.wait(max(self._interval_s, 3 * took_s) if report is not None else 0.02)

    # -- putting together ----------------------------------------------------------------------------------------

    def _compile(self, patience_s: float = UNANSWERED_S) -> TopReport | None:
        """Return the current report; ``None`` = nothing is known yet."""
        evidence, live, now_ns = self._evidence, self._live, clock.now_ns()
        if evidence is None:
            if live is None or self._endpoint is None:
                return None
            evidence = Evidence(job=live.job)
        is_fresh = (now_ns - self._coordinator.answered_ns) / 1e9 < FRESH_S + self._interval_s
        if live is not None and ((evidence.view.newest is not None and not is_fresh) or live.job != evidence.job):
            live = None
        living = {one: is_alive(one.process) for one in evidence.living}
        evidence = replace(evidence, live=live, living=living, unreachable=self._coordinator.reason)
        status = judge(evidence, clock.wall_ns())
        job = evidence.view.job(evidence.job)
        pids = [one.process.pid for one, runs in living.items() if one.rank is None and runs]
        ranks = list_ranks(status, job, [page for pid in pids for page in held_pages(pid)])
        iteration = max((one.iteration for one in ranks if one.iteration is not None), default=status.iteration)
        rate = self._rate(status, ranks)
        is_running = status.state == RunState.RUNNING
        left = None if job.total is None or iteration is None else max(0, job.total - iteration)
        unanswered = [one.unanswered(now_ns, patience_s) for one in (self._coordinator, self._disk)]
        return TopReport(
            schema=SCHEMA,
            iteration=iteration,
            total=job.total,
            rate=rate,
            left_s=round(left / rate, 1) if left is not None and rate and is_running else None,
            goodput=self._goodput,
            ranks=ranks,
            unanswered=[one for one in unanswered if one is not None],
            status=status,
        )

    def _rate(self, status: StatusReport, ranks: Iterable[RankLine]) -> float | None:
        """Return the rate from the heartbeat memory, or the journal's without one."""
        seen = max(
            (one.iteration for one in ranks if one.source == "board" and one.iteration is not None), default=None
        )
        if seen is None or status.job != self._job:
            self._board_rate.clear()
        self._job = status.job
        if seen is not None:
            self._board_rate.note(clock.now_ns(), seen)
        return status.rate if self._board_rate.span_s < 2 * self._interval_s else self._board_rate.value


def list_ranks(status: StatusReport, job: JobView, seen: Sequence[RankState]) -> list[RankLine]:
    """Return all ranks of the newest cycle, in order.

    Args:
        status: The run's status.
        job: The job's events.
        seen: Pages of the heartbeat memory of this machine.
    """
    is_open = status.state not in (RunState.OVER, RunState.NO_PROCESS)
    pages = {state.global_rank: state for state in seen if status.cycle is None or state.cycle >= status.cycle}
    now_ns, now_wall_ns = clock.now_ns(), clock.wall_ns()
    lines = []
    for node in status.nodes:
        elsewhere = "running" if node.state == NodeState.TRAINING else str(node.state)
        for place, rank in enumerate(node.ranks):
            if is_open and (page := pages.get(rank)) is not None:
                lines.append(_line_of_page(page, node, now_ns))
                continue
            track = job.ranks.get(rank)
            lines.append(
                RankLine(
                    rank=rank,
                    node=node.name,
                    pid=node.pids[place] if len(node.pids) == len(node.ranks) else None,
                    state="ended" if rank in node.lost_ranks else elsewhere,
                    iteration=None if track is None else track.iteration,
                    section=None,
                    section_s=None,
                    heartbeat_age_s=None
                    if track is None or track.iteration is None
                    else round(max(0, now_wall_ns - track.wall_ns) / 1e9, 1),
                    source="journal",
                )
            )
    return sorted(lines, key=lambda line: line.rank)


def _line_of_page(page: RankState, node: NodeReport, now_ns: int) -> RankLine:
    inner = page.sections[-1] if page.sections else None
    state = page.standing
    if state != "finished":
        state = {"X": "ended", "Z": "ended", "T": "stopped", "t": "stopped"}.get(process_state(page.pid), state)
    return RankLine(
        rank=page.global_rank,
        node=node.name,
        pid=page.pid or None,
        state=state,
        iteration=page.iteration if page.reports_iteration else None,
        section="/".join(section.name for section in page.sections) or None,
        section_s=None if inner is None else round(max(0, now_ns - inner.start_ns) / 1e9, 1),
        heartbeat_age_s=round(max(0, now_ns - page.last_heartbeat_ns) / 1e9, 1) if page.last_heartbeat_ns else None,
        source="board",
    )
