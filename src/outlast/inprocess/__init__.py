"""Restart in process: a function that is called again on all ranks, in the same processes, when one of them fails.

See :class:`Wrapper`. It runs the function on the active ranks; the others are warm spares.
"""

from __future__ import annotations

from itertools import chain

from outlast.lazy import lazy_names

_HOMES = {
    "outlast.inprocess.call": ("Handle", "RestartRequested", "current_handle"),
    "outlast.inprocess.plugins": (
        "ActiveWorldSizeDivisibleBy",
        "Compose",
        "FaultCounter",
        "FillGaps",
        "Level",
        "MaxActiveWorldSize",
        "RetryController",
        "ShiftRanks",
        "State",
        "Tree",
    ),
    "outlast.inprocess.rank": ("RankLeft", "Wrapper"),
    "outlast.inprocess.restore": ("Restore",),
    "outlast.policy.rank_assignment": ("Assignment", "Member"),
}

__all__ = list(chain.from_iterable(_HOMES.values()))

# On first use: an agent process imports single modules of this package, and no torch.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
