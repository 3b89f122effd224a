"""The account: what each incident was, how it was noticed, and what it cost. Pure: events in, rows out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from outlast.decoding import convert
from outlast.demo.sources import Sources, find_sources, newest_global
from outlast.demo.strikes import Strike, find_strikes, kind_of, split_jobs
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung, Verdict
from outlast.policy.rerun import Diagnosis, JsonNumber

__all__ = ["Account", "account_for", "count_cycles", "unnoticed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One incident, from the strike to the first iteration after it."""

    kind: IncidentKind
    cycle: int
    """The cycle that it befell; it also ended it, unless the step was run again in place."""
    node: str
    rank: int | None
    """Global rank; ``None`` when a whole node was lost."""
    fault: str | None
    """What the demo did; ``None`` for an incident that it did not cause."""
    iteration: int | None
    """The last iteration that any rank had done then."""
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
    """Finished iterations that were done again."""
    restarts: int = 1
    """1, or 0 where the step was run again in place."""
    victims: tuple[int, ...] = ()
    """The ranks that it befell: one, or those of the node that is lost or quarantined."""
    quarantined: tuple[str, ...] = ()
    """Nodes that get no slot any more because of it."""
    finding: str | None = None
    """What was found of an invalid result, such as ``transient``."""
    named: str | None = None
    """What the invalid result was: ``loss``, or the tensor in which replicas differ."""
    struck: str | None = None
    """The tensor that the demo changed, or the module whose output it changed."""
    sources: Sources | None = None
    """Where the next cycle's ranks came back from; ``None`` = it never went on."""
    copies_spoiled: int | None = None
    """Copies on other nodes that the demo damaged before; ``None`` = it did not mean to."""
    newest_global: int | None = None
    """The newest generation in the global tier when it struck; ``None`` = there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """An incident that something was done about, and what caused it, if the demo did."""

    event: Event
    incident: Incident
    verdict: Verdict
    strike: Strike | None


def account_for(events: Sequence[Event]) -> tuple[Account, ...]:
    """Return a row for each incident that something was done about, in their order."""
    return tuple(_row(decision, job) for job in split_jobs(events) for decision in _decisions(job))


def unnoticed(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the faults that no verdict names, each in one line."""
    return tuple(line for job in split_jobs(events) for line in _unnoticed(job))


def count_cycles(events: Iterable[Event]) -> int:
    """Return how many cycles had workers, over all jobs."""
    return len({(event.job, event.cycle) for event in events if event.kind == EventKind.CYCLE_STARTED})


def _unnoticed(events: Sequence[Event]) -> Iterator[str]:
    decisions = _decisions(events)
    for strike in find_strikes(events):
        if not any(decision.strike == strike for decision in decisions):
            others = (one for one in decisions if one.event.cycle == strike.cycle and one.strike is None)
            taken_for = next((one.verdict.reason for one in others), "nothing")
            told = f"{strike.fault}, {strike.target}, in cycle {strike.cycle}"
            yield f"{told}, was not noticed as {strike.expected} but taken for: {taken_for}"


def _decisions(events: Sequence[Event]) -> list[_Decision]:
    found: list[_Decision] = []
    left = find_strikes(events)
    for event in _by_time(events, EventKind.VERDICT, EventKind.INCIDENT):
        if event.cycle is None or not {"verdict", "incident"} <= event.data.keys():
            continue
        incident = convert(event.data["incident"], Incident)
        verdict = convert(event.data["verdict"], Verdict)
        strike = next((one for one in left if one.caused(incident, verdict, event)), None)
        if strike is not None:
            left.remove(strike)
        found.append(_Decision(event=event, incident=incident, verdict=verdict, strike=strike))
    return found


