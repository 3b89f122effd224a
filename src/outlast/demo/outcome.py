"""The outcome: what each fault cost, where the ranks' state came from, and which claims were not kept.

Pure: a ledger and events in, rows out. What happened when, and what it cost, is the ledger's; what events tell besides
is counted here: sources from ``restored`` and ``copy_rejected``, reports of slow ranks, exit codes. All nodes of the
demo are one machine, so that the monotonic times of all events may be compared.

One module because each claim is checked on the facts that are read here for it: the two change together.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.decoding import convert
from outlast.demo.plan import Deed
from outlast.errors import ExitReason
from outlast.goodput import IncidentCost, Ledger
from outlast.goodput.ledger import PREEMPTED
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung, Verdict
from outlast.policy.recovery_point import Tier
from outlast.policy.rerun import Diagnosis, Finding, JsonNumber

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
        elif event.kind == EventKind.INCIDENT:
            incident = event.data["incident"]
            if incident["kind"] == IncidentKind.COPY_REJECTED:
                rejected[incident["evidence"]["tier"]] += 1
    return Sources(tiers=tiers, bytes_read=dict(num_bytes), rejected=dict(rejected))


def newest_global(events: Sequence[Event], *, before_ns: int) -> int | None:
    """Return the newest generation that was committed to the global tier before a moment; ``None`` = none was."""
    commits = (event for event in events if event.kind == EventKind.SAVE_COMMITTED and event.mono_ns <= before_ns)
    found = (event.iteration for event in commits if "global" in event.data.get("tiers", ()))
    return max((iteration for iteration in found if iteration is not None), default=None)


def count_bytes(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    if num_bytes >= 100_000:
        return f"{num_bytes / 1e6:.1f} MB"
    return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"


def read_ledger(events: Iterable[Event]) -> Ledger:
    """Return the account of a run, from all of its events; those of a process in the order in which they were written.

    Raises:
        ConfigError: There is no event.
    """
    files: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        files.setdefault((event.job, event.node, event.proc), []).append(event)
    return Ledger.from_files(list(files.values()))


def find_strikes(events: Iterable[Event]) -> list[Event]:
    """Return all strikes that are to be noticed as incidents that something is done about, by time.

    The demo, or the struck rank, wrote them.
    """
    quiet = [deed for deed in Deed if deed.expected is None]
    return [event for event in _by_time(events, EventKind.FAULT_SIMULATED) if event.data["fault"] not in quiet]


def _is_from_outside(strike: Event) -> bool:
    """Return whether the demo caused it, and not the plan of faults within the training."""
    return strike.proc == "demo"


def _expected(strike: Event) -> IncidentKind:
    """Return what a strike should be noticed as."""
    return IncidentKind(strike.data["expected"]) if _is_from_outside(strike) else IncidentKind.INVALID_RESULT


def _describe(strike: Event) -> str:
    """Return what was done to whom, for people."""
    data = strike.data
    if _is_from_outside(strike):
        return f"{data['fault']}, {data['target']}"
    where = f"{data['tensor']}, element {data['element']}" if "tensor" in data else data["target"]
    return f"{data['fault']}, rank {strike.rank}, {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One incident, from the strike to the first step after it."""

    kind: IncidentKind
    rank: int | None
    """Global rank; ``None`` when a whole node was lost."""
    node: str
    cycle: int
    """The cycle that it befell; it also ended it, unless the step was run again in place."""
    fault: str | None
    """What the demo did; ``None`` for an incident that it did not cause."""
    iteration: int | None
    """The last iteration that any rank had done then."""
    detected_after_s: float | None
    """Seconds from the strike to the first event that names this kind of incident; ``None`` = not struck by us."""
    recovered_after_s: float | None
    """Seconds from the strike (or, without one, the notice) until every rank had begun a step again."""
    redone_iterations: int | None
    """Finished iterations that were done again."""
    restarts: int = 1
    """1, or 0 where the step was run again in place."""
    restored_iteration: int | None
    """Where the next cycle resumed; 0 = from the start, ``None`` = it never did."""
    evidence: str
    """What showed it, for people."""
    action: str
    """The ladder's rung."""
    verdict: str
    """Why that one, for people."""
    finding: str | None = None
    """What was found of an invalid result, such as ``transient``."""
    named: str | None = None
    """What the invalid result was: ``loss``, or the tensor in which replicas differ."""
    struck: str | None = None
    """The tensor that the demo changed, or the module whose output it changed."""
    quarantined: tuple[str, ...] = ()
    """Nodes that get no slot any more because of it."""
    victims: tuple[int, ...] = ()
    """The ranks that it befell: one, or those of the node that is lost or quarantined."""
    copies_spoiled: int | None = None
    """Copies on other nodes that the demo damaged before; ``None`` = it did not mean to."""
    sources: Sources | None = None
    """Where the next cycle's ranks came back from; ``None`` = it never resumed."""
    newest_global: int | None = None
    """The newest generation in the global tier when it struck; ``None`` = there was none."""


