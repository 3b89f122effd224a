"""A rank's own best: what it is compared with by the individual score."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.policy.slowness import MIN_SAMPLES
from outlast.policy.timings import Timing, lower_median

__all__ = ["OwnBest"]

NUM_FASTEST = 3
"""Windows whose middle one is the best: a single one that was timed wrongly, or had less work, does not count."""


class OwnBest:
    """The medians of the fastest windows so far, by name."""

    def __init__(self) -> None:
        self._fastest_s: dict[str, list[float]] = {}

    def best_s(self) -> dict[str, float]:
        """Return the best by name; of what has fewer than :data:`NUM_FASTEST` windows there is none."""
        return {name: lower_median(fastest) for name, fastest in self._fastest_s.items() if len(fastest) == NUM_FASTEST}

    def note(self, timings: Iterable[Timing]) -> None:
        """Take in a window's timings; what was timed too seldom says nothing."""
        for timing in timings:
            if timing.is_usable and timing.count >= MIN_SAMPLES:
                fastest = self._fastest_s.setdefault(timing.name, [])
                fastest.append(timing.median_s)
                fastest.sort()
                del fastest[NUM_FASTEST:]
