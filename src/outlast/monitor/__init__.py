"""Heartbeats and sections of workers, the watchdog that reads them, and what is found out about a hang."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.monitor.rank_monitor import RankMonitor

__all__ = ["RankMonitor"]


def __getattr__(name: str) -> Any:
    # On first use: the side process and the zygote import single modules of this package, and no more.
    if name == "RankMonitor":
        return importlib.import_module("outlast.monitor.rank_monitor").RankMonitor
    raise AttributeError(f"module 'outlast.monitor' has no attribute {name!r}")
