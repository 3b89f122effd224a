"""From evidence to facts: how a run is. Pure: the same evidence and time give the same report.

:class:`JobEvents` takes a job's events in one by one: its agents, its cycles, how far its ranks are.
:func:`list_troubles` brings together each cycle's cause with the verdict on it, and the incidents that ended no cycle.
:func:`judge` makes the report.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outlast.clock import as_iso
from outlast.decoding import convert
from outlast.env import clean_name
from outlast.incidents import CYCLE_ENDING, Event, EventKind, Incident, IncidentKind, Rung
from outlast.launch.protocol import LiveBudgets, LiveNode, LiveStatus
from outlast.policy.durability import Durability, job_tier, with_commit
from outlast.policy.ladder import LadderState, Limits, begin_job
from outlast.policy.recovery_point import Tier
from outlast.status.evidence import Evidence
from outlast.status.report import (
    SCHEMA,
    BudgetReport,
    Budgets,
    DurabilityReport,
    GenerationReport,
    NodeReport,
    NodeState,
    RunState,
    StatusReport,
    Trouble,
    WaitingReport,
)
from outlast.wording import count, duration

RATE_WINDOW_NS = 60_000_000_000
_TELLING = (EventKind.PROGRESS, EventKind.SAVE_SCHEDULED, EventKind.RESTORED, EventKind.SESSION_ENDED)
"""What a rank writes with the iteration at which it is."""


@dataclass(slots=True)
class RankProgress:
    """How far one rank is."""

    cycle: int
    iteration: int
    wall_ns: int
    samples: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=32))
    """(monotonic ns, iteration) of its newest stretch without a step back."""

    def rate(self) -> float | None:
        """Return iterations a second over the newest samples; ``None``: there are too few."""
        if len(self.samples) < 2:
            return None
        last_ns, last = self.samples[-1]
        first_ns, first = next(one for one in self.samples if one[0] >= last_ns - RATE_WINDOW_NS)
        if first_ns == last_ns:  # a step takes longer than the window
            first_ns, first = self.samples[-2]
        return (last - first) / ((last_ns - first_ns) / 1e9) if last_ns > first_ns else None


class JobEvents:
    """What a job's events show, taken in one by one."""

    def __init__(self) -> None:
        self.agents: dict[str, Event] = {}
        """Node to the newest begin of its agent."""
        self.ended: dict[str, Event] = {}
        """Node to the end of that agent."""
        self.sessions: dict[int, Event] = {}
        """Rank to the newest begin of its session."""
        self.session_ends: dict[int, Event] = {}
        self.coordinator_node = ""
        self.joined: dict[str, bool] = {}
        """Nodes that joined and were not lost since."""
        self.lost: set[str] = set()
        self.unhealthy: set[str] = set()
        self.cycles: dict[int, dict[str, Event]] = {}
        """Cycle to node to the start of its workers."""
        self.cycle_ends: dict[int, dict[str, Event]] = {}
        self.lost_ranks: dict[int, set[int]] = {}
        self.verdict: Event | None = None
        self.waits_since_ns = 0
        """When the newest of the events happened after which nodes may be missing."""
        self.world_size: int | None = None
        self.total: int | None = None
        """Number of iterations at which the run is complete."""
        self.command: Sequence[str] = ()
        self.directory: str | None = None
        self.local_directory: str | None = None
        self._tracks: dict[int, RankProgress] = {}

    def take(self, event: Event) -> None:
        """Take in the next event."""
        data, node = event.data, event.node
        match event.kind:
            case EventKind.JOB_STARTED:
                self.agents[node] = event
                self.ended.pop(node, None)
                self.lost.discard(node)
                self.command = [str(word) for word in data.get("command") or ()]
                self.waits_since_ns = self.waits_since_ns or event.wall_ns
            case EventKind.JOB_ENDED:
                self.ended[node] = event
                self.joined.pop(node, None)
            case EventKind.NODE_JOINED:
                name = str(data.get("name", node))
                self.coordinator_node = node
                self.joined[name] = True
                self.lost.discard(name)
                self.unhealthy.discard(name)
            case EventKind.CYCLE_STARTED if event.cycle is not None:
                self.cycles.setdefault(event.cycle, {})[node] = event
                self.world_size = data.get("world_size", self.world_size)
            case EventKind.CYCLE_ENDED if event.cycle is not None:
                self.cycle_ends.setdefault(event.cycle, {})[node] = event
                self.waits_since_ns = max(self.waits_since_ns, event.wall_ns)
                for rank, iteration in (data.get("iterations") or {}).items():
                    if iteration:
                        self._note(int(rank), event, iteration)
            case EventKind.WORKER_EXITED if data.get("spared") and event.cycle is not None and event.rank is not None:
                self.lost_ranks.setdefault(event.cycle, set()).add(event.rank)
            case EventKind.VERDICT:
                self.verdict, self.coordinator_node = event, node
                self.waits_since_ns = max(self.waits_since_ns, event.wall_ns)
            case EventKind.INCIDENT:
                self._take_incident(data.get("incident") or {})
            case EventKind.SESSION_STARTED if event.rank is not None:
                self.sessions[event.rank] = event
                self.session_ends.pop(event.rank, None)
                self.world_size = data.get("world_size", self.world_size)
                self.directory = data.get("directory", self.directory)
                self.local_directory = data.get("local_directory", self.local_directory)
                self._forget_older(event)
            case EventKind.STEPS_STARTED:
                self.total = data.get("total")
            case EventKind.SESSION_ENDED if event.rank is not None:
                self.session_ends[event.rank] = event
        if event.kind in _TELLING and event.rank is not None and event.iteration is not None:
            self._note(event.rank, event, event.iteration)

    def _forget_older(self, begun: Event) -> None:
        """Forget what an earlier life of the job, in the same files, or a larger world has left."""
        size = begun.data.get("world_size") or 0
        for rank in [rank for rank in self.sessions if size and rank >= size]:
            del self.sessions[rank]
            self.session_ends.pop(rank, None)
            self._tracks.pop(rank, None)
        for rank in [rank for rank, track in self._tracks.items() if track.cycle > (begun.cycle or 0)]:
            del self._tracks[rank]
        if (track := self._tracks.get(begun.rank if begun.rank is not None else -1)) is not None:
            track.samples.clear()

    def _take_incident(self, incident: dict[str, Any]) -> None:
        name, kind = str(incident.get("node") or ""), incident.get("kind")
        if kind == IncidentKind.NODE_LOST and name:
            self.lost.add(name)
            self.joined.pop(name, None)
        elif kind == IncidentKind.NODE_UNHEALTHY and name and name not in self.joined:
            self.unhealthy.add(name)

    def _note(self, rank: int, event: Event, iteration: int) -> None:
        cycle = event.cycle or 0
        track = self._tracks.get(rank)
        if track is not None and cycle < track.cycle:
            return  # of a cycle that is over: clocks of nodes differ
        if track is None or cycle > track.cycle:
            track = self._tracks[rank] = RankProgress(cycle, iteration, event.wall_ns)
        if track.samples and iteration <= track.samples[-1][1] and event.kind == EventKind.RESTORED:
            track.samples.clear()
        track.iteration, track.wall_ns = iteration, event.wall_ns
        if event.kind in (EventKind.PROGRESS, EventKind.SAVE_SCHEDULED):
            if track.samples and iteration < track.samples[-1][1]:
                track.samples.clear()
            if not track.samples or iteration > track.samples[-1][1]:
                track.samples.append((event.mono_ns, iteration))

    @property
    def track(self) -> RankProgress | None:
        """How far the rank is that is farthest in the newest cycle in which one told."""
        newest = max((track.cycle for track in self._tracks.values()), default=0)
        of_newest = [track for track in self._tracks.values() if track.cycle == newest]
        return max(of_newest, key=lambda track: (track.iteration, track.wall_ns), default=None)

    @property
    def progress(self) -> Mapping[int, RankProgress]:
        """How far each rank is, by rank."""
        return self._tracks

    @property
    def newest_cycle(self) -> dict[str, Event]:
        """Node to the start of its workers in the newest cycle."""
        return self.cycles[max(self.cycles)] if self.cycles else {}

    @property
    def is_cycle_over(self) -> bool:
        """Whether the newest cycle has ended; nodes whose workers have finished wait for those of the others."""
        ends = self.cycle_ends.get(max(self.cycles, default=-1), {})
        if any(event.data.get("reason") != "finished" for event in ends.values()):
            return True
        return bool(self.cycles) and set(self.newest_cycle) <= set(ends)

    def setting(self, name: str) -> Any:
        """Return a setting of the coordinator's agent, or of another; ``None`` in a journal of an earlier version."""
        agents = [self.agents[self.coordinator_node]] if self.coordinator_node in self.agents else []
        agents += list(self.agents.values())
        return next((value for event in agents if (value := event.data.get(name)) is not None), None)


