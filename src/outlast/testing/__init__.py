"""Test doubles, fault injection and a real cluster on one machine, for tests of outlast and of its users."""

from __future__ import annotations

from outlast.chaos import FaultPlan
from outlast.testing.cluster import Agent, Cluster
from outlast.testing.ranks import RankProcesses

__all__ = ["Agent", "Cluster", "FakeClock", "FaultPlan", "RankProcesses"]


class FakeClock:
    """A :class:`outlast.clock.Clock` whose time the test sets.

    Args:
        start_s: The first reading, in seconds; above 0, as 0 means "never" in the heartbeat memory.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_ns = round(start_s * 1e9)

    def now_ns(self) -> int:
        """Return the set time in nanoseconds."""
        return self._now_ns

    def now_s(self) -> float:
        """Return the set time in seconds."""
        return self._now_ns / 1e9

    def advance(self, seconds: float) -> None:
        """Advance the time.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_ns += round(seconds * 1e9)
