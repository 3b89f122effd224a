"""Restoring a session's state, and telling the launcher what was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.monitor.rank_monitor import RankMonitor
from outlast.policy.quarantine import tier_of_load
from outlast.policy.recovery_point import Tier
from outlast.runtime.board import LoadedCopy
from outlast.session.state import give_back, without_wrappers

if TYPE_CHECKING:
    from outlast.checkpoint import CheckpointManager, Restored

__all__ = ["recover"]


def recover(manager: CheckpointManager, state: Mapping[str, Any], monitor: RankMonitor) -> Restored | None:
    """Load the newest trusted generation into ``state``; ``None`` when there is none at all.

    What was loaded is written on the node's board, so that results which soon turn invalid cast doubt on it.

    Raises:
        CheckpointError: There are generations, but none that all ranks can load.
        PeerLost: A peer left.

    Collective: all ranks.
    """
    given = without_wrappers(state)
    loaded = dict(given)
    restored = manager.load_latest(loaded)
    if restored is None:
        return None
    give_back(state, given, loaded)
    monitor.set_restored(
        LoadedCopy(
            generation=restored.generation,
            attempt=restored.attempt,
            tier=Tier[tier_of_load(restored.tiers).upper()],
            suspect_window=manager.config.suspect_window,
        )
    )
    monitor.set_iteration(restored.iteration)
    monitor.set_durable_iteration(restored.iteration)
    return restored
