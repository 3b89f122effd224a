"""Restoring a session's state, and telling the launcher what was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from outlast.monitor.rank_monitor import RankMonitor
from outlast.policy.quarantine import tier_of_load
from outlast.policy.recovery_point import Tier
from outlast.runtime.board import LoadedCopy
from outlast.session.attempts import OWN_STATE, Attempts
from outlast.session.state import give_back, without_wrappers

if TYPE_CHECKING:
    from outlast.checkpoint import CheckpointManager, Restored

__all__ = ["recover", "recover_suspect", "tell_loaded"]


def recover(
    manager: CheckpointManager, state: Mapping[str, Any], own: Attempts, monitor: RankMonitor
) -> Restored | None:
    """Load the newest trusted generation into ``state`` and the session's own state; ``None`` when there is none.

    What was loaded is written on the node's board, so that results which soon turn invalid cast doubt on it.

    Raises:
        CheckpointError: There are generations, but none that all ranks can load.
        PeerLost: A peer left.

    Collective: all ranks.
    """
    return _load(manager, state, own, monitor, manager.load_latest)


def recover_suspect(
    manager: CheckpointManager, state: Mapping[str, Any], own: Attempts, monitor: RankMonitor, iteration: int
) -> Restored | None:
    """Load what was saved for diagnosis at ``iteration``; ``None`` when not all ranks have it.

    Raises:
        CheckpointError: It does not fit.
        PeerLost: A peer left.

    Collective: all ranks.
    """
    return _load(manager, state, own, monitor, lambda loaded: manager.load_suspect(loaded, iteration))


def tell_loaded(monitor: RankMonitor, restored: Restored, suspect_window: int) -> None:
    """Write on the node's board which generation the state goes back to."""
    monitor.set_restored(
        LoadedCopy(
            generation=restored.generation,
            attempt=restored.attempt,
            tier=Tier[tier_of_load(restored.tiers).upper()],
            suspect_window=suspect_window,
        )
    )


def _load(
    manager: CheckpointManager,
    state: Mapping[str, Any],
    own: Attempts,
    monitor: RankMonitor,
    load: Callable[[Mapping[str, Any]], Restored | None],
) -> Restored | None:
    given = without_wrappers(state)
    loaded = {**given, OWN_STATE: own}
    restored = load(loaded)
    if restored is None:
        return None
    del loaded[OWN_STATE]
    give_back(state, given, loaded)
    tell_loaded(monitor, restored, manager.config.suspect_window)
    monitor.set_iteration(restored.iteration)
    monitor.set_durable_iteration(restored.iteration)
    return restored