MAX_TROUBLES = 50


@dataclass(slots=True)
class _TroubleCase:
    """An incident as it comes together from who reported it."""

    event: Event
    incident: dict[str, Any]
    verdict: dict[str, Any] | None = None
    num_reports: int = 1


def list_troubles(events: Iterable[Event], now_ns: int) -> tuple[list[Trouble], int]:
    """Return what went wrong, newest first, at most :data:`MAX_TROUBLES`, and how much there was.

    Args:
        events: Of one job, by wall time.
        now_ns: Nanoseconds since the epoch, for ages.
    """
    cases: list[_TroubleCase] = []
    unjudged: dict[int | None, dict[tuple[object, ...], _TroubleCase]] = {}
    others: dict[tuple[object, ...], _TroubleCase] = {}
    for event in events:
        incident, verdict = event.data.get("incident"), event.data.get("verdict")
        if event.kind not in (EventKind.INCIDENT, EventKind.VERDICT) or not isinstance(incident, dict):
            continue
        kind = incident.get("kind")
        if event.kind == EventKind.VERDICT:
            reports = unjudged.pop(event.cycle, {})
            same = reports.get(_who(incident))
            cases = [one for one in cases if not any(one is report for report in reports.values())]
            at = same.event if same is not None else event
            cases.append(_TroubleCase(at, incident, verdict, max(1, sum(one.num_reports for one in reports.values()))))
            continue
        key: tuple[object, ...] = _who(incident)
        if kind in CYCLE_ENDING and verdict is None:
            group = unjudged.setdefault(event.cycle, {})
        else:
            group = others
            key = (event.cycle, kind, incident.get("iteration"), "" if kind in _MANY else incident.get("node"))
        if key in group:
            group[key].num_reports += 1
        else:
            group[key] = _TroubleCase(event, incident, verdict)
            cases.append(group[key])
    cases.sort(key=lambda case: case.event.wall_ns, reverse=True)
    return [_trouble(case, now_ns) for case in cases[:MAX_TROUBLES]], len(cases)


