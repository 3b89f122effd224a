"""What a manager reports about its generations to the agent of ``outlast run``, on this rank's page of the board.

A committed generation is progress, on which restart budgets reset. What was loaded is what an invalid result soon after
casts doubt on. Without an agent nothing is reported. A :class:`outlast.monitor.RankMonitor` may attach to the page
before or after; it keeps what a manager wrote.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from outlast.env import WorkerEnv
from outlast.policy.recovery_point import Tier, tier_of_load
from outlast.runtime.board import Board, LoadedCopy

if TYPE_CHECKING:
    from outlast.checkpoint.recovery import Restored

__all__ = ["LauncherReport"]


class LauncherReport:
    """Report what is saved and loaded.

    Args:
        place: The rank's place.
        suspect_window: Iterations after a load in which an invalid result casts doubt on what was loaded.

    Raises:
        OutlastError: The agent's board is not usable.

    Thread: any.
    """

    def __init__(self, place: WorkerEnv, suspect_window: int) -> None:
        self._suspect_window = suspect_window
        self._lock = threading.Lock()
        self._board = None if place.board is None else Board.open(place.board)
        self._page = None if self._board is None else self._board.rank(place.local_rank)

    def saving(self, iteration: int) -> None:
        """Report that a state of so many optimizer steps is being saved: its commit will be reported."""
        with self._lock:
            if self._page is not None:
                self._page.set_iteration(iteration)
                self._page.report_progress()

    def committed(self, iteration: int) -> None:
        """Report that a generation is committed, by this process or before it."""
        with self._lock:
            if self._page is not None:
                self._page.set_durable_iteration(iteration)

    def loaded(self, restored: Restored) -> None:
        """Report what the state goes back to, which is committed."""
        with self._lock:
            if self._page is None:
                return
            self._page.set_iteration(restored.iteration)
            self._page.set_durable_iteration(restored.iteration)
            read = [tier for tier in restored.tiers if tier != "kept"]  # a kept state stayed in its process
            if not read:
                return
            self._page.set_restored(
                LoadedCopy(
                    generation=restored.generation,
                    attempt=restored.attempt,
                    tier=Tier[tier_of_load(read).upper()],
                    suspect_window=self._suspect_window,
                )
            )

    def close(self) -> None:
        """Stop reporting. Idempotent."""
        with self._lock:
            if self._board is not None:
                self._page = None
                self._board.close()
                self._board = None
