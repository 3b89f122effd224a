"""The ledger: a partition of a run's wall time, and the cost of each incident, from the journal alone.

The run is walked from the start of its first job to the end of its last; each moment belongs to one segment. Then
periods of training are cut: steps whose result was lost, since a later period resumed from before them; waits for
saves; and the delay that slow ranks added.

Lost steps count as redone where they were done *first*: the later ones replace their result, so that time and
iterations agree with what a checkpoint could have saved.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from outlast import clock
from outlast.decoding import read_file
from outlast.errors import ConfigError, ExitReason
from outlast.goodput.account import (
    CycleSpan,
    IncidentCost,
    JobSpan,
    LoadSpan,
    NodeClock,
    Part,
    SaveSpan,
    Segment,
    SlowRanksWindow,
    Statistics,
    StepSample,
    Warned,
)
from outlast.goodput.clocks import Moment, align
from outlast.goodput.history import Episode, JobHistory, Life, all_lives, has_session, never_trained, settle
from outlast.goodput.spans import (
    cycle_span,
    find_loads,
    find_notes,
    find_saves,
    find_slow_windows,
    find_steps,
    find_warned,
    job_span,
)
from outlast.incidents import Event, EventKind, RecoveryLevel
from outlast.journal import MAX_JOURNAL_BYTES, decode_events, list_files
from outlast.policy.goodput import goodput
from outlast.policy.recovery_point import Tier
from outlast.policy.run_view import CycleView, JobView, RunView
from outlast.wording import count, duration

PREEMPTED = "preempted"
"""Kind of an incident that is a requested shutdown."""
_LASTING = {str(Tier.LOCAL), str(Tier.GLOBAL)}
"""Tiers that outlive a job's processes; a writer's memory ends with it."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a run's wall time, and the cost of each incident."""

    run_id: str
    began: str
    """ISO 8601, in UTC."""
    began_wall_ns: int
    wall_s: float
    """From the start of the first job to the end of the last one, or to the newest event of a run that continues."""
    state: str
    """``finished``, ``stopped``, ``preempted``, or ``open``: it continues, or its end is not in the journal."""
    headline: str
    """One sentence summary."""
    partition: dict[str, float]
    """Name of each :class:`Part` to its seconds; they add up to ``wall_s``."""
    ettr: float | None
    """Effective training time ratio, the goodput: the productive share of the wall time; ``None`` = no rank reported a
    step."""
    num_iterations: int | None
    """The highest iteration that was finished and not lost; ``None`` = not known, as the script has no session."""
    lost_iterations: int | None
    """Finished iterations that had to be done again, or will have to be; ``None`` = not known."""
    lost_is_minimum: bool = False
    """``lost_iterations`` is a lower bound: a part of the run had no session."""
    num_in_process: int = 0
    num_spared: int = 0
    """Ranks that were lost, and without which the others continued."""
    jobs: tuple[JobSpan, ...]
    cycles: tuple[CycleSpan, ...]
    incidents: tuple[IncidentCost, ...]
    warned: tuple[Warned, ...]
    segments: tuple[Segment, ...]
    saves: tuple[SaveSpan, ...]
    loads: tuple[LoadSpan, ...]
    slow_ranks: tuple[SlowRanksWindow, ...]
    steps: tuple[StepSample, ...]
    statistics: Statistics
    clocks: tuple[NodeClock, ...]
    notes: tuple[str, ...]
    """Limitations of the account: lost events, unreadable lines, aligned clocks."""

    @classmethod
    def read(cls, run_dir: str | os.PathLike[str], *, job: str | None = None) -> Ledger:
        """Build the ledger from the journal of a run directory.

        Args:
            run_dir: The run directory. A live run may continue to write: call again.
            job: Name of the one job to account for; ``None`` = all of the run's.

        Raises:
            ConfigError: The path is not a run directory, or its journal has no event.
        """
        folder = Path(run_dir) / "journal"
        if not folder.is_dir():
            what = "is a file, not a run directory" if Path(run_dir).is_file() else "has no journal"
            what = what if Path(run_dir).exists() else "does not exist"
            raise ConfigError(f"{run_dir} {what}; name a run directory (--run-dir of outlast run)")
        files: list[list[Event]] = []
        notes: list[str] = []
        try:
            listed = list_files(run_dir)
        except OSError as error:
            listed = []
            notes.append(f"{folder} cannot be read: {error.strerror}")
        for file in listed:
            name = file.path.name
            try:
                events, num_bad = decode_events(read_file(file.path, max_bytes=MAX_JOURNAL_BYTES))
            except OSError as error:
                notes.append(f"{name} cannot be read: {error.strerror}")
                continue
            if num_bad:
                notes.append(f"{count(num_bad, 'line')} of {name} cannot be read: torn, or of another version")
            files.append(events if job is None else [event for event in events if event.job == job])
        files = [events for events in files if events]
        if not files:
            why = f": {notes[0]}" if notes else ""
            raise ConfigError(
                f"the journal in {run_dir} holds no event{why}; the run has not begun yet, or it is damaged"
            )
        return cls.from_files(files, notes=notes)

    @classmethod
    def from_files(cls, files: Sequence[Sequence[Event]], *, notes: Iterable[str] = ()) -> Ledger:
        """Build the ledger from the events of each file of a journal, each in the order in which they were written."""
        moments, clocks = align(files)
        return _Walk(moments).close(clocks, list(notes))


