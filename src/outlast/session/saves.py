"""What a session saves and loads, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, Untrusted
from outlast.inprocess.call import current_handle
from outlast.monitor.rank_monitor import RankMonitor
from outlast.runtime.journal import Journal
from outlast.session.attempts import OWN_STATE, Attempts
from outlast.session.departure import Departure
from outlast.session.place import has_near_tier
from outlast.session.recovery import recover, recover_suspect, tell_loaded
from outlast.session.rhythm import NEAR_TIERS, Due, Rhythm
from outlast.session.state import without_wrappers

if TYPE_CHECKING:
    from outlast.checkpoint import Restored, SaveHandle
    from outlast.policy.in_place import Origin

__all__ = ["Saves"]

log = logging.getLogger(__name__)


class Saves:
    """Load a session's state once, and save it in its rhythm.

    Args:
        config: Where, how and how often.
        place: This worker's place.
        journal: Where events are written.
        monitor: Is told what is durable.
        section: Opens the section that saving is in.

    Collective: all ranks make it.
    Thread: that of the training loop.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        place: WorkerEnv,
        journal: Journal,
        monitor: RankMonitor,
        section: Callable[[], AbstractContextManager[None]],
    ) -> None:
        from outlast.checkpoint import CheckpointManager

        self._place, self._monitor, self._section = place, monitor, section
        self._saved_iteration: int | None = None
        self._manager = CheckpointManager(config, env=place, journal=journal)
        if (call := current_handle()) is not None:
            self._manager.treat_failures_as_abandoned(lambda: call.is_left)
        self._rhythm = Rhythm(
            config,
            decides=place.global_rank == 0,
            world_size=place.world_size,
            has_near=has_near_tier(config, place),
        )
        self._manager.on_commit = monitor.set_durable_iteration
        if self._rhythm.saves_by_itself:
            monitor.report_progress()

    @property
    def has_durable(self) -> bool:
        """Whether there is something to come back from."""
        return self.durable_iteration is not None

    @property
    def durable_iteration(self) -> int | None:
        """The newest iteration that there is a generation of, saved or loaded; ``None`` = none yet. Thread: any."""
        return self._manager.durable_iteration

    @property
    def refusal(self) -> CheckpointError | None:
        """Why no save can succeed any more: a directory is another run's; ``None``: they can. Thread: any."""
        return self._manager.refusal

    def restore(self, state: Mapping[str, Any], own: Attempts) -> Restored | None:
        """Load what is to be replayed, if anything, else the newest generation; ``None`` when there is nothing to load.

        Raises:
            CheckpointError: There are generations, but none that all ranks can load; or another run uses a directory,
                or has saved what is there.
            PeerLost: A peer left.

        Collective: all ranks.
        """
        self._manager.claim()
        restored = self._recover(state, own)
        if restored is None:
            return None
        if self._manager.config.directory is None or set(restored.tiers) == {"global"}:
            self._saved_iteration = restored.iteration
        self._rhythm.start_from(restored.iteration)
        return restored

    def go_on(self, state: Mapping[str, Any], own: Attempts, iteration: int, origin: Origin | None) -> None:
        """Go on from a state that all ranks have in memory already.

        Args:
            state: As for :meth:`save`.
            own: The session's own state.
            iteration: Number of optimizer steps that it has done.
            origin: What it goes back to.

        Raises:
            CheckpointError: Another run has taken a directory.
            PeerLost: A peer left.

        Collective: all ranks.
        """
        from outlast.checkpoint import Restored

        self._manager.claim()
        loaded = None
        if origin is not None:
            loaded = Restored(
                iteration=iteration,
                generation=origin.generation,
                attempt=origin.attempt,
                tier=origin.tiers[self._place.global_rank],
                tiers=origin.tiers,
                rejected=[],
                load_s=0.0,
                bytes_read={},
            )
            tell_loaded(self._monitor, loaded, self._manager.config.suspect_window)
        self._manager.go_on({**without_wrappers(state), OWN_STATE: own}, iteration, loaded)
        if (durable := self._manager.durable_iteration) is not None:
            self._monitor.set_durable_iteration(durable)
        self._rhythm.start_from(iteration)

    def wish(self, iteration: int) -> Due:
        """Return what this rank wants to follow the step that begins after so many."""
        return self._rhythm.wish(iteration + 1, self._manager.save_cost_s)

    def note_step(self, took_s: float) -> None:
        """Take in how long a step took, saves aside."""
        self._rhythm.note_step(took_s)

    def due(self, iteration: int, agreed: int) -> Due:
        """Return what follows the step that has ended; see :meth:`Rhythm.due`."""
        return self._rhythm.due(iteration, agreed)

    def is_saved(self, iteration: int) -> bool:
        """Return whether a save of that iteration to all tiers was begun, or is what was loaded."""
        return self._saved_iteration == iteration

    def save(
        self, state: Mapping[str, Any], own: Attempts, iteration: int, *, near: bool = False, suspect: bool = False
    ) -> SaveHandle:
        """Save ``state`` and return once it is copied.

        Args:
            state: As for :meth:`Session.steps`.
            own: The session's own state, saved with it.
            iteration: Number of optimizer steps done.
            near: To the near tiers only.
            suspect: For a diagnosis only.

        Raises:
            CheckpointError: Saving failed too often in a row. A save that is refused is a handle that has failed.

        Collective: all ranks, at the same iteration.
        Blocks: while the state is copied; with ``async_save`` off, until it is committed.
        """
        tiers: Collection[str] | None = NEAR_TIERS if near else None
        with self._section():
            saved = {**without_wrappers(state), OWN_STATE: own}
            try:
                handle = self._manager.save(saved, iteration, tiers=tiers, suspect=suspect)
            except Untrusted as error:
                if self.refusal is None:
                    raise
                handle = _failed(iteration, error)  # all ranks leave together, once they have agreed to
        if not suspect:
            self._rhythm.note_save(iteration, Due.NEAR if near else Due.ALL)
            if not near:
                self._saved_iteration = iteration
        return handle

    def save_suspect(self, state: Mapping[str, Any], own: Attempts, iteration: int) -> None:
        """Save ``state`` for diagnosis, and wait until it is committed.

        Raises:
            CheckpointError: It was not committed.

        Collective: all ranks, at the same iteration.
        Blocks: until it is committed, up to ``checkpoint.save_timeout``.
        """
        handle = self.save(state, own, iteration, suspect=True)
        with self._section():
            handle.wait()

    def wait(self) -> None:
        """Wait until what was saved is committed.

        Raises:
            CheckpointError: The newest save failed.

        Blocks: up to ``checkpoint.save_timeout``.
        """
        with self._section():
            self._manager.wait()

    def wait_unless_given_up(self, handle: SaveHandle, departure: Departure) -> bool:
        """Wait for the commit; return ``False`` if it is to be given up before: told again, or the deadline is near.

        Raises:
            CheckpointError: The save failed.
        """
        with self._section():
            while not handle.done:
                if departure.wait_to_give_up(0.02):
                    return False
            handle.wait()
        return True

    def finish_staging(self) -> None:
        """Wait until nothing of the state is being copied any more. Blocks: up to the rest of one memory copy."""
        self._manager.finish_staging()

    def close(self) -> None:
        """End the threads; what is not committed yet is given up. Idempotent. Blocks: up to 10 s."""
        self._manager.close()

    def _recover(self, state: Mapping[str, Any], own: Attempts) -> Restored | None:
        if own.replay is not None:
            replayed = recover_suspect(self._manager, state, own, self._monitor, own.replay.iteration)
            if replayed is not None:
                return replayed
        return recover(self._manager, state, own, self._monitor)


def _failed(iteration: int, error: CheckpointError) -> SaveHandle:
    from outlast.checkpoint import SaveHandle

    handle = SaveHandle(iteration, limit_s=0.0)
    handle.fail(error)
    return handle
