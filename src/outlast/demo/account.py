"""The account: what each incident was, how it was noticed, and what it cost. Pure: events in, rows out.

All nodes of the demo are one machine, so that the monotonic times of all events may be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from outlast.demo.sources import Sources, find_sources, newest_global
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Verdict

__all__ = ["Account", "account_for", "count_cycles", "unnoticed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One incident, from the strike to the first iteration after it."""

    kind: IncidentKind
    cycle: int
    """The cycle that it ended."""
    node: str
    rank: int | None
    """Global rank; ``None`` when a whole node was lost."""
    fault: str | None
    """What the demo did; ``None`` for an incident that it did not cause."""
    iteration: int | None
    """The last iteration that any rank had done."""
    detected_after_s: float | None
    """Seconds from the strike to the first event that names this kind of incident; ``None`` = not struck by us."""
    evidence: str
    """What showed it, for people."""
    action: str
    """The ladder's rung."""
    verdict: str
    """Why that one, for people."""
    restored_iteration: int | None
    """Where the next cycle went on; 0 = from the start, ``None`` = it never did."""
    recovered_after_s: float | None
    """Seconds from the strike (or, without one, the verdict) until every rank had done an iteration again."""
    redone_iterations: int | None
    """Iterations that were done twice."""
    victims: tuple[int, ...] = ()
    """The ranks that it befell: one, or those of the node."""
    sources: Sources | None = None
    """Where the next cycle's ranks came back from; ``None`` = it never went on."""
    copies_spoiled: int | None = None
    """Copies on other nodes that the demo damaged before; ``None`` = it did not mean to."""
    newest_global: int | None = None
    """The newest generation in the global tier when it struck; ``None`` = there was none."""


def account_for(events: Sequence[Event]) -> tuple[Account, ...]:
    """Return a row for each incident on which a cycle ended, in their order."""
    strikes = {e.cycle: e for e in events if e.kind == EventKind.FAULT_SIMULATED and e.proc == "demo"}
    rows = []
    for event in _by_time(events, EventKind.VERDICT):
        if "incident" not in event.data or event.cycle is None:
            continue
        incident = msgspec.convert(event.data["incident"], Incident)
        verdict = msgspec.convert(event.data["verdict"], Verdict)
        strike = strikes.get(event.cycle)
        if strike is not None and not _names(incident, strike):
            strike = None
        rows.append(_row(event, incident, verdict, strike, events))
    return tuple(rows)