class _Walk:
    """Builds a ledger by walking the jobs."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        first_agent = next((one for one in moments if one.event.kind == EventKind.JOB_STARTED), moments[0])
        begin = RunView()
        for one in (moments[0], first_agent):
            begin.take(one.event, one.time_ns)
        self._zero_ns = begin.began_ns or 0
        view = RunView(zero_ns=self._zero_ns)
        for one in moments:
            view.take(one.event, one.time_ns)
        self._run_id = view.run_id
        self._jobs = settle(view)
        self._episodes: list[tuple[JobHistory, Episode]] = []
        self._causes: dict[int, int] = {}
        """Incident's identity to its index in the list."""
        self._shutdowns = [_shutdown_of(job) for job in self._jobs]
        """Of each job."""
        for job, shutdown in zip(self._jobs, self._shutdowns, strict=True):
            for episode in (*job.episodes, *shutdown):
                self._causes[id(episode)] = len(self._episodes)
                self._episodes.append((job, episode))
        self._segments: list[Segment] = []
        self._now_s = 0.0
        self._active: int | None = None
        """Index of the incident that the following time is spent on, until all ranks train again."""
        self._open: set[int] = set()
        """The active incident, and those that it overtook before all ranks trained again."""
        self._resumed: dict[int, tuple[float, int | None]] = {}
        """Incident to when all ranks began a step again, and from which iteration; ``None`` = not known."""
        self._is_observed = any(has_session(job) for job in self._jobs) or not all_lives(self._jobs)
        """A script had a session, which reports iterations."""
        self._unobserved: set[int] = set()
        """Periods whose scripts may have trained without a session, by identity."""
        self._lost: Counter[int] = Counter()
        """Iterations that each incident lost, by its index; -1 = no incident."""
        self._redone: list[tuple[float, float, int | None]] = []
        """Periods of lost iterations, with the index of the incident."""

    # -- the walk ------------------------------------------------------------------------------------------------

    def close(self, clocks: tuple[NodeClock, ...], notes: list[str]) -> Ledger:
        for place, job in enumerate(self._jobs):
            self._walk_job(job, self._shutdowns[place], is_first=place == 0)
        wall_s = self._now_s
        lives = all_lives(self._jobs)
        self._find_redone(lives)
        windows = find_slow_windows(self._jobs)
        saves = find_saves(self._jobs)
        segments = _cut(self._segments, sorted(self._redone, key=lambda one: one[:2]), Part.REDONE)
        segments = _cut(segments, [(one.at_s - one.stall_s, one.at_s, None) for one in saves], Part.SAVE_STALL)
        segments = [_with_excess(one, windows) for one in segments]
        partition = dict.fromkeys((str(part) for part in Part), 0.0)
        for segment in segments:
            partition[str(segment.part)] += segment.end_s - segment.start_s - segment.straggler_s
            partition[Part.STRAGGLER] += segment.straggler_s
        incidents = self._price(segments)
        trained = any(life.steps_start_s is not None for life in lives)
        state, why = self._state()
        ettr = goodput(partition[Part.PRODUCTIVE], wall_s) if trained and wall_s > 0 else None
        notes += find_notes(self._jobs, clocks)
        num_lost = sum(self._lost.values()) if self._is_observed else None
        is_minimum = self._is_observed and bool(self._unobserved)
        newest = next((life for life in reversed(lives) if life.is_tracked or id(life) in self._unobserved), None)
        ends_unobserved = newest is not None and id(newest) in self._unobserved
        return Ledger(
            run_id=self._run_id,
            began=clock.as_iso(self._zero_ns),
            began_wall_ns=self._zero_ns,
            wall_s=wall_s,
            state=state,
            headline=_headline(state, why, ettr, wall_s, incidents, num_lost, is_minimum=is_minimum),
            partition=partition,
            ettr=ettr,
            num_iterations=None if ends_unobserved else 0 if newest is None else newest.to_iteration,
            lost_iterations=num_lost,
            lost_is_minimum=is_minimum,
            num_in_process=sum(one.recovery_level == "restart_in_process" for one in incidents),
            num_spared=sum(len(cycle.spared) for job in self._jobs for cycle in job.view.cycles.values()),
            jobs=tuple(job_span(job.view) for job in self._jobs),
            cycles=tuple(cycle_span(job, cycle) for job in self._jobs for _, cycle in sorted(job.view.cycles.items())),
            incidents=incidents,
            warned=find_warned(self._jobs),
            segments=tuple(segments),
            saves=tuple(saves),
            loads=find_loads(self._jobs),
            slow_ranks=tuple(windows),
            steps=find_steps(self._jobs),
            statistics=_average(incidents, wall_s - partition[Part.QUEUED]),
            clocks=clocks,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _spend(
        self, until_s: float, part: Part, job: JobView, cycle: int | None = None, *, on: int | None = None
    ) -> None:
        """Assign the time until then to a part; earlier time is already assigned."""
        if until_s > self._now_s:
            segment = Segment(start_s=self._now_s, end_s=until_s, part=part, job=job.name, cycle=cycle, incident=on)
            self._segments.append(segment)
            self._now_s = until_s

    def _walk_job(self, job: JobHistory, shutdown: list[Episode], *, is_first: bool) -> None:
        view = job.view
        begins_s = min(view.start_s, max(view.began_s, self._now_s))
        for _, event in view.of(EventKind.QUEUED)[-1:]:
            scheduled_s = (int(event.data.get("started_wall_ns", 0)) - self._zero_ns) / 1e9
            if is_first or scheduled_s > self._now_s:
                begins_s = min(begins_s, max(scheduled_s, self._now_s))
        if not is_first:
            self._spend(begins_s, Part.QUEUED, view, on=self._active)
        self._spend(view.start_s, Part.START_UP, view, on=self._active)
        for number, cycle in sorted(view.cycles.items()):
            lives = job.lives[number]
            if cycle.started_s is None and not lives:
                continue
            begins_s = lives[0].began_s if lives else cycle.started_s or self._now_s
            self._meet(view, cycle, begins_s, is_first=number == min(view.cycles))
            for life in lives:
                self._walk_life(job, cycle, life)
        part = Part.START_UP if any(job.lives.values()) else Part.RENDEZVOUS
        stops = ("stop", "requeue_job")
        stopped_by = next(
            (self._causes[id(one)] for one in reversed(job.episodes) if one.recovery_level in stops), None
        )
        leaving = next((self._causes[id(one)] for one in shutdown), None)
        if stopped_by is not None:
            part = Part.RESTART
        self._spend(view.end_s, part, view, on=leaving if leaving is not None else stopped_by)
        if leaving is not None:
            self._begin(leaving)

    def _meet(self, job: JobView, cycle: CycleView, until_s: float, *, is_first: bool) -> None:
        """Assign the time in which nodes meet: after the first cycle of a job, a wait for missing ones is idle."""
        missing_since_s: float | None = None
        forming = [(time_s, int(event.data.get("missing", 0))) for time_s, event in cycle.of(EventKind.FORMING)]
        for time_s, num_missing in [*forming, (until_s, 0)]:
            time_s = min(time_s, until_s)
            if missing_since_s is not None and not num_missing:
                part = Part.RENDEZVOUS if is_first else Part.IDLE
                self._spend(time_s, part, job, cycle.number, on=self._active)
                missing_since_s = None
            elif num_missing and missing_since_s is None:
                self._spend(time_s, Part.RENDEZVOUS, job, cycle.number, on=self._active)
                missing_since_s = time_s
        self._spend(until_s, Part.RENDEZVOUS, job, cycle.number, on=self._active)

    def _walk_life(self, history: JobHistory, cycle: CycleView, life: Life) -> None:
        number, job = cycle.number, history.view
        episode = life.episode
        caused = -1 if episode is None else self._causes[id(episode)]
        if life.steps_start_s is None:
            is_known = has_session(history) or never_trained(life, history, self._jobs)
            part = Part.START_UP if is_known else Part.UNOBSERVED
            on = self._active if self._active is not None or episode is None else caused
            self._spend(life.end_s, part, job, number, on=on if is_known else None)
            if not is_known:
                self._unobserved.add(id(life))
                self._note_resumed(life.began_s, None)
        else:
            self._load(job, cycle, life, life.steps_start_s)
            self._spend(life.steps_start_s, Part.START_UP, job, number, on=self._active)
            self._note_resumed(life.steps_start_s, life.from_iteration)
            self._spend(life.end_s, Part.PRODUCTIVE, job, number)
        if episode is not None:
            self._begin(caused)
            self._spend(episode.at_s, Part.DETECTION, job, number, on=caused)
            back_s = life.back_s if life.back_s is not None else _until_restart(job, cycle, episode)
            self._spend(back_s, Part.RESTART, job, number, on=caused)
        elif life.back_s is not None:
            self._spend(life.back_s, Part.RESTART, job, number)
        elif cycle.ends:
            self._spend(max(time_s for time_s, _ in cycle.ends.values()), Part.START_UP, job, number)

    def _load(self, job: JobView, cycle: CycleView, life: Life, until_s: float) -> None:
        """Assign the time until a load has ended on all ranks."""
        loads = [(t, e) for t, e in cycle.of(EventKind.RESTORED) if life.began_s <= t <= until_s]
        if not loads:
            return
        end_s = max(time_s for time_s, _ in loads)
        load_s = max(float(event.data.get("load_s") or 0.0) for _, event in loads)
        self._spend(max(life.began_s, end_s - load_s), Part.START_UP, job, cycle.number, on=self._active)
        self._spend(end_s, Part.LOAD, job, cycle.number, on=self._active)

    def _begin(self, incident: int) -> None:
        self._active = incident
        self._open.add(incident)

    def _note_resumed(self, at_s: float, iteration: int | None) -> None:
        self._resumed |= dict.fromkeys(self._open, (at_s, iteration))
        self._active = None
        self._open.clear()

    # -- lost iterations ---------------------------------------------------------------------------------------------

    def _find_redone(self, lives: Sequence[Life]) -> None:
        stack: list[list[Any]] = []  # of each period: itself, its last iteration that counts, until when it counts
        cause: int | None = None
        for life in lives:
            if life.is_tracked:
                self._cut_back(stack, life.from_iteration, cause)
                stack.append([life, life.to_iteration, life.end_s])
                cause = None
            if life.episode is not None:
                cause = self._causes[id(life.episode)] if cause is None else cause
        if self._jobs[-1].view.exit_code not in (None, ExitReason.FINISHED) and stack:
            self._cut_back(stack, _durable(self._jobs), cause)
        for job in self._jobs:
            for episode in job.episodes:
                if episode.decision is not None and episode.decision.recovery_level == RecoveryLevel.RERUN_STEP:
                    step_s = _step_s(job, episode.cycle, episode.at_s)
                    self._redone.append((episode.at_s - step_s, episode.at_s, self._causes[id(episode)]))

    def _cut_back(self, stack: list[list[Any]], iteration: int, cause: int | None) -> None:
        """Discard what was done beyond an iteration."""
        for entry in reversed(stack):
            life, reached, until_s = entry
            failed = life.episode is not None and until_s == life.end_s
            if reached <= iteration and not failed:
                continue
            kept = max(min(iteration, reached), life.from_iteration)
            from_s = min(life.when_done(kept), until_s)
            if kept < reached:
                self._lost[-1 if cause is None else cause] += reached - kept
            own = self._causes[id(life.episode)] if life.episode is not None else None
            if from_s < until_s and (kept < reached or failed):
                self._redone.append((from_s, until_s, cause if kept < reached and cause is not None else own))
            entry[1], entry[2] = kept, from_s

    # -- incident costs ----------------------------------------------------------------------------------------------

    def _price(self, segments: Sequence[Segment]) -> tuple[IncidentCost, ...]:
        parts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for segment in segments:
            if segment.incident is not None:
                parts[segment.incident][str(segment.part)] += segment.end_s - segment.start_s
        exits = {
            (job.view.name, number, event.rank): event.data
            for job in self._jobs
            for number, cycle in job.view.cycles.items()
            for _, event in cycle.of(EventKind.WORKER_EXITED)
        }
        return tuple(
            self._cost(job, episode, index, dict(parts[index]), exits)
            for index, (job, episode) in enumerate(self._episodes)
        )

    def _cost(
        self, job: JobHistory, episode: Episode, index: int, parts: dict[str, float], exits: dict[Any, dict[str, Any]]
    ) -> IncidentCost:
        incident = episode.incident
        life = next((one for one in job.lives.get(episode.cycle, ()) if one.episode is episode), None)
        iteration = incident.iteration if incident is not None else None
        if life is not None:
            iteration = max(life.to_iteration, iteration or 0)
        recovered_s, resumed = self._resumed.get(index, (None, None))
        if episode.decision is not None and episode.decision.recovery_level == RecoveryLevel.RERUN_STEP:
            recovered_s, resumed = episode.at_s, iteration
        evidence = dict(incident.evidence) if incident is not None else {}
        rank = incident.rank if incident is not None else None
        if (ended := exits.get((job.view.name, episode.cycle, rank))) is not None and rank is not None:
            evidence["exited"] = ended
        return IncidentCost(
            index=index,
            kind=episode.kind,
            text=episode.text,
            recovery_level=episode.recovery_level,
            reason=episode.decision.reason if episode.decision is not None else "",
            job=job.view.name,
            cycle=episode.cycle,
            node=incident.node if incident is not None else "",
            rank=rank,
            iteration=iteration,
            at_s=episode.at_s,
            since_s=episode.since_s,
            recovered_s=recovered_s,
            resumed_iteration=resumed,
            lost_iterations=None if not self._is_observed or id(life) in self._unobserved else self._lost[index],
            parts=parts,
            cost_s=sum(parts.values()),
            simulated=episode.simulated,
            fault=episode.fault,
            incident=incident,
            decision=episode.decision,
            evidence=evidence,
        )

    def _state(self) -> tuple[str, str]:
        job = self._jobs[-1].view
        code = job.exit_code
        ended = job.of(EventKind.JOB_ENDED)
        reason = str(ended[-1][1].data.get("reason", "")) if ended else ""
        if code is None or (job.agents and not ended):
            return "open", ""
        if code == ExitReason.FINISHED:
            return "finished", reason
        return ("preempted" if code == ExitReason.PREEMPTED else "stopped"), reason or f"exit code {code}"


# -- helpers
# -------------------------------------------------------------------------------------------------------------


def _shutdown_of(history: JobHistory) -> list[Episode]:
    """Return the requested shutdown on which a job ended, if any."""
    job = history.view
    if job.exit_code != ExitReason.PREEMPTED:
        return []
    first = min(job.of(EventKind.NOTICE), default=None, key=lambda one: one[0])
    at_s = job.end_s if first is None else first[0]
    fault, text = None, "shutdown requested"
    number = max(job.cycles, default=0)
    if first is not None:
        event = first[1]
        who = f"rank {event.rank} on node {event.node}" if event.rank is not None else f"node {event.node}"
        text = f"shutdown requested, first detected by {who}"
        number = event.cycle if event.cycle is not None else number
        faults = job.cycles[number].of(EventKind.FAULT_SIMULATED) if number in job.cycles else []
        fault = next((one for one in reversed(faults) if one[0] <= at_s and one[1].rank in (None, event.rank)), None)
    episode = Episode(PREEMPTED, at_s, at_s, cycle=number, text=text)
    if fault is not None and not any(one.fault is fault[1] for one in history.episodes):
        episode.since_s, episode.fault, episode.simulated = fault[0], fault[1], str(fault[1].data.get("fault", ""))
    return [episode]


def _until_restart(job: JobView, cycle: CycleView, episode: Episode) -> float:
    """Return when the next cycle could begin: the decision's time plus its delay, unless it began or the job ended
    earlier."""
    delay_s = episode.decision.delay_s if episode.decision is not None else 0.0
    following = job.cycles.get(cycle.number + 1)
    started_s = following.started_s if following is not None else None
    end_s = job.end_s if started_s is None else started_s
    return max(episode.decided_s, min(episode.decided_s + delay_s, end_s))


def _durable(jobs: Sequence[JobHistory]) -> int:
    """Return the highest iteration of a checkpoint that outlives the last job."""
    best = 0
    for job in jobs:
        for _, event in job.view.of(EventKind.SAVE_COMMITTED, EventKind.RESTORED):
            if _LASTING & {event.data.get("tier"), *(event.data.get("tiers") or ())}:
                best = max(best, event.iteration or 0)
    return best


def _step_s(job: JobHistory, number: int, at_s: float) -> float:
    """Return the mean time of a step around a moment, in seconds; 0 = not known."""
    for life in job.lives.get(number, ()):
        if life.steps_start_s is None or not life.steps_start_s <= at_s <= life.end_s:
            continue
        later = next((place for place, (time_s, _) in enumerate(life.points) if time_s >= at_s), len(life.points) - 1)
        (t0, i0), (t1, i1) = life.points[max(0, later - 1)], life.points[later]
        if i1 > i0:
            return min(at_s - life.steps_start_s, (t1 - t0) / (i1 - i0))
    return 0.0


def _cut(
    segments: Iterable[Segment], stretches: Sequence[tuple[float, float, int | None]], part: Part
) -> list[Segment]:
    """Assign periods of training to another part; both by time, periods may overlap."""
    found: list[Segment] = []
    place = 0
    for segment in segments:
        if segment.part not in (Part.PRODUCTIVE, Part.REDONE):
            found.append(segment)
            continue
        now_s = segment.start_s
        while place < len(stretches) and stretches[place][1] <= segment.start_s:
            place += 1
        at = place
        while at < len(stretches) and stretches[at][0] < segment.end_s:
            begin_s, end_s, incident = stretches[at]
            begin_s, end_s = max(begin_s, now_s), min(end_s, segment.end_s)
            if end_s > begin_s:
                if begin_s > now_s:
                    found.append(msgspec.structs.replace(segment, start_s=now_s, end_s=begin_s))
                found.append(
                    msgspec.structs.replace(segment, start_s=begin_s, end_s=end_s, part=part, incident=incident)
                )
                now_s = end_s
            at += 1
        if now_s < segment.end_s:
            found.append(msgspec.structs.replace(segment, start_s=now_s))
    return found


def _with_excess(segment: Segment, windows: Sequence[SlowRanksWindow]) -> Segment:
    if segment.part != Part.PRODUCTIVE:
        return segment
    slow_s = sum(
        window.excess * max(0.0, min(window.end_s, segment.end_s) - max(window.start_s, segment.start_s))
        for window in windows
        if window.excess and window.job == segment.job and window.cycle == segment.cycle
    )
    if not slow_s:
        return segment
    return msgspec.structs.replace(segment, straggler_s=min(slow_s, segment.end_s - segment.start_s))


def _average(incidents: Sequence[IncidentCost], running_s: float) -> Statistics:
    num = Counter(one.kind for one in incidents)
    num["all"] = sum(one.kind != PREEMPTED for one in incidents)
    detected: dict[str, list[float]] = defaultdict(list)
    recovered: dict[str, list[float]] = defaultdict(list)
    for one in incidents:
        for found, name, after_s in (
            (detected, one.kind, one.detected_after_s),
            (recovered, one.recovery_level or one.kind, one.recovered_after_s),
        ):
            if after_s is not None:
                for each in (name,) if one.kind == PREEMPTED else (name, "all"):
                    found[each].append(after_s)
    return Statistics(
        num_incidents=dict(num),
        mtbf_s={kind: running_s / number for kind, number in num.items() if number},
        mttd_s={kind: fmean(values) for kind, values in detected.items()},
        mttr_s={recovery_level: fmean(values) for recovery_level, values in recovered.items()},
    )


def _headline(
    state: str,
    why: str,
    ettr: float | None,
    wall_s: float,
    incidents: Sequence[IncidentCost],
    num_lost: int | None,
    *,
    is_minimum: bool,
) -> str:
    start = {
        "finished": "finished",
        "preempted": "preempted, to be continued by another job",
        "open": "not over",
        "stopped": f"stopped because {why.rstrip('.')}",
    }[state]
    goodput = "goodput unknown (the script reports no steps)" if ettr is None else f"{100 * ettr:.1f} % goodput"
    num = count(len(incidents), "incident")
    least = "at least " if is_minimum else ""
    redone = "" if num_lost is None else f", {least}{count(num_lost, 'iteration')} redone"
    return f"{start}: {goodput} in {duration(wall_s)}, {num}{redone}"
