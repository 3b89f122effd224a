"""Faults on purpose: planned, the same for the same seed, on record when they struck."""

from __future__ import annotations

from outlast.chaos.armed import ArmedFaults
from outlast.chaos.fault import Fault, FaultKind, FaultTarget
from outlast.chaos.plan import FaultPlan
from outlast.chaos.process_faults import SimulatedError
from outlast.chaos.verification import MissingFault, verify_fired

__all__ = [
    "ArmedFaults",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultTarget",
    "MissingFault",
    "SimulatedError",
    "verify_fired",
]
