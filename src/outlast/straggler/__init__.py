"""Slow ranks: what is timed, how ranks are compared, and what a report contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.policy.slowness import Basis, RankTimings, Slowness, Timing
    from outlast.policy.stragglers import Findings, MachineVerdict, SlownessCause, Straggler, WaitingRank
    from outlast.straggler.detector import StragglerDetector
    from outlast.straggler.recorder import StepSection
    from outlast.straggler.report import Report

_HOMES = {
    "Basis": "outlast.policy.slowness",
    "Findings": "outlast.policy.stragglers",
    "MachineVerdict": "outlast.policy.stragglers",
    "RankTimings": "outlast.policy.slowness",
    "Report": "outlast.straggler.report",
    "Slowness": "outlast.policy.slowness",
    "SlownessCause": "outlast.policy.stragglers",
    "StepSection": "outlast.straggler.recorder",
    "Straggler": "outlast.policy.stragglers",
    "StragglerDetector": "outlast.straggler.detector",
    "Timing": "outlast.policy.slowness",
    "WaitingRank": "outlast.policy.stragglers",
}

__all__ = [
    "Basis",
    "Findings",
    "MachineVerdict",
    "RankTimings",
    "Report",
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
