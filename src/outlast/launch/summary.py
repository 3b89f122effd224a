"""What a job came to, read from its journal, for its last line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from outlast.errors import ExitReason
from outlast.incidents import CYCLE_ENDING, Event, EventKind, Rung
from outlast.journal import read
from outlast.policy.recovery_point import Tier
from outlast.wording import count

__all__ = ["Summary", "count_lost", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts over one job."""

    num_cycles: int
    num_incidents: int
    """Causes of a cycle's end or of a restart inside the processes, not what they did to peers."""
    lost_iterations: int
    """Iterations that were done and had to be done again, or will have to be by the next job."""
    num_in_process: int = 0
    """Restarts inside the processes."""
    num_spared: int = 0
    """Ranks that were lost, and without which the others continued inside their processes."""

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

    An iteration counts as lost when it was done and had to be done again, or will have to be: a later cycle, or call in
    the same processes, began before it, or the job ended without the run's end and no generation that outlives the job
    holds it.
    """
    events = [event for event in read(run_dir) if event.job == job]
    cycles = {event.cycle for event in events if event.kind == EventKind.CYCLE_STARTED and event.cycle is not None}
    verdicts = [event.data for event in events if event.kind == EventKind.VERDICT and "incident" in event.data]
    exits = [event.data for event in events if event.kind == EventKind.WORKER_EXITED]
    codes = [event.data.get("exit_code") for event in events if event.kind == EventKind.JOB_ENDED]
    is_given_up = bool(codes) and ExitReason.FINISHED not in codes
    return Summary(
        num_cycles=len(cycles),
        num_incidents=len(verdicts) + (is_given_up and _ended_unjudged(events)),
        lost_iterations=count_lost(events, is_given_up=is_given_up),
        num_in_process=sum(data.get("verdict", {}).get("rung") == Rung.RESTART_IN_PROCESS for data in verdicts),
        num_spared=sum(bool(data.get("spared")) for data in exits),
    )


def count_lost(events: Sequence[Event], *, is_given_up: bool) -> int:
    """Return how many iterations were done in vain.

    Ranks train together: the one that reports the most counts.

    Args:
        events: Of one job, by wall time.
        is_given_up: The job is over, and did not finish the run.
    """
    tracks: dict[int, _RankHistory] = {}
    durable = 0
    for event in sorted(events, key=lambda event: event.cycle or 0):  # nodes' clocks differ, cycles do not overlap
        durable = max(durable, _durable(event))
        if event.kind == EventKind.CYCLE_ENDED:
            for rank, iteration in event.data.get("iterations", {}).items():
                if int(rank) in tracks:
                    tracks[int(rank)].do(iteration)
        elif event.rank is not None:
            if event.kind == EventKind.SESSION_STARTED:
                tracks.setdefault(event.rank, _RankHistory()).begin()
            elif event.rank in tracks and event.iteration is not None:
                if event.kind == EventKind.RESTORED:
                    tracks[event.rank].go_on_from(event.iteration)
                elif event.kind in _DONE:
                    tracks[event.rank].do(event.iteration)
    return max((track.lost + (track.beyond(durable) if is_given_up else 0) for track in tracks.values()), default=0)


_DONE = (EventKind.PROGRESS, EventKind.SAVE_SCHEDULED, EventKind.SESSION_ENDED)
"""What a rank writes with the number of iterations that it has done."""


@dataclass(slots=True)
class _RankHistory:
    """What one rank has done, and how much of it in vain."""

    done: int = 0
    lost: int = 0
    _begins: bool = False
    """A session has begun, and it is not known yet from where it resumes."""

    def begin(self) -> None:
        self._begins = True

    def go_on_from(self, iteration: int) -> None:
        self.lost += self.beyond(iteration)
        self.done, self._begins = iteration, False

    def do(self, iteration: int) -> None:
        if self._begins and iteration:  # nothing was loaded: it began anew
            self.go_on_from(0)
        self.done = max(self.done, iteration)

    def beyond(self, iteration: int) -> int:
        return max(0, self.done - iteration)


def _durable(event: Event) -> int:
    """Return the iteration of a generation that outlives the job, if the event names one, else 0."""
    if event.kind == EventKind.SAVE_COMMITTED:
        tiers = event.data.get("tiers", ())
    elif event.kind == EventKind.RESTORED:
        tiers = (event.data.get("tier"),)
    else:
        return 0
    return (event.iteration or 0) if _LASTING.intersection(tiers) else 0


_LASTING = {str(Tier.LOCAL), str(Tier.GLOBAL)}
"""Tiers that outlive a job's processes; what a writer holds in memory, its own or another node's, ends with it."""


def _ended_unjudged(events: Sequence[Event]) -> bool:
    """Return whether the last cycle saw trouble on which the job ended before the ladder was asked."""
    last = max((event.cycle for event in events if event.cycle is not None), default=None)
    of_last = [event for event in events if event.cycle == last]
    judged = any(event.kind == EventKind.VERDICT and "incident" in event.data for event in of_last)
    return not judged and any(
        event.kind == EventKind.INCIDENT and event.data.get("incident", {}).get("kind") in CYCLE_ENDING
        for event in of_last
    )
