"""Fault injection: planned, reproducible from a seed, and recorded in the journal."""

from __future__ import annotations

from outlast.chaos.armed import ArmedFaults, FiredFault
from outlast.chaos.netns import NodeNetwork
from outlast.chaos.plan import Fault, FaultKind, FaultPlan, FaultTarget, FaultTier, MissingFault, verify_fired
from outlast.chaos.process_faults import SimulatedError

__all__ = [
    "ArmedFaults",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultTarget",
    "FaultTier",
    "FiredFault",
    "MissingFault",
    "NodeNetwork",
    "SimulatedError",
    "verify_fired",
]
