"""Delay of restarts, so that a lasting fault does not use all restarts within seconds.

A disk, file server or object store that fails for a minute fails each cycle as soon as it starts. So each restart in a
row without progress waits longer. The first one does not wait: most failures end with their workers.
"""

from __future__ import annotations

DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0, 60.0)
"""Delay of the first, second, ... restart in a row without progress; the last one repeats."""
LONG_CYCLE_S = 600.0
"""A cycle that ran this long probably did not fail for the reason of the one before: no delay."""


def restart_delay_s(num_restarts: int, *, ran_s: float, max_s: float) -> float:
    """Return how long the next restart waits.

    Args:
        num_restarts: Restarts since the last progress, without the next one.
        ran_s: How long the cycle that ended ran.
        max_s: Longest delay.
    """
    if ran_s >= LONG_CYCLE_S:
        return 0.0
    return min(DELAYS_S[min(num_restarts, len(DELAYS_S) - 1)], max_s)
