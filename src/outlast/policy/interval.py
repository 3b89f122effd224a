"""How often to save: often enough that a failure costs little, seldom enough that saves cost little.

Young's first-order optimum (J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974): with
a save that costs ``C`` seconds of training and failures at a rate of ``lambda``, saving every ``sqrt(2 C / lambda)``
seconds makes the sum of both smallest. It holds while the interval is short against the time between failures.
"""

from __future__ import annotations

import math

__all__ = ["GLOBAL_SHARE", "failures_per_s", "iterations_between", "optimal_interval_s"]

GLOBAL_SHARE = 1 / 16
"""Share of failures that take the near copies along as well, where there are some: what the global tier is for. An
assumption, to which the interval is not sensitive: it goes with the square root."""
MAX_ITERATIONS = 1 << 40


def failures_per_s(world_size: int, rank_mttf_hours: float, *, share: float = 1.0) -> float:
    """Return the rate of failures of the whole world, in 1/s.

    Args:
        world_size: Number of ranks, each of which ends the cycle when it fails.
        rank_mttf_hours: Mean time to a failure of one rank, in hours.
        share: Share of the failures that count.
    """
    assert world_size >= 1, world_size
    assert rank_mttf_hours > 0, rank_mttf_hours
    return share * world_size / (rank_mttf_hours * 3600.0)


def optimal_interval_s(cost_s: float, failures_per_s: float) -> float:
    """Return the time between two saves that loses the least time, in seconds.

    Args:
        cost_s: Seconds of training that one save costs.
        failures_per_s: Rate of failures, in 1/s, above 0.

    Returns:
        ``sqrt(2 * cost_s / failures_per_s)``, and never less than the cost itself.
    """
    return max(cost_s, math.sqrt(2.0 * cost_s / failures_per_s))


def iterations_between(cost_s: float, step_s: float, failures_per_s: float) -> int:
    """Return the number of iterations between two saves, at least 1.

    Args:
        cost_s: Seconds of training that one save costs.
        step_s: Seconds of one iteration without a save.
        failures_per_s: Rate of failures, in 1/s, above 0.
    """
    if step_s <= 0:
        return 1
    return max(1, min(MAX_ITERATIONS, round(optimal_interval_s(cost_s, failures_per_s) / step_s)))
