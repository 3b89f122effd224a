"""No setting is accepted for nothing: each field of each config changes what happens, or is refused by name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from pathlib import Path

import pytest
import restarting_proofs
import training_proofs
import watching_proofs
from scenes import Proof, Scene

import outlast.config
from outlast.config import (
    CheckpointConfig,
    Config,
    FaultToleranceConfig,
    HealthConfig,
    InProcessRestartConfig,
    PreemptionConfig,
    ReplicaDigestConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from outlast.config.training import RecoveryConfig

PROOFS: dict[type, dict[str, Proof]] = {
    CheckpointConfig: training_proofs.CHECKPOINT,
    Config: training_proofs.CONFIG,
    FaultToleranceConfig: watching_proofs.FAULT_TOLERANCE,
    HealthConfig: watching_proofs.HEALTH,
    InProcessRestartConfig: restarting_proofs.IN_PROCESS,
    PreemptionConfig: training_proofs.PREEMPTION,
    RecoveryConfig: restarting_proofs.RECOVERY,
    ReplicaDigestConfig: training_proofs.REPLICA_DIGEST,
    RerunStateMachineConfig: training_proofs.RERUN,
    StragglerDetectionConfig: restarting_proofs.STRAGGLER,
}


def configs() -> set[type]:
    """Return every config there is."""
    found = set()
    for module in pkgutil.iter_modules(outlast.config.__path__):
        for value in vars(importlib.import_module(f"outlast.config.{module.name}")).values():
            if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__name__.endswith("Config"):
                found.add(value)
    return found


def test_every_field_has_a_proof() -> None:
    """A field that is added to a config needs an entry here, that is, an effect; one that goes takes its entry too."""
    assert PROOFS.keys() == configs()
    for cls, proofs in PROOFS.items():
        fields = {field.name for field in dataclasses.fields(cls)}
        assert proofs.keys() == fields, f"{cls.__name__}: {proofs.keys() ^ fields}"


@pytest.mark.process
@pytest.mark.parametrize(
    ("cls", "name"), [pytest.param(cls, name, id=f"{cls.__name__}.{name}") for cls in PROOFS for name in PROOFS[cls]]
)
def test_setting_changes_something_or_is_refused(
    cls: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its proof, a function of this field's name in the table, shows what another value does."""
    PROOFS[cls][name](Scene(folder=tmp_path, patch=monkeypatch, log=caplog))
