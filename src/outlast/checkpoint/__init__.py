"""Checkpoints: saved behind training's back, committed whole, loaded only when every rank has proven its part.

The names below are imported on first use: the writer process must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint.manager import CheckpointManager
    from outlast.checkpoint.recovery import Rejection, Restored
    from outlast.checkpoint.save import SaveHandle, SaveResult

_HOMES = {
    "CheckpointManager": "outlast.checkpoint.manager",
    "Rejection": "outlast.checkpoint.recovery",
    "Restored": "outlast.checkpoint.recovery",
    "SaveHandle": "outlast.checkpoint.save",
    "SaveResult": "outlast.checkpoint.save",
}

__all__ = ["CheckpointManager", "Rejection", "Restored", "SaveHandle", "SaveResult"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'outlast.checkpoint' has no attribute {name!r}")
