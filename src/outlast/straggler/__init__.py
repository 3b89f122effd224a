"""Slow ranks: timing of sections, comparison of ranks, and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.policy.slowness import Basis, RankTimings, Slowness, Timing
    from outlast.policy.stragglers import Findings, MachineDecision, Scope, SlownessCause, Straggler, WaitingRank
    from outlast.straggler.detector import StragglerDetector
    from outlast.straggler.recorder import StepSection
    from outlast.straggler.report import Report

_HOMES = {
    "outlast.policy.slowness": ("Basis", "RankTimings", "Slowness", "Timing"),
    "outlast.policy.stragglers": ("Findings", "MachineDecision", "Scope", "SlownessCause", "Straggler", "WaitingRank"),
    "outlast.straggler.detector": ("StragglerDetector",),
    "outlast.straggler.recorder": ("StepSection",),
    "outlast.straggler.report": ("Report",),
}

__all__ = [
    "Basis",
    "Findings",
    "MachineDecision",
    "RankTimings",
    "Report",
    "Scope",
    "Slowness",
    "SlownessCause",
    "StepSection",
    "Straggler",
    "StragglerDetector",
    "Timing",
    "WaitingRank",
]

# On first use: a report can be read without torch.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
