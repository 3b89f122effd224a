"""Many runs of one scenario, each with its own seed: the median of their ETTR, its range, and means of the rest.

Run ``n`` of two scenarios has the same seed, so that both have the same faults: their studies differ by the change of
the scenario, not by chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outlast import clock
from outlast.config.base import require
from outlast.policy.recovery_point import Tier
from outlast.simulate.run import SimulatedRun, find_partners, simulate
from outlast.simulate.scenario import Scenario

RANGE_PERCENT = (5.0, 95.0)
"""Percentiles of the runs' ETTR that are its range."""
_PROGRESS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Results of many runs of a scenario."""

    scenario: Scenario
    runs: Sequence[SimulatedRun]
    wall_s: float = 0.0
    """How long the simulation took."""

    @property
    def ettr(self) -> float:
        """Median over the runs of the productive share of the time."""
        return statistics.median(run.ettr for run in self.runs)

    @property
    def ettr_range(self) -> tuple[float, float]:
        """The 5th and the 95th percentile of the runs."""
        low, high = np.percentile([run.ettr for run in self.runs], RANGE_PERCENT)
        return float(low), float(high)

    @property
    def partition(self) -> dict[str, float]:
        """Mean seconds of each part; they add up to the wall time of a run."""
        return _means([run.partition for run in self.runs])

    @property
    def num_failures(self) -> float:
        """Mean number of failures of a run."""
        return statistics.fmean(run.num_failures for run in self.runs)

    @property
    def num_by_kind(self) -> dict[str, float]:
        """Mean number of failures of each kind."""
        return _means([run.num_by_kind for run in self.runs])

    @property
    def loads(self) -> dict[str, float]:
        """Mean number of loads from each tier, the nearest first."""
        means = _means([run.loads for run in self.runs])
        return {str(tier): means[str(tier)] for tier in Tier if str(tier) in means}

    @property
    def num_stops(self) -> float:
        """Mean number of times that the recovery policy stopped a run."""
        return statistics.fmean(len(run.stops) for run in self.runs)

    @property
    def stop_reason(self) -> str:
        """The reason for the first stop; empty = there was none."""
        return next((run.stops[0].reason for run in self.runs if run.stops), "")

    def to_fields(self) -> dict[str, Any]:
        return {
            "wall_s": round(self.wall_s, 3),
            "ettr": self.ettr,
            "ettr_range": list(self.ettr_range),
            "simulated_s": self.scenario.duration_s,
            "repeats": len(self.runs),
            "partition": self.partition,
            "num_failures": self.num_failures,
            "num_by_kind": self.num_by_kind,
            "lost_iterations": statistics.fmean(run.lost_iterations for run in self.runs),
            "loads": self.loads,
            "decisions": _means([run.decisions for run in self.runs]),
            "num_stops": self.num_stops,
            "stop_reason": self.stop_reason,
            "settings": self.scenario.to_fields(),
        }


def _means(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: statistics.fmean(one.get(name, 0) for one in counts) for name in names}


def run_study(
    scenario: Scenario, *, repeats: int = 20, seed: int = 0, progress: Callable[[str], None] = lambda line: None
) -> Study:
    """Simulate a scenario several times.

    Args:
        scenario: The scenario.
        repeats: Runs, each with its own seed; at least 1.
        seed: Seed of the study; the same one gives the same result.
        progress: Called every two seconds with a text line.

    Raises:
        ConfigError: ``repeats`` is below 1.
    """
    require(repeats >= 1, f"repeats={repeats} must be at least 1")
    began_s = reported_s = clock.now_s()
    partners, runs = find_partners(scenario), list[SimulatedRun]()
    for number in range(repeats):
        runs.append(simulate(scenario, seed * 1_000_003 + number, partners=partners))
        now_s = clock.now_s()
        if now_s - reported_s >= _PROGRESS_S:
            reported_s = now_s
            progress(f"run {number + 1} of {repeats}; {now_s - began_s:.0f} s")
    return Study(scenario=scenario, runs=runs, wall_s=clock.now_s() - began_s)
