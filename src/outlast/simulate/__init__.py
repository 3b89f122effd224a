"""Predict what failures cost a run: a discrete-event simulation with the shipped policy deciding."""

from __future__ import annotations

from outlast.simulate.closed_form import ClosedForm, best_intervals, evaluate
from outlast.simulate.failures import FaultSchedule, draw_faults, read_trace
from outlast.simulate.run import SimulatedPart, SimulatedRun, simulate
from outlast.simulate.scenario import DrawnFault, RecoveryCosts, Scenario, SimulatedFault
from outlast.simulate.study import StudyResult, Sweep, parse_sweep, run_study, run_sweep

__all__ = [
    "ClosedForm",
    "DrawnFault",
    "FaultSchedule",
    "RecoveryCosts",
    "Scenario",
    "SimulatedFault",
    "SimulatedPart",
    "SimulatedRun",
    "StudyResult",
    "Sweep",
    "best_intervals",
    "draw_faults",
    "evaluate",
    "parse_sweep",
    "read_trace",
    "run_study",
    "run_sweep",
    "simulate",
]
