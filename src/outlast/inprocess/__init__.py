"""Restart in process: a function that is called again on all ranks, in the same processes, when one of them fails.

See :class:`Wrapper`. It runs the function on the active ranks; the others are warm reserves.
"""

from __future__ import annotations

from outlast.lazy import lazy_names

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

# On first use: a monitor process imports single modules of this package, and no torch.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
