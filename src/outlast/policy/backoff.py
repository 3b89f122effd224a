"""How long a restart waits, so that a fault that lasts does not use all restarts within seconds.

A disk, a file server or an object store that fails for a minute fails each cycle as soon as it starts. Restarts without
a delay then use the budget before the fault is over. So each restart without progress in a row waits longer than the
one before. The first one does not wait: most failures are over with their workers.
"""

from __future__ import annotations

DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0, 60.0)
"""Delay of the first, second, ... restart in a row without progress; the last one repeats."""
LONG_CYCLE_S = 600.0
"""A cycle that ran for so long did not fail because of what ended the one before, as far as is known: no delay."""


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