_MANY = {IncidentKind.SAVE_FAILED, IncidentKind.COPY_REJECTED, IncidentKind.REPLICATION_FAILED}
"""Incidents that many ranks report of one and the same trouble."""


def _who(incident: dict[str, Any]) -> tuple[object, ...]:
    return incident.get("kind"), incident.get("node"), incident.get("rank")


def _trouble(case: _TroubleCase, now_ns: int) -> Trouble:
    event, incident, verdict = case.event, case.incident, case.verdict or {}
    try:
        text = convert(incident, Incident).describe()
    except msgspec.ValidationError:  # a kind of another version
        text = " ".join(str(part) for part in _who(incident) if part is not None)
    reason = verdict.get("reason")
    decision = str(reason).removeprefix(text).lstrip("; ") if reason else None
    rung = verdict.get("rung")
    return Trouble(
        time=_time(event),
        age_s=_age(event.wall_ns, now_ns),
        cycle=event.cycle,
        kind=str(incident.get("kind", "")),
        node=incident.get("node") or None,
        rank=incident.get("rank"),
        iteration=incident.get("iteration"),
        text=text,
        remedy=Rung(rung).name.lower() if rung in set(Rung) else None,
        decision=decision or None,
        num_reports=case.num_reports,
    )


RECENT_S = 30.0
"""Processes on machines that cannot be seen from here are taken for alive while the newest line of the journal, or
renewal of the run directory's owner, is younger than this."""
_TIERS = ("memory", "local", "replica", "global")


