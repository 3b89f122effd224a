"""What does not protect a run is said in one line, with what would."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig, Config, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.session.environment import has_near_tier, warn_of_missing_protection


def test_near_saves_without_a_near_tier_are_said_to_be_off(caplog: pytest.LogCaptureFixture) -> None:
    """An interval for near saves that nothing near can keep is no silent nothing: one warning names the setting, and
    the two ways to have it."""
    checkpoint = CheckpointConfig(directory="x", non_persistent_save_interval=5)
    with caplog.at_level(logging.WARNING):
        warn_of_missing_protection(
            Config(checkpoint=checkpoint), WorkerEnv(launcher="torchrun"), FaultToleranceConfig(), watches_signals=True
        )
    (record,) = caplog.records
    for text in ("non_persistent_save_interval", "checkpoint.local_directory", "outlast run"):
        assert text in record.getMessage()


def test_an_agents_memory_is_a_near_tier() -> None:
    """Under an agent near saves need no folder; without one they do."""
    checkpoint = CheckpointConfig(directory="x", non_persistent_save_interval=5)
    assert has_near_tier(checkpoint, WorkerEnv(writer="name"))
    assert not has_near_tier(checkpoint, WorkerEnv())
    assert has_near_tier(CheckpointConfig(local_directory="x"), WorkerEnv())


def test_fully_parallel_is_said_to_mean_atomic(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Megatron's way to lay out local files is taken, and one line says which other one is used."""
    with caplog.at_level(logging.INFO, logger="outlast"):
        for algo in ("fully_parallel", "atomic"):
            config = CheckpointConfig(local_directory=str(tmp_path), non_persistent_local_ckpt_algo=algo)
            CheckpointManager(config).close()
    (said,) = [record.getMessage() for record in caplog.records if "fully_parallel" in record.getMessage()]
    assert "understood as atomic: each rank's local file holds all of its own state" in said
