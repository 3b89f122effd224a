"""Turn evidence into the status report. Pure: the same evidence and time give the same report.

:class:`outlast.policy.run_view.RunView` has combined the journal's events; :func:`judge` combines the view with the
living processes and the coordinator's status.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import msgspec

from outlast.clock import as_iso
from outlast.decoding import convert
from outlast.env import clean_name
from outlast.incidents import Event, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.launch.protocol import LiveBudgets, LiveNode, LiveStatus
from outlast.policy.durability import Durability, job_tier, with_commit
from outlast.policy.recovery_point import Tier
from outlast.policy.recovery_policy import Limits, RecoveryState, begin_job
from outlast.policy.run_view import CycleView, IncidentView, JobView, incident_of
from outlast.status.evidence import Evidence
from outlast.status.report import (
    SCHEMA,
    BudgetReport,
    Budgets,
    CheckpointReport,
    DurabilityReport,
    IncidentReport,
    NodeReport,
    NodeState,
    RunState,
    StatusReport,
    WaitingReport,
    describe_waiting,
)
from outlast.wording import duration

MAX_INCIDENTS = 50
RECENT_S = 30.0
"""Processes on machines that are not visible from here count as alive while the newest line of the journal, or renewal
of the run directory's owner, is younger than this."""
_TIERS = ("memory", "local", "replica", "global")


def judge(evidence: Evidence, now_ns: int) -> StatusReport:
    """Return the status report of a run.

    Args:
        evidence: Events, or the coordinator's status, or both.
        now_ns: Nanoseconds since the epoch, for ages.
    """
    live = evidence.live
    job = evidence.view.job(evidence.job)
    newest = job.newest
    seen: list[tuple[str, int]] = []  # activity: time for people, and in nanoseconds since the epoch
    if newest is not None:
        seen.append((_time(newest), newest.wall_ns))
        if evidence.renewed_ns:
            seen.append((as_iso(evidence.renewed_ns), evidence.renewed_ns))
    if live is not None:
        seen.append((live.time, _from_iso(live.time)))
    run = newest.run_id if newest is not None else live.run_id if live is not None else ""
    recovery_state = _recovery_state_of(evidence, job)
    state = _state(evidence, job, recovery_state, now_ns)
    over = _end(job, live) if state == RunState.OVER else (None, None)
    waiting = _waiting(job, live, recovery_state, now_ns) if state == RunState.WAITING else None
    nodes = _nodes(evidence, job, recovery_state, state)
    cycle = job.newest_cycle.number if job.newest_cycle is not None else None
    if cycle is None and live is not None and live.phase == "running":
        cycle = live.cycle
    farthest = job.farthest
    begun = [*job.agents.values(), *job.sessions.values()]
    incidents = [one for each in evidence.view.jobs if each.name == job.name for one in each.incidents]
    checkpoints = _checkpoints(evidence, job, state, recovery_state, now_ns)
    report = StatusReport(
        schema=SCHEMA,
        time=as_iso(now_ns),
        sources=[*(["journal"] if newest is not None else []), *(["coordinator"] if live is not None else [])],
        run=run,
        run_dir=evidence.run_dir or (live.run_dir if live is not None else None),
        job=evidence.job or (live.job if live is not None else ""),
        launcher="outlast run" if job.agents or live is not None else job.launcher or None,
        command=job.command,
        state=state,
        summary="",
        exit_code=over[0],
        reason=over[1],
        started=_time(min(begun, key=_wall)) if begun else None,
        last_seen=max((time for time, _ in seen), default=None),
        last_seen_s=min((_age(wall_ns, now_ns) for _, wall_ns in seen), default=None),
        waiting=waiting,
        cycle=cycle,
        num_cycles=job.num_cycles or (0 if live is None else live.cycle + (live.phase == "running")),
        world_size=job.world_size,
        iteration=None if farthest is None else farthest.iteration,
        iteration_time=None if farthest is None else as_iso(farthest.wall_ns),
        iteration_age_s=None if farthest is None else _age(farthest.wall_ns, now_ns),
        rate=None if farthest is None else farthest.rate.value,
        nodes=nodes,
        spares=[node.name for node in nodes if node.state == NodeState.SPARE],
        excluded=[node.name for node in nodes if node.state == NodeState.EXCLUDED],
        budgets=_budgets(job, live, recovery_state, [one for one in checkpoints if one.job == evidence.job]),
        checkpoints=checkpoints,
        durability=_durability(job, checkpoints, None if farthest is None else farthest.iteration),
        directory=job.directory,
        local_directory=job.local_directory,
        incidents=[_describe(one, now_ns) for one in reversed(incidents[-MAX_INCIDENTS:])],
        num_incidents=len(incidents),
        problems=list(evidence.problems),
    )
    return msgspec.structs.replace(report, summary=_summary(report, evidence.unreachable))


