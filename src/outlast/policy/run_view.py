"""One view of a run: the only place where the journal's events are combined.

:class:`RunView` takes events one by one, in the order of their time as far as the reader knows it, and holds the jobs,
cycles, ranks, incidents with their decisions, saves and training progress so far. It serves readers of finished and of
running runs. Pure: reads and writes no events; readers do not modify it.

Rejected: a fold for each reader. There were ten, and they disagreed on what a job, a restart and an incident is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast.errors import ExitReason
from outlast.incidents import CYCLE_ENDING, Event, EventKind, IncidentKind, RecoveryLevel
from outlast.policy.goodput import REPORTED_S, IterationRate, ProductiveTime, goodput, read_scores
from outlast.policy.recovery_point import Tier

At = tuple[float, Event]
"""Seconds since the view's zero, and the event."""
MANY = frozenset({IncidentKind.SAVE_FAILED, IncidentKind.COPY_REJECTED, IncidentKind.REPLICATION_FAILED})
"""Incidents that many ranks report for one cause."""
_DONE = frozenset({EventKind.PROGRESS, EventKind.SAVE_SCHEDULED, EventKind.SESSION_ENDED})
"""Events of a rank that contain the number of steps done."""
_REPORTS = _DONE | {EventKind.RESTORED}
_GROWING = frozenset(
    {EventKind.PROGRESS, EventKind.SAVE_SCHEDULED, EventKind.SAVE_COMMITTED, EventKind.STRAGGLER_REPORT}
)
"""Events that are written repeatedly while training continues."""


@dataclass(slots=True)
class RankView:
    """Last reported state of one rank."""

    cycle: int = 0
    iteration: int | None = None
    """Optimizer steps done; ``None`` = none reported."""
    wall_ns: int = 0
    """When they were reported."""
    rate: IterationRate = field(default_factory=IterationRate)
    session: Event | None = None
    """The newest start of its session."""
    session_end: Event | None = None
    """The end of that session."""
    stall: tuple[int, float] | None = None
    """Iteration of the newest save, and how long training waited for it."""


@dataclass(slots=True)
class WorkersStart:
    """One start of a cycle's workers. A coordinator that did not know of later cycles may reuse a number: then there
    are two starts, with different masters."""

    job: str
    run_id: str
    cycle: int
    master: str
    """Rendezvous address of its ranks."""
    began_ns: int
    """By the monotonic clock of the node that wrote the first event."""
    world_size: int = 0
    ranks: dict[int, str] = field(default_factory=dict)
    """Rank to node."""
    first_ns: dict[int, int] = field(default_factory=dict)
    """Rank to when its first iteration was done, by the monotonic clock of its node."""
    restored: int = 0
    """The highest iteration that a rank loaded."""
    iteration: int = 0
    """The highest iteration that a rank reported as done or loaded."""
    reached: int = 0
    """The highest iteration that an agent read at the end."""
    is_ending: bool = False
    """A decision on it was written."""
    committed: set[int] = field(default_factory=set)
    """Iterations committed in it, to any tier."""
    awaits_global: dict[int | None, set[int]] = field(default_factory=dict)
    """Rank to the iterations that are being written from its memory to the global tier."""

    @property
    def trained_ns(self) -> int | None:
        """When all ranks had done an iteration; ``None`` = not all have."""
        return max(self.first_ns.values()) if 0 < self.world_size == len(self.first_ns) else None

    def take(self, event: Event) -> None:
        match event.kind:
            case EventKind.PROGRESS if event.rank is not None:
                self.first_ns.setdefault(event.rank, event.mono_ns)
                self.iteration = max(self.iteration, event.iteration or 0)
            case EventKind.RESTORED:
                self.restored = max(self.restored, event.iteration or 0)
                self.iteration = max(self.iteration, event.iteration or 0)
            case EventKind.SAVE_SCHEDULED if str(Tier.GLOBAL) in (event.data.get("tiers") or ()):
                self.awaits_global.setdefault(event.rank, set()).add(event.iteration or 0)
            case EventKind.SAVE_COMMITTED if (iteration := saved_iteration(event)) is not None:
                self.committed.add(iteration)
                if str(Tier.GLOBAL) in (event.data.get("tiers") or ()):
                    # A save that a newer one replaced is not written any more.
                    self.awaits_global[event.rank] = {
                        one for one in self.awaits_global.get(event.rank, ()) if one > iteration
                    }
            case EventKind.INCIDENT if incident_of(event).get("kind") == IncidentKind.SAVE_FAILED:
                self.awaits_global.get(event.rank, set()).discard(event.iteration or 0)
            case EventKind.CYCLE_ENDED:
                self.reached = max([self.reached, *(event.data.get("iterations") or {}).values()])
        if event.kind in (EventKind.DECISION, EventKind.CYCLE_ENDED, EventKind.JOB_ENDED, EventKind.NOTICE):
            self.is_ending = True


