"""All settings, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.config.base import Settings, require, settle_sections
from outlast.config.checkpoint import CheckpointConfig
from outlast.config.launching import FaultToleranceConfig, HealthConfig, PreemptionConfig
from outlast.config.training import (
    InProcessRestartConfig,
    RecoveryConfig,
    ReplicaDigestConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "FaultToleranceConfig",
    "HealthConfig",
    "InProcessRestartConfig",
    "PreemptionConfig",
    "RecoveryConfig",
    "ReplicaDigestConfig",
    "RerunStateMachineConfig",
    "StragglerDetectionConfig",
]


class Config(Settings):
    """All settings of a session. A section may also be given as a mapping, as in a file.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    run_dir: str | None = None
    """The run directory (journal, learned timeouts, stacks); none = the launcher's, and without a launcher no
    journal."""

    checkpoint: CheckpointConfig | None = None
    """Where and how often to save; none = nothing is saved or restored."""

    fault_tolerance: FaultToleranceConfig | None = None
    """Timeouts and budgets; none = those of ``outlast run``, else the defaults. Field by field, ``outlast run``'s
    ``--ft-*`` options come before its ``--config`` file, and that before this."""

    rerun_state_machine: RerunStateMachineConfig | None = None
    """Which results of a step that the script validates are invalid, and the action on an invalid one; none = the
    defaults."""

    replica_digest: ReplicaDigestConfig | None = None
    """How often the replicas of a data-parallel group are compared; none = never."""

    straggler_detection: StragglerDetectionConfig | None = None
    """Whether slow ranks are detected, and the action on a detected one; none = no detection."""

    in_process: bool = False
    """The session runs inside a function that ``outlast.inprocess.Wrapper`` calls, and ends with each call at an
    in-process restart; also on if ``in_process_restart.enabled`` is on."""

    in_process_restart: InProcessRestartConfig | None = None
    """Settings of the ``Wrapper`` that is created with this config: ``Wrapper("outlast.toml")``; none = the
    defaults."""

    preemption: PreemptionConfig | None = None
    """Which events request a shutdown, and how long the shutdown may take; none = the defaults, which handle
    SIGTERM."""

    health: HealthConfig | None = None
    """Health requirements of a node, for `outlast doctor` and `outlast run --config`, and the interval of the check
    that all ranks of the process group respond; none = the defaults."""

    fault_plan: str | None = None
    """File (TOML, YAML or JSON) with a plan of faults to inject in a test; none = no faults."""

    seed: int | None = None
    """Seed of the random numbers of Python, NumPy and torch, offset by the rank; none = the script seeds them."""

    @classmethod
    def _settle(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        settled = settle_sections(cls, values)
        restart = settled.get("in_process_restart")
        return {**settled, "in_process": True} if restart is not None and restart.enabled else settled

    def _check(self) -> None:
        restart = self.in_process_restart
        require(
            not self.in_process or restart is None or restart.given.get("enabled") is not False,
            "in_process is on, but in_process_restart.enabled is off: the Wrapper would protect nothing; leave one out",
        )
        require(self.seed is None or self.seed >= 0, f"seed={self.seed} must not be negative")
