"""Timings of a window, as ranks tell each other: how long each section and kernel took on each rank.

All are the rank's *own* time: what was spent in sections within a section, or waiting where that was marked, is not
part of it. Numbers that are no durations (NaN, negative) are counted and left out, never mixed in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

__all__ = ["RankTimings", "Timing", "lower_median", "remarks", "summarise"]


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long one thing took on one rank in a window."""

    name: str
    count: int = 0
    """Times that it was timed."""
    median_s: float = 0.0
    spread_s: float = 0.0
    """Median distance of a single time from the median."""
    total_s: float = 0.0
    best_s: float = 0.0
    """The rank's own best in earlier windows; 0 = there are too few of them."""
    num_invalid: int = 0
    """Times that were no numbers, or negative; left out of everything else."""

    @property
    def is_usable(self) -> bool:
        """Whether there is a time to compare: a finite one above 0."""
        return self.count > 0 and math.isfinite(self.median_s) and self.median_s > 0


class RankTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank timed in a window."""

    rank: int
    """Global rank."""
    node: str = ""
    role: str = ""
    """Ranks of one role do the same work and are compared; as stages of a pipeline do not."""
    num_steps: int = 0
    """Steps that were timed."""
    step_s: float = 0.0
    """Median seconds of a step, from its begin until the rank arrived at its end."""
    pace_s: float = 0.0
    """Mean seconds from one step's begin to the next one's, with all that lies between; 0 = not known."""
    wait_s: float | None = None
    """Median seconds that the rank waited for others at the step's end; ``None`` = not known."""
    sections: tuple[Timing, ...] = ()
    """In the order in which they end within a step."""
    kernels: tuple[Timing, ...] = ()
    """Kernels of the device, or operators of torch; empty = not timed. Collectives are not among them."""

    @property
    def by_name(self) -> dict[str, Timing]:
        """Sections by name."""
        return {timing.name: timing for timing in self.sections}

    @property
    def has_times(self) -> bool:
        """Whether there is anything to compare."""
        return any(timing.is_usable for timing in (*self.sections, *self.kernels))


def lower_median(values: Iterable[float]) -> float:
    """Return the middle one of at least one value; of two middle ones the smaller.

    So half of the ranks can be slow and are still compared with the others.
    """
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def summarise(name: str, values_s: Sequence[float], *, best_s: float = 0.0, num_more: int = 0) -> Timing:
    """Return the summary of single times.

    Args:
        name: What they are of.
        values_s: Seconds of each; those that are no durations are counted and left out.
        best_s: The rank's own best in earlier windows.
        num_more: Times that are not among ``values_s`` but took as long on average.
    """
    valid = [value for value in values_s if math.isfinite(value) and value >= 0]
    num_invalid = len(values_s) - len(valid)
    if not valid:
        return Timing(name=name, best_s=best_s, num_invalid=num_invalid)
    median_s = lower_median(valid)
    count = len(valid) + num_more
    return Timing(
        name=name,
        count=count,
        median_s=median_s,
        spread_s=lower_median(abs(value - median_s) for value in valid),
        total_s=math.fsum(valid) / len(valid) * count,
        best_s=best_s,
        num_invalid=num_invalid,
    )


def remarks(ranks: Sequence[RankTimings]) -> Iterator[str]:
    """Yield a line for everything that cannot be compared: no durations, sections that some ranks never entered."""
    for owner in ranks:
        for timing in (*owner.sections, *owner.kernels):
            if timing.num_invalid or not math.isfinite(timing.median_s):
                many = f"{timing.num_invalid} of {timing.num_invalid + timing.count}" if timing.num_invalid else "all"
                yield f"rank {owner.rank}: {many} times of {timing.name!r} are no durations (NaN, negative): left out"
        if not owner.num_steps and not owner.has_times:
            yield f"rank {owner.rank} timed nothing: it cannot be compared"
    roles: dict[str, list[RankTimings]] = {}
    for owner in ranks:
        roles.setdefault(owner.role, []).append(owner)
    for role, members in roles.items():
        among = f" of role {role!r}" if role else ""
        entered: dict[str, list[int]] = {}
        for owner in members:
            for timing in owner.sections:
                if timing.count + timing.num_invalid:
                    entered.setdefault(timing.name, []).append(owner.rank)
        for name, who in entered.items():
            missing = [owner.rank for owner in members if owner.rank not in set(who)]
            if missing and len(who) > len(missing):
                yield (
                    f"rank {', '.join(map(str, missing))} never entered section {name!r}, which {len(who)} of "
                    f"{len(members)} ranks{among} entered: not compared there"
                )
            elif missing:
                yield (
                    f"only rank {', '.join(map(str, who))} of {len(members)} ranks{among} entered section {name!r}"
                    + (": nothing to compare with" if len(who) == 1 else "")
                )
