"""When a session saves by itself, and to which tiers.

An interval in iterations needs no talk: every rank counts alike. For ``"auto"`` one rank measures and decides, since no
two ranks measure the same: rank 0 says at a step's begin what is to follow the step, and all ranks read it from the
step's reduction.
"""

from __future__ import annotations

import logging
from enum import IntEnum

from outlast.config import CheckpointConfig
from outlast.policy.checkpoint_plan import GLOBAL_SHARE, failures_per_s, iterations_between
from outlast.wording import count

__all__ = ["NEAR_TIERS", "Due", "Rhythm"]

log = logging.getLogger(__name__)
NEAR_TIERS = ("memory", "local", "replica")
"""The tiers of a save that nothing outside the nodes takes part in."""
MIN_TIMED_STEPS = 3
"""Steps to time before the first automatic save, which measures what one costs."""
STEP_WEIGHT = 0.1
"""Of the newest step in the mean of what steps take."""


class Due(IntEnum):
    """What follows a step; the larger one includes the smaller."""

    NOTHING = 0
    NEAR = 1
    """A save to memory, local tier and replicas."""
    ALL = 2
    """A save to all tiers."""


class Rhythm:
    """Decide after which steps the state is saved.

    Args:
        config: The intervals and the failure rate.
        decides: Whether this rank decides about automatic intervals; one does.
        world_size: Number of ranks.
        has_near: Whether there is a near tier that a save can go to.

    Thread: that of the training loop.
    """

    def __init__(self, config: CheckpointConfig, *, decides: bool, world_size: int, has_near: bool) -> None:
        self._decides = decides
        self._intervals = {Due.ALL: config.save_interval}
        if has_near:
            self._intervals[Due.NEAR] = config.non_persistent_save_interval
        rate = failures_per_s(world_size, config.rank_mttf_hours)
        has_both = self._intervals.get(Due.NEAR, 0) != 0
        self._rates = {Due.NEAR: rate, Due.ALL: rate * GLOBAL_SHARE if has_both else rate}
        self._saved_at = dict.fromkeys(self._intervals, 0)
        self._chosen: dict[Due, int] = {}
        self._step_s = 0.0
        self._num_timed = -1  # the first step of a cycle warms up

    @property
    def saves_by_itself(self) -> bool:
        """Whether some save comes without being asked for."""
        return any(interval != 0 for interval in self._intervals.values())

    def start_from(self, iteration: int) -> None:
        """Count from the iteration at which this cycle begins."""
        self._saved_at = dict.fromkeys(self._intervals, iteration)

    def note_step(self, took_s: float) -> None:
        """Take in how long a step took, saves aside."""
        self._num_timed += 1
        if self._num_timed == 1:
            self._step_s = took_s
        elif self._num_timed > 1:
            self._step_s += STEP_WEIGHT * (took_s - self._step_s)

    def wish(self, iteration: int, cost_s: float | None) -> Due:
        """Return what this rank wants to follow the step that begins.

        Args:
            iteration: Number of optimizer steps done once the step has ended.
            cost_s: What a save cost training lately, in seconds; ``None`` = there was none yet.
        """
        due = Due.NOTHING
        for kind, interval in self._intervals.items():
            if interval == "auto" and self._decides and iteration - self._saved_at[kind] >= self._between(kind, cost_s):
                due = max(due, kind)
        return due

    def due(self, iteration: int, agreed: int) -> Due:
        """Return what follows the step that has ended.

        Args:
            iteration: Number of optimizer steps done.
            agreed: The largest of what the ranks wished for when it began.
        """
        due = Due(agreed)
        for kind, interval in self._intervals.items():
            if interval != "auto" and interval > 0 and iteration % interval == 0:
                due = max(due, kind)
        return due

    def note_save(self, iteration: int, kind: Due) -> None:
        """Take in that the state was saved."""
        for one in self._saved_at:
            if one <= kind:
                self._saved_at[one] = iteration

    def _between(self, kind: Due, cost_s: float | None) -> int:
        if self._num_timed < MIN_TIMED_STEPS:
            return 1 << 62
        if cost_s is None:
            return 1
        number = iterations_between(cost_s, self._step_s, self._rates[kind])
        if (before := self._chosen.get(kind)) is None or not before / 2 <= number <= before * 2:
            self._chosen[kind] = number
            log.info(
                "a save to %s every %s: it costs %.3g s of training, a step takes %.3g s, "
                "and a failure that needs it is expected every %.3g h",
                "all tiers" if kind == Due.ALL else "the near tiers",
                count(number, "iteration"),
                cost_s,
                self._step_s,
                1 / self._rates[kind] / 3600,
            )
        return number
