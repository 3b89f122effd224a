"""Protections that are off are logged in one line, with the setting that enables them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import outlast
from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig, Config, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.session.environment import has_node_local_tier, warn_of_missing_protection


def test_node_local_saves_without_a_tier_are_logged_as_off(caplog: pytest.LogCaptureFixture) -> None:
    """An interval for node-local saves without a node-local tier logs one warning with the setting and the two ways
    to get a tier."""
    checkpoint = CheckpointConfig(directory="x", non_persistent_save_interval=5)
    with caplog.at_level(logging.WARNING):
        warn_of_missing_protection(
            Config(checkpoint=checkpoint), WorkerEnv(launcher="torchrun"), FaultToleranceConfig(), watches_signals=True
        )
    (record,) = caplog.records
    for text in ("non_persistent_save_interval", "checkpoint.local_directory", "outlast run"):
        assert text in record.getMessage()


def test_an_agents_memory_is_a_node_local_tier() -> None:
    """Under an agent node-local saves need no folder; without an agent they do."""
    checkpoint = CheckpointConfig(directory="x", non_persistent_save_interval=5)
    assert has_node_local_tier(checkpoint, WorkerEnv(writer="name"))
    assert not has_node_local_tier(checkpoint, WorkerEnv())
    assert has_node_local_tier(CheckpointConfig(local_directory="x"), WorkerEnv())


def test_fully_parallel_is_logged_as_atomic(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Megatron's layout of local files is accepted, and one line has the layout that is used."""
    with caplog.at_level(logging.INFO, logger="outlast"):
        for algo in ("fully_parallel", "atomic"):
            config = CheckpointConfig(local_directory=str(tmp_path), non_persistent_local_ckpt_algo=algo)
            CheckpointManager(config).close()
    (messages,) = [record.getMessage() for record in caplog.records if "fully_parallel" in record.getMessage()]
    assert "treated as atomic: each rank's local file contains the complete state of that rank" in messages


def test_a_session_resumes_at_the_trainers_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The session begins at the step that the trainer restored, which counts as saved, and logs no lack of
    checkpoints. With checkpoint settings both arguments are errors with the argument's name."""
    with outlast.init(outlast.Config(), saved_by="the trainer") as session:
        assert session.restore({}, restored_iteration=7) == session.iteration == 7
        session.begin_step()
        assert session.end_step().iteration == 8
    assert "nothing is saved or restored" not in caplog.text
    saves = outlast.Config(checkpoint=outlast.CheckpointConfig(directory=str(tmp_path)))
    with pytest.raises(ConfigError, match="saved_by='the trainer' contradicts the checkpoint settings"):
        outlast.init(saves, saved_by="the trainer")
    with outlast.init(saves) as session, pytest.raises(ConfigError, match="restored_iteration=7 has no effect"):
        session.restore({}, restored_iteration=7)


OTHERS = ["step_1200", "iter_0000100", "checkpoint-500", "last.ckpt", "global_step20"]


@pytest.mark.parametrize("name", [*OTHERS, "", "step-8.tmp-4-0"])
def test_checkpoints_of_another_system_are_logged(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training that begins at iteration 0 next to a checkpoint of another system logs one warning with its name;
    other files and an interrupted save of outlast cause none."""
    (tmp_path / (name or "logs")).mkdir()
    with outlast.init(outlast.Config(checkpoint=CheckpointConfig(directory=str(tmp_path)))) as session:
        assert session.restore({}) == 0
    warnings = [record.getMessage() for record in caplog.records if "nothing was loaded" in record.getMessage()]
    assert len(warnings) == (name in OTHERS)
    assert name not in OTHERS or name in warnings[0]