def account_for(ledger: Ledger, events: Sequence[Event]) -> tuple[Account, ...]:
    """Return a row for each incident that something was done about, in their order; a requested shutdown is none.

    Args:
        ledger: Made of the same events.
        events: Of all jobs.
    """
    return tuple(
        _row(cost, cost.incident, cost.verdict, ledger, events)
        for cost in ledger.incidents
        if cost.incident is not None and cost.verdict is not None
    )


def unnoticed(ledger: Ledger, events: Iterable[Event]) -> tuple[str, ...]:
    """Return the faults that were not noticed for what they are, each in one line."""
    return tuple(_find_unnoticed(ledger, events))


def count_cycles(ledger: Ledger) -> int:
    """Return how many cycles had workers, over all jobs."""
    return sum(bool(cycle.nodes) for cycle in ledger.cycles)


def _find_unnoticed(ledger: Ledger, events: Iterable[Event]) -> Iterator[str]:
    for strike in find_strikes(events):
        if any(_is_due_to(cost, strike) for cost in ledger.incidents):
            continue
        here = (cost for cost in ledger.incidents if (cost.job, cost.cycle) == (strike.job, strike.cycle))
        others = (cost for cost in here if cost.fault is None or not _is_due_to(cost, cost.fault))
        taken_for = next((cost.reason or cost.text for cost in others), "nothing")
        struck = f"{_describe(strike)}, in cycle {strike.cycle}"
        yield f"{struck}, was not noticed as {_expected(strike)} but taken for: {taken_for}"


def _is_due_to(cost: IncidentCost, strike: Event) -> bool:
    """Return whether an incident is what must follow a strike."""
    if cost.fault != strike or strike.data["fault"] in (Deed.SLOW, Deed.LEAVE):
        return False
    is_rerun = cost.rung == Rung.RERUN_STEP.name.lower()
    return cost.kind == _expected(strike) and (strike.data["fault"] == Deed.NAN) == is_rerun


def _row(cost: IncidentCost, incident: Incident, verdict: Verdict, ledger: Ledger, events: Sequence[Event]) -> Account:
    strike = None if cost.fault is None or not _is_due_to(cost, cost.fault) else cost.fault
    since_s = cost.at_s if strike is None else cost.since_s
    is_rerun = verdict.rung == Rung.RERUN_STEP
    diagnosis = convert(incident.evidence["diagnosis"], Diagnosis) if "diagnosis" in incident.evidence else None
    next_cycle = None if is_rerun else _find_next_cycle(cost, ledger)
    of_job = [event for event in events if event.job == cost.job]
    return Account(
        kind=IncidentKind(cost.kind),
        rank=cost.rank,
        node=cost.node,
        cycle=cost.cycle,
        fault=None if strike is None else strike.data["fault"],
        iteration=cost.iteration,
        detected_after_s=None if strike is None else _duration(since_s, cost.at_s),
        recovered_after_s=_duration(since_s, cost.recovered_s),
        redone_iterations=None if cost.recovered_s is None else cost.lost_iterations,
        restarts=int(not is_rerun),
        restored_iteration=cost.resumed_iteration,
        evidence=_evidence(incident, diagnosis),
        action=cost.rung,
        verdict=cost.reason,
        finding=None if diagnosis is None else diagnosis.finding,
        named=None if diagnosis is None else diagnosis.what,
        struck=None if strike is None else strike.data.get("tensor"),
        quarantined=verdict.quarantine,
        victims=_victims(cost, verdict, ledger),
        copies_spoiled=None if strike is None else strike.data.get("copies_spoiled"),
        sources=None if next_cycle is None else find_sources(next_cycle, of_job),
        newest_global=None if strike is None else newest_global(of_job, before_ns=strike.mono_ns),
    )


