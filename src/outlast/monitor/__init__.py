"""Heartbeats and sections of workers, the watchdog that reads them, and the examination of a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.monitor.rank_monitor import RankMonitor, SectionTimer

__all__ = ["RankMonitor", "SectionTimer"]

# Lazy: the agent process and the fork server import single modules of this package.
__getattr__, __dir__ = lazy_names(__name__, {"outlast.monitor.rank_monitor": __all__})
