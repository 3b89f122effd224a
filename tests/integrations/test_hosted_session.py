"""Shared behaviour of the trainers' adapters: settings, restored random numbers, and the finished flag."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import outlast
from outlast.errors import ConfigError
from outlast.integrations.hosted_session import (
    KeptRandom,
    clear_finished_flag,
    hosted_config,
    require_directory,
    touch_finished_flag,
    with_fault_tolerance,
)


def test_settings_come_from_object_file_or_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``config=`` accepts a config or a file, and falls back to the file of ``outlast run``."""
    monkeypatch.delenv("OUTLAST_CONFIG_FILE", raising=False)
    path = tmp_path / "outlast.toml"
    path.write_text("[checkpoint]\ndirectory = 'ckpt'\n")
    config = outlast.Config(seed=4)
    assert hosted_config(config) is config
    assert hosted_config(path) == hosted_config(str(path))
    assert hosted_config(path).checkpoint == outlast.CheckpointConfig(directory="ckpt")
    assert hosted_config(None) == outlast.Config()
    monkeypatch.setenv("OUTLAST_CONFIG_FILE", str(path))
    assert hosted_config(None) == hosted_config(path)
    with pytest.raises(ConfigError, match=r"^config= takes an outlast\.Config or the path.*, not dict$"):
        hosted_config({"seed": 1})  # type: ignore[arg-type]


def test_adapter_setting_keeps_the_users_settings() -> None:
    """An adapter's setting is added to the user's settings."""
    given = outlast.Config(fault_tolerance=outlast.FaultToleranceConfig(safety_factor=3.0))
    changed = with_fault_tolerance(given, calc_ft_timeouts=True).fault_tolerance
    assert changed is not None
    assert changed.given == {"safety_factor": 3.0, "calc_ft_timeouts": True}


def test_missing_directory_is_rejected_with_its_user() -> None:
    """The error contains the component that needs a directory, and the remedy."""
    with pytest.raises(ConfigError, match=r"^It has nowhere to save to: give it config=.*directory"):
        require_directory(outlast.Config(), "It")
    require_directory(outlast.Config(checkpoint=outlast.CheckpointConfig(directory="a")), "It")


def test_random_state_is_restored_once() -> None:
    """A saved random state is restored once; after that the generators continue normally."""
    saved = KeptRandom()
    saved.keep()
    first = random.random(), torch.rand(1).item()
    assert saved.is_kept
    saved.put_back()
    assert not saved.is_kept
    assert (random.random(), torch.rand(1).item()) == first
    saved.put_back()
    assert (random.random(), torch.rand(1).item()) != first


def test_finished_flag_file_is_created_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file of the environment variable is created, and removed when training continues. Without the variable
    nothing happens; a file that cannot be created is logged as an error and does not stop training."""
    monkeypatch.delenv("FAULT_TOL_FINISHED_FLAG_FILE", raising=False)
    touch_finished_flag()
    flag = tmp_path / "flags" / "finished"
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    touch_finished_flag()
    assert flag.exists()
    clear_finished_flag()
    clear_finished_flag()
    assert not flag.exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "file" / "flag"))
    touch_finished_flag()
    assert "cannot be made" in caplog.text
