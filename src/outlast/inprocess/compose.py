"""Several plug-ins as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outlast.errors import ConfigError

__all__ = ["Compose", "labels_of"]


class Compose:
    """Call plug-ins from left to right, each with what the one before it returned.

    A plug-in that returns ``None`` hands on what it was given, so that plug-ins that only do something (``initialize``,
    ``abort``, ``finalize``, ``health_check``) and those that decide (``rank_assignment``) are composed alike. The
    first one that raises ends the call; those to its right are not called.

    Args:
        plugins: What is called; at least one.

    Raises:
        ConfigError: There is none, or one cannot be called.
    """

    def __init__(self, *plugins: Callable[[Any], Any]) -> None:
        if not plugins:
            raise ConfigError("Compose() has no plug-ins; name at least one")
        for plugin in plugins:
            if not callable(plugin):
                raise ConfigError(
                    f"Compose was given {plugin!r}, which cannot be called; pass an instance or a function"
                )
        self._plugins = plugins

    def __call__(self, value: Any) -> Any:
        """Return what the last plug-in handed on."""
        for plugin in self._plugins:
            returned = plugin(value)
            value = value if returned is None else returned
        return value

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self._plugins))})"

    def labels(self) -> dict[str, str]:
        """Return what its plug-ins want to be known of this rank's place."""
        return {name: text for plugin in self._plugins for name, text in labels_of(plugin).items()}


def labels_of(plugin: object) -> Mapping[str, str]:
    """Return what a ``rank_assignment`` plug-in wants to be known of this rank's place, for ``Member.labels``.

    It is asked once on every rank, by its method ``labels()`` if it has one.
    """
    labels = getattr(plugin, "labels", None)
    return labels() if callable(labels) else {}
