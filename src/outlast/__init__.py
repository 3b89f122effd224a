"""outlast keeps long distributed PyTorch training runs alive.

The names below are imported on first use, so that ``import outlast`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import lazy_names

if TYPE_CHECKING:
    from outlast.config import (
        CheckpointConfig,
        Config,
        FaultToleranceConfig,
        InProcessRestartConfig,
        PreemptionConfig,
        RerunStateMachineConfig,
        StragglerDetectionConfig,
    )
    from outlast.errors import ExitReason, OutlastError
    from outlast.session import Attempt, Session, StepDecision, init

from outlast.version import __version__

_HOMES = {
    "outlast.config": (
        "CheckpointConfig",
        "Config",
        "FaultToleranceConfig",
        "InProcessRestartConfig",
        "PreemptionConfig",
        "RerunStateMachineConfig",
        "StragglerDetectionConfig",
    ),
    "outlast.errors": ("ExitReason", "OutlastError"),
    "outlast.session": ("Attempt", "Session", "StepDecision", "init"),
}

__all__ = [
    "Attempt",
    "CheckpointConfig",
    "Config",
    "ExitReason",
    "FaultToleranceConfig",
    "InProcessRestartConfig",
    "OutlastError",
    "PreemptionConfig",
    "RerunStateMachineConfig",
    "Session",
    "StepDecision",
    "StragglerDetectionConfig",
    "__version__",
    "init",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
