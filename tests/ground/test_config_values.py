"""Invalid and contradictory config values are rejected in one line that states the change to make."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from outlast.config import (
    CheckpointConfig,
    Config,
    FaultToleranceConfig,
    InProcessRestartConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from outlast.config.base import describe_fields, from_mapping
from outlast.errors import ConfigError

BAD = [
    (FaultToleranceConfig, {"rank_heartbeat_timeout": -1.0}, "rank_heartbeat_timeout=-1.0 must be above 0"),
    (FaultToleranceConfig, {"rank_heartbeat_timeout": math.nan}, "must be finite"),
    (FaultToleranceConfig, {"rank_section_timeouts": {"step": 0.0}}, "rank_section_timeouts['step']=0.0"),
    (FaultToleranceConfig, {"rank_section_timeouts": {"step": math.inf}}, "must be finite"),
    (FaultToleranceConfig, {"rank_section_timeouts": {"s" * 40: 1.0}}, "1 to 39 bytes; shorten it"),
    (FaultToleranceConfig, {"rank_out_of_section_timeout": 0.0}, "rank_out_of_section_timeout=0.0"),
    (FaultToleranceConfig, {"safety_factor": 0.5}, "safety_factor=0.5 must be at least 1"),
    (FaultToleranceConfig, {"num_warmup_iterations": -1}, "num_warmup_iterations=-1"),
    (FaultToleranceConfig, {"max_no_progress_cycles": 0}, "max_no_progress_cycles=0 must be at least 1"),
    (FaultToleranceConfig, {"max_node_faults": -1}, "max_node_faults=-1"),
    (FaultToleranceConfig, {"min_nodes": 0}, "min_nodes=0 must be at least 1"),
    (FaultToleranceConfig, {"shutdown_grace": -1.0}, "shutdown_grace=-1.0"),
    (FaultToleranceConfig, {"node_heartbeat_timeout": 0.0}, "node_heartbeat_timeout=0.0"),
    (FaultToleranceConfig, {"gpu_memory_reclaim_timeout": -1.0}, "gpu_memory_reclaim_timeout=-1.0 must not be"),
    (FaultToleranceConfig, {"gpu_memory_tolerance_mb": -1.0}, "gpu_memory_tolerance_mb=-1.0"),
    (FaultToleranceConfig, {"gpu_memory_poll_interval": 0.0}, "gpu_memory_poll_interval=0.0 must be above 0 seconds"),
    (FaultToleranceConfig, {"rank_termination_signal": "SIGWHAT"}, "is not a signal; write for example SIGKILL"),
    (FaultToleranceConfig, {"simulated_fault_type": "rank_lost"}, "rank_hung, rank_killed or random"),
    (FaultToleranceConfig, {"simulated_fault_rank": -1}, "simulated_fault_rank=-1"),
    (FaultToleranceConfig, {"simulated_fault_base_delay": -1.0}, "simulated_fault_base_delay=-1.0"),
    (
        FaultToleranceConfig,
        {"initial_rank_heartbeat_timeout": 5.0, "rank_heartbeat_timeout": 10.0},
        "initial_rank_heartbeat_timeout=5.0 must be at least rank_heartbeat_timeout=10.0",
    ),
    (CheckpointConfig, {"directory": ""}, "directory must not be empty"),
    (CheckpointConfig, {"directory": "/ck\udcff"}, "is not UTF-8, as what is written about it must be; name another"),
    (CheckpointConfig, {"local_directory": "/ck\udcff"}, "local_directory='/ck\\udcff' is not UTF-8"),
    (CheckpointConfig, {"directory": "x", "save_interval": -1}, "save_interval=-1"),
    (CheckpointConfig, {"directory": "x", "most_recent_k": 1}, "must be at least 2, or -1 to keep all"),
    (CheckpointConfig, {"directory": "x", "most_recent_k": 0}, "most_recent_k=0"),
    (CheckpointConfig, {"directory": "x", "save_timeout": 0.0}, "save_timeout=0.0"),
    (CheckpointConfig, {"directory": "x", "ckpt_format": "zarr"}, "written in the format of torch.distributed.checkpo"),
    (CheckpointConfig, {"directory": "x", "non_persistent_local_ckpt_algo": "x"}, "must be atomic or fully_parallel"),
    (CheckpointConfig, {"directory": "x", "non_persistent_ckpt_type": "ram"}, "'ram' must be local or in_memory"),
    (CheckpointConfig, {"directory": "x", "non_persistent_ckpt_type": "local"}, "needs local_directory"),
    (
        CheckpointConfig,
        {"local_directory": "x", "non_persistent_ckpt_type": "in_memory"},
        "contradicts local_directory='x'",
    ),
    (
        CheckpointConfig,
        {
            "directory": "x",
            "non_persistent_ckpt_type": "global",
            "save_interval": 1000,
            "non_persistent_save_interval": 100,
        },
        "write save_interval=100, and save_retain_interval=1000",
    ),
    (CheckpointConfig, {"directory": "x", "max_consecutive_save_failures": -1}, "must not be negative"),
    (RerunStateMachineConfig, {"rerun_mode": "on"}, "disabled, validate_results or report_determinism_stats"),
    (RerunStateMachineConfig, {"error_injection_type": "nan"}, "persistent_error or correct_result"),
    (RerunStateMachineConfig, {"spiky_loss_factor": 1.0}, "spiky_loss_factor=1.0 must be above 1"),
    (RerunStateMachineConfig, {"spiky_loss_factor": math.inf}, "must be finite"),
    (RerunStateMachineConfig, {"spike_warmup": 0}, "spike_warmup=0"),
    (RerunStateMachineConfig, {"spike_window": 99}, "spike_window=99 must be at least spike_warmup=100"),
    (RerunStateMachineConfig, {"max_same_device_reruns": -1}, "max_same_device_reruns=-1"),
    (RerunStateMachineConfig, {"error_injection_rate": -1}, "error_injection_rate=-1"),
    (
        RerunStateMachineConfig,
        {"rerun_mode": "disabled", "check_for_spiky_loss": True},
        "check_for_spiky_loss is on, but rerun_mode='disabled' judges nothing",
    ),
    (
        RerunStateMachineConfig,
        {"rerun_mode": "report_determinism_stats", "error_injection_rate": 5},
        "error_injection_rate=5, but rerun_mode='report_determinism_stats'",
    ),
    (
        RerunStateMachineConfig,
        {"check_for_nan_in_loss": False, "error_injection_rate": 5},
        "check_for_nan_in_loss is off",
    ),
    (InProcessRestartConfig, {"soft_timeout": 90.0}, "soft_timeout=90.0 must be smaller than hard_timeout=90.0"),
    (InProcessRestartConfig, {"hard_timeout": 120.0}, "hard_timeout=120.0 must be smaller than barrier_timeout=120.0"),
    (InProcessRestartConfig, {"heartbeat_interval": 60.0}, "heartbeat_interval=60.0 must be smaller than heartbeat_t"),
    (InProcessRestartConfig, {"heartbeat_timeout": 121.0}, "heartbeat_timeout=121.0 must be smaller than barrier_ti"),
    (
        InProcessRestartConfig,
        {"monitor_process_interval": 60.0, "soft_timeout": 61.0},
        "monitor_process_interval=60.0 must be smaller than heartbeat_timeout=60.0",
    ),
    (
        InProcessRestartConfig,
        {"monitor_process_interval": 2.0, "soft_timeout": 2.0},
        "monitor_process_interval=2.0 must be smaller than soft_timeout=2.0",
    ),
    (
        InProcessRestartConfig,
        {"monitor_thread_interval": 2.0, "soft_timeout": 2.0},
        "monitor_thread_interval=2.0 must be smaller than soft_timeout=2.0",
    ),
    (
        InProcessRestartConfig,
        {"progress_watchdog_interval": 2.0, "soft_timeout": 2.0},
        "progress_watchdog_interval=2.0 must be smaller than soft_timeout=2.0",
    ),
    (InProcessRestartConfig, {"completion_timeout": 0.0}, "completion_timeout=0.0 must be above 0 seconds"),
    (InProcessRestartConfig, {"last_call_wait": -1.0}, "last_call_wait=-1.0 must not be negative"),
    (InProcessRestartConfig, {"soft_timeout": math.nan}, "must be finite"),
    (InProcessRestartConfig, {"granularity": "rack"}, "granularity='rack' must be node or rank"),
    (InProcessRestartConfig, {"active_world_size": 0}, "active_world_size=0 must be at least 1"),
    (InProcessRestartConfig, {"max_iterations": -1}, "max_iterations=-1"),
    (InProcessRestartConfig, {"max_rank_faults": -1}, "max_rank_faults=-1"),
    (InProcessRestartConfig, {"monitor_process_logdir": ""}, "monitor_process_logdir must not be empty"),
    (
        InProcessRestartConfig,
        {"monitor_process_pidfile": "a.pid"},
        "monitor_process_pidfile='a.pid' must be",
    ),
    (Config, {"seed": -1}, "seed=-1"),
]


@pytest.mark.parametrize(("cls", "values", "message"), BAD)
def test_invalid_value_is_rejected_at_construction(cls: type, values: dict[str, Any], message: str) -> None:
    """A value out of range or a contradiction is a ConfigError at once, in one line that contains the field."""
    with pytest.raises(ConfigError) as caught:
        cls(**values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "cls",
    [
        Config,
        CheckpointConfig,
        FaultToleranceConfig,
        InProcessRestartConfig,
        RerunStateMachineConfig,
        StragglerDetectionConfig,
    ],
)
def test_every_field_is_documented(cls: type) -> None:
    """Each setting has a docstring, from which help and docs are generated."""
    for field in describe_fields(cls):
        assert field.text, f"{cls.__name__}.{field.name} has no docstring"


def test_settings_survive_the_environment() -> None:
    """A worker reads the same settings from its environment that its agent wrote."""
    config = FaultToleranceConfig(
        rank_section_timeouts={"step": 1.5, "setup": None}, rank_heartbeat_timeout=3.0, simulate_fault=True
    )
    assert FaultToleranceConfig.from_json(config.to_json()) == config


def test_config_records_explicitly_set_fields() -> None:
    """Explicitly set fields are distinguished from defaults, even with the default value and after a copy; a config
    derived from another one keeps its defaults."""
    config = FaultToleranceConfig(enable_ft_package=False, rank_heartbeat_timeout=None)
    for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same.given == {"enable_ft_package": False, "rank_heartbeat_timeout": None}
    assert FaultToleranceConfig().given == {}
    replaced = dataclasses.replace(FaultToleranceConfig(safety_factor=2.0), min_nodes=2)
    assert replaced.given == {"safety_factor": 2.0, "min_nodes": 2}
    changed = config.changed(min_nodes=None, safety_factor=2.0)
    assert changed.given == {**config.given, "min_nodes": None, "safety_factor": 2.0}
    assert config.changed() == config
    all_set = config.changed(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    assert len(pickle.loads(pickle.dumps(all_set)).given) == len(dataclasses.fields(config))
    with pytest.raises(ConfigError, match=r"safety_factor=0\.5"):
        config.changed(safety_factor=0.5)


def test_unknown_key_reports_source_and_closest_name() -> None:
    """A mapping's unknown key is rejected with its source and the closest valid name."""
    with pytest.raises(ConfigError, match=r"mine: unknown key 'safty_factor'; did you mean 'safety_factor'\?"):
        from_mapping(FaultToleranceConfig, {"safty_factor": 2}, where="mine")