def judge(evidence: Evidence, now_ns: int) -> StatusReport:
    """Return how a run is.

    Args:
        evidence: What there is to judge by: events, or the coordinator's status, or both.
        now_ns: Nanoseconds since the epoch, for ages.
    """
    live = evidence.live
    job = JobEvents()
    for event in evidence.events:
        job.take(event)
    newest = evidence.events[-1] if evidence.events else None
    seen: list[tuple[str, int]] = []  # signs of life: when, for people and in nanoseconds since the epoch
    if newest is not None:
        seen.append((_time(newest), newest.wall_ns))
        if evidence.renewed_ns:
            seen.append((as_iso(evidence.renewed_ns), evidence.renewed_ns))
    if live is not None:
        seen.append((live.time, _from_iso(live.time)))
    run = newest.run_id if newest is not None else live.run_id if live is not None else ""
    ladder = _ladder_of(evidence, job)
    state = _state(evidence, job, ladder, now_ns)
    over = _end(job, live) if state == RunState.OVER else (None, None)
    waiting = _waiting(job, live, ladder, now_ns) if state == RunState.WAITING else None
    nodes = _nodes(evidence, job, ladder, state)
    cycle = max(job.cycles, default=live.cycle if live is not None and live.phase == "running" else None)
    track = job.track
    begun = [*job.agents.values(), *job.sessions.values()]
    launcher = next((event.data.get("launcher") for event in job.sessions.values()), None)
    troubles, num_troubles = list_troubles(evidence.events, now_ns)
    generations = _generations(evidence, job, state, ladder, now_ns)
    report = StatusReport(
        schema=SCHEMA,
        time=as_iso(now_ns),
        sources=[*(["journal"] if evidence.events else []), *(["coordinator"] if live is not None else [])],
        run=run,
        run_dir=evidence.run_dir or (live.run_dir if live is not None else None),
        job=evidence.job or (live.job if live is not None else ""),
        launcher="outlast run" if job.agents or live is not None else launcher,
        command=list(job.command),
        state=state,
        summary="",
        exit_code=over[0],
        reason=over[1],
        started=_time(min(begun, key=_wall)) if begun else None,
        last_seen=max((time for time, _ in seen), default=None),
        last_seen_s=min((_age(wall_ns, now_ns) for _, wall_ns in seen), default=None),
        waiting=waiting,
        cycle=cycle,
        num_cycles=len(job.cycles) if job.cycles else 0 if live is None else live.cycle + (live.phase == "running"),
        world_size=job.world_size,
        iteration=None if track is None else track.iteration,
        iteration_time=None if track is None else as_iso(track.wall_ns),
        iteration_age_s=None if track is None else _age(track.wall_ns, now_ns),
        rate=None if track is None else track.rate(),
        nodes=nodes,
        spares=[node.name for node in nodes if node.state == NodeState.SPARE],
        excluded=[node.name for node in nodes if node.state == NodeState.EXCLUDED],
        budgets=_budgets(job, live, ladder, [one for one in generations if one.job == evidence.job]),
        generations=generations,
        durability=_durability(job, generations, None if track is None else track.iteration),
        directory=job.directory,
        local_directory=job.local_directory,
        incidents=troubles,
        num_incidents=num_troubles,
        problems=list(evidence.problems),
    )
    return msgspec.structs.replace(report, summary=_summary(report, evidence.unreachable))


