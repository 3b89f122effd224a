"""Training periods of each job, and the incidents that caused a decision, from a view of the run.

A *life* is a period in which ranks train without a restart: a cycle has one, and one more for each in-process restart.
Pure: :class:`outlast.policy.run_view.RunView` has combined the events.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outlast.decoding import convert
from outlast.errors import ExitReason
from outlast.incidents import CYCLE_ENDING, Decision, Event, EventKind, Incident, IncidentKind, RecoveryLevel
from outlast.policy.run_view import CycleView, JobView, RunView


@dataclass(slots=True)
class Episode:
    """An incident that caused a decision."""

    kind: str
    at_s: float
    """When it was detected."""
    decided_s: float
    since_s: float | None = None
    """When the fault happened; ``None`` = not known."""
    cycle: int = 0
    incident: Incident | None = None
    decision: Decision | None = None
    text: str = ""
    simulated: str = ""
    fault: Event | None = None
    """The injected fault that caused it."""

    @property
    def recovery_level(self) -> str:
        """Name of the recovery level in lower case; empty = no decision."""
        return "" if self.decision is None else self.decision.recovery_level.name.lower()

    @property
    def began_s(self) -> float:
        """When training stopped for it, as far as known."""
        return self.at_s if self.since_s is None else min(self.since_s, self.at_s)


@dataclass(slots=True)
class Life:
    """A period of training without a restart."""

    job: str
    cycle: int
    began_s: float
    """When the processes had started, or were back in the script."""
    steps_start_s: float | None = None
    """When the last rank began its first step; ``None`` = not all did."""
    end_s: float = 0.0
    """When training stopped: by the fault, or by its own end."""
    from_iteration: int = 0
    to_iteration: int = 0
    is_tracked: bool = False
    """Whether its first and last iterations are known."""
    points: list[tuple[float, int]] = field(default_factory=list)
    """Time and iterations done; both ascending."""
    episode: Episode | None = None
    """The incident that ended it; ``None`` = it ended by itself, or continues."""
    back_s: float | None = None
    """When the processes were back in the script after an in-process recovery."""

    def when_done(self, iteration: int) -> float:
        """Return when an iteration was done, by interpolation."""
        if not self.points or iteration <= self.points[0][1]:
            return self.points[0][0] if self.points else self.end_s
        place = bisect_left(self.points, iteration, key=lambda point: point[1])
        if place == len(self.points):
            return self.points[-1][0]
        (t0, i0), (t1, i1) = self.points[place - 1], self.points[place]
        return t0 + (t1 - t0) * (iteration - i0) / (i1 - i0)


@dataclass(slots=True)
class JobHistory:
    view: JobView
    num_reporting: int = 0
    """Number of ranks that report steps."""
    lives: dict[int, list[Life]] = field(default_factory=dict)
    episodes: list[Episode] = field(default_factory=list)
    """Incidents that caused a decision, by time."""


def settle(view: RunView) -> list[JobHistory]:
    """Return the history of each job of a run, by time."""
    found = []
    for job in view.jobs:
        history = JobHistory(job, job.num_reporting)
        for _, cycle in sorted(job.cycles.items()):
            _settle(history, cycle)
        history.episodes.sort(key=lambda episode: episode.at_s)
        found.append(history)
    return found


# -- a cycle's incidents and training periods
# ----------------------------------------------------------------------------


def _settle(job: JobHistory, cycle: CycleView) -> None:
    """Find a cycle's incidents and training periods, once all its events are known."""
    episodes = sorted(_find_episodes(job.view, cycle), key=lambda episode: episode.at_s)
    job.episodes += episodes
    lives = job.lives[cycle.number] = list[Life]()
    began_s = cycle.started_s
    if began_s is None:
        began_s = min((time_s for time_s, _ in (*cycle.of(EventKind.STEPS_STARTED), *cycle.done)), default=None)
    if began_s is None:
        return
    bounds = [began_s, *_find_returns(cycle)]
    recovered = [
        one
        for one in episodes
        if one.decision is not None and one.decision.recovery_level == RecoveryLevel.RESTART_IN_PROCESS
    ]
    ending = next((one for one in reversed(episodes) if _ends_cycle(one)), None)
    for place, begin_s in enumerate(bounds):
        life = Life(job=job.view.name, cycle=cycle.number, began_s=begin_s)
        is_last = place + 1 == len(bounds)
        until_s = float("inf") if is_last else bounds[place + 1]
        if is_last:
            life.episode = ending
        else:
            inside = [one for one in recovered if begin_s <= one.at_s]
            life.episode = next((one for one in inside if one.began_s <= until_s), None)
            if life.episode is not None:
                recovered.remove(life.episode)
            life.back_s = until_s
        least = min(cycle.world_size, job.num_reporting) if not lives else 1
        _fill(cycle, life, least, begin_s, until_s)
        lives.append(life)


