"""What went wrong in a job, from its events: each cycle's cause with what was decided, and what ended no cycle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from outlast.clock import as_iso
from outlast.decoding import convert
from outlast.incidents import CYCLE_ENDING, Event, EventKind, Incident, IncidentKind, Rung
from outlast.status.report import Trouble

__all__ = ["MAX_TROUBLES", "list_troubles"]

MAX_TROUBLES = 50


@dataclass(slots=True)
class _Case:
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
    cases: list[_Case] = []
    unjudged: dict[int | None, list[_Case]] = {}
    known: dict[tuple[object, ...], _Case] = {}
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
            cases.append(_Case(at, incident, verdict, max(1, sum(one.num_reports for one in reports))))
        elif kind in CYCLE_ENDING and verdict is None:
            same = next((one for one in unjudged.get(event.cycle, []) if _who(one.incident) == _who(incident)), None)
            if same is not None:
                same.num_reports += 1
            else:
                case = _Case(event, incident)
                cases.append(case)
                unjudged.setdefault(event.cycle, []).append(case)
        else:
            key = (event.cycle, kind, incident.get("iteration"), incident.get("node") if kind not in _MANY else "")
            if key in known:
                known[key].num_reports += 1
            else:
                known[key] = _Case(event, incident, verdict)
                cases.append(known[key])
    cases.sort(key=lambda case: case.event.wall_ns, reverse=True)
    return [_trouble(case, now_ns) for case in cases[:MAX_TROUBLES]], len(cases)


_MANY = {IncidentKind.SAVE_FAILED, IncidentKind.COPY_REJECTED, IncidentKind.REPLICATION_FAILED}
"""Incidents that many ranks report of one and the same trouble."""


def _who(incident: dict[str, Any]) -> tuple[object, ...]:
    return incident.get("kind"), incident.get("node"), incident.get("rank")


def _trouble(case: _Case, now_ns: int) -> Trouble:
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
