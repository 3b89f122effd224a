"""The outcome of each planned fault: whether it was injected, as what it was detected, and when the run recovered.

Pure: events in, rows out. Times are from the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from outlast.chaos.plan import FaultKind, FaultPlan, planned_faults
from outlast.incidents import Event, EventKind, IncidentKind, RecoveryLevel
from outlast.policy.run_view import RunView, WorkersStart

_HANGING = frozenset({FaultKind.STOP, FaultKind.SLEEP, FaultKind.HOLD_GIL})
_OF_COORDINATORS = frozenset({FaultKind.KILL_COORDINATOR, FaultKind.STOP_COORDINATOR})
_EITHER_SIDE = _OF_COORDINATORS | {FaultKind.PARTITION}
_DETECTED_AS: dict[FaultKind, tuple[IncidentKind, ...]] = {
    FaultKind.KILL: (IncidentKind.WORKER_DIED,),
    FaultKind.EXCEPTION: (IncidentKind.WORKER_FAILED,),
    FaultKind.EXIT: (IncidentKind.WORKER_FAILED,),
    FaultKind.SLOW: (IncidentKind.STRAGGLER,),
    FaultKind.DISK_FULL: (IncidentKind.SAVE_FAILED, IncidentKind.REPLICATION_FAILED),
    **dict.fromkeys(_HANGING, (IncidentKind.WORKER_HUNG,)),
}


class FaultOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one planned fault."""

    index: int
    """Index in the plan."""
    kind: str
    planned: str
    """Description of the planned fault."""
    fired: bool
    iteration: int | None = None
    """Highest iteration of the ranks at the injection."""
    target: str = ""
    """Where it was injected."""
    detected_as: str | None = None
    """Kind of the incident, or the event; ``taken over``: another coordinator leads; ``... elsewhere``: the cycle ended
    because of another rank or node; ``None``: not detected, or it did not have to be."""
    detected_after_s: float | None = None
    recovered_after_s: float | None = None
    """Seconds from the injection until every rank had completed an iteration again, or the step was repeated; ``None``:
    no cost, or the run did not continue."""
    lost_iterations: int | None = None
    """Completed iterations that were repeated."""


class KindOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of all faults of one kind."""

    kind: str
    planned: int
    fired: int
    detected_as: dict[str, int]
    """Number of outcomes by :attr:`FaultOutcome.detected_as`."""
    detected_median_s: float | None = None
    recovered_median_s: float | None = None
    lost_iterations: int = 0


def reckon(plan: FaultPlan, events: Sequence[Event]) -> list[FaultOutcome]:
    """Return one row for each fault of a plan, in its order; the first injection counts.

    Args:
        plan: The plan.
        events: All events of the run, in journal order.
    """
    starts = RunView.of(events).starts
    injections: dict[str, Event] = {}
    for event in events:
        if event.kind == EventKind.FAULT_SIMULATED:
            injections.setdefault(str(event.data.get("fault_id")), event)
    return [
        _reckon_one(
            one.index, FaultKind(one.fault.kind), one.fault.describe(), injections.get(one.fault_id), events, starts
        )
        for one in planned_faults(plan)
    ]


def by_kind(rows: Iterable[FaultOutcome]) -> list[KindOutcome]:
    """Return a row for each kind, in the order of :class:`~outlast.chaos.FaultKind`."""
    all_rows = list(rows)
    found = []
    for kind in FaultKind:
        if not (of_kind := [row for row in all_rows if row.kind == kind]):
            continue
        names = [row.detected_as for row in of_kind if row.detected_as is not None]
        found.append(
            KindOutcome(
                kind=kind,
                planned=len(of_kind),
                fired=sum(row.fired for row in of_kind),
                detected_as={name: names.count(name) for name in dict.fromkeys(names)},
                detected_median_s=_median(row.detected_after_s for row in of_kind),
                recovered_median_s=_median(row.recovered_after_s for row in of_kind),
                lost_iterations=sum(row.lost_iterations or 0 for row in of_kind),
            )
        )
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _reckon_one(
    index: int,
    kind: FaultKind,
    planned: str,
    injected: Event | None,
    events: Sequence[Event],
    starts: Sequence[WorkersStart],
) -> FaultOutcome:
    if injected is None:
        return FaultOutcome(index=index, kind=kind, planned=planned, fired=False)
    detected = next(_detections(kind, injected, events), None) or next(
        _detections_elsewhere(kind, injected, events), None
    )
    name = None if detected is None else detected[0]
    detected_s = None if detected is None else (detected[1].mono_ns - injected.mono_ns) / 1e9
    recovered_ns: int | None = None
    lost = None
    if kind.is_numeric or not kind.is_gentle:
        recovered_ns = _rerun_ns(kind, injected, events)
        if recovered_ns is None and (found := _next_start(injected, starts)) is not None:
            ended, after = found
            is_over = detected is not None or _ended_soon(injected, events)
            recovered_ns = after.trained_ns if is_over else None
            lost = max(0, max(ended.reached, injected.iteration or 0) - after.restored) if is_over else None
    return FaultOutcome(
        index=index,
        kind=kind,
        planned=planned,
        fired=True,
        iteration=injected.iteration,
        target=str(injected.data.get("target", "")),
        detected_as=name,
        detected_after_s=detected_s,
        recovered_after_s=None if recovered_ns is None else (recovered_ns - injected.mono_ns) / 1e9,
        lost_iterations=lost,
    )


def _detections(kind: FaultKind, injected: Event, events: Sequence[Event]) -> Iterator[tuple[str, Event]]:
    """Yield the names under which a fault was detected, and the events, in order."""
    for event in events:
        if event.mono_ns < injected.mono_ns:
            continue
        is_same = (event.job, event.cycle) == (injected.job, injected.cycle)
        if kind == FaultKind.SIGTERM and event.kind == EventKind.NOTICE and is_same:
            yield "notice", event
        elif kind == FaultKind.SLOW and event.kind == EventKind.STRAGGLER_REPORT and is_same:
            if injected.rank in event.data.get("named", ()):
                yield str(IncidentKind.STRAGGLER), event
        elif event.kind in (EventKind.INCIDENT, EventKind.DECISION) and event.data.get("incident"):
            incident = event.data["incident"]
            if _fits(kind, injected, incident, is_same=is_same):
                name = IncidentKind.INVALID_RESULT if kind.is_numeric else incident["kind"]
                yield str(name), event


def _detections_elsewhere(kind: FaultKind, injected: Event, events: Sequence[Event]) -> Iterator[tuple[str, Event]]:
    """Yield indirect detections: a successor of the coordinator, or another cause of the cycle's end."""
    if kind.is_gentle:
        return
    for event in events:
        is_same = (event.job, event.cycle) == (injected.job, injected.cycle)
        incident = event.data.get("incident")
        if event.mono_ns < injected.mono_ns:
            continue
        takes_over = event.proc == "coordinator" and event.node != injected.data.get("node")
        if (
            kind in _OF_COORDINATORS
            and takes_over
            and event.kind == EventKind.NODE_JOINED
            and event.job == injected.job
        ):
            yield "taken over", event
        elif event.kind == EventKind.DECISION and is_same and incident:
            yield f"{incident['kind']} elsewhere", event