def _victims(cost: IncidentCost, verdict: Verdict, ledger: Ledger) -> tuple[int, ...]:
    if cost.rank is not None and cost.node not in verdict.quarantine:
        return (cost.rank,)
    cycles = (cycle for cycle in ledger.cycles if (cycle.job, cycle.cycle) == (cost.job, cost.cycle))
    nodes = (node for cycle in cycles for node in cycle.nodes if node.node == cost.node)
    return tuple(sorted(rank for node in nodes for rank in node.ranks))


def _find_next_cycle(cost: IncidentCost, ledger: Ledger) -> int | None:
    """Return the first later cycle of its job in which all ranks trained."""
    later = (cycle for cycle in ledger.cycles if cycle.job == cost.job and cycle.cycle > cost.cycle)
    return min((cycle.cycle for cycle in later if cycle.steps_start_s is not None), default=None)


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


def _duration(since_s: float | None, until_s: float | None) -> float | None:
    return None if since_s is None or until_s is None else round(until_s - since_s, 3)


def _since(struck: Event, ns: int) -> float:
    return round((ns - struck.mono_ns) / 1e9, 3)


MAX_REPORTS = 3
"""Reports on wholly slow windows by which the rank must be named."""
NUM_UNTIMED = 3
"""First steps of a process that no report is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """One rank that was slowed down, until its process ended."""

    fault: str
    """What was done to it."""
    rank: int
    """Global rank."""
    node: str
    since: int
    """Iterations done when it became slow."""
    until: int | None
    """The last iteration of its cycle; ``None`` = not known."""
    num_reports: int | None
    """Reports on windows in which it was slow all the time, up to the one that named it; ``None`` = none did."""
    noticed_after_s: float | None
    """Seconds from its becoming slow to the report that named it."""
    section: str | None
    """Where it is slow, as was found."""
    ratio: float | None
    """How many times as long it takes there, as was found."""
    evidence: str
    """What was found, for people; empty = nothing."""
    others_named: tuple[int, ...]
    """Ranks that were named and were not slowed down."""
    restarts: int
    """Restarts that were made for it."""


def find_slowed(events: Sequence[Event]) -> Slowed | None:
    """Return what came of the rank that the demo slowed down; ``None`` = it did not."""
    for event in events:
        if event.kind == EventKind.FAULT_SIMULATED and event.data["fault"] == Deed.SLOW and event.rank is not None:
            return _follow_slowed(event, event.rank, events)
    return None


def named_ranks(events: Iterable[Event]) -> tuple[int, ...]:
    """Return the ranks that any report names, each once."""
    reports = (event for event in events if event.kind == EventKind.STRAGGLER_REPORT)
    return tuple(dict.fromkeys(rank for event in reports for rank in event.data["named"]))


def unkept_of_slowed(slowed: Slowed | None) -> tuple[str, ...]:
    """Return what was not as it should be, each in one line.

    The rank is named in the third report on a wholly slow window at the latest, no other rank is named in any report of
    the run, and no rank is restarted for it.
    """
    if slowed is None:
        return ("no rank was slowed down",)
    return tuple(f"{slowed.fault}, rank {slowed.rank}: {told}" for told in _check_slowed(slowed))


def _check_slowed(slowed: Slowed) -> Iterator[str]:
    if slowed.num_reports is None:
        yield "it was never named"
    elif slowed.num_reports > MAX_REPORTS:
        yield f"it was named in report {slowed.num_reports} only, and should be within {MAX_REPORTS}"
    if slowed.others_named:
        yield f"rank {', '.join(map(str, slowed.others_named))} was named, too"
    if slowed.restarts:
        yield "it was restarted for being slow"


def _follow_slowed(struck: Event, rank: int, events: Sequence[Event]) -> Slowed:
    reports = [event for event in events if event.kind == EventKind.STRAGGLER_REPORT]
    here = sorted((event for event in reports if _is_same_cycle(event, struck)), key=lambda event: event.mono_ns)
    begins = [0, *(event.iteration or 0 for event in here)]
    windows = [event for event, begin in zip(here, begins, strict=False) if begin >= _first_timed(struck)]
    number = next((number for number, event in enumerate(windows, 1) if rank in event.data["named"]), None)
    incident = next((event for event in events if _names(event, rank, struck)), None)
    found = {} if incident is None else incident.data["incident"]
    evidence = found.get("evidence", {})
    ended = [e for e in events if e.kind == EventKind.CYCLE_ENDED and _is_same_cycle(e, struck)]
    others = [event for event in reports if not _is_same_cycle(event, struck)]
    mistaken = [*(one for one in named_ranks(here) if one != rank), *named_ranks(others)]
    return Slowed(
        fault=struck.data["fault"],
        rank=rank,
        node=struck.node,
        since=struck.iteration or 0,
        until=max((i for event in ended for i in event.data.get("iterations", {}).values()), default=None),
        num_reports=number,
        noticed_after_s=None if incident is None else _since(struck, incident.mono_ns),
        section=found.get("section"),
        ratio=evidence.get("ratio"),
        evidence=evidence.get("summary", ""),
        others_named=tuple(dict.fromkeys(mistaken)),
        restarts=sum(_is_restart_for(event) for event in events),
    )


def _first_timed(struck: Event) -> int:
    """Return the begin of the first window that counts: 0 where the slow ones are all that it holds."""
    return 0 if (struck.iteration or 0) <= NUM_UNTIMED else struck.iteration or 0


def _is_same_cycle(event: Event, other: Event) -> bool:
    return (event.job, event.cycle) == (other.job, other.cycle)


def _names(event: Event, rank: int, struck: Event) -> bool:
    incident = event.data["incident"] if event.kind == EventKind.INCIDENT and _is_same_cycle(event, struck) else {}
    return incident.get("kind") == IncidentKind.STRAGGLER and incident.get("rank") == rank


def _is_restart_for(event: Event) -> bool:
    incident = event.data.get("incident") or {}
    return event.kind == EventKind.VERDICT and incident.get("exit_code") == ExitReason.STRAGGLER


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """One notice to leave, from the signal to the first iteration of the next job."""

    fault: str
    """What the demo did."""
    rank: int
    """Global rank that got the signal."""
    node: str
    struck_at: int
    """Iterations done by then."""
    noticed_after_s: float | None
    """Seconds from the signal to the rank's own event; ``None`` = it did not notice."""
    left_after_s: float | None
    """Seconds from the signal until all ranks had saved and left; ``None`` = they did not."""
    left_at: Mapping[int, int]
    """Rank to the iteration after which it left."""
    exit_codes: Mapping[int, int]
    """Rank to its exit code."""
    saved_by: Mapping[int, int]
    """Iteration to the number of ranks that saw its generation committed to all tiers, after the signal."""
    run_exit_codes: tuple[int, ...]
    """Those of the agents, each once."""
    resumed_at: Mapping[int, int]
    """Rank to the iteration from which the next job resumed; empty = there was none, or it started anew."""
    sources: Sources | None
    """Where the next job's ranks came back from."""
    going_on_after_s: float | None
    """Seconds from the signal until every rank had begun a step in the next job."""
    next_exit_codes: tuple[int, ...]
    """Those of the next job's agents, each once."""

    @property
    def iteration(self) -> int | None:
        """The iteration after which all ranks left; ``None`` = they did not leave, or after different ones."""
        iterations = set(self.left_at.values())
        return iterations.pop() if len(iterations) == 1 else None

    @property
    def lost_iterations(self) -> int | None:
        """Finished iterations that had to be done again."""
        if not self.left_at or not self.resumed_at:
            return None
        return max(0, max(self.left_at.values()) - min(self.resumed_at.values()))