# -- the state -------------------------------------------------------------------------------------------------


def _state(evidence: Evidence, job: JobEvents, ladder: LadderState | None, now_ns: int) -> RunState:
    live = evidence.live
    if live is not None:
        waits = live.lack is not None and live.lack.num_missing
        idle = RunState.WAITING if waits else RunState.FORMING
        return {"over": RunState.OVER, "running": RunState.RUNNING}.get(live.phase, idle)
    if job.agents:
        processes = {one.node: alive for one, alive in evidence.living.items() if one.rank is None}
        open_ = {node: processes.get(node) for node in job.agents if node not in job.ended}
        has_ended = job.coordinator_node in job.ended or (not job.coordinator_node and bool(job.ended))
    else:
        ranks = {one.rank: alive for one, alive in evidence.living.items() if one.rank is not None}
        open_ = {str(rank): ranks.get(rank) for rank in job.sessions if rank not in job.session_ends}
        has_ended = bool(job.sessions) and not open_
    if True not in open_.values():
        if has_ended or (not open_ and bool(job.agents)):
            return RunState.OVER
        if open_ and None not in open_.values():
            return RunState.NO_PROCESS
        signs_ns = [event.wall_ns for event in evidence.events[-1:]] + [evidence.renewed_ns]
        if _age(max(signs_ns), now_ns) > RECENT_S:
            return RunState.UNKNOWN
    if not job.agents or (job.cycles and not job.is_cycle_over):
        return RunState.RUNNING
    return RunState.WAITING if _missing(job, ladder) > 0 else RunState.FORMING


def _present(job: JobEvents, ladder: LadderState | None) -> set[str]:
    """Return the nodes that may be given a slot, as far as the journal tells."""
    names = set(job.joined) or set(job.agents) - set(job.ended) - job.lost
    return names - job.unhealthy - set(ladder.barred if ladder is not None else ())


def _missing(job: JobEvents, ladder: LadderState | None) -> int:
    """Return how many nodes are missing, as far as the journal tells."""
    present = len(_present(job, ladder))
    least = job.setting("min_nodes")
    if job.cycles and least and present >= int(least):
        return 0  # the world shrinks
    return max(0, int(job.setting("num_nodes") or 0) - present)


def _waiting(job: JobEvents, live: LiveStatus | None, ladder: LadderState | None, now_ns: int) -> WaitingReport:
    if live is not None and live.lack is not None:
        barred = {*live.quarantined, *live.held_back}
        return WaitingReport(
            num_missing=live.lack.num_missing,
            num_needed=live.lack.num_needed,
            have=sorted(node.name for node in live.nodes if node.ready and node.name not in barred),
            gives_up_in_s=live.lack.gives_up_in_s,
        )
    timeout_s = job.setting("join_timeout_s")
    left_s = None if timeout_s is None else max(0.0, float(timeout_s) - _age(job.waits_since_ns, now_ns))
    return WaitingReport(
        num_missing=_missing(job, ladder),
        num_needed=int(job.setting("num_nodes") or 0),
        have=sorted(_present(job, ladder)),
        gives_up_in_s=None if left_s is None else round(left_s, 1),
    )


def _end(job: JobEvents, live: LiveStatus | None) -> tuple[int | None, str | None]:
    """Return a job's exit code and the reason: those of the coordinator's node, else of the last one to end."""
    if live is not None and live.exit_code is not None:
        return live.exit_code, live.reason
    if job.ended:
        event = job.ended.get(job.coordinator_node) or max(job.ended.values(), key=_wall)
        return event.data.get("exit_code"), event.data.get("reason")
    codes = [event.data.get("exit_code") or 0 for event in job.session_ends.values()]
    return (max(codes, key=lambda code: code != 0), None) if codes else (None, None)


# -- who, what for, how much -----------------------------------------------------------------------------------


