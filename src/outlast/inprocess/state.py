"""What a plug-in is told of the restart that it is called in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["State"]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """This rank's place in one restart."""

    initial_rank: int
    """The rank that this process was started as; it stays the same."""
    initial_world_size: int
    """How many processes were started, reserves included."""
    rank: int | None
    """Its rank in the function; ``None``: it is a reserve."""
    world_size: int
    """How many processes are left, reserves included."""
    active_world_size: int
    """How many ranks run the function."""
    iteration: int
    """Number of the restart; 0 = the function's first call."""
    node: str
    """Name of the node."""
    fault_counts: Mapping[int, int] = field(default_factory=dict)
    """Faults so far, by initial rank; consequences of another rank's fault do not count."""

    @property
    def active_rank(self) -> int | None:
        """The rank in the function, by its longer name."""
        return self.rank

    @property
    def is_reserve(self) -> bool:
        """Whether this process waits to take another one's place."""
        return self.rank is None
