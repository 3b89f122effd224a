"""Restart in process: a function that is called again on all ranks, in the same processes, when one of them fails.

See :class:`Wrapper`. It runs the function on the active ranks; the others are warm reserves.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "ActiveWorldSizeDivisibleBy": "outlast.inprocess.assignments",
    "Assignment": "outlast.policy.rank_assignment",
    "Compose": "outlast.inprocess.compose",
    "FaultCounter": "outlast.inprocess.retry",
    "FillGaps": "outlast.inprocess.assignments",
    "Handle": "outlast.inprocess.handle",
    "Level": "outlast.inprocess.assignments",
    "MaxActiveWorldSize": "outlast.inprocess.assignments",
    "Member": "outlast.policy.rank_assignment",
    "RankLeft": "outlast.inprocess.rank_left",
    "Restore": "outlast.inprocess.restore",
    "RestartRequested": "outlast.inprocess.interruption",
    "RetryController": "outlast.inprocess.retry",
    "ShiftRanks": "outlast.inprocess.assignments",
    "State": "outlast.inprocess.state",
    "Tree": "outlast.inprocess.assignments",
    "Wrapper": "outlast.inprocess.wrapper",
    "current_handle": "outlast.inprocess.handle",
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
