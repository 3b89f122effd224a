"""Checkpoints: saved in the background, committed atomically, loaded only when every rank has verified its part.

The names below are imported on first use: the writer process must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.checkpoint.manager import CheckpointManager
    from outlast.checkpoint.save import SaveHandle, SaveResult
    from outlast.checkpoint.tiers import Rejection, Restored
    from outlast.policy.durability import Durability

_HOMES = {
    "outlast.checkpoint.manager": ("CheckpointManager",),
    "outlast.checkpoint.save": ("SaveHandle", "SaveResult"),
    "outlast.checkpoint.tiers": ("Rejection", "Restored"),
    "outlast.policy.durability": ("Durability",),
}

__all__ = ["CheckpointManager", "Durability", "Rejection", "Restored", "SaveHandle", "SaveResult"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