def _nodes(evidence: Evidence, job: JobEvents, ladder: LadderState | None, state: RunState) -> list[NodeReport]:
    live, newest = evidence.live, job.newest_cycle
    newest_number = max(job.cycles, default=-1)
    lost_ranks = job.lost_ranks.get(newest_number, set())
    alive = {one.node: runs for one, runs in evidence.living.items() if one.rank is None}
    there = {node.name: node for node in live.nodes} if live is not None else {}
    barred = {*live.quarantined, *live.held_back} if live is not None else set(ladder.barred if ladder else ())
    names = dict.fromkeys([*newest, *job.agents, *job.joined, *there, *sorted(barred), *sorted(job.unhealthy)])
    if not job.agents:
        return [*_nodes_of_sessions(evidence, job, state)] or [_node_of_coordinator(*one) for one in there.items()]
    reports = []
    for name in names:
        agent, start = job.agents.get(name), newest.get(name)
        runs = state == RunState.RUNNING and start is not None and name not in job.cycle_ends.get(newest_number, {})
        if (told := there.get(name)) is not None and state == RunState.RUNNING:
            runs = told.slot is not None and not told.ready
        if name in job.ended:
            what = NodeState.ENDED
        elif (alive.get(name) is False or name in job.lost) and name not in there:
            what = NodeState.LOST
        elif name in barred or name in job.unhealthy:
            what = NodeState.EXCLUDED
        elif state in (RunState.UNKNOWN, RunState.NO_PROCESS, RunState.OVER):
            what = NodeState.UNKNOWN
        elif runs:
            what = NodeState.TRAINING
        elif name not in job.joined and name not in there and start is None:
            what = NodeState.JOINING
        else:
            what = NodeState.SPARE if state == RunState.RUNNING and start is None else NodeState.READY
        facts = agent.data if agent is not None else {}
        workers = start.data if start is not None else {}
        ranks = [int(rank) for rank in workers.get("ranks") or ()]
        reports.append(
            NodeReport(
                name=name,
                state=what,
                host=facts.get("host"),
                agent_pid=facts.get("pid") if what not in (NodeState.ENDED, NodeState.LOST) else None,
                node_rank=workers.get("node_rank"),
                ranks=ranks,
                pids=[int(pid) for pid in workers.get("pids") or ()] if what == NodeState.TRAINING else [],
                lost_ranks=sorted(lost_ranks.intersection(ranks)),
            )
        )
    return sorted(reports, key=lambda node: (node.node_rank is None, node.node_rank or 0, node.name))


def _nodes_of_sessions(evidence: Evidence, job: JobEvents, state: RunState) -> Iterable[NodeReport]:
    """Yield the nodes of workers that were started by another launcher."""
    alive = {one.rank: runs for one, runs in evidence.living.items() if one.rank is not None}
    for name in dict.fromkeys(event.node for _, event in sorted(job.sessions.items())):
        sessions = {rank: event for rank, event in sorted(job.sessions.items()) if event.node == name}
        open_ = {rank: event for rank, event in sessions.items() if rank not in job.session_ends}
        if not open_:
            what = NodeState.ENDED
        elif state == RunState.NO_PROCESS or all(alive.get(rank) is False for rank in open_):
            what = NodeState.LOST
        else:
            what = NodeState.TRAINING if state == RunState.RUNNING else NodeState.UNKNOWN
        pids = [event.data.get("pid") for event in sessions.values()]
        yield NodeReport(
            name=name,
            state=what,
            host=next((event.data.get("host") for event in sessions.values()), None),
            ranks=list(sessions),
            pids=[pid for pid in pids if pid] if what == NodeState.TRAINING else [],
        )


def _node_of_coordinator(name: str, live: LiveNode) -> NodeReport:
    """Return a node of which only the coordinator knows."""
    what = NodeState.READY if live.ready else NodeState.TRAINING
    first = live.first_rank if what == NodeState.TRAINING and live.first_rank is not None else None
    return NodeReport(
        name=name,
        state=what,
        node_rank=live.slot,
        ranks=[] if first is None else list(range(first, first + live.nproc)),
    )


