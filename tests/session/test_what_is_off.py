"""What does not protect a run is said in one line, with what would."""

from __future__ import annotations

import logging

import pytest

from outlast.config import CheckpointConfig, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.session.place import has_near_tier, say_what_is_off


def test_near_saves_without_a_near_tier_are_said_to_be_off(caplog: pytest.LogCaptureFixture) -> None:
    """An interval for near saves that nothing near can keep is no silent nothing: one warning names the setting, and
    the two ways to have it."""
    checkpoint = CheckpointConfig(directory="x", non_persistent_save_interval=5)
    with caplog.at_level(logging.WARNING):
        say_what_is_off(checkpoint, WorkerEnv(launcher="torchrun"), FaultToleranceConfig(), watches_signals=True)
    (record,) = caplog.records
    for text in ("non_persistent_save_interval", "checkpoint.local_directory", "outlast run"):
        assert text in record.getMessage()


def test_an_agents_memory_is_a_near_tier() -> None:
    """Under an agent near saves need no folder; without one they do."""
    checkpoint = CheckpointConfig(directory="x", non_persistent_save_interval=5)
    assert has_near_tier(checkpoint, WorkerEnv(writer="name"))
    assert not has_near_tier(checkpoint, WorkerEnv())
    assert has_near_tier(CheckpointConfig(local_directory="x"), WorkerEnv())
