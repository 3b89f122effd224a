"""What became of this process's saves: tiers reached, failures in a row, who is told.

The methods are called by the committer's and the global lane's threads; what they keep is read by the training thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outlast import clock
from outlast.checkpoint.arena_pool import ArenaPool
from outlast.checkpoint.claim import DirectoryRefused
from outlast.checkpoint.exchange import PeerSilent
from outlast.checkpoint.frames import CopyFailure
from outlast.checkpoint.handle import SaveResult
from outlast.checkpoint.report import Reporter
from outlast.checkpoint.save import Save
from outlast.errors import CheckpointError
from outlast.policy.recovery_point import Tier
from outlast.wording import count

__all__ = ["Outcomes"]

_HEARSAY_S = 2.0
"""Seconds in which a process hears that it has to leave what its peers have left already."""
_LOOK_S = 0.01


class Outcomes:
    """Take note of saves' ends, in whichever tier.

    Args:
        reporter: Writes log and journal.
        arenas: Where a save's memory goes back to.
        to_global: Hands a save that is committed nearby on to the global tier.
        on_durable: Called with the iteration of each generation that a tier has committed.
    """

    def __init__(
        self,
        reporter: Reporter,
        arenas: ArenaPool,
        *,
        to_global: Callable[[Save], None],
        on_durable: Callable[[int], None],
    ) -> None:
        self._reporter, self._arenas = reporter, arenas
        self._to_global, self._on_durable = to_global, on_durable
        self._lock = threading.Lock()
        self._reached: dict[int, frozenset[Tier]] = {}
        """Near tiers of the saves that are on their way to the global one, by their ordinal."""
        self.durable: int | None = None
        """The newest generation known to be committed, loaded or saved."""
        self.num_failures = 0
        """Saves in a row that failed."""
        self.last_error: CheckpointError | None = None
        self.refusal: DirectoryRefused | None = None
        """Why no save of this run can succeed: a directory is another run's."""
        self.is_left: Callable[[], bool] | None = None
        """Says whether the call that saves is left, and with it what is not committed; ``None``: there is no call."""

    def check(self, limit: int, *, rank: int, iteration: int) -> None:
        """Raise :class:`CheckpointError` when ``limit`` saves in a row have failed; 0 = never."""
        if self.refusal is None and 0 < limit <= self.num_failures:
            advice = "Make room or repair the directory"
            if isinstance(self.last_error, PeerSilent):
                advice = "Have the launcher start all ranks again"
            raise CheckpointError(
                f"{count(self.num_failures, 'save')} in a row failed, the last with: {self.last_error}. "
                f"{advice}; max_consecutive_save_failures sets how many are tolerated",
                rank=rank,
                iteration=iteration,
            )

    def near(self, save: Save, missing: frozenset[Tier], failures: tuple[CopyFailure, ...]) -> None:
        """A save is committed to the near tiers, or was before; ``missing`` were the tiers that it still lacked."""
        for failure in failures:
            self._reporter.not_copied(save.iteration, failure)
        near = missing - {Tier.GLOBAL}
        if near and not save.suspect:
            self._note_durable(save, near)
        if Tier.GLOBAL in missing:
            self._reached[save.attempt.ordinal] = near
            self._to_global(save)
        else:
            self._succeed(save, near)

    def far(self, save: Save, error: CheckpointError | None) -> None:
        """A save reached the global tier, or did not."""
        if error is not None:
            self.failed(save, error)
            return
        if not save.suspect:
            self._note_durable(save, frozenset({Tier.GLOBAL}))
        self._succeed(save, self._reached.pop(save.attempt.ordinal, frozenset()) | {Tier.GLOBAL})

    def failed(self, save: Save, error: CheckpointError) -> None:
        """A save did not reach a tier that it was meant for."""
        self._release(save)
        reached = self._reached.pop(save.attempt.ordinal, frozenset())
        if isinstance(error, DirectoryRefused):
            self.refusal = error
        if self.refusal is None and self._is_given_up():
            self._reporter.given_up(save.iteration, error)
        else:
            with self._lock:
                self.num_failures += 1
                self.last_error, num_failures = error, self.num_failures
            self._reporter.failed(save.iteration, error, num_failures=num_failures, reached=reached)
        save.handle.fail(error)

    def _is_given_up(self) -> bool:
        """Say whether a save failed because the call was left, here or at a peer. Blocks: up to 2 s."""
        if self.is_left is None:
            return False
        end_ns = clock.now_ns() + int(_HEARSAY_S * 1e9)
        while not self.is_left():
            if clock.now_ns() >= end_ns:
                return False
            time.sleep(_LOOK_S)
        return True

    def _succeed(self, save: Save, reached: frozenset[Tier]) -> None:
        self._release(save)
        with self._lock:
            self.num_failures = 0
        if reached and not save.suspect:
            self._reporter.saved(_result(save), reached)
        # Last, so that whoever waited finds the outcome logged and in the journal.
        save.handle.succeed(_result(save))

    def _note_durable(self, save: Save, tiers: frozenset[Tier]) -> None:
        with self._lock:
            self.durable = max(self.durable or 0, save.iteration)
        self._reporter.committed(_result(save), tiers)
        self._on_durable(save.iteration)

    def _release(self, save: Save) -> None:
        if save.arena is not None:
            self._arenas.give_back(save.arena)


def _result(save: Save) -> SaveResult:
    return SaveResult(
        generation=save.iteration,
        num_bytes=save.num_bytes,
        duration_s=(clock.now_ns() - save.started_ns) / 1e9,
        stall_s=save.stall_s,
    )