def _ladder_of(evidence: Evidence, job: JobEvents) -> LadderState | None:
    """Return what the ladder remembers as the job goes by it; the file may still be an earlier job's."""
    ladder = evidence.ladder
    if ladder is None or ladder.job == evidence.job or (not ladder.job and ladder == LadderState()):
        return ladder
    if not ladder.job and job.verdict is not None:
        return ladder  # written by an earlier version, which did not name the job
    return begin_job(ladder)


def _budgets(
    job: JobEvents, live: LiveStatus | None, ladder: LadderState | None, generations: Sequence[GenerationReport]
) -> Budgets | None:
    """Return what may still be tried.

    A generation of this job beyond those that the newest decision knew of is progress: the next decision begins with
    fresh budgets.
    """
    if live is not None:
        told = live.budgets
    else:
        limits = job.setting("limits")
        if not isinstance(limits, dict) or ladder is None:
            return None
        cycles = [event.data.get("max_no_progress_cycles") for event in job.sessions.values()]
        allowed = Limits(
            max_restarts=limits.get("max_restarts") or 0,
            max_restarts_total=limits.get("max_restarts_total"),
            max_no_progress_cycles=next(filter(None, cycles), None) or limits.get("max_no_progress_cycles") or 0,
        )
        told = LiveBudgets.of(ladder, allowed)
    if live is not None:
        known = live.best_durable if live.best_committed is None else live.best_committed
    else:
        known = ladder.newest_iteration if ladder is not None else None
    if any(known is None or one.iteration > known for one in generations):
        told = msgspec.structs.replace(told, restarts_without_progress=0, cycles_without_progress=0)
    return Budgets(
        restarts_in_a_row=_budget(told.restarts_without_progress, told.max_restarts),
        restarts_total=_budget(told.restarts_total, told.max_restarts_total),
        cycles_without_progress=_budget(told.cycles_without_progress, told.max_no_progress_cycles),
        progress_known=told.progress_known,
    )


def _budget(used: int, limit: int | None) -> BudgetReport:
    return BudgetReport(used=used, limit=limit, left=None if limit is None else max(0, limit - used))


# -- what is saved ---------------------------------------------------------------------------------------------


def _generations(
    evidence: Evidence, job: JobEvents, state: RunState, ladder: LadderState | None, now_ns: int
) -> list[GenerationReport]:
    """Return the newest generation in each tier that still holds one, as far as the journal tells.

    What processes hold in memory ends with them: with the job, a node, or its checkpoint writer.
    """
    newest: dict[str, Event] = {}
    for event in (*evidence.earlier, *evidence.events):
        if event.kind == EventKind.WRITER_ENDED or _is_loss(event):
            newest.pop("memory", None)
        elif event.kind in (EventKind.SAVE_COMMITTED, EventKind.RESTORED) and event.iteration is not None:
            tiers = [str(tier) for tier in event.data.get("tiers") or ()]
            if event.kind == EventKind.RESTORED:  # ranks may load from different tiers, but for this one
                tiers = ["global"] if event.data.get("tier") == "global" else []
            is_over = event.job != evidence.job or state in (RunState.OVER, RunState.NO_PROCESS)
            for tier in tiers:
                lasts = tier in ("local", "global") or (tier == "replica" and "local" in tiers)
                if (lasts or not is_over) and not _is_distrusted(event, tier, ladder):
                    known = newest.get(tier)
                    if known is None or (known.iteration or 0) <= event.iteration or known.job != event.job:
                        newest[tier] = event
    return [
        GenerationReport(
            tier=tier,
            iteration=newest[tier].iteration or 0,
            time=_time(newest[tier]),
            age_s=_age(newest[tier].wall_ns, now_ns),
            job=newest[tier].job,
        )
        for tier in _TIERS
        if tier in newest
    ]