def find_leaving(ledger: Ledger, events: Sequence[Event]) -> Leaving | None:
    """Return what followed the demo's notice to a rank; ``None`` = there was none.

    Args:
        ledger: Made of the same events.
        events: Of all jobs.
    """
    for event in events:
        if event.kind == EventKind.FAULT_SIMULATED and event.data["fault"] == Deed.LEAVE:
            cost = next((one for one in ledger.incidents if one.kind == PREEMPTED and one.fault == event), None)
            jobs = [job.job for job in ledger.jobs]
            following = jobs[jobs.index(event.job) + 1 :][:1]
            before, after = ([one for one in events if one.job in names] for names in ([event.job], following))
            return _follow_leaving(event, cost, before, after)
    return None


def unkept_of_leaving(leaving: Leaving | None, *, world_size: int) -> tuple[str, ...]:
    """Return what was not as it should be, each in one line.

    The rank notices the signal; all ranks leave after the same iteration with 75, and so do the agents; the state of
    that very iteration is committed to all tiers; the next job resumes from it and ends with 0.
    """
    if leaving is None:
        return ("no rank was preempted",)
    return tuple(
        f"{Deed.LEAVE} at iteration {leaving.struck_at}: {told}" for told in _check_leaving(leaving, world_size)
    )


def _check_leaving(leaving: Leaving, world_size: int) -> Iterator[str]:
    if leaving.noticed_after_s is None:
        yield f"rank {leaving.rank} did not notice it"
    iteration, ranks = leaving.iteration, range(world_size)
    if iteration is None or set(leaving.left_at) != set(ranks):
        yield f"not all ranks left after the same iteration: {_by_rank(leaving.left_at)}"
        return
    if iteration < leaving.struck_at:
        yield f"the ranks left after iteration {iteration}"
    if set(leaving.exit_codes.values()) != {ExitReason.PREEMPTED}:
        yield f"the ranks' exit codes were {_by_rank(leaving.exit_codes)}"
    if leaving.run_exit_codes != (ExitReason.PREEMPTED,):
        yield f"the run's exit code was {' or '.join(map(str, leaving.run_exit_codes)) or 'missing'}"
    if max(leaving.saved_by, default=0) != iteration or leaving.saved_by[iteration] != world_size:
        yield f"iteration {iteration} should be committed by {world_size} ranks: {_by_iteration(leaving.saved_by)}"
    if dict(leaving.resumed_at) != dict.fromkeys(ranks, iteration):
        yield f"the next job went on from {_by_rank(leaving.resumed_at)} instead of {iteration}"
    if leaving.next_exit_codes != (ExitReason.FINISHED,):
        yield f"the next job's exit code was {' or '.join(map(str, leaving.next_exit_codes)) or 'missing'}"


