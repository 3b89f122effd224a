"""What a job's events show: its agents, its cycles, how far its ranks are, and what went wrong.

:class:`JobEvents` takes the events in one by one. :func:`list_troubles` brings together each cycle's cause with the
verdict on it, and the incidents that ended no cycle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outlast.clock import as_iso
from outlast.decoding import convert
from outlast.incidents import CYCLE_ENDING, Event, EventKind, Incident, IncidentKind, Rung
from outlast.status.report import Trouble

__all__ = ["MAX_TROUBLES", "JobEvents", "RankProgress", "list_troubles"]


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
    unjudged: dict[int | None, list[_TroubleCase]] = {}
    known: dict[tuple[object, ...], _TroubleCase] = {}
    for event in events:
        incident, verdict = event.data.get("incident"), event.data.get("verdict")
        if event.kind not in (EventKind.INCIDENT, EventKind.VERDICT) or not isinstance(incident, dict):
            continue
        kind = incident.get("kind")
        if event.kind == EventKind.VERDICT:
            reports = unjudged.pop(event.cycle, [])
            same = next((one for one in reports if _who(one.incident) == _who(incident)), None)
            cases = [one for one in cases if not any(one is report for report in reports)]
            at = same.event if same is not None else event
            cases.append(_TroubleCase(at, incident, verdict, max(1, sum(one.num_reports for one in reports))))
        elif kind in CYCLE_ENDING and verdict is None:
            same = next((one for one in unjudged.get(event.cycle, []) if _who(one.incident) == _who(incident)), None)
            if same is not None:
                same.num_reports += 1
            else:
                case = _TroubleCase(event, incident)
                cases.append(case)
                unjudged.setdefault(event.cycle, []).append(case)
        else:
            key = (event.cycle, kind, incident.get("iteration"), incident.get("node") if kind not in _MANY else "")
            if key in known:
                known[key].num_reports += 1
            else:
                known[key] = _TroubleCase(event, incident, verdict)
                cases.append(known[key])
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
        time=event.time or as_iso(event.wall_ns),
        age_s=round(max(0, now_ns - event.wall_ns) / 1e9, 3),
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
