"""Fault injection: planned, the same for the same seed, recorded when they struck."""

from __future__ import annotations

from outlast.chaos.armed import ArmedFaults, FiredFault, SimulatedError
from outlast.chaos.plan import Fault, FaultKind, FaultPlan, FaultTarget, FaultTier, MissingFault, verify_fired

__all__ = [
    "ArmedFaults",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultTarget",
    "FaultTier",
    "FiredFault",
    "MissingFault",
    "SimulatedError",
    "verify_fired",
]
