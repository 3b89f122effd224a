"""Invalid numbers: results that are not finite, replicas that differ, and what is done about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.numerics.nonfinite import FiniteCheck, NonFiniteAction, NonFiniteDetector
    from outlast.numerics.replay import ReplayableIterator
    from outlast.numerics.replica_digest import Agreement, Replica, ReplicaDigest
    from outlast.numerics.rerun_machine import RerunDecision, RerunStateMachine
    from outlast.numerics.validation import Differences
    from outlast.policy.rerun import Action, Diagnosis, Finding, Replay

_HOMES = {
    "outlast.numerics.nonfinite": ("FiniteCheck", "NonFiniteAction", "NonFiniteDetector"),
    "outlast.numerics.replay": ("ReplayableIterator",),
    "outlast.numerics.replica_digest": ("Agreement", "Replica", "ReplicaDigest"),
    "outlast.numerics.rerun_machine": ("RerunDecision", "RerunStateMachine"),
    "outlast.numerics.validation": ("Differences",),
    "outlast.policy.rerun": ("Action", "Diagnosis", "Finding", "Replay"),
}

__all__ = [
    "Action",
    "Agreement",
    "Diagnosis",
    "Differences",
    "Finding",
    "FiniteCheck",
    "NonFiniteAction",
    "NonFiniteDetector",
    "Replay",
    "ReplayableIterator",
    "Replica",
    "ReplicaDigest",
    "RerunDecision",
    "RerunStateMachine",
]

# On first use: some importers of these modules do not need torch.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