def _follow_leaving(
    struck: Event, cost: IncidentCost | None, job: Sequence[Event], following: Sequence[Event]
) -> Leaving:
    assert struck.rank is not None
    after = [event for event in job if event.mono_ns >= struck.mono_ns]
    noticed = [event for event in after if event.kind == EventKind.NOTICE and event.rank == struck.rank]
    ends = {e.rank: e for e in after if e.kind == EventKind.SESSION_ENDED and e.rank is not None}
    saved_by: dict[int, set[int | None]] = {}
    for event in after:
        if event.kind == EventKind.SAVE_COMMITTED and "global" in event.data["tiers"]:
            saved_by.setdefault(event.iteration or 0, set()).add(event.rank)
    return Leaving(
        fault=struck.data["fault"],
        rank=struck.rank,
        node=struck.data["node"],
        struck_at=struck.iteration or 0,
        noticed_after_s=_since(struck, min(e.mono_ns for e in noticed)) if noticed else None,
        left_after_s=_since(struck, max(e.mono_ns for e in ends.values())) if ends else None,
        left_at={rank: end.iteration or 0 for rank, end in sorted(ends.items())},
        exit_codes={rank: end.data["exit_code"] for rank, end in sorted(ends.items())},
        saved_by={iteration: len(ranks) for iteration, ranks in sorted(saved_by.items())},
        run_exit_codes=_exit_codes(after),
        resumed_at=_resumed_at(following),
        sources=find_sources(0, following) if following else None,
        going_on_after_s=None if cost is None else _duration(cost.since_s, cost.recovered_s),
        next_exit_codes=_exit_codes(following),
    )


