"""What the outside sees of training: heartbeats, the section of the step, the iteration, and progress."""

from __future__ import annotations

from outlast import clock
from outlast.incidents import EventKind
from outlast.monitor.rank_monitor import RankMonitor
from outlast.runtime.journal import Journal
from outlast.session.enclosure import Enclosure

__all__ = ["Pulse"]

PROGRESS_EVERY_NS = 5_000_000_000
"""A rank writes a PROGRESS event at most this often."""


class Pulse:
    """Tell the beginning and the end of each step.

    Args:
        enclosure: The call around the session.
        monitor: What the watchdog sees.
        journal: What people see.
        rank: This worker's global rank.

    Thread: that of the training loop.
    """

    def __init__(self, enclosure: Enclosure, monitor: RankMonitor, journal: Journal, rank: int) -> None:
        self._enclosure, self._monitor, self._journal, self._rank = enclosure, monitor, journal, rank
        self._began_ns = 0
        self._wrote_progress_ns: int | None = None

    def begin_step(self) -> None:
        """Say that a step begins."""
        self._enclosure.ping()
        self._monitor.heartbeat()
        self._monitor.start_section("step")
        self._began_ns = clock.now_ns()

    def end_step(self, iteration: int) -> float:
        """Say that a step has ended.

        Args:
            iteration: Number of optimizer steps done.

        Returns:
            How long it took, in seconds.
        """
        self._monitor.end_section("step")
        self._monitor.set_iteration(iteration)
        now_ns = clock.now_ns()
        if self._wrote_progress_ns is None or now_ns - self._wrote_progress_ns >= PROGRESS_EVERY_NS:
            self._wrote_progress_ns = now_ns
            self._journal.write(EventKind.PROGRESS, rank=self._rank, iteration=iteration)
        return (now_ns - self._began_ns) / 1e9
