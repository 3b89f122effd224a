"""What does not protect a run is said in one line, with what would."""

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
    assert has_node_local_tier(checkpoint, WorkerEnv(writer="name"))
    assert not has_node_local_tier(checkpoint, WorkerEnv())
    assert has_node_local_tier(CheckpointConfig(local_directory="x"), WorkerEnv())


def test_fully_parallel_is_said_to_mean_atomic(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Megatron's way to lay out local files is taken, and one line says which other one is used."""
    with caplog.at_level(logging.INFO, logger="outlast"):
        for algo in ("fully_parallel", "atomic"):
            config = CheckpointConfig(local_directory=str(tmp_path), non_persistent_local_ckpt_algo=algo)
            CheckpointManager(config).close()
    (said,) = [record.getMessage() for record in caplog.records if "fully_parallel" in record.getMessage()]
    assert "treated as atomic: each rank's local file contains the complete state of that rank" in said


def test_a_session_whose_trainer_saves_continues_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It begins at the step that the trainer restored, which counts as saved, and reports no lack of checkpoints. With
    checkpoint settings both arguments are refused by name."""
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
def test_checkpoints_of_another_system_are_not_passed_over_in_silence(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training that begins at iteration 0 next to a checkpoint that is not outlast's logs one warning with its name;
    other files, and a save of outlast's that was cut short, cause none."""
    (tmp_path / (name or "logs")).mkdir()
    with outlast.init(outlast.Config(checkpoint=CheckpointConfig(directory=str(tmp_path)))) as session:
        assert session.restore({}) == 0
    told = [record.getMessage() for record in caplog.records if "nothing was loaded" in record.getMessage()]
    assert len(told) == (name in OTHERS)
    assert name not in OTHERS or name in told[0]
