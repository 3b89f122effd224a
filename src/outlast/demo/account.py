"""The account: what each incident was, how it was noticed, what it cost, and where the ranks' state came from.

Pure: events in, rows out. All nodes of the demo are one machine, so that the monotonic times of all events may be
compared. Sources are counted from the ranks' own events ``restored`` and ``copy_rejected`` of the cycle that follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.decoding import convert
from outlast.demo.plan import Deed
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung, Verdict
from outlast.policy.recovery_point import Tier
from outlast.policy.rerun import Diagnosis, JsonNumber

__all__ = [
    "TIERS",
    "Account",
    "Sources",
    "Strike",
    "account_for",
    "count_bytes",
    "count_cycles",
    "find_sources",
    "find_strikes",
    "kind_of",
    "newest_global",
    "split_jobs",
    "unnoticed",
]


TIERS = tuple(str(tier) for tier in sorted(Tier))
"""The nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where one cycle's ranks came back from."""

    tiers: Mapping[int, str]
    """Rank to the name of its tier."""
    bytes_read: Mapping[str, int]
    """Tier to the bytes that all ranks read there."""
    rejected: Mapping[str, int]
    """Tier to the number of copies there that ranks rejected first."""

    @property
    def num_ranks(self) -> dict[str, int]:
        """Tier to the number of ranks that came back from it."""
        counts = Counter(self.tiers.values())
        return {tier: counts[tier] for tier in TIERS if tier in counts}

    @property
    def global_bytes(self) -> int:
        """Bytes that were read from the global tier."""
        return self.bytes_read.get("global", 0)


def find_sources(cycle: int, events: Iterable[Event]) -> Sources:
    """Return where the ranks of a cycle came back from."""
    tiers: dict[int, str] = {}
    num_bytes, rejected = Counter[str](), Counter[str]()
    for event in events:
        if event.cycle != cycle or event.rank is None:
            continue
        if event.kind == EventKind.RESTORED:
            tiers[event.rank] = event.data["tier"]
            num_bytes.update(event.data["bytes_read"])
        elif event.kind == EventKind.INCIDENT and _is_rejected(incident := event.data["incident"]):
            rejected[incident["evidence"]["tier"]] += 1
    return Sources(tiers=tiers, bytes_read=dict(num_bytes), rejected=dict(rejected))


def newest_global(events: Sequence[Event], *, before_ns: int) -> int | None:
    """Return the newest generation that was committed to the global tier before a moment; ``None`` = none was."""
    return max(
        (
            event.iteration
            for event in events
            if event.kind == EventKind.SAVE_COMMITTED
            and event.mono_ns <= before_ns
            and event.iteration is not None
            and "global" in event.data.get("tiers", ())
        ),
        default=None,
    )


def count_bytes(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    if num_bytes >= 100_000:
        return f"{num_bytes / 1e6:.1f} MB"
    return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"


def _is_rejected(incident: Mapping[str, Any]) -> bool:
    return bool(incident["kind"] == IncidentKind.COPY_REJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault that was caused."""

    fault: str
    """What was done, for people."""
    target: str
    """To whom or what, for people."""
    expected: IncidentKind
    """What it should be noticed as."""
    at_ns: int
    """Monotonic time."""
    cycle: int | None
    node: str
    rank: int | None
    """Global rank that it befell; ``None`` = a whole node."""
    iteration: int | None
    """Iterations done by then."""
    tensor: str | None = None
    """Which tensor was changed, or which module's output; ``None`` = none."""
    copies_spoiled: int | None = None
    """Copies on other nodes that were damaged before; ``None`` = none was meant to be."""

    @property
    def is_transient(self) -> bool:
        """Whether no restart is to follow."""
        return self.fault == Deed.NAN

    def caused(self, incident: Incident, verdict: Verdict, event: Event) -> bool:
        """Return whether an incident, on which an event tells the verdict, is the one that must have followed."""
        if self.cycle != event.cycle or self.at_ns > event.mono_ns or kind_of(incident) != self.expected:
            return False
        if self.is_transient != (verdict.rung == Rung.RERUN_STEP):
            return False
        return incident.node == self.node if self.rank is None else incident.rank == self.rank


def kind_of(incident: Incident) -> IncidentKind:
    """Return what an incident is about: a worker that failed with a diagnosis did so for an invalid result."""
    return IncidentKind.INVALID_RESULT if "diagnosis" in incident.evidence else incident.kind


def split_jobs(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events of each job of the run, the first job first: cycles are numbered anew in each."""
    jobs: dict[str, list[Event]] = {}
    for event in events:
        jobs.setdefault(event.job, []).append(event)
    return list(jobs.values())


def find_strikes(events: Iterable[Event]) -> list[Strike]:
    """Return all strikes that are to be noticed as incidents that something is done about, by time."""
    struck = (event for event in events if event.kind == EventKind.FAULT_SIMULATED and _is_incident(event))
    return sorted((_strike(event) for event in struck), key=lambda strike: strike.at_ns)


def _is_incident(event: Event) -> bool:
    return event.data["fault"] not in [deed for deed in Deed if deed.expected is None]


def _strike(event: Event) -> Strike:
    data, tensor = event.data, event.data.get("tensor")
    if event.proc == "demo":
        target, expected, node = data["target"], IncidentKind(data["expected"]), data["node"]
    else:
        where = data["target"] if tensor is None else f"{tensor}, element {data['element']}"
        target, expected, node = f"rank {event.rank}, {where}", IncidentKind.INVALID_RESULT, event.node
    return Strike(
        fault=data["fault"],
        target=target,
        expected=expected,
        at_ns=event.mono_ns,
        cycle=event.cycle,
        node=node,
        rank=event.rank,
        iteration=event.iteration,
        tensor=tensor,
        copies_spoiled=data.get("copies_spoiled"),
    )


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
class _AnsweredIncident:
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


def _decisions(events: Sequence[Event]) -> list[_AnsweredIncident]:
    found: list[_AnsweredIncident] = []
    left = find_strikes(events)
    for event in _by_time(events, EventKind.VERDICT, EventKind.INCIDENT):
        if event.cycle is None or not {"verdict", "incident"} <= event.data.keys():
            continue
        incident = convert(event.data["incident"], Incident)
        verdict = convert(event.data["verdict"], Verdict)
        strike = next((one for one in left if one.caused(incident, verdict, event)), None)
        if strike is not None:
            left.remove(strike)
        found.append(_AnsweredIncident(event=event, incident=incident, verdict=verdict, strike=strike))
    return found


def _row(decision: _AnsweredIncident, events: Sequence[Event]) -> Account:
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


def _noticed(decision: _AnsweredIncident, events: Sequence[Event]) -> Event:
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
