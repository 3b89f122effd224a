"""A setting that nothing reads is rejected or logged, with the component that reads it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from outlast.config import Config, FaultToleranceConfig, HealthConfig, InProcessRestartConfig
from outlast.config.launching import LAUNCHERS_OWN
from outlast.env import WorkerEnv
from outlast.errors import ConfigError
from outlast.session.environment import warn_of_missing_protection

ray = pytest.importorskip("ray", reason="groups of actors need Ray")
from outlast.ray import ActorGroup  # noqa: E402
from outlast.ray.train import TrainCallback  # noqa: E402

OTHERS: dict[str, Any] = {
    "calc_ft_timeouts": True,
    "state_directory": "there",
    "safety_factor": 2.0,
    "rank_termination_signal": "SIGTERM",
    "rank_termination_grace": 5.0,
    "max_no_progress_cycles": 2,
    "max_node_faults": 1,
    "max_restart_delay": 1.0,
    "min_nodes": 1,
    "node_heartbeat_timeout": 2.0,
    "shutdown_grace": 3.0,
    "exit_timeout": 7.0,
    "gpu_memory_reclaim_timeout": 4.0,
    "gpu_memory_tolerance_mb": 5.0,
    "gpu_memory_poll_interval": 6.0,
    "simulate_fault": True,
    "simulated_fault_type": "rank_hung",
    "simulated_fault_rank": 1,
    "simulated_fault_base_delay": 1.0,
}
"""Fields of the fault tolerance settings with a value other than their default, except for timeouts."""
READ_BY_TRAIN = {"rank_termination_signal", "rank_termination_grace", "max_no_progress_cycles", "shutdown_grace"}


def test_the_table_of_other_fields_is_complete() -> None:
    """Every field is either a timeout, which groups of actors use, or in the table."""
    timeouts = {
        field.name
        for field in dataclasses.fields(FaultToleranceConfig)
        if field.name not in OTHERS and field.name not in ("enable_ft_package", "num_warmup_iterations")
    }
    assert timeouts == {
        "initial_rank_heartbeat_timeout",
        "rank_heartbeat_timeout",
        "rank_section_timeouts",
        "rank_out_of_section_timeout",
    }


@pytest.mark.parametrize("name", OTHERS)
def test_actor_group_rejects_settings_that_it_does_not_read(name: str) -> None:
    """ActorGroup uses timeouts; any other field is rejected by name before anything starts."""
    with pytest.raises(ConfigError, match=rf"fault_tolerance\.{name} is not for ActorGroup"):
        ActorGroup(object, {"dp": 1}, fault_tolerance=FaultToleranceConfig(**{name: OTHERS[name]}))


@pytest.mark.parametrize("name", OTHERS)
def test_ray_train_rejects_settings_that_it_does_not_read(name: str) -> None:
    """TrainCallback accepts timeouts, the budget, the signal, the grace and simulated faults, and rejects the other
    fields."""
    config = FaultToleranceConfig(**{name: OTHERS[name]})
    if name in READ_BY_TRAIN or name.startswith("simulate"):
        assert getattr(TrainCallback(fault_tolerance=config).config.fault_tolerance, name) == OTHERS[name]
    else:
        with pytest.raises(ConfigError, match=f"{name} is not for Ray Train"):
            TrainCallback(fault_tolerance=config)


def test_ray_train_rejects_sections_that_it_does_not_read() -> None:
    """Limits of nodes and settings of a Wrapper do not apply to Ray Train's workers, and are rejected by name."""
    with pytest.raises(ConfigError, match=r"health\.commands is not for Ray Train"):
        TrainCallback(Config(health=HealthConfig(commands=("true",))))
    with pytest.raises(ConfigError, match="in_process_restart is not for Ray Train"):
        TrainCallback(Config(in_process_restart=InProcessRestartConfig(soft_timeout=5.0)))
    TrainCallback(Config(health=HealthConfig(process_group_interval=2)))


@pytest.mark.parametrize("name", LAUNCHERS_OWN)
def test_a_session_logs_settings_that_only_a_launcher_reads(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Outside of outlast run, a setting that only its agents apply is logged in one warning with the remedy; under
    outlast run it is not."""
    config = Config(fault_tolerance=FaultToleranceConfig(**{name: OTHERS[name]}))
    assert config.fault_tolerance is not None
    for place, is_logged in ((WorkerEnv(launcher="torchrun"), True), (WorkerEnv(board="b", config_file=""), False)):
        caplog.clear()
        warn_of_missing_protection(config, place, config.fault_tolerance, watches_signals=True)
        message = f"without effect here: fault_tolerance.{name} (start the script with outlast run)"
        assert (message in caplog.text) is is_logged


def test_learning_without_a_run_directory_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Learned timeouts need a directory to be stored in."""
    learns = FaultToleranceConfig(calc_ft_timeouts=True)
    for run_dir, is_logged in ((None, True), (str(tmp_path), False)):
        caplog.clear()
        config = Config(fault_tolerance=learns, run_dir=run_dir)
        warn_of_missing_protection(config, WorkerEnv(), learns, watches_signals=True)
        assert ("fault_tolerance.calc_ft_timeouts (what is learned is kept in run_dir" in caplog.text) is is_logged


def test_hangs_are_detected_by_default_under_an_agent(caplog: pytest.LogCaptureFixture) -> None:
    """Under outlast run hangs are detected without a setting; elsewhere a warning has the setting."""
    caplog.set_level(logging.WARNING)
    for place, is_off in ((WorkerEnv(launcher="torchrun"), True), (WorkerEnv(board="b", config_file=""), False)):
        caplog.clear()
        warn_of_missing_protection(Config(), place, FaultToleranceConfig(), watches_signals=True)
        assert ("a hung rank is not detected" in caplog.text) is is_off


def test_in_process_contradicts_a_disabled_wrapper() -> None:
    """in_process and in_process_restart.enabled=false contradict each other, and are rejected at construction."""
    with pytest.raises(ConfigError, match=r"in_process is on, but in_process_restart\.enabled is off"):
        Config(in_process=True, in_process_restart=InProcessRestartConfig(enabled=False))
