"""Slow ranks: what is timed, how ranks are compared, and what a report says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.straggler.detector import StragglerDetector
    from outlast.straggler.report import Report

_HOMES = {
    "Report": "outlast.straggler.report",
    "StragglerDetector": "outlast.straggler.detector",
}

__all__ = ["Report", "StragglerDetector"]

# On first use: a report can be read without torch.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