# -- the state -------------------------------------------------------------------------------------------------


def _state(evidence: Evidence, job: JobView, recovery_state: RecoveryState | None, now_ns: int) -> RunState:
    live = evidence.live
    if live is not None:
        waits = live.lack is not None and live.lack.num_missing
        idle = RunState.WAITING if waits else RunState.FORMING
        return {"over": RunState.OVER, "running": RunState.RUNNING}.get(live.phase, idle)
    if job.agents:
        processes = {one.node: alive for one, alive in evidence.living.items() if one.rank is None}
        open_ = {node: processes.get(node) for node in job.agents if node not in job.ended_agents}
        ended = job.ended_agents
        has_ended = job.coordinator_node in ended or (not job.coordinator_node and bool(ended))
    else:
        ranks = {one.rank: alive for one, alive in evidence.living.items() if one.rank is not None}
        open_ = {str(rank): ranks.get(rank) for rank in job.sessions if job.ranks[rank].session_end is None}
        has_ended = bool(job.sessions) and not open_
    if True not in open_.values():
        if has_ended or (not open_ and bool(job.agents)):
            return RunState.OVER
        if open_ and None not in open_.values():
            return RunState.NO_PROCESS
        seen_ns = max(evidence.renewed_ns, job.newest.wall_ns if job.newest is not None else 0)
        if _age(seen_ns, now_ns) > RECENT_S:
            return RunState.UNKNOWN
    if not job.agents or (job.newest_cycle is not None and not job.newest_cycle.is_over):
        return RunState.RUNNING
    return RunState.WAITING if _missing(job, recovery_state) > 0 else RunState.FORMING


def _present(job: JobView, recovery_state: RecoveryState | None) -> set[str]:
    """Return the nodes that may get a slot, according to the journal."""
    names = set(job.joined) or set(job.agents) - set(job.ended_agents) - job.lost
    return names - job.unhealthy - set(recovery_state.barred if recovery_state is not None else ())


def _missing(job: JobView, recovery_state: RecoveryState | None) -> int:
    """Return the number of missing nodes, according to the journal."""
    present = len(_present(job, recovery_state))
    least = job.setting("min_nodes")
    if job.num_cycles and least and present >= int(least):
        return 0  # continues with fewer nodes
    return max(0, int(job.setting("num_nodes") or 0) - present)


def _waiting(job: JobView, live: LiveStatus | None, recovery_state: RecoveryState | None, now_ns: int) -> WaitingReport:
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
        num_missing=_missing(job, recovery_state),
        num_needed=int(job.setting("num_nodes") or 0),
        have=sorted(_present(job, recovery_state)),
        gives_up_in_s=None if left_s is None else round(left_s, 1),
    )


def _end(job: JobView, live: LiveStatus | None) -> tuple[int | None, str | None]:
    """Return a job's exit code and reason: those of the coordinator's node, else of the last node to end."""
    if live is not None and live.exit_code is not None:
        return live.exit_code, live.reason
    if ended := job.ended_agents:
        event = ended.get(job.coordinator_node) or max(ended.values(), key=_wall)
        return event.data.get("exit_code"), event.data.get("reason")
    ends = (one.session_end for one in job.ranks.values())
    codes = [event.data.get("exit_code") or 0 for event in ends if event is not None]
    return (max(codes, key=lambda code: code != 0), None) if codes else (None, None)


def _describe(one: IncidentView, now_ns: int) -> IncidentReport:
    event, incident, decision = one.event, one.incident, one.decision or {}
    try:
        text = convert(incident, Incident).describe()
    except msgspec.ValidationError:  # a kind of incident of another version
        text = " ".join(str(incident[name]) for name in ("kind", "node", "rank") if incident.get(name) is not None)
    reason = decision.get("reason")
    what = str(reason).removeprefix(text).lstrip("; ") if reason else None
    recovery_level = decision.get("rung")
    return IncidentReport(
        time=_time(event),
        age_s=_age(event.wall_ns, now_ns),
        cycle=event.cycle,
        kind=str(incident.get("kind", "")),
        node=incident.get("node") or None,
        rank=incident.get("rank"),
        iteration=incident.get("iteration"),
        text=text,
        remedy=RecoveryLevel(recovery_level).name.lower() if recovery_level in set(RecoveryLevel) else None,
        decision=what or None,
        num_reports=one.num_reports,
    )


