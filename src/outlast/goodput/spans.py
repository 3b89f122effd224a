"""Lists in a ledger: jobs, cycles, saves, loads, slow ranks, samples of steps, and warnings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from outlast.goodput.account import (
    CycleSpan,
    JobSpan,
    LoadSpan,
    NodeClock,
    NodeSpan,
    SaveSpan,
    SlowRanksWindow,
    StepSample,
    Warned,
)
from outlast.goodput.history import JobHistory, decode
from outlast.incidents import CYCLE_ENDING, Event, EventKind, Incident
from outlast.policy.goodput import read_scores, share_before, slow_share
from outlast.policy.recovery_point import Tier
from outlast.policy.run_view import CycleView, JobView
from outlast.wording import count


def find_slow_windows(jobs: Sequence[JobHistory]) -> list[SlowRanksWindow]:
    """Return the reports of the straggler detector, each with its period."""
    found: list[SlowRanksWindow] = []
    for job in jobs:
        previous: dict[int, float] = {}
        for time_s, event in job.view.of(EventKind.STRAGGLER_REPORT):
            number = event.cycle or 0
            starts = [life.steps_start_s for life in job.lives.get(number, ()) if life.steps_start_s is not None]
            begin_s = previous.get(number, max((one for one in starts if one <= time_s), default=time_s))
            previous[number] = time_s
            scores = read_scores(event.data)
            named = tuple(int(rank) for rank in event.data.get("named") or ())
            found.append(
                SlowRanksWindow(
                    job=job.view.name,
                    cycle=event.cycle,
                    iteration=event.iteration or 0,
                    start_s=begin_s,
                    end_s=time_s,
                    named=named,
                    scores=scores,
                    excess=slow_share(scores, named),
                    why_none=str(event.data.get("why_nobody") or ""),
                )
            )
    for place in range(len(found) - 1, 0, -1):  # windows in which the rank was slow, but not reported yet
        later, window = found[place], found[place - 1]
        if (later.job, later.cycle) == (window.job, window.cycle) and later.excess and not window.named:
            excess = share_before(window.scores, later.named)
            found[place - 1] = msgspec.structs.replace(window, excess=excess)
    return found


def find_saves(jobs: Sequence[JobHistory]) -> list[SaveSpan]:
    order = {str(tier): place for place, tier in enumerate(sorted(Tier))}
    found = []
    for job in jobs:
        groups: dict[tuple[int | None, int], list[tuple[float, Event]]] = defaultdict(list)
        for pair in job.view.of(EventKind.SAVE_SCHEDULED, EventKind.SAVE_COMMITTED):
            if pair[1].iteration is not None:
                groups[pair[1].cycle, pair[1].iteration].append(pair)
        for (cycle, iteration), group in groups.items():
            begun = [pair for pair in group if pair[1].kind == EventKind.SAVE_SCHEDULED]
            committed = [event for _, event in group if event.kind == EventKind.SAVE_COMMITTED]
            tiers = {str(tier) for event in committed for tier in event.data.get("tiers") or ()}
            sizes: dict[int | None, int] = {}
            for event in committed:
                sizes[event.rank] = max(int(event.data.get("num_bytes") or 0), sizes.get(event.rank, 0))
            found.append(
                SaveSpan(
                    job=job.view.name,
                    cycle=cycle,
                    iteration=iteration,
                    at_s=max(time_s for time_s, _ in begun or group),
                    stall_s=max((float(event.data.get("stall_s") or 0.0) for _, event in begun), default=0.0),
                    tiers=tuple(sorted(tiers, key=lambda tier: order.get(tier, len(order)))),
                    duration_s=max((float(event.data.get("duration_s") or 0.0) for event in committed), default=None),
                    num_bytes=sum(sizes.values()),
                )
            )
    return sorted(found, key=lambda save: save.at_s)


def find_loads(jobs: Sequence[JobHistory]) -> tuple[LoadSpan, ...]:
    found = []
    for job in jobs:
        for number, cycle in sorted(job.view.cycles.items()):
            bounds = [life.began_s for life in job.lives[number]] or [0.0]
            groups: dict[tuple[int, int], list[tuple[float, Event]]] = defaultdict(list)
            for time_s, event in cycle.of(EventKind.RESTORED):
                life = sum(bound <= time_s for bound in bounds)
                groups[life, event.iteration or 0].append((time_s, event))
            for (_, iteration), group in groups.items():
                bytes_read = Counter[str]()
                for _, event in group:
                    bytes_read.update({str(k): int(v) for k, v in (event.data.get("bytes_read") or {}).items()})
                rejected = [str(text) for _, event in group for text in event.data.get("rejected") or ()]
                found.append(
                    LoadSpan(
                        job=job.view.name,
                        cycle=number,
                        iteration=iteration,
                        at_s=max(time_s for time_s, _ in group),
                        load_s=max(float(event.data.get("load_s") or 0.0) for _, event in group),
                        tiers=dict(Counter(str(event.data.get("tier")) for _, event in group)),
                        bytes_read=dict(bytes_read),
                        rejected=tuple(dict.fromkeys(rejected)),
                    )
                )
    return tuple(sorted(found, key=lambda load: load.at_s))


def find_steps(jobs: Sequence[JobHistory]) -> tuple[StepSample, ...]:
    """Return the samples of one rank in each cycle: the lowest that reported."""
    found = []
    for job in jobs:
        for _, cycle in sorted(job.view.cycles.items()):
            progress = [one for one in cycle.of(EventKind.PROGRESS) if one[1].iteration is not None]
            rank = min((event.rank for _, event in progress if event.rank is not None), default=None)
            found += [
                StepSample(
                    at_s=time_s,
                    iteration=event.iteration or 0,
                    step_s=event.data.get("step_s"),
                    loss=event.data.get("loss"),
                )
                for time_s, event in progress
                if event.rank == rank
            ]
    return tuple(found)


def find_warned(jobs: Sequence[JobHistory]) -> tuple[Warned, ...]:
    """Return the incidents that ended no cycle, by time; those that many ranks reported once."""
    found: list[Warned] = []
    for job in jobs:
        decided = {
            (number, *(event.data["incident"].get(name) for name in ("kind", "node", "rank")))
            for number, cycle in job.view.cycles.items()
            for _, event in cycle.decisions
        }
        for one in job.view.incidents:
            raw, cycle_number = one.incident, one.event.cycle
            kind, node, rank = str(raw.get("kind", "")), raw.get("node"), raw.get("rank")
            if one.decision is not None or kind in CYCLE_ENDING or (cycle_number or 0, kind, node, rank) in decided:
                continue
            incident = decode(raw, Incident)
            found.append(
                Warned(
                    kind=kind,
                    text=incident.describe() if incident is not None else kind.replace("_", " "),
                    at_s=one.time_s,
                    job=job.view.name,
                    cycle=cycle_number,
                    node=str(node or ""),
                    rank=rank,
                    iteration=raw.get("iteration"),
                    num_reports=one.num_reports,
                    evidence=dict(raw.get("evidence") or {}),
                )
            )
    return tuple(sorted(found, key=lambda one: one.at_s))


def find_notes(jobs: Sequence[JobHistory], clocks: Sequence[NodeClock]) -> list[str]:
    notes = []
    lost = (int(event.data.get("num") or 0) for job in jobs for _, event in job.view.of(EventKind.EVENTS_LOST))
    if num_lost := sum(lost):
        notes.append(f"{count(num_lost, 'event')} could not be written when they happened")
    notes += [
        f"the clock of node {one.node} differed by {one.offset_s:+.1f} s; aligned by {count(one.num_anchors, 'event')}"
        for one in clocks
        if one.offset_s
    ]
    return notes


def job_span(job: JobView) -> JobSpan:
    started = next((event.data for _, event in job.of(EventKind.JOB_STARTED)), {})
    ended = next((event.data for _, event in reversed(job.of(EventKind.JOB_ENDED))), {})
    return JobSpan(
        job=job.name,
        start_s=job.start_s,
        end_s=job.end_s,
        exit_code=job.exit_code,
        reason=str(ended.get("reason", "")),
        command=tuple(str(word) for word in started.get("command") or ()),
        launcher=job.launcher,
        version=str(started.get("version", "")),
    )


def cycle_span(job: JobHistory, cycle: CycleView) -> CycleSpan:
    lives = job.lives[cycle.number]
    starts = [life.steps_start_s for life in lives if life.steps_start_s is not None]
    start_s = min((time_s for time_s, _ in cycle.starts.values()), default=cycle.started_s or cycle.last_s)
    end_s = max((time_s for time_s, _ in cycle.ends.values()), default=max(cycle.last_s, start_s))
    nodes = tuple(
        NodeSpan(
            node=node,
            node_rank=event.data.get("node_rank"),
            ranks=tuple(event.data.get("ranks") or ()),
            start_s=time_s,
            end_s=max(time_s, cycle.ends[node][0] if node in cycle.ends else end_s),
        )
        for node, (time_s, event) in sorted(cycle.starts.items(), key=lambda one: one[1][1].data.get("node_rank") or 0)
    )
    reasons = [str(event.data.get("reason", "")) for _, (_, event) in sorted(cycle.ends.items())]
    return CycleSpan(
        job=job.view.name,
        cycle=cycle.number,
        start_s=start_s,
        end_s=max(start_s, end_s),
        steps_start_s=min(starts, default=None),
        world_size=cycle.world_size
        if cycle.starts
        else len({event.rank for _, event in cycle.of(EventKind.STEPS_STARTED)})
        or len(cycle.of(EventKind.SESSION_STARTED)),
        from_iteration=lives[0].from_iteration if starts else None,
        to_iteration=max((life.to_iteration for life in lives), default=None) if starts else None,
        nodes=nodes,
        num_in_process=len(cycle.of(EventKind.RESTARTED_IN_PROCESS)),
        reason=next((reason for reason in reasons if reason != "finished"), reasons[0] if reasons else ""),
    )
