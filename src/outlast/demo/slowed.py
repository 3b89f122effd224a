"""The slowed rank: in which report it was named, and whether anybody else ever was. Pure: events in, facts out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from outlast.demo.plan import Deed
from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind, IncidentKind

__all__ = ["Slowed", "find_slowed", "named_ranks", "unkept_of_slowed"]

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
            return _follow(event, event.rank, events)
    return None


def named_ranks(events: Iterable[Event]) -> tuple[int, ...]:
    """Return the ranks that any report names, each once."""
    reports = (event for event in events if event.kind == EventKind.STRAGGLER_REPORT)
    return tuple(dict.fromkeys(rank for event in reports for rank in event.data["named"]))


def unkept_of_slowed(slowed: Slowed | None) -> tuple[str, ...]:
    """Return what was not as it should be, each in one line.

    The rank is named in the third report on a wholly slow window at the latest, nobody else is named in any report of
    the run, and nobody is restarted for it.
    """
    if slowed is None:
        return ("no rank was slowed down",)
    return tuple(f"{slowed.fault}, rank {slowed.rank}: {told}" for told in _check(slowed))


def _check(slowed: Slowed) -> Iterator[str]:
    if slowed.num_reports is None:
        yield "it was never named"
    elif slowed.num_reports > MAX_REPORTS:
        yield f"it was named in report {slowed.num_reports} only, and should be within {MAX_REPORTS}"
    if slowed.others_named:
        yield f"rank {', '.join(map(str, slowed.others_named))} was named, too"
    if slowed.restarts:
        yield "it was restarted for being slow"


def _follow(struck: Event, rank: int, events: Sequence[Event]) -> Slowed:
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
        noticed_after_s=None if incident is None else round((incident.mono_ns - struck.mono_ns) / 1e9, 3),
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
    if event.kind != EventKind.INCIDENT or not _is_same_cycle(event, struck):
        return False
    incident = event.data["incident"]
    return bool(incident["kind"] == IncidentKind.STRAGGLER and incident.get("rank") == rank)


def _is_restart_for(event: Event) -> bool:
    if event.kind != EventKind.VERDICT:
        return False
    incident = event.data.get("incident") or {}
    return bool(incident.get("exit_code") == ExitReason.STRAGGLER)
