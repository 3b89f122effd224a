"""What a job came to, read from its journal, for its last line."""

from __future__ import annotations

import os
from dataclasses import dataclass

from outlast.incidents import Event, EventKind
from outlast.runtime.journal import read_journal

__all__ = ["Summary", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts over one job."""

    num_cycles: int
    num_incidents: int
    """Causes of a cycle's end, not what they did to peers."""
    lost_iterations: int
    """Iterations that were done and had to be done again."""

    def describe(self) -> str:
        """Return a few words for people."""
        return (
            f"{_count(self.num_cycles, 'cycle')}, {_count(self.num_incidents, 'incident')}, "
            f"{_count(self.lost_iterations, 'iteration')} lost"
        )


def summarise(run_dir: str | os.PathLike[str], job: str) -> Summary:
    """Read the run's journal and count what belongs to one job.

    An iteration counts as lost when a cycle had finished it and the next one began before it.
    """
    events = [event for event in read_journal(run_dir) if event.job == job]
    reached = _highest_by_cycle(events, EventKind.CYCLE_ENDED)
    restored = _highest_by_cycle(events, EventKind.RESTORED)
    cycles = {event.cycle for event in events if event.kind == EventKind.CYCLE_STARTED and event.cycle is not None}
    reports = {event.cycle for event in events if event.kind == EventKind.SESSION_STARTED}
    lost = sum(
        max(0, reached.get(cycle, 0) - restored.get(cycle + 1, 0)) for cycle in cycles if cycle + 1 in cycles & reports
    )
    incidents = [event for event in events if event.kind == EventKind.VERDICT and "incident" in event.data]
    return Summary(num_cycles=len(cycles), num_incidents=len(incidents), lost_iterations=lost)


def _highest_by_cycle(events: list[Event], kind: EventKind) -> dict[int, int]:
    highest: dict[int, int] = {}
    for event in events:
        if event.kind != kind or event.cycle is None:
            continue
        iterations = [*event.data.get("iterations", {}).values()]
        if event.iteration is not None:
            iterations.append(event.iteration)
        highest[event.cycle] = max([highest.get(event.cycle, 0), *iterations])
    return highest


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
