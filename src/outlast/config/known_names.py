"""Settings under the names that users of another system know, put where ours are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outlast.errors import ConfigError

__all__ = ["KNOWN_NAMES", "Translation"]

KNOWN_NAMES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "train": {  # KempnerForge
        "shutdown_timeout_sec": ("preemption", "shutdown_timeout"),
        "nccl_health_check_interval": ("health", "process_group_interval"),
    },
}
"""Section and key of another system, to section and key of ours; unit and the meaning of 0 are the same. What else
stands in such a section is that system's: the training script reads it."""


class Translation:
    """Values of a file in our names, and where each came from.

    Args:
        values: What the file holds.
        place: Tells file and line of keys that stand there, for errors.

    Raises:
        ConfigError: A known section is none, or a setting is given under both names.
    """

    def __init__(self, values: Mapping[str, Any], *, place: Callable[[tuple[str, ...]], str]) -> None:
        self.values: dict[str, Any] = {key: value for key, value in values.items() if key not in KNOWN_NAMES}
        self.foreign: dict[str, list[str]] = {}
        """Section to its keys that are none of ours."""
        self._origins: dict[tuple[str, ...], tuple[str, ...]] = {}
        for section, known in KNOWN_NAMES.items():
            if section not in values:
                continue
            given = values[section]
            if not isinstance(given, Mapping):
                raise ConfigError(f"{place((section,))}: {section}: {given!r} is not a section with keys of its own")
            for key, value in given.items():
                name, here = str(key).replace("-", "_"), (section, str(key))
                if name not in known:
                    self.foreign.setdefault(section, []).append(str(key))
                    continue
                ours, there = known[name]
                beside = self.values.get(ours, {})
                if not isinstance(beside, Mapping) or there in {str(other).replace("-", "_") for other in beside}:
                    raise ConfigError(
                        f"{place(here)}: {section}.{key} is {ours}.{there}, which is given too; keep one of them"
                    )
                if ours not in self.values:
                    self._origins[ours,] = (section,)
                self._origins[ours, there] = here
                self.values[ours] = {**beside, there: value}

    def origin(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys that stand in the file for keys of ours."""
        return self._origins.get(tuple(key.replace("-", "_") for key in keys), keys)