@dataclass(slots=True)
class _Events:
    by_kind: dict[EventKind, list[At]] = field(default_factory=dict)

    def keep(self, pair: At, *, newest_only: bool) -> None:
        """Keep an event; ``newest_only`` drops the earlier ones of its kind."""
        kept = self.by_kind.setdefault(pair[1].kind, [])
        if newest_only:
            kept.clear()
        kept.append(pair)

    def of(self, *kinds: EventKind) -> list[At]:
        """Return the events of some kinds, by time."""
        found = [pair for kind in kinds for pair in self.by_kind.get(kind, ())]
        return sorted(found, key=lambda pair: pair[0]) if len(kinds) > 1 else found


@dataclass(slots=True)
class CycleView(_Events):
    number: int = -1
    starts: dict[str, At] = field(default_factory=dict)
    """Node to the start of its workers."""
    ends: dict[str, At] = field(default_factory=dict)
    incidents: list[At] = field(default_factory=list)
    """Incident reports without a decision."""
    decisions: list[At] = field(default_factory=list)
    """Events that contain an incident and its decision."""
    last_s: float = 0.0

    @property
    def done(self) -> list[At]:
        return [pair for pair in self.of(*_DONE) if pair[1].iteration is not None]

    @property
    def world_size(self) -> int:
        """Number of ranks that it began with; 0 = not known."""
        return max((int(event.data.get("world_size") or 0) for _, event in self.starts.values()), default=0)

    @property
    def started_s(self) -> float | None:
        """When its workers ran on the last node; ``None`` = they never did."""
        if self.starts:
            return max(time_s for time_s, _ in self.starts.values())
        return min((time_s for time_s, _ in self.of(EventKind.SESSION_STARTED)), default=None)

    @property
    def spared(self) -> list[int]:
        """Ranks that were lost and without which the others continued; one that was lost twice is listed twice."""
        return [
            event.rank
            for _, event in self.of(EventKind.WORKER_EXITED)
            if event.data.get("spared") and event.rank is not None
        ]

    @property
    def is_over(self) -> bool:
        """Whether it has ended; nodes whose workers have finished wait for those of other nodes."""
        if any(event.data.get("reason") != "finished" for _, event in self.ends.values()):
            return True
        return bool(self.starts) and set(self.starts) <= set(self.ends)


@dataclass(slots=True)
class IncidentView:
    """One incident, combined from all reports of it."""

    time_s: float
    event: Event
    """The first report."""
    incident: dict[str, Any]
    decision: dict[str, Any] | None = None
    """The decision; ``None`` = none was needed, or none yet."""
    num_reports: int = 1


_Key = tuple[object, ...]