def _find_returns(cycle: CycleView) -> list[float]:
    """Return when ranks began again in process: as the wrapper reports it, else by their sessions."""
    back = [time_s for time_s, _ in cycle.of(EventKind.RESTARTED_IN_PROCESS)]
    again: dict[int, float] = {}
    num_begun = Counter[int | None]()
    for time_s, event in cycle.of(EventKind.SESSION_STARTED):
        num_begun[event.rank] += 1
        again.setdefault(num_begun[event.rank], time_s)
    sessions = [time_s for ordinal, time_s in sorted(again.items()) if ordinal > 1]
    return back if len(back) >= len(sessions) else sessions


def _ends_cycle(episode: Episode) -> bool:
    if episode.decision is None:
        return episode.kind in CYCLE_ENDING
    return episode.decision.recovery_level not in (RecoveryLevel.RERUN_STEP, RecoveryLevel.RESTART_IN_PROCESS)


def _fill(cycle: CycleView, life: Life, least: int, begin_s: float, until_s: float) -> None:
    """Fill in when a period trained, and its iterations; ``least`` ranks must have begun a step for that."""
    steps = [one for one in cycle.of(EventKind.STEPS_STARTED) if begin_s <= one[0] < until_s]
    done = [one for one in cycle.done if begin_s <= one[0] < until_s]
    restored = [e.iteration or 0 for time_s, e in cycle.of(EventKind.RESTORED) if begin_s <= time_s < until_s]
    first: dict[int | None, float] = {}
    for time_s, event in steps:
        first.setdefault(event.rank, time_s)
    progress = [(time_s, event) for time_s, event in done if event.kind == EventKind.PROGRESS]
    if not steps:  # a journal of an earlier version: from the first finished iteration on
        for time_s, event in progress:
            first.setdefault(event.rank, time_s)
    if first and len(first) >= least:
        life.steps_start_s = max(first.values())
    if steps:
        life.from_iteration = min(event.iteration or 0 for _, event in steps)
    elif progress:
        life.from_iteration = min(restored, default=max(0, min(event.iteration or 0 for _, event in progress) - 1))
    reached = [event.iteration or 0 for _, event in done]
    ended = [time_s for time_s, _ in cycle.ends.values()]
    if until_s == float("inf"):
        for _, event in cycle.ends.values():
            reached += [int(value) for value in (event.data.get("iterations") or {}).values()]
    if life.episode is not None:
        life.end_s = life.episode.began_s
        reached += [one.iteration or 0 for one in (life.episode.incident, life.episode.fault) if one is not None]
    elif until_s != float("inf"):
        data = next((e.data for time_s, e in cycle.of(EventKind.RESTARTED_IN_PROCESS) if time_s == until_s), {})
        life.end_s = until_s - float(data.get("duration_s") or 0.0)
    else:
        session_ends = [time_s for time_s, _ in cycle.of(EventKind.SESSION_ENDED)]
        life.end_s = max(session_ends, default=max(ended, default=max(cycle.last_s, begin_s)))
    life.end_s = max(life.end_s, begin_s)
    if life.steps_start_s is None:
        life.from_iteration = min(restored, default=life.from_iteration)
    life.to_iteration = max([*reached, life.from_iteration])
    if life.steps_start_s is None:
        life.is_tracked = bool(restored) or life.to_iteration > 0
        return
    life.is_tracked = True
    life.steps_start_s = min(life.steps_start_s, life.end_s)
    points = [(life.steps_start_s, life.from_iteration)]
    for time_s, event in done:
        if time_s <= life.end_s and (event.iteration or 0) > points[-1][1]:
            points.append((max(time_s, points[-1][0]), event.iteration or 0))
    if life.to_iteration > points[-1][1]:
        points.append((max(life.end_s, points[-1][0]), life.to_iteration))
    life.points = points


def _find_episodes(job: JobView, cycle: CycleView) -> Iterator[Episode]:
    """Yield a cycle's incidents with decisions, with the times of detection and, where known, of the fault."""
    faults = cycle.of(EventKind.FAULT_SIMULATED)
    for episode in (*_decided(cycle), *_undecided(job, cycle)):
        if episode.incident is not None and episode.incident.detected_after_s is not None:
            episode.since_s = episode.at_s - episode.incident.detected_after_s
        _match_fault(episode, faults)
        yield episode


def _decided(cycle: CycleView) -> Iterator[Episode]:
    """Yield the incidents with decisions; detected by the first event since the last decision on a similar one."""
    decided_before: dict[tuple[Any, ...], float] = {}
    for decided_s, event in cycle.decisions:
        raw = event.data["incident"]
        about = _about(raw)
        after_s = decided_before.get(about, float("-inf"))
        decided_before[about] = decided_s
        detected = [
            time_s
            for time_s, other in cycle.incidents
            if after_s < time_s <= decided_s and _about(other.data.get("incident") or {}) == about
        ]
        episode = _episode(_kind_of(raw), raw, cycle, min(detected, default=decided_s), decided_s)
        episode.decision = decode(event.data.get("verdict"), Decision)
        yield episode


def _episode(kind: str, raw: dict[str, Any], cycle: CycleView, at_s: float, decided_s: float) -> Episode:
    incident = decode(raw, Incident)
    text = incident.describe() if incident is not None else kind.replace("_", " ")
    return Episode(kind, at_s, decided_s, cycle=cycle.number, incident=incident, text=text)


