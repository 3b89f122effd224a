"""What a job came to, read from its journal, for its last line."""

from __future__ import annotations

import os
from dataclasses import dataclass

from outlast.incidents import Event, EventKind, Rung
from outlast.runtime.journal import read_journal
from outlast.wording import count

__all__ = ["Summary", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts over one job."""

    num_cycles: int
    num_incidents: int
    """Causes of a cycle's end or of a restart inside the processes, not what they did to peers."""
    lost_iterations: int
    """Iterations that were done and had to be done again because a cycle ended."""
    num_in_process: int = 0
    """Restarts inside the processes."""
    num_spared: int = 0
    """Ranks that were lost, and without which the others went on inside their processes."""

    def describe(self) -> str:
        """Return a few words for people."""
        parts = [
            count(self.num_cycles, "cycle"),
            count(self.num_incidents, "incident"),
            f"{count(self.lost_iterations, 'iteration')} lost",
        ]
        if self.num_in_process:
            parts.append(f"{count(self.num_in_process, 'restart')} in process")
        if self.num_spared:
            parts.append(f"{count(self.num_spared, 'rank')} lost and done without")
        return ", ".join(parts)


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
    verdicts = [event.data for event in events if event.kind == EventKind.VERDICT and "incident" in event.data]
    exits = [event.data for event in events if event.kind == EventKind.WORKER_EXITED]
    return Summary(
        num_cycles=len(cycles),
        num_incidents=len(verdicts),
        lost_iterations=lost,
        num_in_process=sum(data.get("verdict", {}).get("rung") == Rung.RESTART_IN_PROCESS for data in verdicts),
        num_spared=sum(bool(data.get("spared")) for data in exits),
    )


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