@dataclass(slots=True)
class JobView(_Events):
    name: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    keeps_samples: bool = True
    newest: Event | None = None
    cycles: dict[int, CycleView] = field(default_factory=dict)
    ranks: dict[int, RankView] = field(default_factory=dict)
    launcher: str = ""
    agents: dict[str, Event] = field(default_factory=dict)
    """Node to the newest start of its agent."""
    ended_agents: dict[str, Event] = field(default_factory=dict)
    """Node to the end of that agent."""
    coordinator_node: str = ""
    joined: dict[str, None] = field(default_factory=dict)
    """Nodes that joined and were not lost since."""
    lost: set[str] = field(default_factory=set)
    unhealthy: set[str] = field(default_factory=set)
    decision: Event | None = None
    decided: Event | None = None
    """The newest decision on an incident."""
    waits_since_ns: int = 0
    """Time of the newest event after which nodes may be missing."""
    world_size: int | None = None
    total: int | None = None
    """Number of iterations at which the run is complete."""
    directory: str | None = None
    local_directory: str | None = None
    counts: Counter[EventKind] = field(default_factory=Counter)
    incident_counts: Counter[str] = field(default_factory=Counter)
    """Incident reports by kind."""
    failed_saves: Counter[str] = field(default_factory=Counter)
    num_reruns: int = 0
    stall_s: float = 0.0
    """How long ranks waited for saves, summed over ranks."""
    committed: dict[str, Event] = field(default_factory=dict)
    """Tier to the newest commit."""
    productive: ProductiveTime = field(default_factory=ProductiveTime)
    witness: int | None = None
    """The rank whose reports count as those of all: the lowest that trains."""
    _cases: dict[_Key, IncidentView] = field(default_factory=dict)
    _unjudged: dict[int | None, dict[_Key, IncidentView]] = field(default_factory=dict)
    _ended_by: dict[int | None, IncidentView] = field(default_factory=dict)
    """Cycle to the incident that ended it."""
    _newest_cycle: int = -1

    @property
    def num_reporting(self) -> int:
        """Number of ranks that report steps: the most in any of its cycles."""
        reports = (cycle.of(EventKind.STEPS_STARTED, *_DONE) for cycle in self.cycles.values())
        return max((len({one.rank for _, one in pairs if one.iteration is not None}) for pairs in reports), default=0)

    @property
    def exit_code(self) -> int | None:
        """The job's exit code; ``None`` = it runs, or its end is not in the journal."""
        ends = self.of(EventKind.JOB_ENDED)
        codes = [int(event.data["exit_code"]) for _, event in ends if "exit_code" in event.data]
        if not codes and self.cycles:
            codes = self._session_codes()
        if ExitReason.FINISHED in codes:
            return int(ExitReason.FINISHED)
        return codes[-1] if codes else None

    def _session_codes(self) -> list[int]:
        """Return the exit code of the last cycle if all of its sessions ended and no agent reports one."""
        if self.agents:
            return []
        last = self.cycles[max(self.cycles)]
        codes = [int(event.data.get("exit_code", 1)) for _, event in last.of(EventKind.SESSION_ENDED)]
        return [max(codes)] if codes and len(codes) >= len(last.of(EventKind.SESSION_STARTED)) else []

    @property
    def num_cycles(self) -> int:
        return sum(bool(cycle.starts) for cycle in self.cycles.values())

    @property
    def newest_cycle(self) -> CycleView | None:
        return max((cycle for cycle in self.cycles.values() if cycle.starts), key=lambda one: one.number, default=None)

    @property
    def command(self) -> list[str]:
        newest = next(reversed(self.agents.values()), None)
        return [str(word) for word in (newest.data.get("command") or () if newest is not None else ())]

    @property
    def sessions(self) -> dict[int, Event]:
        """Rank to the newest start of its session, by rank."""
        return {rank: one.session for rank, one in sorted(self.ranks.items()) if one.session is not None}

    @property
    def farthest(self) -> RankView | None:
        """The rank that is farthest in the newest cycle with reported iterations."""
        known = [one for one in self.ranks.values() if one.iteration is not None]
        return max(known, key=lambda one: (one.cycle, one.iteration or 0, one.wall_ns), default=None)

    @property
    def incidents(self) -> list[IncidentView]:
        """Incidents by time; consequences are counted with their root cause."""
        return sorted(self._cases.values(), key=lambda case: case.event.wall_ns)

    def setting(self, name: str) -> Any:
        """Return a setting of the coordinator's agent, or of another; ``None`` in a journal of an earlier version."""
        agents = [self.agents[self.coordinator_node]] if self.coordinator_node in self.agents else []
        values = (event.data.get(name) for event in (*agents, *self.agents.values()))
        return next((value for value in values if value is not None), None)

    @property
    def began_s(self) -> float:
        """When it began: its first event, or the start of the agent that joined first."""
        return min(
            [self.start_s, *(time_s - start_up_s(event) for time_s, event in self.of(EventKind.JOB_STARTED)[:1])]
        )

    def goodput(self, now_s: float) -> float | None:
        """Return the goodput up to the newest report, or up to :data:`REPORTED_S` before now if that is later; ``None``
        = no rank has begun a step."""
        elapsed_s = max(self.end_s, now_s - REPORTED_S) - self.began_s
        return goodput(self.productive.total_s, elapsed_s) if self.productive.has_begun else None

    def take(self, time_s: float, event: Event) -> None:
        self.end_s = max(self.end_s, time_s)
        self.newest = event
        self.counts[event.kind] += 1
        pair = (time_s, event)
        newest_only = not self.keeps_samples and event.kind in _GROWING
        self.keep(pair, newest_only=newest_only)
        self._take_of_job(event)
        if event.kind in _REPORTS and event.rank is not None and event.iteration is not None:
            self._note(event.rank, event, event.iteration)
        if event.kind in (EventKind.INCIDENT, EventKind.DECISION):
            self._take_incident(time_s, event)
        self._take_training(time_s, event)
        is_of_agent = event.kind in (EventKind.JOB_STARTED, EventKind.JOB_ENDED, EventKind.QUEUED)
        if not is_of_agent and (event.cycle is not None or event.rank is not None):
            self._take_of_cycle(pair, newest_only=newest_only)

    def _take_of_job(self, event: Event) -> None:
        data, node = event.data, event.node
        match event.kind:
            case EventKind.JOB_STARTED:
                self.agents.pop(node, None)
                self.agents[node] = event
                self.ended_agents.pop(node, None)
                self.lost.discard(node)
                self.waits_since_ns = self.waits_since_ns or event.wall_ns
            case EventKind.JOB_ENDED:
                self.ended_agents[node] = event
                self.joined.pop(node, None)
            case EventKind.NODE_JOINED:
                name = str(data.get("name", node))
                self.coordinator_node = node
                self.joined[name] = None
                self.lost.discard(name)
                self.unhealthy.discard(name)
            case EventKind.CYCLE_STARTED | EventKind.SESSION_STARTED:
                self.world_size = data.get("world_size", self.world_size)
                if event.kind == EventKind.SESSION_STARTED and event.rank is not None:
                    self._begin_session(event.rank, event)
            case EventKind.CYCLE_ENDED:
                self.waits_since_ns = max(self.waits_since_ns, event.wall_ns)
                for rank, iteration in (data.get("iterations") or {}).items():
                    if iteration:
                        self._note(int(rank), event, iteration)
            case EventKind.STEPS_STARTED:
                self.total = data.get("total")
            case EventKind.SESSION_ENDED if event.rank is not None:
                self.ranks.setdefault(event.rank, RankView()).session_end = event
            case EventKind.SAVE_SCHEDULED if event.rank is not None:
                stall_s = float(data.get("stall_s") or 0.0)
                self.ranks.setdefault(event.rank, RankView()).stall = event.iteration or 0, stall_s
                self.stall_s += stall_s
            case EventKind.SAVE_COMMITTED if event.iteration is not None:
                self.committed.update(dict.fromkeys(map(str, data.get("tiers") or ()), event))

    def _begin_session(self, rank: int, event: Event) -> None:
        data, cycle = event.data, event.cycle or 0
        self.launcher = str(data.get("launcher") or self.launcher)
        self.directory = data.get("directory") or self.directory
        self.local_directory = data.get("local_directory") or self.local_directory
        # An earlier start of the job, in the same files, may have had more ranks and higher cycles.
        size = int(data.get("world_size") or 0)
        if cycle < self._newest_cycle or (size and size < len(self.ranks)):
            self.ranks = {
                other: one for other, one in self.ranks.items() if not (size and other >= size) and one.cycle <= cycle
            }
        self._newest_cycle = cycle
        one = self.ranks.setdefault(rank, RankView())
        one.session, one.session_end = event, None
        one.rate.clear()

    def _note(self, rank: int, event: Event, iteration: int) -> None:
        cycle = event.cycle or 0
        one = self.ranks.setdefault(rank, RankView())
        if one.iteration is not None and cycle < one.cycle:
            return  # of an earlier cycle: clocks of nodes differ
        if one.iteration is None or cycle > one.cycle or event.kind == EventKind.RESTORED:
            one.rate.clear()
        one.cycle, one.iteration, one.wall_ns = cycle, iteration, event.wall_ns
        self._newest_cycle = max(self._newest_cycle, cycle)
        if event.kind in (EventKind.PROGRESS, EventKind.SAVE_SCHEDULED):
            one.rate.note(event.mono_ns, iteration)

    def _take_training(self, time_s: float, event: Event) -> None:
        """Count productive time: one rank's reports count for all, once the last rank has begun."""
        time, rank, iteration = self.productive, event.rank, event.iteration or 0
        if event.kind == EventKind.STEPS_STARTED and rank is not None:
            if self.witness is None or rank < self.witness:
                self.witness = rank
            if rank == self.witness or not time.has_advanced:
                time.begin(time_s, iteration)
        elif event.kind in _DONE and rank == self.witness and rank is not None:
            time.advance(time_s, iteration, float(event.data.get("stall_s") or 0.0))
        elif event.kind == EventKind.STRAGGLER_REPORT:
            time.take_slow_ranks(read_scores(event.data), event.data.get("named") or ())

    def _take_incident(self, time_s: float, event: Event) -> None:
        incident, decision = incident_of(event), event.data.get("verdict")
        kind, node = incident.get("kind"), str(incident.get("node") or "")
        key: _Key
        if event.kind == EventKind.DECISION:
            self.decision, self.coordinator_node = event, event.node
            self.waits_since_ns = max(self.waits_since_ns, event.wall_ns)
            if not incident:
                return
            self.decided = event
            reports = self._unjudged.pop(event.cycle, {})
            for key in reports:
                del self._cases[key]
            same = reports.get((event.cycle, *_who(incident)))
            number = max(1, sum(one.num_reports for one in reports.values()))
            first = event if same is None else same.event
            at_s = time_s if same is None else same.time_s
            key = ("decision", self.counts[EventKind.DECISION])
            self._cases[key] = IncidentView(at_s, first, incident, decision, number)
            if (decision or {}).get("rung", -1) >= RecoveryLevel.RESTART_WORKERS:
                self._ended_by[event.cycle] = self._cases[key]
            return
        self.incident_counts[str(kind)] += 1
        if kind == IncidentKind.SAVE_FAILED:
            self.failed_saves[str((incident.get("evidence") or {}).get("tier", "unknown"))] += 1
        self.num_reruns += (decision or {}).get("rung") == RecoveryLevel.RERUN_STEP
        if kind == IncidentKind.NODE_LOST and node:
            self.lost.add(node)
            self.joined.pop(node, None)
        elif kind == IncidentKind.NODE_UNHEALTHY and node and node not in self.joined:
            self.unhealthy.add(node)
        if not incident:
            return
        who = _who(incident) if kind not in MANY else (kind,)
        ends_cycle = kind in CYCLE_ENDING and decision is None
        key = (event.cycle, *who) if ends_cycle else (event.cycle, incident.get("iteration"), *who)
        known = self._ended_by.get(event.cycle) if ends_cycle else None  # then the report is that of a node cut off
        if known is not None or (known := self._cases.get(key)) is not None:
            known.num_reports += 1
            return
        self._cases[key] = IncidentView(time_s, event, incident, decision)
        if (decision or {}).get("rung") == RecoveryLevel.RERUN_STEP:
            self.productive.redo_step()
        if ends_cycle:
            self._unjudged.setdefault(event.cycle, {})[key] = self._cases[key]

    def _take_of_cycle(self, pair: At, *, newest_only: bool) -> None:
        time_s, event = pair
        number = event.cycle or 0
        cycle = self.cycles.get(number) or self.cycles.setdefault(number, CycleView(number=number))
        cycle.keep(pair, newest_only=newest_only)
        if event.kind not in (EventKind.NODE_JOINED, EventKind.FORMING):
            cycle.last_s = max(cycle.last_s, time_s)
        if event.kind == EventKind.CYCLE_STARTED:
            cycle.starts[event.node] = pair
            self._ended_by.pop(number, None)  # a coordinator that did not know its predecessor repeats a number
        elif event.kind == EventKind.CYCLE_ENDED:
            cycle.ends[event.node] = pair
        elif incident_of(event) and (event.kind == EventKind.DECISION or "verdict" in event.data):
            cycle.decisions.append(pair)
        elif event.kind == EventKind.INCIDENT:
            cycle.incidents.append(pair)


