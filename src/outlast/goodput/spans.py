"""What a ledger lists beside the parts: jobs, cycles, saves, loads, slow ranks, samples of steps, and warnings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

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
from outlast.goodput.history import CycleHistory, JobHistory, decode
from outlast.incidents import CYCLE_ENDING, Event, EventKind, Incident, IncidentKind
from outlast.policy.recovery_point import Tier
from outlast.wording import count

_SLOW_SCORE = 0.9
"""A window before the one in which a rank is named counts as slowed by it if its score was lower than this there."""


_MANY = frozenset({IncidentKind.SAVE_FAILED, IncidentKind.COPY_REJECTED, IncidentKind.REPLICATION_FAILED})
"""Incidents that many ranks report of one and the same trouble."""


def find_slow_windows(jobs: Sequence[JobHistory]) -> list[SlowRanksWindow]:
    """Return the reports of the straggler detector, each with the time that it is about."""
    found: list[SlowRanksWindow] = []
    for job in jobs:
        previous: dict[int, float] = {}
        for time_s, event in job.events:
            if event.kind != EventKind.STRAGGLER_REPORT:
                continue
            number = event.cycle or 0
            lives = job.cycles[number].lives if number in job.cycles else []
            starts = [life.steps_start_s for life in lives if life.steps_start_s is not None]
            begin_s = previous.get(number, max((one for one in starts if one <= time_s), default=time_s))
            previous[number] = time_s
            scores = _scores(event.data)
            named = tuple(int(rank) for rank in event.data.get("named") or ())
            worst = min((scores[rank] for rank in named if rank in scores), default=1.0)
            found.append(
                SlowRanksWindow(
                    job=job.name,
                    cycle=event.cycle,
                    iteration=event.iteration or 0,
                    start_s=begin_s,
                    end_s=time_s,
                    named=named,
                    scores=scores,
                    excess=max(0.0, 1.0 - worst),
                    why_nobody=str(event.data.get("why_nobody") or ""),
                )
            )
    for place in range(len(found) - 1, 0, -1):  # the windows in which the rank was slow, but not named yet
        later, window = found[place], found[place - 1]
        same = (later.job, later.cycle) == (window.job, window.cycle)
        if not (same and later.excess and not window.named and window.scores):
            continue
        rank = min(window.scores, key=lambda one: window.scores[one])
        slow = [one for one in later.named or (rank,) if window.scores.get(one, 1.0) < _SLOW_SCORE]
        if slow:
            excess = 1.0 - min(window.scores[one] for one in slow)
            found[place - 1] = msgspec.structs.replace(window, excess=excess)
    return found


def _scores(data: dict[str, Any]) -> dict[int, float]:
    scores = data.get("scores")
    if isinstance(scores, list):
        return {rank: float(score) for rank, score in enumerate(scores) if score is not None}
    return {int(rank): float(score) for rank, score in (data.get("worst") or {}).items()}


def find_saves(jobs: Sequence[JobHistory]) -> list[SaveSpan]:
    """Return the saves, by time."""
    spans: dict[tuple[int, int | None, int], dict[str, Any]] = {}
    for place, job in enumerate(jobs):
        for time_s, event in job.events:
            if event.kind not in (EventKind.SAVE_SCHEDULED, EventKind.SAVE_COMMITTED) or event.iteration is None:
                continue
            blank: dict[str, Any] = {
                "job": job.name,
                "at_s": None,
                "stall_s": 0.0,
                "tiers": set(),
                "duration_s": None,
                "bytes": {},
            }
            span = spans.setdefault((place, event.cycle, event.iteration), blank)
            if event.kind == EventKind.SAVE_SCHEDULED:
                span["at_s"] = max(time_s, span["at_s"] or time_s)
                span["stall_s"] = max(span["stall_s"], float(event.data.get("stall_s") or 0.0))
            else:
                span["tiers"].update(event.data.get("tiers") or ())
                span["duration_s"] = max(span["duration_s"] or 0.0, float(event.data.get("duration_s") or 0.0))
                size = int(event.data.get("num_bytes") or 0)
                span["bytes"][event.rank] = max(size, span["bytes"].get(event.rank, 0))
                span["committed_s"] = time_s
    order = [str(tier) for tier in sorted(Tier)]
    found = [
        SaveSpan(
            job=span["job"],
            cycle=cycle,
            iteration=iteration,
            at_s=span["at_s"] if span["at_s"] is not None else span["committed_s"],
            stall_s=span["stall_s"],
            tiers=tuple(sorted(span["tiers"], key=lambda tier: order.index(tier) if tier in order else len(order))),
            duration_s=span["duration_s"],
            num_bytes=sum(span["bytes"].values()),
        )
        for (_, cycle, iteration), span in spans.items()
    ]
    return sorted(found, key=lambda save: save.at_s)


def find_loads(jobs: Sequence[JobHistory]) -> tuple[LoadSpan, ...]:
    """Return the loads, by time."""
    found = []
    for job in jobs:
        for number in sorted(job.cycles):
            cycle = job.cycles[number]
            bounds = [life.began_s for life in cycle.lives] or [0.0]
            groups: dict[tuple[int, int], list[tuple[float, Event]]] = defaultdict(list)
            for time_s, event in cycle.restored:
                life = sum(bound <= time_s for bound in bounds)
                groups[life, event.iteration or 0].append((time_s, event))
            for (_, iteration), group in groups.items():
                bytes_read = Counter[str]()
                for _, event in group:
                    bytes_read.update({str(k): int(v) for k, v in (event.data.get("bytes_read") or {}).items()})
                rejected = [str(text) for _, event in group for text in event.data.get("rejected") or ()]
                found.append(
                    LoadSpan(
                        job=job.name,
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
        for number in sorted(job.cycles):
            progress = [(t, event) for t, event in job.cycles[number].done if event.kind == EventKind.PROGRESS]
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
    """Return the incidents that ended nothing, by time; those that many ranks reported once."""
    found: dict[tuple[Any, ...], Warned] = {}
    for place, job in enumerate(jobs):
        decided = {
            (number, *(event.data["incident"].get(name) for name in ("kind", "node", "rank")))
            for number, cycle in job.cycles.items()
            for _, event in cycle.decisions
        }
        for time_s, event in job.events:
            raw = event.data.get("incident")
            if event.kind != EventKind.INCIDENT or "verdict" in event.data or not isinstance(raw, dict):
                continue
            kind, node = str(raw.get("kind", "")), raw.get("node")
            if kind in CYCLE_ENDING or (event.cycle or 0, kind, node, raw.get("rank")) in decided:
                continue
            rank = None if kind in _MANY else raw.get("rank")
            key = (place, event.cycle, kind, raw.get("iteration"), rank)
            if (known := found.get(key)) is not None:
                found[key] = msgspec.structs.replace(known, num_reports=known.num_reports + 1)
                continue
            incident = decode(raw, Incident)
            found[key] = Warned(
                kind=kind,
                text=incident.describe() if incident is not None else kind.replace("_", " "),
                at_s=time_s,
                job=job.name,
                cycle=event.cycle,
                node=str(node or ""),
                rank=raw.get("rank"),
                iteration=raw.get("iteration"),
                evidence=dict(raw.get("evidence") or {}),
            )
    return tuple(sorted(found.values(), key=lambda one: one.at_s))


def find_notes(jobs: Sequence[JobHistory], clocks: Sequence[NodeClock]) -> list[str]:
    """Return what limits the account."""
    notes = []
    num_lost = sum(
        int(event.data.get("num") or 0)
        for job in jobs
        for _, event in job.events
        if event.kind == EventKind.EVENTS_LOST
    )
    if num_lost:
        notes.append(f"{count(num_lost, 'event')} could not be written when they happened")
    notes += [
        f"the clock of node {one.node} differed by {one.offset_s:+.1f} s; aligned by {count(one.num_anchors, 'event')}"
        for one in clocks
        if one.offset_s
    ]
    return notes


def job_span(job: JobHistory) -> JobSpan:
    """Return what the account lists of a job."""
    started = job.started[0][1].data if job.started else {}
    return JobSpan(
        job=job.name,
        start_s=job.start_s,
        end_s=job.end_s,
        exit_code=job.exit_code,
        reason=str(job.ended[-1][1].data.get("reason", "")) if job.ended else "",
        command=tuple(str(word) for word in started.get("command") or ()),
        launcher=job.launcher,
        version=str(started.get("version", "")),
    )


def cycle_span(job: JobHistory, cycle: CycleHistory) -> CycleSpan:
    """Return what the account lists of a cycle."""
    lives = cycle.lives
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
    sizes = [int(event.data.get("world_size") or 0) for _, event in cycle.starts.values()]
    reasons = [str(event.data.get("reason", "")) for _, (_, event) in sorted(cycle.ends.items())]
    return CycleSpan(
        job=job.name,
        cycle=cycle.number,
        start_s=start_s,
        end_s=max(start_s, end_s),
        steps_start_s=min(starts, default=None),
        world_size=max(sizes, default=len({event.rank for _, event in cycle.steps}) or len(cycle.sessions)),
        from_iteration=lives[0].from_iteration if starts else None,
        to_iteration=max((life.to_iteration for life in lives), default=None) if starts else None,
        nodes=nodes,
        num_in_process=len(cycle.back),
        reason=next((reason for reason in reasons if reason != "finished"), reasons[0] if reasons else ""),
    )
