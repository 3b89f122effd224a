"""Simulated timing windows of ranks, with the jitter of real machines and with ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from outlast.policy.slowness import RankTimings, Timing, summarise

SECTIONS = {"data": 0.002, "forward": 0.020, "backward": 0.040, "optimizer": 0.004}
"""Seconds of each section of a healthy rank, in the order of a step."""


@dataclass
class SimulatedRanks:
    """Ranks whose sections take random times.

    A step's jitter is lognormal with a heavy tail. Each rank has a small bias, an individual drift and occasional
    windows in which its node is busy; a common factor slows down and speeds up all ranks together.
    """

    num_ranks: int = 4
    seed: int = 0
    num_steps: int = 30
    sections: Mapping[str, float] = field(default_factory=lambda: dict(SECTIONS))
    slowed: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Rank and section to a factor; the section ``*`` means all."""
    meet_in: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Sections at whose end groups of ranks wait for each other."""
    busy_chance: float = 0.01
    """Probability of a window in which a node is busy with other work and its rank takes 1.5 times as long."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.bias = self.random.normal(1.0, 0.015, self.num_ranks)
        self.drift = np.zeros(self.num_ranks)
        self.common = 0.0
        self.history: dict[tuple[int, str], list[float]] = {}

    def steps(self, **changes: Any) -> dict[str, NDArray[np.float64]]:
        """Return the seconds of each section, by rank and step."""
        settings = {
            name: changes.get(name, getattr(self, name)) for name in ("sections", "slowed", "meet_in", "busy_chance")
        }
        n, k = self.num_ranks, self.num_steps
        self.drift = 0.9 * self.drift + self.random.normal(0, 0.004, n)
        self.common = 0.95 * self.common + self.random.normal(0, 0.03)
        busy = np.where(self.random.random(n) < settings["busy_chance"], 1.5, 1.0)
        pace = (self.bias + self.drift) * busy * np.exp(self.common)
        clock = np.zeros((n, k))
        taken = {}
        for name, seconds in settings["sections"].items():
            noise = self.random.lognormal(0, 0.08, (n, k))
            tail = np.where(self.random.random((n, k)) < 0.02, self.random.uniform(2, 6, (n, k)), 1.0)
            factors = np.array(
                [settings["slowed"].get((r, name), settings["slowed"].get((r, "*"), 1.0)) for r in range(n)]
            )
            end = clock + seconds * noise * tail * (pace * factors)[:, None]
            for group in settings["meet_in"].get(name, ()):
                end[list(group)] = end[list(group)].max(axis=0)
            taken[name] = end - clock
            clock = end
        return taken

    def window(self, **changes: Any) -> list[RankTimings]:
        """Return the timings that the ranks report for one window."""
        taken = self.steps(**changes)
        step_times = sum(taken.values())
        assert not isinstance(step_times, int)
        ranks = []
        for rank in range(self.num_ranks):
            sections = []
            for name, times in taken.items():
                history = self.history.setdefault((rank, name), [])
                best = sorted(history)[1] if len(history) >= 3 else 0.0
                sections.append(summarise_fast(name, times[rank], best))
                history.append(sections[-1].median_s)
                history[:] = sorted(history)[:3]
            ranks.append(
                RankTimings(
                    rank=rank,
                    node=f"node-{rank}",
                    num_steps=self.num_steps,
                    step_s=float(np.median(step_times[rank])),
                    sections=tuple(sections),
                )
            )
        return ranks


def summarise_fast(name: str, times: NDArray[np.float64], best_s: float) -> Timing:
    """Return the result of :func:`summarise`, fast enough for the many windows of a test."""
    ordered = np.sort(times)
    middle = ordered[(len(ordered) - 1) // 2]
    spread = np.sort(np.abs(ordered - middle))[(len(ordered) - 1) // 2]
    return Timing(
        name=name,
        count=len(times),
        median_s=float(middle),
        spread_s=float(spread),
        total_s=float(times.sum()),
        best_s=best_s,
    )


def report_timings(rank: int, seconds: Mapping[str, float], **facts: Any) -> RankTimings:
    """Return the report of a rank whose sections take the same time in each of 10 steps."""
    sections = tuple(
        summarise(name, [value] * 10, best_s=facts.pop(f"best_{name}", 0.0)) for name, value in seconds.items()
    )
    settings = RankTimings(
        rank=rank, node=f"node-{rank}", num_steps=10, step_s=sum(seconds.values()), sections=sections
    )
    return replace(settings, **facts)
