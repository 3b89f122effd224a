"""What a caller asks to have saved, checked."""

from __future__ import annotations

import operator
from collections.abc import Collection

from outlast.checkpoint.places import Places
from outlast.errors import CheckpointError, ConfigError
from outlast.policy.recovery_point import Tier

__all__ = ["check_may_save", "checked_iteration", "wanted_tiers"]


def check_may_save(places: Places, *, is_closed: bool, is_loaded: bool) -> None:
    """Refuse a save where it could not be told apart from what others saved.

    Beside generations that were not loaded, those would be taken for newer than what this training saves, and be
    loaded in its place.

    Args:
        places: What there is.
        is_closed: The manager is closed.
        is_loaded: What there is was loaded, or nothing is there.

    Raises:
        CheckpointError: So it is.
    """
    if is_closed:
        raise CheckpointError("the manager is closed")
    if not is_loaded:
        newest = max(places.generations, default="unknown")
        raise CheckpointError(
            f"there are generations (newest: {newest}) that this training did not load; call load_latest() first, "
            "or give an empty directory"
        )


def checked_iteration(iteration: int) -> int:
    """Return a number of optimizer steps. Raises: ConfigError, when it is none."""
    try:
        number = operator.index(iteration)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"iteration={iteration!r} must be the number of optimizer steps done, 0 or more")
    return number


def wanted_tiers(places: Places, tiers: Collection[str] | None) -> frozenset[Tier]:
    """Return those of the tiers asked for that exist here.

    Args:
        places: What there is.
        tiers: Their names; ``None`` = all.

    Raises:
        ConfigError: There is no such tier, or none of them is configured.
    """
    there = {Tier.MEMORY} if places.memory else set[Tier]()
    there |= {Tier.LOCAL} if places.local is not None else set()
    there |= {Tier.REPLICA} if places.targets else set()
    there |= {Tier.GLOBAL} if places.directory is not None else set()
    if tiers is None:
        return frozenset(there)
    names = {str(tier): tier for tier in Tier}
    if unknown := [name for name in tiers if name not in names]:
        raise ConfigError(f"there is no tier {unknown[0]!r}; the tiers are {', '.join(names)}")
    wanted = frozenset(names[name] for name in tiers) & there
    if not wanted:
        raise ConfigError(f"none of the tiers {', '.join(tiers)} is configured; there are {sorted(map(str, there))}")
    return wanted
