"""The script's state mapping, as it is saved and as it is given back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

__all__ = ["give_back", "without_wrappers"]


def without_wrappers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with each DDP-wrapped module replaced by the module within.

    So a checkpoint does not know whether DDP was used, and loads with and without it.
    """
    from torch.nn.parallel import DistributedDataParallel

    return {
        name: value.module if isinstance(value, DistributedDataParallel) else value for name, value in state.items()
    }


def give_back(state: Mapping[str, Any], given: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put loaded plain values into the script's mapping.

    Args:
        state: The script's mapping; everything with a state of its own was loaded in place.
        given: What was given to the load.
        loaded: The same mapping after it.

    Raises:
        TypeError: There are plain values to give back, and the mapping cannot take any.
    """
    replaced = {name: value for name, value in loaded.items() if value is not given.get(name)}
    if not replaced:
        return
    if not isinstance(state, MutableMapping):
        raise TypeError(
            f"state holds plain values ({', '.join(sorted(replaced))}), which are loaded into a dict only; give one"
        )
    state.update(replaced)
