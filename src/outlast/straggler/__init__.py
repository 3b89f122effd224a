"""Slow ranks: what is timed, how ranks are compared, and what a report contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.policy.machines import MachineVerdict, SlownessCause
    from outlast.policy.slowness import Basis, Slowness
    from outlast.policy.stragglers import Findings, Straggler, WaitingRank
    from outlast.policy.timings import RankTimings, Timing
    from outlast.straggler.detector import StragglerDetector
    from outlast.straggler.recorder import StepSection
    from outlast.straggler.report import Report

_HOMES = {
    "Basis": "outlast.policy.slowness",
    "Findings": "outlast.policy.stragglers",
    "MachineVerdict": "outlast.policy.machines",
    "RankTimings": "outlast.policy.timings",
    "Report": "outlast.straggler.report",
    "Slowness": "outlast.policy.slowness",
    "SlownessCause": "outlast.policy.machines",
    "StepSection": "outlast.straggler.recorder",
    "Straggler": "outlast.policy.stragglers",
    "StragglerDetector": "outlast.straggler.detector",
    "Timing": "outlast.policy.timings",
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