def test_config_is_frozen() -> None:
    """The validated values are the ones that are used."""
    config = FaultToleranceConfig()
    with pytest.raises(AttributeError):
        config.safety_factor = 0.0  # type: ignore[misc]


def test_short_timeouts_need_no_other_setting() -> None:
    """With a soft timeout of two seconds and a hard one of four, all other defaults are valid."""
    config = InProcessRestartConfig(soft_timeout=2.0, hard_timeout=4.0)
    assert (config.heartbeat_timeout, config.barrier_timeout, config.monitor_thread_interval) == (60.0, 120.0, 1.0)


def test_enabled_in_process_restart_sets_in_process() -> None:
    """in_process_restart.enabled sets in_process, so either one is enough in a file."""
    assert Config(in_process_restart=InProcessRestartConfig(enabled=True)).in_process
    assert not Config(in_process_restart=InProcessRestartConfig()).in_process
    assert Config(in_process=True).in_process_restart is None


def test_section_may_be_a_mapping() -> None:
    """A mapping becomes its config section, or is rejected at once with the name."""
    config = Config(checkpoint={"directory": "somewhere", "save-interval": 5})  # type: ignore[arg-type]
    assert config.checkpoint == CheckpointConfig(directory="somewhere", save_interval=5)
    with pytest.raises(ConfigError, match="checkpoint: unknown key 'directry'; did you mean 'directory'"):
        Config(checkpoint={"directry": "somewhere"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="checkpoint must be a CheckpointConfig or a mapping, not 'somewhere'"):
        Config(checkpoint="somewhere")  # type: ignore[arg-type]
