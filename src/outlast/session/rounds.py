"""What all ranks agree on at each step: whether to leave now, and what to save."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outlast.runtime.consensus import Consensus
from outlast.session.attempts import Attempts
from outlast.session.slow_ranks import SlowRanks

__all__ = ["Rounds"]


class Rounds:
    """Agree once a step: in a reduction of its own, or in that of the step's attempts.

    Args:
        consensus: How the ranks agree.
        attempts: Their own reduction carries the wishes where it comes anyway.
        wishes: What this rank asks all ranks for, by name.
        slow_ranks: Times the steps; ``None`` = nobody does.

    Thread: that of the training loop.
    """

    def __init__(
        self,
        consensus: Consensus,
        attempts: Attempts,
        wishes: Callable[[], Mapping[str, int]],
        slow_ranks: SlowRanks | None = None,
    ) -> None:
        self._consensus, self._attempts, self._wishes = consensus, attempts, wishes
        self._slow_ranks = slow_ranks

    def begin(self, iteration: int) -> None:
        """Begin a step. Collective: all ranks. Blocks: never."""
        self._attempts.begin_step(iteration)
        if not self._attempts.carries_wishes:
            self._consensus.begin(self._wishes())
        if self._slow_ranks is not None:
            self._slow_ranks.begin_step(iteration)

    def finish(self) -> dict[str, int]:
        """Return what all ranks agreed on in the step.

        Raises:
            PeerLost: A peer left, or did not come in time.

        Collective: all ranks, after :meth:`begin`.
        Blocks: until all ranks have begun the step.
        """
        if self._slow_ranks is None:
            return self._finish()
        self._slow_ranks.end_step()
        agreed = self._finish()
        self._slow_ranks.note_wait()
        return agreed

    def _finish(self) -> dict[str, int]:
        agreed = self._attempts.take_agreed()
        if self._consensus.pending:
            return self._consensus.finish()
        if agreed is None:  # the step had no attempts
            self._consensus.begin(self._wishes())
            return self._consensus.finish()
        return agreed
