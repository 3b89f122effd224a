"""Restart in process: a function that is called again on all ranks, in the same processes, when one of them fails.

See :class:`Wrapper`. It runs the function on the active ranks; the others are warm spares.
"""

from __future__ import annotations

from outlast.lazy import lazy_names

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
    "Wrapper": "outlast.inprocess.rank",
    "current_handle": "outlast.inprocess.call",
}

__all__ = list(_HOMES)

# On first use: a monitor process imports single modules of this package, and no torch.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