class RunView:
    """View of a run as its events so far show it.

    Args:
        zero_ns: The zero of the view's times, in nanoseconds since the epoch.
        keeps_samples: Keep every report of progress, saves and slow ranks. A view that follows a run for months keeps
            only the newest of each job and cycle.
    """

    def __init__(self, *, zero_ns: int = 0, keeps_samples: bool = True) -> None:
        self._zero_ns, self._keeps_samples = zero_ns, keeps_samples
        self.run_id = ""
        self.began_ns: int | None = None
        """When the run began, in nanoseconds since the epoch: its first event, or the start of the agent that joined
        first; ``None`` = no event yet."""
        self.newest: Event | None = None
        self.jobs: list[JobView] = []
        """Jobs in the order of their start; one that was requeued under its name is listed twice."""
        self.starts: list[WorkersStart] = []
        self.committed: dict[str, set[int]] = {}
        self._has_agent = False
        self._by_name: dict[str, JobView] = {}
        self._open_agents: dict[str, set[str]] = {}
        self._workers: dict[tuple[str, int], WorkersStart] = {}

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunView:
        view = cls()
        for event in events:
            view.take(event)
        return view

    def job(self, name: str) -> JobView:
        """Return the newest job of a name; an empty one if there is none."""
        return self._by_name.get(name) or JobView(name=name)

    def take(self, event: Event, time_ns: int | None = None) -> None:
        """Add the next event.

        Args:
            time_ns: Time of the event in nanoseconds since the epoch; ``None`` = by its node's clock.
        """
        time_ns = event.wall_ns if time_ns is None else time_ns
        self.newest = event
        self.run_id = self.run_id or event.run_id
        self.began_ns = time_ns if self.began_ns is None else self.began_ns
        job = self._job_of(event, (time_ns - self._zero_ns) / 1e9)
        if event.kind == EventKind.JOB_STARTED and not self._has_agent:
            self._has_agent = True
            if job is self.jobs[0]:
                self.began_ns = min(self.began_ns, time_ns - int(start_up_s(event) * 1e9))
        job.take((time_ns - self._zero_ns) / 1e9, event)
        if event.kind == EventKind.SAVE_COMMITTED and (iteration := saved_iteration(event)) is not None:
            for tier in event.data.get("tiers") or ():
                self.committed.setdefault(str(tier), set()).add(iteration)
        if event.cycle is None:
            return
        if event.kind == EventKind.CYCLE_STARTED:
            self._start_workers(event)
        if (workers := self._workers.get((event.job, event.cycle))) is not None:
            workers.take(event)

    def _job_of(self, event: Event, time_s: float) -> JobView:
        name = event.job
        agents = self._open_agents.setdefault(name, set())
        known = self._by_name.get(name)
        if event.kind == EventKind.JOB_STARTED:
            if known is not None and known.counts[EventKind.JOB_ENDED] and not agents:
                known = None
            agents.add(event.node)
        elif event.kind == EventKind.JOB_ENDED:
            agents.discard(event.node)
        if known is None:
            known = JobView(name=name, start_s=time_s, end_s=time_s, keeps_samples=self._keeps_samples)
            self._by_name[name] = known
            self.jobs.append(known)
        return known

    def _start_workers(self, event: Event) -> None:
        key, master = (event.job, event.cycle or 0), str(event.data.get("master", ""))
        workers = self._workers.get(key)
        if workers is None or workers.master != master:
            workers = WorkersStart(event.job, event.run_id, key[1], master, event.mono_ns)
            self._workers[key] = workers
            self.starts.append(workers)
        workers.world_size = int(event.data.get("world_size") or 0)
        workers.ranks |= dict.fromkeys(event.data.get("ranks") or (), event.node)


def incident_of(event: Event) -> dict[str, Any]:
    """Return the incident of an event; empty = none."""
    incident = event.data.get("incident")
    return incident if isinstance(incident, dict) else {}


def saved_iteration(event: Event) -> int | None:
    """Return the iteration of a save event."""
    iteration = event.data.get("generation") if event.iteration is None else event.iteration
    return iteration if isinstance(iteration, int) else None


def start_up_s(event: Event) -> float:
    """Return how long an agent had run when it wrote ``job_started``, in seconds."""
    return float(event.data.get("start_up_s") or 0.0)


def _who(incident: Mapping[str, Any]) -> _Key:
    return incident.get("kind"), incident.get("node"), incident.get("rank")