def _resumed_at(following: Sequence[Event]) -> dict[int, int]:
    restored = (e for e in following if e.kind == EventKind.RESTORED and e.cycle == 0)
    return dict(sorted((e.rank, e.iteration) for e in restored if e.rank is not None and e.iteration is not None))


def _exit_codes(events: Sequence[Event]) -> tuple[int, ...]:
    return tuple(sorted({event.data["exit_code"] for event in events if event.kind == EventKind.JOB_ENDED}))


def _by_rank(values: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in values.items()) or "nowhere"


def _by_iteration(numbers: Mapping[int, int]) -> str:
    return ", ".join(f"iteration {iteration} by {number}" for iteration, number in numbers.items()) or "nothing was"


def unkept(rows: Sequence[Account]) -> tuple[str, ...]:
    """Return what was not as it should be after the demo's faults, each in one line.

    * After a killed or a hung rank: from the nodes that have it, and nothing from the global tier.
    * After a lost node: its ranks from the copies on other nodes, and nothing from the global tier.
    * After one whose copies were spoiled: each of its ranks rejects them and comes back from the global tier, and all
      resume from the newest generation there.
    * After a NaN that comes once: it is found transient, and no rank is restarted.
    * After a bit flip in a weight: the tensor is named, the rank's node is quarantined, and the node's ranks come back
      from the copies on other nodes.
    """
    lines = []
    for row in rows:
        if row.fault is not None:
            lines += [f"{row.fault} at iteration {row.iteration}: {told}" for told in _check_claims(row)]
    return tuple(lines)


def _check_claims(row: Account) -> Iterator[str]:
    if row.kind == IncidentKind.INVALID_RESULT:
        yield from _transient(row) if row.fault == Deed.NAN else _flipped(row)
    if row.sources is not None:
        yield from _near(row, row.sources) if row.copies_spoiled is None else _far(row, row.sources)


def _transient(row: Account) -> Iterator[str]:
    if row.restarts or row.finding != Finding.TRANSIENT:
        yield f"it was found {row.finding}, and what was done was to {row.action.replace('_', ' ')}"


def _flipped(row: Account) -> Iterator[str]:
    if row.named != row.struck:
        yield f"{row.named} was named instead of {row.struck}"
    if row.quarantined != (row.node,):
        yield f"{row.node} should be quarantined, and not {', '.join(row.quarantined) or 'nobody'}"


def _near(row: Account, sources: Sources) -> Iterator[str]:
    if sources.global_bytes:
        yield f"{count_bytes(sources.global_bytes)} were read from the global tier"
    is_node_gone = row.kind == IncidentKind.NODE_LOST or bool(row.quarantined)
    expected = ("replica",) if is_node_gone else ("memory", "local")
    yield from _elsewhere(row.victims, sources, expected)


def _far(row: Account, sources: Sources) -> Iterator[str]:
    if not row.copies_spoiled:
        yield "there was no copy on another node to damage"
    yield from _elsewhere(row.victims, sources, ("global",))
    if (rejected := sources.rejected.get("replica", 0)) < len(row.victims):
        yield f"{rejected} damaged copies were rejected by {len(row.victims)} ranks"
    if row.newest_global is None or (row.restored_iteration or 0) < row.newest_global:
        yield f"it went on from {row.restored_iteration}, but the global tier held {row.newest_global}"