def _undecided(job: JobView, cycle: CycleView) -> Iterator[Episode]:
    """Yield what ended a cycle, or a call in process, without a decision: without an agent the recovery policy is not
    run."""
    decisions = [event.data.get("verdict") for _, event in cycle.decisions]
    decided = [
        decision.get("rung") if isinstance(decision, dict) else int(RecoveryLevel.RESTART_WORKERS)
        for decision in decisions
    ]
    num_in_process = sum(recovery_level == RecoveryLevel.RESTART_IN_PROCESS for recovery_level in decided)
    for time_s, event in cycle.of(EventKind.RESTARTED_IN_PROCESS)[num_in_process:]:
        fault = (event.data.get("faults") or [{}])[0]
        began_s = time_s - float(event.data.get("duration_s") or 0.0)
        yield Episode(
            str(fault.get("kind") or IncidentKind.WORKER_FAILED),
            began_s,
            began_s,
            cycle=cycle.number,
            text=f"rank {fault.get('rank', '?')}: {fault.get('summary', 'a fault within the process')}",
            decision=Decision(recovery_level=RecoveryLevel.RESTART_IN_PROCESS, reason="restarted within the processes"),
        )
    if any(
        recovery_level not in (None, int(RecoveryLevel.RERUN_STEP), int(RecoveryLevel.RESTART_IN_PROCESS))
        for recovery_level in decided
    ):
        return
    for time_s, event in cycle.incidents:
        raw = event.data.get("incident") or {}
        if raw.get("kind") in CYCLE_ENDING:
            yield _episode(str(raw["kind"]), raw, cycle, time_s, time_s)
            return
    is_followed = any(number > cycle.number for number in job.cycles)
    if is_followed and not job.agents and not cycle.starts and cycle.of(EventKind.SESSION_STARTED):
        text = f"the workers of cycle {cycle.number} ended; their launcher started them again"
        yield Episode(str(IncidentKind.WORKER_FAILED), cycle.last_s, cycle.last_s, cycle=cycle.number, text=text)


def _match_fault(episode: Episode, free: list[tuple[float, Event]]) -> None:
    """Find the injected fault that caused it: the newest before it of the same rank or node."""
    incident = episode.incident
    for pair in reversed(free):
        time_s, event = pair
        if time_s > episode.at_s or (expected := event.data.get("expected")) not in (None, episode.kind):
            continue
        node = event.data.get("node") or (event.node if event.rank is not None else None)
        if incident is None or incident.rank is None:
            hits = expected is not None or incident is None or incident.node == node
        else:
            hits = event.rank == incident.rank or (event.rank is None and node == incident.node)
        if hits and (expected is None or incident is None or event.rank is not None or node == incident.node):
            free.remove(pair)
            episode.since_s, episode.fault = time_s, event
            episode.simulated = str(event.data.get("fault", ""))
            return


def _kind_of(incident: dict[str, Any]) -> str:
    """Return the kind of an incident: a worker that failed with a diagnosis failed for an invalid result."""
    return str(IncidentKind.INVALID_RESULT if "diagnosis" in incident.get("evidence", {}) else incident.get("kind", ""))


def _about(incident: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key that all reports of one incident share; without the rank for a hang, which other ranks report,
    too."""
    kind = _kind_of(incident)
    return (kind,) if kind == IncidentKind.WORKER_HUNG else (kind, incident.get("node"), incident.get("rank"))


def decode(value: Any, kind: type[msgspec.Struct]) -> Any:
    """Return a value of the journal as a struct; ``None`` = it is of another version."""
    try:
        return convert(value, kind)
    except msgspec.ValidationError:
        return None


def all_lives(jobs: Iterable[JobHistory]) -> list[Life]:
    return [life for job in jobs for _, lives in sorted(job.lives.items()) for life in lives]


STARTS_WITHIN_S = 60.0
"""Time in which a script with a session opens it, unless its other starts took longer."""


def has_session(job: JobHistory) -> bool:
    """Return whether the job's script has reported anything: then the finished iterations are known."""
    return job.num_reporting > 0 or job.view.counts[EventKind.SESSION_STARTED] > 0


def never_trained(life: Life, job: JobHistory, jobs: Iterable[JobHistory]) -> bool:
    """Return whether a period failed so early that its script cannot have trained, although it opened no session.

    Args:
        life: A period of a job that has reported nothing.
        job: The job.
        jobs: All jobs of the run: that the script opens a session is known only if others have one.
    """
    starts_s = [
        time_s - cycle.started_s
        for other in jobs
        for cycle in other.view.cycles.values()
        if cycle.started_s is not None
        for time_s, _ in cycle.of(EventKind.SESSION_STARTED)
    ]
    has_failed = life.episode is not None or job.view.exit_code not in (None, ExitReason.FINISHED)
    return bool(starts_s) and has_failed and life.end_s - life.began_s <= max(STARTS_WITHIN_S, *starts_s)
