"""Restart in process: a function that is called again on all ranks, in the same processes, when one of them fails.

See :class:`Wrapper`. It runs the function on the active ranks; the others are warm spares.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "ActiveWorldSizeDivisibleBy": "outlast.inprocess.plugins",
    "Assignment": "outlast.policy.rank_assignment",
    "Compose": "outlast.inprocess.plugins",
    "FaultCounter": "outlast.inprocess.plugins",
    "FillGaps": "outlast.inprocess.plugins",
    "Handle": "outlast.inprocess.call",
    "Level": "outlast.inprocess.plugins",
    "MaxActiveWorldSize": "outlast.inprocess.plugins",
    "Member": "outlast.policy.rank_assignment",
    "RankLeft": "outlast.inprocess.rank",
    "Restore": "outlast.inprocess.restore",
    "RestartRequested": "outlast.inprocess.call",
    "RetryController": "outlast.inprocess.plugins",
    "ShiftRanks": "outlast.inprocess.plugins",
    "State": "outlast.inprocess.plugins",
    "Tree": "outlast.inprocess.plugins",
    "Wrapper": "outlast.inprocess.wrapper",
    "current_handle": "outlast.inprocess.call",
}

__all__ = [
    "ActiveWorldSizeDivisibleBy",
    "Assignment",
    "Compose",
    "FaultCounter",
    "FillGaps",
    "Handle",
    "Level",
    "MaxActiveWorldSize",
    "Member",
    "RankLeft",
    "RestartRequested",
    "Restore",
    "RetryController",
    "ShiftRanks",
    "State",
    "Tree",
    "Wrapper",
    "current_handle",
]


def __getattr__(name: str) -> Any:
    # On first use: a monitor process imports single modules of this package, and no torch.
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'outlast.inprocess' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