def _elsewhere(victims: Iterable[int], sources: Sources, expected: tuple[str, ...]) -> Iterator[str]:
    for rank in victims:
        if (tier := sources.tiers.get(rank, "nowhere")) not in expected:
            yield f"rank {rank} came back from {tier} instead of {' or '.join(expected)}"


COMPARED = ("weights", "optimizer", "losses")
"""What is compared at least, by its name in a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """What the demo found."""

    seed: int
    undisturbed: Mapping[str, Any]
    """What the script wrote about the undisturbed run; empty when it did not get there."""
    struck: Mapping[str, Any]
    """What it wrote about the other run."""
    incidents: tuple[Account, ...]
    slowed: Slowed | None = None
    """Whether the slow rank was named; ``None`` = none was slow."""
    leaving: Leaving | None = None
    """The preemption, and how the next job resumed; ``None`` = it ended before that."""
    cycles: int
    """Cycles of the run with faults, over all of its jobs."""
    wall_s: float
    """Seconds for everything."""
    problems: tuple[str, ...]
    """What went wrong; empty = nothing."""
    folder: str | None = None
    """Where everything was kept; ``None`` = nothing was."""
    report: str | None = None
    """The page about the run with faults; ``None`` = none was written."""

    @property
    def bit_identical(self) -> bool:
        """Whether both runs ended, with the same bits."""
        return bool(self.undisturbed) and not differences(self.undisturbed, self.struck)

    @property
    def ok(self) -> bool:
        """Whether the demo has shown what it is to show."""
        return self.bit_identical and not self.problems

    def to_json(self) -> str:
        """Return everything as one JSON object on one line."""
        return json.dumps(
            {
                "bit_identical": self.bit_identical,
                "incidents": [_incident_fields(one) for one in self.incidents],
                "slowed": None if self.slowed is None else dataclasses.asdict(self.slowed),
                "preemption": None if self.leaving is None else _leaving_fields(self.leaving),
                "cycles": self.cycles,
                "final_loss": self.struck.get("final_loss"),
                "wall_s": round(self.wall_s, 2),
                "seed": self.seed,
                "iterations": self.struck.get("iterations"),
                "digests": {name: self.struck.get(name) for name in COMPARED},
                "problems": list(self.problems),
                "folder": self.folder,
            }
        )


def differences(undisturbed: Mapping[str, Any], struck: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what is not the same in two results, or is missing in one."""
    names = dict.fromkeys([*COMPARED, *undisturbed, *struck])
    return tuple(
        name for name in names if name not in undisturbed or name not in struck or undisturbed[name] != struck[name]
    )


def _incident_fields(one: Account) -> dict[str, Any]:
    fields = dataclasses.asdict(one) | _source_fields(one.sources)
    del fields["sources"], fields["newest_global"]
    return fields


def _leaving_fields(leaving: Leaving) -> dict[str, Any]:
    exit_code, next_exit_code = (
        codes[0] if len(codes) == 1 else None for codes in (leaving.run_exit_codes, leaving.next_exit_codes)
    )
    return {
        "rank": leaving.rank,
        "node": leaving.node,
        "fault": leaving.fault,
        "struck_at": leaving.struck_at,
        "noticed_after_s": leaving.noticed_after_s,
        "left_after_s": leaving.left_after_s,
        "iteration": leaving.iteration,
        "ranks_that_saved": leaving.saved_by.get(leaving.iteration or 0, 0),
        "exit_code": exit_code,
        "resumed_at": min(leaving.resumed_at.values(), default=None),
        "lost_iterations": leaving.lost_iterations,
        "going_on_after_s": leaving.going_on_after_s,
        "next_exit_code": next_exit_code,
        **_source_fields(leaving.sources),
    }


def _source_fields(sources: Sources | None) -> dict[str, Any]:
    if sources is None:
        return dict.fromkeys(("tiers", "bytes_read", "global_bytes_read", "copies_rejected"))
    return {
        "tiers": sources.num_ranks,
        "bytes_read": dict(sources.bytes_read),
        "global_bytes_read": sources.global_bytes,
        "copies_rejected": dict(sources.rejected),
    }
