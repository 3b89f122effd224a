"""Slow ranks: what is timed, how ranks are compared, and what a report says."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.straggler.detector import StragglerDetector
    from outlast.straggler.report import Report

_HOMES = {
    "Report": "outlast.straggler.report",
    "StragglerDetector": "outlast.straggler.detector",
}

__all__ = ["Report", "StragglerDetector"]


def __getattr__(name: str) -> Any:
    # On first use: a report can be read without torch.
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'outlast.straggler' has no attribute {name!r}")