# -- who, what for, how much -----------------------------------------------------------------------------------


def _nodes(evidence: Evidence, job: JobView, recovery_state: RecoveryState | None, state: RunState) -> list[NodeReport]:
    live, newest = evidence.live, job.newest_cycle or CycleView()
    alive = {one.node: runs for one, runs in evidence.living.items() if one.rank is None}
    there = {node.name: node for node in live.nodes} if live is not None else {}
    barred = (
        {*live.quarantined, *live.held_back}
        if live is not None
        else set(recovery_state.barred if recovery_state else ())
    )
    names = dict.fromkeys([*newest.starts, *job.agents, *job.joined, *there, *sorted(barred), *sorted(job.unhealthy)])
    if not job.agents:
        return [*_nodes_of_sessions(evidence, job, state)] or [_node_of_coordinator(*one) for one in there.items()]
    reports = []
    for name in names:
        agent, (_, start) = job.agents.get(name), newest.starts.get(name, (0.0, None))
        runs = state == RunState.RUNNING and start is not None and name not in newest.ends
        if (reported := there.get(name)) is not None and state == RunState.RUNNING:
            runs = reported.slot is not None and not reported.ready
        if name in job.ended_agents:
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
                lost_ranks=sorted(set(newest.spared).intersection(ranks)),
            )
        )
    return sorted(reports, key=lambda node: (node.node_rank is None, node.node_rank or 0, node.name))


def _nodes_of_sessions(evidence: Evidence, job: JobView, state: RunState) -> Iterable[NodeReport]:
    """Yield the nodes of workers that another launcher started."""
    alive = {one.rank: runs for one, runs in evidence.living.items() if one.rank is not None}
    for name in dict.fromkeys(event.node for event in job.sessions.values()):
        sessions = {rank: event for rank, event in job.sessions.items() if event.node == name}
        open_ = [rank for rank in sessions if job.ranks[rank].session_end is None]
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
    """Return a node that is known from the coordinator only."""
    what = NodeState.READY if live.ready else NodeState.TRAINING
    first = live.first_rank if what == NodeState.TRAINING and live.first_rank is not None else None
    return NodeReport(
        name=name,
        state=what,
        node_rank=live.slot,
        ranks=[] if first is None else list(range(first, first + live.nproc)),
    )


def _recovery_state_of(evidence: Evidence, job: JobView) -> RecoveryState | None:
    """Return the recovery policy's state as valid for this job; the file may still be an earlier job's."""
    recovery_state = evidence.recovery_state
    if (
        recovery_state is None
        or recovery_state.job == evidence.job
        or (not recovery_state.job and recovery_state == RecoveryState())
    ):
        return recovery_state
    if not recovery_state.job and job.decision is not None:
        return recovery_state  # written by an earlier version, without the job
    return begin_job(recovery_state)


def _budgets(
    job: JobView, live: LiveStatus | None, recovery_state: RecoveryState | None, checkpoints: Sequence[CheckpointReport]
) -> Budgets | None:
    """Return the remaining budgets.

    A checkpoint of this job newer than those known to the latest decision is progress: the next decision starts with
    fresh budgets.
    """
    if live is not None:
        budgets = live.budgets
    else:
        limits = job.setting("limits")
        if not isinstance(limits, dict) or recovery_state is None:
            return None
        cycles = [event.data.get("max_no_progress_cycles") for event in job.sessions.values()]
        allowed = Limits(
            max_restarts=limits.get("max_restarts") or 0,
            max_restarts_total=limits.get("max_restarts_total"),
            max_no_progress_cycles=next(filter(None, cycles), None) or limits.get("max_no_progress_cycles") or 0,
        )
        budgets = LiveBudgets.of(recovery_state, allowed)
    if live is not None:
        known = live.best_durable if live.best_committed is None else live.best_committed
    else:
        known = recovery_state.newest_iteration if recovery_state is not None else None
    if any(known is None or one.iteration > known for one in checkpoints):
        budgets = msgspec.structs.replace(budgets, restarts_without_progress=0, cycles_without_progress=0)
    return Budgets(
        restarts_in_a_row=_budget(budgets.restarts_without_progress, budgets.max_restarts),
        restarts_total=_budget(budgets.restarts_total, budgets.max_restarts_total),
        cycles_without_progress=_budget(budgets.cycles_without_progress, budgets.max_no_progress_cycles),
        progress_known=budgets.progress_known,
    )


