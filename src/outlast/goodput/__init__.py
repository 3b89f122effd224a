"""Goodput: how a run's wall time was spent, from its journal alone."""

from __future__ import annotations

from outlast.goodput.account import (
    CycleSpan,
    IncidentCost,
    JobSpan,
    LoadSpan,
    NodeClock,
    NodeSpan,
    Part,
    SaveSpan,
    Segment,
    SlowRanksWindow,
    Statistics,
    StepSample,
    Warned,
)
from outlast.goodput.ledger import Ledger

__all__ = [
    "CycleSpan",
    "IncidentCost",
    "JobSpan",
    "Ledger",
    "LoadSpan",
    "NodeClock",
    "NodeSpan",
    "Part",
    "SaveSpan",
    "Segment",
    "SlowRanksWindow",
    "Statistics",
    "StepSample",
    "Warned",
]