def _fits(kind: FaultKind, injected: Event, incident: dict[str, object], *, is_same: bool) -> bool:
    """Return whether an incident is the expected detection of a fault, at the right rank or node."""
    found = incident.get("kind")
    if kind.is_of_copies:
        evidence = incident.get("evidence")
        tier = evidence.get("tier") if isinstance(evidence, dict) else None
        return found == IncidentKind.COPY_REJECTED and tier in (None, injected.data.get("tier"))
    if kind.is_of_disks:
        return found in _DETECTED_AS.get(kind, ())
    if kind.is_outside:
        # A coordinator that was stopped or cut off declares the other nodes lost.
        is_its = kind in _EITHER_SIDE or incident.get("node") == injected.data.get("node")
        # A coordinator that takes over, or resumes, judges the cycle that it knows.
        return found == IncidentKind.NODE_LOST and incident.get("job", injected.job) == injected.job and is_its
    if not is_same or incident.get("rank") not in (None, injected.rank):
        return False
    if kind.is_numeric:
        evidence = incident.get("evidence")
        has_diagnosis = isinstance(evidence, dict) and "diagnosis" in evidence
        return found == IncidentKind.INVALID_RESULT or has_diagnosis
    return found in _DETECTED_AS.get(kind, ())


def _rerun_ns(kind: FaultKind, injected: Event, events: Sequence[Event]) -> int | None:
    """Return when the step with a wrong number was repeated in place."""
    if not kind.is_numeric:
        return None
    for event in events:
        decision = event.data.get("verdict")
        is_same = (event.job, event.cycle) == (injected.job, injected.cycle)
        if is_same and event.mono_ns >= injected.mono_ns and isinstance(decision, dict):
            return event.mono_ns if decision.get("rung") == RecoveryLevel.RERUN_STEP else None
    return None


def _ended_soon(injected: Event, events: Sequence[Event]) -> bool:
    """Return whether the cycle of the injection ended by a later decision."""
    return any(
        event.kind == EventKind.DECISION
        and event.mono_ns >= injected.mono_ns
        and (event.job, event.cycle) == (injected.job, injected.cycle)
        and FaultKind(str(injected.data.get("fault_kind", FaultKind.KILL))).is_outside
        for event in events
    )


def _next_start(injected: Event, starts: Sequence[WorkersStart]) -> tuple[WorkersStart, WorkersStart] | None:
    """Return the workers of the injection, and the first later ones whose ranks all trained."""
    key = (injected.job, injected.cycle or 0)
    before = [at for at, one in enumerate(starts) if (one.job, one.cycle) == key and one.began_ns <= injected.mono_ns]
    if not before:
        return None
    at = before[-1]
    after = next((one for one in starts[at + 1 :] if (one.trained_ns or 0) > injected.mono_ns), None)
    return None if after is None else (starts[at], after)
