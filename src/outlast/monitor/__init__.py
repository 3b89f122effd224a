"""Heartbeats and sections of workers, the watchdog that reads them, and what is found out about a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.monitor.rank_monitor import RankMonitor, SectionTimer

__all__ = ["RankMonitor", "SectionTimer"]

# On first use: the agent process and the zygote import single modules of this package, and no more.
__getattr__, __dir__ = lazy_names(__name__, {"outlast.monitor.rank_monitor": __all__})
