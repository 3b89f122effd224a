"""Predict what failures cost a run: a discrete-event simulation with the shipped policy deciding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.simulate.failures import FaultSchedule, draw_faults, read_trace
    from outlast.simulate.run import SimulatedRun, simulate
    from outlast.simulate.scenario import DrawnFault, RecoveryCosts, Scenario, SimulatedFault
    from outlast.simulate.study import Study, run_study

_HOMES = {
    "outlast.simulate.failures": ("FaultSchedule", "draw_faults", "read_trace"),
    "outlast.simulate.run": ("SimulatedRun", "simulate"),
    "outlast.simulate.scenario": ("DrawnFault", "RecoveryCosts", "Scenario", "SimulatedFault"),
    "outlast.simulate.study": ("Study", "run_study"),
}

__all__ = [
    "DrawnFault",
    "FaultSchedule",
    "RecoveryCosts",
    "Scenario",
    "SimulatedFault",
    "SimulatedRun",
    "Study",
    "draw_faults",
    "read_trace",
    "run_study",
    "simulate",
]

# On first use: the benchmarks use this package's result format without simulating.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