def _row(decision: _Decision, events: Sequence[Event]) -> Account:
    event, incident, verdict, strike = decision.event, decision.incident, decision.verdict, decision.strike
    assert event.cycle is not None
    since_ns = event.mono_ns if strike is None else strike.at_ns
    reached: int | None
    restored: int | None
    next_cycle: int | None
    recovered_ns: int | None
    if verdict.rung == Rung.RERUN_STEP:  # it is decided once the second run has shown a valid result
        reached = restored = incident.iteration
        next_cycle, recovered_ns = None, event.mono_ns
    else:
        reached = _reached(event.cycle, strike, events)
        next_cycle, recovered_ns = _recovery(event.cycle, events)
        restored = None if next_cycle is None else _restored(next_cycle, events)
    diagnosis = _diagnosis(incident)
    return Account(
        kind=kind_of(incident),
        cycle=event.cycle,
        node=incident.node,
        rank=incident.rank,
        fault=None if strike is None else strike.fault,
        iteration=reached,
        detected_after_s=None if strike is None else _seconds(_noticed(decision, events).mono_ns - strike.at_ns),
        evidence=_evidence(incident, diagnosis),
        action=verdict.rung.name.lower(),
        verdict=verdict.reason,
        restored_iteration=restored,
        recovered_after_s=None if recovered_ns is None else _seconds(recovered_ns - since_ns),
        redone_iterations=None if restored is None or reached is None else max(0, reached - restored),
        restarts=int(verdict.rung != Rung.RERUN_STEP),
        victims=_victims(incident, verdict, event.cycle, events),
        quarantined=verdict.quarantine,
        finding=None if diagnosis is None else diagnosis.finding,
        named=None if diagnosis is None else diagnosis.what,
        struck=None if strike is None else strike.tensor,
        sources=None if next_cycle is None else find_sources(next_cycle, events),
        copies_spoiled=None if strike is None else strike.copies_spoiled,
        newest_global=newest_global(events, before_ns=since_ns),
    )


def _diagnosis(incident: Incident) -> Diagnosis | None:
    if "diagnosis" not in incident.evidence:
        return None
    return convert(incident.evidence["diagnosis"], Diagnosis)


def _victims(incident: Incident, verdict: Verdict, cycle: int, events: Sequence[Event]) -> tuple[int, ...]:
    if incident.rank is not None and incident.node not in verdict.quarantine:
        return (incident.rank,)
    started = (event for event in events if event.kind == EventKind.CYCLE_STARTED and event.cycle == cycle)
    return tuple(sorted(rank for event in started if event.node == incident.node for rank in event.data["ranks"]))


def _noticed(decision: _Decision, events: Sequence[Event]) -> Event:
    """Return the first event after a strike that names its kind; the verdict itself, when no other does.

    The latter is so when the coordinator went down with the node: its heir finds out while it takes over.
    """
    decided, since_ns = decision.event, 0 if decision.strike is None else decision.strike.at_ns
    for event in _by_time(events, EventKind.INCIDENT):
        named = event.data["incident"].get("kind") == kind_of(decision.incident) and event.cycle == decided.cycle
        if named and since_ns <= event.mono_ns <= decided.mono_ns:
            return event
    return decided


def _reached(cycle: int, strike: Strike | None, events: Sequence[Event]) -> int | None:
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


def _evidence(incident: Incident, diagnosis: Diagnosis | None) -> str:
    if diagnosis is not None:
        return _finding(diagnosis)
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


def _finding(diagnosis: Diagnosis) -> str:
    """Return what was found of an invalid result: a value, or that a replica differs."""
    if diagnosis.first is None:
        return diagnosis.message
    again = "" if diagnosis.second is None else f", run again {_number(diagnosis.second)}"
    why = f" ({diagnosis.message})" if diagnosis.message else ""
    return f"{diagnosis.what} was {_number(diagnosis.first)}{why}{again}: {diagnosis.finding}"


def _number(value: JsonNumber) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _by_time(events: Iterable[Event], *kinds: EventKind) -> list[Event]:
    return sorted((event for event in events if event.kind in kinds), key=lambda event: event.mono_ns)


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 3)
