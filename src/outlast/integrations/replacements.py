"""Attributes of foreign objects that are replaced for a while."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Replacements:
    """Replaced attributes of objects, classes and modules, with what to restore."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, replacement: Any) -> Any:
        """Replace an attribute; return its former value."""
        before = getattr(owner, name)
        # An inherited attribute is restored by deleting the owner's own; static and class methods keep their wrapper.
        self._replaced.append((owner, name, getattr(owner, "__dict__", {}).get(name, _ABSENT)))
        setattr(owner, name, replacement)
        return before

    def give_back(self) -> None:
        """Restore all replaced attributes, the newest first. Idempotent."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is not _ABSENT:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)