def _budget(used: int, limit: int | None) -> BudgetReport:
    return BudgetReport(used=used, limit=limit, left=None if limit is None else max(0, limit - used))


# -- what is saved ---------------------------------------------------------------------------------------------


def _checkpoints(
    evidence: Evidence, job: JobView, state: RunState, recovery_state: RecoveryState | None, now_ns: int
) -> list[CheckpointReport]:
    """Return the newest checkpoint in each tier that still holds one, according to the journal.

    Checkpoints in memory end with their process: with the job, a node, or its checkpoint writer.
    """
    newest: dict[str, Event] = {}
    kinds = (EventKind.SAVE_COMMITTED, EventKind.RESTORED, EventKind.WRITER_ENDED, EventKind.INCIDENT)
    for event in (event for each in evidence.view.jobs for _, event in each.of(*kinds)):
        if event.kind == EventKind.WRITER_ENDED or incident_of(event).get("kind") == IncidentKind.NODE_LOST:
            newest.pop("memory", None)
        elif event.kind != EventKind.INCIDENT and event.iteration is not None:
            tiers = [str(tier) for tier in event.data.get("tiers") or ()]
            if event.kind == EventKind.RESTORED:  # only the global tier is the same for all ranks
                tiers = ["global"] if event.data.get("tier") == "global" else []
            is_over = event.job != evidence.job or state in (RunState.OVER, RunState.NO_PROCESS)
            for tier in tiers:
                lasts = tier in ("local", "global") or (tier == "replica" and "local" in tiers)
                if (lasts or not is_over) and not _is_excluded(event, tier, recovery_state):
                    known = newest.get(tier)
                    if known is None or (known.iteration or 0) <= event.iteration or known.job != event.job:
                        newest[tier] = event
    return [
        CheckpointReport(
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
    job: JobView, checkpoints: Sequence[CheckpointReport], iteration: int | None
) -> DurabilityReport | None:
    """Return the newest checkpoints that survive each failure, according to the journal."""
    if not checkpoints and not (job.directory or job.local_directory):
        return None
    places = ((Tier.GLOBAL, job.directory), (Tier.LOCAL, job.local_directory))
    configured = {tier for tier, place in places if place}
    known = Durability()
    for one in checkpoints:
        known = with_commit(known, one.iteration, {Tier[one.tier.upper()]}, configured)
    lasting = job_tier(configured)
    age_s = next((one.age_s for one in checkpoints if lasting is not None and one.tier == str(lasting)), None)
    return DurabilityReport(
        worker=known.worker,
        node=known.node,
        job=known.job,
        job_age_s=age_s,
        lag_iterations=None if iteration is None else max(0, iteration - (known.job or 0)),
    )


def _is_excluded(event: Event, tier: str, recovery_state: RecoveryState | None) -> bool:
    """Return whether a checkpoint is excluded: it led to invalid results, or descends from one that did."""
    cycle = f"{clean_name(event.job)}-{event.cycle or 0}"
    for one in recovery_state.excluded if recovery_state is not None else ():
        if cycle in one.tainted:
            return True
        if event.iteration == one.checkpoint and (tier != "global" or one.tier == "global"):
            return True
    return False


# -- in words --------------------------------------------------------------------------------------------------


def _summary(report: StatusReport, unreachable: str | None) -> str:
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
                f"here{asked}; run this command there"
            )
        case RunState.WAITING if report.waiting is not None:
            return f"waiting for {describe_waiting(report.waiting)}"
        case RunState.RUNNING:
            where = "" if report.cycle is None else f"cycle {report.cycle}"
            progress = "" if report.iteration is None else f"iteration {report.iteration}"
            rate = "" if report.rate is None else f"{report.rate:.3g} iterations/s"
            return "running" + "".join(f", {part}" for part in (where, progress, rate) if part)
        case _:
            return "forming: the nodes come together for the next cycle"


def _ago(age_s: float | None) -> str:
    return "at an unknown time" if age_s is None else f"{duration(age_s)} ago"


def _wall(event: Event) -> int:
    return event.wall_ns


def _time(event: Event) -> str:
    return event.time or as_iso(event.wall_ns)


def _from_iso(text: str) -> int:
    """Parse a time of :func:`as_iso` to nanoseconds since the epoch; 0 = malformed."""
    try:
        return round(datetime.datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError:
        return 0


def _age(wall_ns: int, now_ns: int) -> float:
    return round(max(0, now_ns - wall_ns) / 1e9, 3)