def _durability(
    job: JobEvents, generations: Sequence[GenerationReport], iteration: int | None
) -> DurabilityReport | None:
    """Return the newest checkpoints that survive each failure, as far as the journal has them."""
    if not generations and not (job.directory or job.local_directory):
        return None
    places = ((Tier.GLOBAL, job.directory), (Tier.LOCAL, job.local_directory))
    configured = {tier for tier, place in places if place}
    known = Durability()
    for one in generations:
        known = with_commit(known, one.iteration, {Tier[one.tier.upper()]}, configured)
    lasting = job_tier(configured)
    age_s = next((one.age_s for one in generations if lasting is not None and one.tier == str(lasting)), None)
    return DurabilityReport(
        worker=known.worker,
        node=known.node,
        job=known.job,
        job_age_s=age_s,
        lag_iterations=None if iteration is None else max(0, iteration - (known.job or 0)),
    )


def _is_loss(event: Event) -> bool:
    incident = event.data.get("incident") or {}
    return event.kind == EventKind.INCIDENT and incident.get("kind") == IncidentKind.NODE_LOST


def _is_distrusted(event: Event, tier: str, ladder: LadderState | None) -> bool:
    """Return whether a generation is one that is not loaded again: it led to invalid results, or descends from that."""
    cycle = f"{clean_name(event.job)}-{event.cycle or 0}"
    for one in ladder.distrusted if ladder is not None else ():
        if cycle in one.tainted:
            return True
        if event.iteration == one.generation and (tier != "global" or one.tier == "global"):
            return True
    return False


# -- in words --------------------------------------------------------------------------------------------------


def _summary(report: StatusReport, unreachable: str | None) -> str:
    """Return the state in one line."""
    match report.state:
        case RunState.OVER:
            if report.exit_code is None:
                return "over"
            return f"over with exit code {report.exit_code}" + (f": {report.reason}" if report.reason else "")
        case RunState.NO_PROCESS:
            return f"no live process: last seen {_ago(report.last_seen_s)}; start it again to resume"
        case RunState.UNKNOWN:
            hosts = sorted({node.host or node.name for node in report.nodes if node.state == NodeState.UNKNOWN})
            where = f"on {', '.join(hosts[:3])}{', ...' if len(hosts) > 3 else ''}"
            asked = f" ({unreachable})" if unreachable else ""
            return (
                f"not known: last seen {_ago(report.last_seen_s)}; its processes are {where} and cannot be seen from "
                f"here{asked}; ask there"
            )
        case RunState.WAITING if report.waiting is not None:
            waiting = report.waiting
            have = ", ".join(waiting.have[:8]) + (", ..." if len(waiting.have) > 8 else "")
            ends = "" if waiting.gives_up_in_s is None else f"; gives up in {waiting.gives_up_in_s:.0f} s"
            needed = count(waiting.num_needed, "node")
            return f"waiting for {waiting.num_missing} of {needed} (have: {have or 'none'}){ends}"
        case RunState.RUNNING:
            where = "" if report.cycle is None else f"cycle {report.cycle}"
            told = "" if report.iteration is None else f"iteration {report.iteration}"
            rate = "" if report.rate is None else f"{report.rate:.3g} iterations/s"
            return "running" + "".join(f", {part}" for part in (where, told, rate) if part)
        case _:
            return "forming: the nodes come together for the next cycle"


def _ago(age_s: float | None) -> str:
    return "at an unknown time" if age_s is None else f"{duration(age_s)} ago"


def _wall(event: Event) -> int:
    return event.wall_ns


def _time(event: Event) -> str:
    return event.time or as_iso(event.wall_ns)


def _from_iso(text: str) -> int:
    """Return a time that :func:`as_iso` wrote, in nanoseconds since the epoch; 0: it is none."""
    try:
        return round(datetime.datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError:
        return 0


def _age(wall_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - wall_ns) / 1e9, 3)
