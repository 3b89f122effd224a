"""The leaving: how all ranks left together when one was told to, and where the next job of the run went on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from outlast.demo.plan import Deed
from outlast.demo.sources import Sources, find_sources
from outlast.demo.strikes import split_jobs
from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind

__all__ = ["Leaving", "find_leaving", "unkept_of_leaving"]


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
    """Rank to the iteration from which the next job went on; empty = there was none, or it began anew."""
    sources: Sources | None
    """Where the next job's ranks came back from."""
    going_on_after_s: float | None
    """Seconds from the signal until every rank had done an iteration in the next job."""
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


def find_leaving(events: Sequence[Event]) -> Leaving | None:
    """Return what followed when the demo told a rank to leave; ``None`` = it did not."""
    jobs = split_jobs(events)
    for index, job in enumerate(jobs):
        for event in job:
            if event.kind == EventKind.FAULT_SIMULATED and event.data["fault"] == Deed.LEAVE:
                return _follow(event, job, jobs[index + 1] if index + 1 < len(jobs) else [])
    return None


def unkept_of_leaving(leaving: Leaving | None, *, world_size: int) -> tuple[str, ...]:
    """Return what was not as it should be, each in one line.

    The rank notices the signal; all ranks leave after the same iteration with 75, and so do the agents; the state of
    that very iteration is committed to all tiers; the next job goes on from it and ends with 0.
    """
    if leaving is None:
        return ("no rank was told to leave",)
    return tuple(f"{Deed.LEAVE} at iteration {leaving.struck_at}: {told}" for told in _check(leaving, world_size))


def _check(leaving: Leaving, world_size: int) -> Iterator[str]:
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


def _follow(struck: Event, job: Sequence[Event], following: Sequence[Event]) -> Leaving:
    assert struck.rank is not None
    after = [event for event in job if event.mono_ns >= struck.mono_ns]
    noticed = [event for event in after if event.kind == EventKind.NOTICE and event.rank == struck.rank]
    ends = {e.rank: e for e in after if e.kind == EventKind.SESSION_ENDED and e.rank is not None}
    saved_by: dict[int, set[int | None]] = {}
    for event in after:
        if event.kind == EventKind.SAVE_COMMITTED and "global" in event.data["tiers"]:
            saved_by.setdefault(event.iteration or 0, set()).add(event.rank)
    size = max((e.data["world_size"] for e in following if e.kind == EventKind.CYCLE_STARTED), default=0)
    first_ns: dict[int, int] = {}
    for event in following:
        if event.kind == EventKind.PROGRESS and event.rank is not None:
            first_ns.setdefault(event.rank, event.mono_ns)
    has_all = 0 < size <= len(first_ns)
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
        going_on_after_s=_since(struck, max(first_ns.values())) if has_all else None,
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


def _since(struck: Event, ns: int) -> float:
    return round((ns - struck.mono_ns) / 1e9, 3)