def unnoticed(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the faults of the demo that no verdict names, each in one line."""
    rows = account_for(events)
    lines = []
    for strike in _by_time(events, EventKind.FAULT_SIMULATED):
        if strike.proc == "demo" and not any(row.cycle == strike.cycle and row.fault is not None for row in rows):
            taken_for = next((row.verdict for row in rows if row.cycle == strike.cycle), "nothing")
            told = f"{strike.data['fault']}, {strike.data['target']}, in cycle {strike.cycle}"
            lines.append(f"{told}, was not noticed as {strike.data['expected']} but taken for: {taken_for}")
    return tuple(lines)


def count_cycles(events: Iterable[Event]) -> int:
    """Return how many cycles had workers."""
    return len({event.cycle for event in events if event.kind == EventKind.CYCLE_STARTED})


def _row(
    decided: Event, incident: Incident, verdict: Verdict, strike: Event | None, events: Sequence[Event]
) -> Account:
    assert decided.cycle is not None
    noticed = _noticed(decided, incident, strike, events)
    reached = _reached(decided.cycle, strike, events)
    next_cycle, recovered_ns = _recovery(decided.cycle, events)
    restored = None if next_cycle is None else _restored(next_cycle, events)
    since_ns = decided.mono_ns if strike is None else strike.mono_ns
    return Account(
        kind=incident.kind,
        cycle=decided.cycle,
        node=incident.node,
        rank=incident.rank,
        fault=None if strike is None else strike.data["fault"],
        iteration=reached,
        detected_after_s=None if strike is None else _seconds(noticed.mono_ns - strike.mono_ns),
        evidence=_evidence(incident),
        action=verdict.rung.name.lower(),
        verdict=verdict.reason,
        restored_iteration=restored,
        recovered_after_s=None if recovered_ns is None else _seconds(recovered_ns - since_ns),
        redone_iterations=None if restored is None or reached is None else max(0, reached - restored),
        victims=_victims(incident, decided.cycle, events),
        sources=None if next_cycle is None else find_sources(next_cycle, events),
        copies_spoiled=None if strike is None else strike.data.get("copies_spoiled"),
        newest_global=newest_global(events, before_ns=since_ns),
    )


def _victims(incident: Incident, cycle: int, events: Sequence[Event]) -> tuple[int, ...]:
    if incident.rank is not None:
        return (incident.rank,)
    started = (event for event in events if event.kind == EventKind.CYCLE_STARTED and event.cycle == cycle)
    return tuple(sorted(rank for event in started if event.node == incident.node for rank in event.data["ranks"]))


def _names(incident: Incident, strike: Event) -> bool:
    """Return whether an incident is the one that a strike must have caused."""
    if incident.kind != strike.data["expected"]:
        return False
    return incident.node == strike.data["node"] if strike.rank is None else incident.rank == strike.rank


def _noticed(decided: Event, incident: Incident, strike: Event | None, events: Sequence[Event]) -> Event:
    """Return the first event after a strike that names its kind; the verdict itself, when no other does.

    The latter is so when the coordinator went down with the node: its heir finds out while it takes over.
    """
    since_ns = 0 if strike is None else strike.mono_ns
    for event in _by_time(events, EventKind.INCIDENT):
        named = event.data["incident"].get("kind") == incident.kind and event.cycle == decided.cycle
        if named and since_ns <= event.mono_ns <= decided.mono_ns:
            return event
    return decided


def _reached(cycle: int, strike: Event | None, events: Sequence[Event]) -> int | None:
    """Return the last iteration that any rank had done when a cycle ended."""
    seen = [] if strike is None or strike.iteration is None else [strike.iteration]
    for event in events:
        if event.kind == EventKind.CYCLE_ENDED and event.cycle == cycle:
            seen.extend(event.data.get("iterations", {}).values())
    return max(seen, default=None)


def _recovery(cycle: int, events: Sequence[Event]) -> tuple[int | None, int | None]:
    """Return the first later cycle in which every rank has done an iteration, and when the last of them had."""
    sizes: dict[int, int] = {}
    first_ns: dict[int, dict[int, int]] = {}
    for event in events:
        if event.cycle is None or event.cycle <= cycle:
            continue
        if event.kind == EventKind.CYCLE_STARTED:
            sizes[event.cycle] = event.data["world_size"]
        elif event.kind == EventKind.PROGRESS and event.rank is not None:
            times = first_ns.setdefault(event.cycle, {})
            times[event.rank] = min(event.mono_ns, times.get(event.rank, event.mono_ns))
    for number in sorted(sizes):
        times = first_ns.get(number, {})
        if len(times) >= sizes[number]:
            return number, max(times.values())
    return None, None


def _restored(cycle: int, events: Sequence[Event]) -> int:
    found = [e.iteration for e in events if e.kind == EventKind.RESTORED and e.cycle == cycle]
    return min((iteration for iteration in found if iteration is not None), default=0)


def _evidence(incident: Incident) -> str:
    facts = incident.evidence
    parts = []
    if incident.kind == IncidentKind.WORKER_DIED:
        parts.append(f"its process ended with status {incident.exit_code}")
        if incident.section:
            parts.append(f"in section {incident.section!r}")
    if summary := str(facts.get("summary", "")):
        parts.append(summary)
    for name, text in (("process_state", "process state {}"), ("stack_line", "at {}")):
        if (fact := facts.get(name)) and str(fact) not in summary:
            parts.append(text.format(fact))
    return ", ".join(parts) or incident.describe()


def _by_time(events: Iterable[Event], kind: EventKind) -> list[Event]:
    return sorted((event for event in events if event.kind == kind), key=lambda event: event.mono_ns)


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 3)
