"""One simulated fault a run: a rank that hangs or is killed, so that the recovery can be watched.

All ranks draw the same fault from the run's name. It comes once a run, not once a cycle: before it strikes,
the victim leaves a marker in the run directory; without one, only cycle 0 is struck.
"""

from __future__ import annotations

import logging
import os
import random
import signal
from pathlib import Path

from outlast import clock
from outlast.config import FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.runtime.journal import Journal

__all__ = ["SimulatedFault"]

log = logging.getLogger(__name__)
_SIGNALS = {"rank_hung": signal.SIGSTOP, "rank_killed": signal.SIGKILL}


class SimulatedFault:
    """The fault that the settings ask for, as one rank sees it.

    Args:
        config: The settings; ``simulate_fault`` is on.
        place: This worker's place.
        run_dir: Folder of the marker, seen by all cycles of the run; none: no marker.
        journal: Where the fault is written before it strikes.
        time: The clock of ``simulated_fault_base_delay``, which runs from here on.

    Raises:
        ConfigError: The rank that the fault is for does not exist.
    """

    def __init__(
        self,
        config: FaultToleranceConfig,
        place: WorkerEnv,
        *,
        run_dir: str | None,
        journal: Journal,
        time: clock.Clock = clock.MONOTONIC,
    ) -> None:
        draw = random.Random(f"simulated fault of {place.run_id}")
        drawn_type, drawn_rank = draw.choice(sorted(_SIGNALS)), draw.randrange(place.world_size)
        self.fault = drawn_type if config.simulated_fault_type == "random" else config.simulated_fault_type
        self.rank = drawn_rank if config.simulated_fault_rank is None else config.simulated_fault_rank
        if self.rank >= place.world_size:
            raise ConfigError(
                f"simulated_fault_rank={self.rank} does not exist, ranks end at {place.world_size - 1}; name one"
            )
        self._place, self._journal, self._time = place, journal, time
        self._marker = Path(run_dir) / "simulated-fault" if run_dir else None
        self._not_before_ns = time.now_ns() + int(config.simulated_fault_base_delay * 1e9)
        self._armed = place.global_rank == self.rank and (run_dir is not None or place.cycle == 0)

    def strike_if_due(self, *, iteration: int, has_durable: bool) -> None:
        """Hang or kill this process if the fault is for it, is due, and has not come before in this run.

        Args:
            iteration: Number of optimizer steps done.
            has_durable: Whether there is something to come back from, or nothing is saved at all.
        """
        if not self._armed or not has_durable or self._time.now_ns() < self._not_before_ns:
            return
        self._armed = False
        if self._marker is not None:
            try:
                os.close(os.open(self._marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            except FileExistsError:
                return
        log.warning("[FaultTolerance] simulating %s on rank %d after iteration %d", self.fault, self.rank, iteration)
        self._journal.write(
            EventKind.FAULT_SIMULATED,
            rank=self.rank,
            iteration=iteration,
            fault=self.fault,
            target=f"rank {self.rank}",
        )
        os.kill(os.getpid(), _SIGNALS[self.fault])
