"""Health checks of a node, its devices and a group of ranks, with results as data.

The names below are imported on first use: an agent checks its node without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.health.devices import check_gpu
    from outlast.health.node import check_node
    from outlast.health.probing import CheckResult, Status, has_failed
    from outlast.health.process_group import ProcessGroupCheck, check_process_group

_HOMES = {
    "outlast.health.devices": ("check_gpu",),
    "outlast.health.node": ("check_node",),
    "outlast.health.probing": ("CheckResult", "Status", "has_failed"),
    "outlast.health.process_group": ("ProcessGroupCheck", "check_process_group"),
}

__all__ = [
    "CheckResult",
    "ProcessGroupCheck",
    "Status",
    "check_gpu",
    "check_node",
    "check_process_group",
    "has_failed",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
