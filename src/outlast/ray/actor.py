"""An actor as its driver knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outlast.ray.words import Hello

__all__ = ["Actor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Actor:
    """One living actor that has started."""

    number: int
    """Counts the actors of a group; never used again."""
    bundle: int
    """The bundle of resources that it occupies."""
    handle: Any
    """Ray's handle of its shell."""
    hello: Hello

    @property
    def node(self) -> str:
        """Ray's id of its node."""
        return self.hello.node_id

    @property
    def pid(self) -> int:
        """Process id on its node."""
        return self.hello.pid
