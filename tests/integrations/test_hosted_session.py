"""What the trainers' adapters share: settings, kept random numbers, the finished flag."""

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


def test_settings_are_given_as_object_as_file_or_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``config=`` takes a config or a file, and falls back to the file of ``outlast run``."""
    monkeypatch.delenv("OUTLAST_CONFIG_FILE", raising=False)
    path = tmp_path / "outlast.toml"
    path.write_text("[checkpoint]\ndirectory = 'ckpt'\n")
    own = outlast.Config(seed=4)
    assert hosted_config(own) is own
    assert hosted_config(path) == hosted_config(str(path))
    assert hosted_config(path).checkpoint == outlast.CheckpointConfig(directory="ckpt")
    assert hosted_config(None) == outlast.Config()
    monkeypatch.setenv("OUTLAST_CONFIG_FILE", str(path))
    assert hosted_config(None) == hosted_config(path)
    with pytest.raises(ConfigError, match=r"^config= takes an outlast\.Config or the path.*, not dict$"):
        hosted_config({"seed": 1})  # type: ignore[arg-type]


def test_changed_fault_tolerance_keeps_what_was_given() -> None:
    """An adapter's setting is added to the user's."""
    given = outlast.Config(fault_tolerance=outlast.FaultToleranceConfig(safety_factor=3.0))
    changed = with_fault_tolerance(given, calc_ft_timeouts=True).fault_tolerance
    assert changed is not None
    assert changed.given == {"safety_factor": 3.0, "calc_ft_timeouts": True}


def test_who_needs_a_directory_is_told_so() -> None:
    """The refusal names who needs a directory, and how to give one."""
    with pytest.raises(ConfigError, match=r"^It has nowhere to save to: give it config=.*directory"):
        require_directory(outlast.Config(), "It")
    require_directory(outlast.Config(checkpoint=outlast.CheckpointConfig(directory="a")), "It")


def test_random_numbers_come_back_once() -> None:
    """What is kept is put back once; after that the generators go on by themselves."""
    kept = KeptRandom()
    kept.keep()
    first = random.random(), torch.rand(1).item()
    assert kept.is_kept
    kept.put_back()
    assert not kept.is_kept
    assert (random.random(), torch.rand(1).item()) == first
    kept.put_back()
    assert (random.random(), torch.rand(1).item()) != first


def test_the_finished_flag_is_made_where_the_scheduler_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file that the variable names comes into being, and goes when training goes on; without a variable nothing
    happens; one that cannot be made is an error in the log, not one of training."""
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
