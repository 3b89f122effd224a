"""One save on its way to its tiers, and what is in them already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outlast.checkpoint.arena import Arena
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.handle import SaveHandle
from outlast.checkpoint.manifest import TensorEntry
from outlast.policy.recovery_point import Tier

__all__ = ["Known", "Save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save, staged or failed at that."""

    iteration: int
    attempt: SaveAttempt
    handle: SaveHandle
    started_ns: int
    stall_s: float
    tiers: frozenset[Tier]
    suspect: bool = False
    """For diagnosis only: never loaded, never kept in memory."""
    restored_from: int | None = None
    restored_attempt: str | None = None
    arena: Arena | None = None
    num_bytes: int = 0
    tensors: tuple[TensorEntry, ...] = ()
    guard: Callable[[], None] | None = None
    """Waits until the arena is filled; ``None`` = it is."""
    error: str | None = None
    """Why there is nothing staged on this rank: the others must hear of it, or they would wait."""


@dataclass(slots=True)
class Known:
    """What is known to be committed."""

    tiers: dict[int, set[Tier]] = field(default_factory=dict)

    def missing(self, save: Save) -> frozenset[Tier]:
        """Return the tiers that a save is meant for and its iteration is not in yet."""
        return save.tiers - self.tiers.get(save.iteration, set())

    def add(self, iteration: int, tiers: frozenset[Tier]) -> None:
        """Take an iteration for committed to these tiers, too."""
        self.tiers.setdefault(iteration, set()).update(tiers)
