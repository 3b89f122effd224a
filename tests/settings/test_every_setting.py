"""No setting is accepted without an effect: each field of each config changes the behaviour, or is rejected by name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
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
    ReplicaDigestConfig: {},
    RerunStateMachineConfig: training_proofs.RERUN,
    StragglerDetectionConfig: restarting_proofs.STRAGGLER,
}
"""The settings whose effect is verified in this folder."""
REFUSED = "ground/test_config_values.py::test_invalid_value_is_rejected_at_construction"
WAITS = "checkpoint/test_restore_waits.py::test_"
SAVES = "checkpoint/test_saves.py::test_"
UNHEALTHY = "health/test_node_health.py::test_"
ASSIGNED = "policy/test_rank_assignment.py::test_incomplete_node_is_replaced_as_a_whole"
REFUSALS = "integrations/test_nvrx_inprocess_refusals.py::test_"
STUCK = "inprocess/test_monitor_process_faults.py::test_"
LIMITS = "launch/test_settings_in_force.py::test_cleared_script_settings_restore_the_launchers"
TIMEOUTS = "policy/test_deadlines.py::test_config_fields_map_to_timeouts"
SIMULATED = "chaos/test_simulated_fault.py::test_"
NODES = "launch/test_unhealthy_nodes.py::test_"
LEAVING = "session/test_session_preemption.py::test_"
RERUN = "numerics/test_rerun_in_place.py::test_"
EVERYTHING_ON = "session/test_own_groups.py::test_a_session_adds_three_process_groups"
PRINTED = "straggler/test_straggler_report.py::test_printing_and_metrics_are_configurable"
METRICS = "session/test_own_loop.py::test_metrics_have_their_documented_names"
GROUPS = "ray/test_group_limits.py::test_"
ELSEWHERE: dict[type, dict[str, str]] = {
    CheckpointConfig: {
        "non_persistent_save_interval": "session/test_rhythm.py::test_fixed_intervals_count_iterations_of_the_run",
        "rank_mttf_hours": "session/test_rhythm.py::test_auto_measures_first_and_then_keeps_the_optimum",
        "overlap_staging": "checkpoint/test_device_states.py::test_each_save_has_the_state_of_its_call",
        "replication_parity": "checkpoint/test_parity_tier.py::test_a_lost_node_is_rebuilt",
        "most_recent_k": "policy/test_retention.py::test_newest_checkpoints_are_kept",
        "suspect_window": "dcp/test_failed_global_saves.py::test_retention_keeps_one_beyond_the_suspect_window",
        "local_most_recent_k": f"{SAVES}retention_keeps_two_and_skips_committed_checkpoints",
        "save_retain_interval": "dcp/test_turns.py::test_a_queued_permanent_checkpoint_is_not_replaced",
        "max_consecutive_save_failures": f"{SAVES}a_full_disk_fails_saves_until_space_is_free",
        "save_timeout": f"{SAVES}a_stopped_writer_fails_its_save_and_is_replaced",
        "max_durable_lag": "faults/test_behind_tier.py::test_a_run_whose_commits_are_overdue_stops",
        "response_timeout": f"{WAITS}a_permanently_hung_directory_fails_the_start",
        "restore_timeout": f"{WAITS}restore_timeout_0_makes_one_attempt",
        "missing": "session/test_missing_state.py::test_values_missing_in_the_checkpoint_are_kept",
        "prefer_finite": "checkpoint/test_not_finite.py::test_a_load_skips_newer_checkpoints_with_nan",
        "resume_from_other_run": "session/test_one_writer.py::"
        "test_another_runs_checkpoints_are_resumed_only_on_request",
        **dict.fromkeys(("non_persistent_local_ckpt_algo", "non_persistent_ckpt_type", "ckpt_format"), REFUSED),
    },
    Config: {
        "rerun_state_machine": "session/test_nonfinite_weights.py::test_a_nan_loss_raises_if_reruns_are_disabled",
        "replica_digest": EVERYTHING_ON,
        "straggler_detection": EVERYTHING_ON,
        "in_process": "session/test_session_in_process.py::test_in_process_needs_a_wrapped_function",
        "preemption": f"{LEAVING}sigusr1_is_a_preemption_notice_by_default",
        "fault_plan": "session/test_own_loop.py::test_a_step_runs_again_after_an_invalid_result",
    },
    FaultToleranceConfig: {
        "enable_ft_package": "launch/test_settings_in_force.py::test_script_can_disable_hang_detection",
        "calc_ft_timeouts": "monitor/test_rank_monitor.py::test_timeouts_are_learned_without_an_agent",
        **dict.fromkeys(
            ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_section_timeouts"), TIMEOUTS
        ),
        **dict.fromkeys(("rank_out_of_section_timeout", "num_warmup_iterations"), TIMEOUTS),
        "exit_timeout": "launch/test_lingering_ranks.py::test_a_rank_that_hangs_at_its_exit_is_ended",
        **dict.fromkeys(("max_no_progress_cycles", "max_restart_delay", "max_node_faults", "min_nodes"), LIMITS),
        "node_heartbeat_timeout": "launch/test_impersonated_nodes.py::test_an_idle_impersonator_loses_the_name",
        "shutdown_grace": "launch/test_shutdown_in_restore.py::test_job_shut_down_during_its_restore_is_requeued",
        **dict.fromkeys(
            ("gpu_memory_reclaim_timeout", "gpu_memory_tolerance_mb", "gpu_memory_poll_interval"),
            "launch/test_device_memory.py::test_memory_that_is_not_released_is_awaited_once",
        ),
        **dict.fromkeys(
            ("simulate_fault", "simulated_fault_type", "simulated_fault_rank"),
            f"{SIMULATED}the_simulated_fault_occurs_once_per_run",
        ),
        "simulated_fault_base_delay": f"{SIMULATED}the_fault_waits_for_its_delay_and_a_checkpoint",
    },
    HealthConfig: {
        "check_timeout": f"{UNHEALTHY}hung_check_times_out_and_is_killed",
        "min_free_disk_gib": f"{UNHEALTHY}nearly_full_disk_fails",
        "min_free_shm_gib": f"{UNHEALTHY}small_shared_memory_is_accepted_by_default",
        **dict.fromkeys(("min_free_memory_gib", "min_open_files"), f"{UNHEALTHY}failed_check_has_a_reason"),
        "before_joining": f"{NODES}full_or_hung_disk_does_not_prevent_training",
        "retry_interval": f"{NODES}recovered_node_joins",
        "node_interval": f"{NODES}node_that_becomes_unhealthy_is_replaced",
        "simulate_wrong_gemm": f"{UNHEALTHY}wrong_arithmetic_is_detected_on_the_injected_node",
    },
    InProcessRestartConfig: {
        **dict.fromkeys(("active_world_size", "granularity"), ASSIGNED),
        "max_iterations": "inprocess/test_restart_plugins.py::test_retry_controller_aborts_with_the_counts",
        "max_rank_faults": "inprocess/test_restart_plugins.py::test_fault_counter_removes_a_rank_that_fails_too_often",
        "max_no_progress_restarts": f"{REFUSALS}restarts_without_progress_end",
        "monitor_process_pidfile": f"{REFUSALS}monitor_process_writes_its_pid_file",
        "termination_grace_time": f"{REFUSALS}uninterruptible_rank_gets_sigterm_before_sigkill",
        "soft_timeout": f"{STUCK}a_hanging_rank_restarts_after_the_soft_timeout",
        "hard_timeout": f"{STUCK}a_stopped_rank_is_killed_after_the_hard_timeout",
        "barrier_timeout": f"{STUCK}a_rank_that_is_not_ready_in_time_is_expelled",
        "empty_cuda_cache": "gpu/test_nccl_in_process.py::test_empty_cuda_cache_returns_cached_memory",
    },
    PreemptionConfig: {
        "preempt_time": f"{LEAVING}the_slurm_time_limit_is_a_preemption_notice",
        "shutdown_timeout": f"{LEAVING}a_rank_stuck_in_c_exits_by_the_deadline",
        "notice_file": f"{LEAVING}a_notice_file_stops_all_ranks",
    },
    RecoveryConfig: {
        "start_timeout": f"{GROUPS}a_group_without_room_stops_with_an_error",
        "spare_wait": f"{GROUPS}a_group_without_spares_starts_another_actor",
        "drain_margin": "ray/test_drained_nodes.py::test_a_hanging_call_is_interrupted_before_the_deadline",
        "allow_shrink": f"{GROUPS}a_group_without_spares_shrinks",
        "max_recoveries": f"{GROUPS}a_plain_class_starts_over_after_a_loss",
    },
    ReplicaDigestConfig: {"interval": EVERYTHING_ON},
    RerunStateMachineConfig: {
        "rerun_mode": f"{RERUN}disabled_machine_runs_every_step_once",
        "check_for_nan_in_loss": f"{RERUN}disabled_machine_that_accepts_nan_warns_once",
        **dict.fromkeys(
            ("check_for_spiky_loss", "spike_warmup", "spike_window"),
            f"{RERUN}reproduced_spike_is_trained_on",
        ),
        "error_injection_rate": "numerics/test_error_injection.py::test_injection_follows_the_configured_rate",
        "error_injection_type": "numerics/test_error_injection.py::test_injected_kind_is_identified_on_another_device",
    },
    StragglerDetectionConfig: {
        **dict.fromkeys(("enabled", "report_time_interval"), METRICS),
        **dict.fromkeys(
            ("calc_relative_gpu_perf", "calc_individual_gpu_perf"),
            "policy/test_stragglers.py::test_disabled_scores_are_not_calculated",
        ),
        **dict.fromkeys(("num_gpu_perf_scores_to_print", "enable_logging", "logger_name"), PRINTED),
        "stop_if_detected": "session/test_session_slow_ranks.py::test_all_ranks_exit_for_a_slow_one_without_loss",
        "profiling_interval": "straggler/test_recorder.py::test_warmup_and_profiling_interval_skip_steps",
        "confirmations": "policy/test_stragglers.py::test_tenfold_slowdown_is_reported_despite_variation",
        "profile_kernels": "straggler/test_kernel_times.py::test_the_profiled_steps_are_the_same_on_all_ranks",
    },
}
"""The settings whose effect a test of another folder proves."""


def configs() -> set[type]:
    """Return every config class."""
    found = set()
    for module in pkgutil.iter_modules(outlast.config.__path__):
        for value in vars(importlib.import_module(f"outlast.config.{module.name}")).values():
            if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__name__.endswith("Config"):
                found.add(value)
    return found


def test_every_field_has_a_proof() -> None:
    """A field that is added to a config needs an entry here, which proves its effect; a removed field loses its
    entry."""
    assert PROOFS.keys() == ELSEWHERE.keys() == configs()
    for cls in PROOFS:
        fields = {field.name for field in dataclasses.fields(cls)}
        verified = [*PROOFS[cls], *ELSEWHERE[cls]]
        assert sorted(verified) == sorted(fields), f"{cls.__name__}: {set(verified) ^ fields}"


def test_every_proof_of_another_folder_exists() -> None:
    """The test exists, and its module uses the setting, by its name or by its option."""
    for cls, tests in ELSEWHERE.items():
        for name, test in tests.items():
            module, _, function = test.partition("::")
            text = (Path(__file__).parents[1] / module).read_text(encoding="utf-8")
            assert f"def {function}(" in text, f"{cls.__name__}.{name}: there is no {test}"
            usage = rf"\b{name}\b|--ft-{name.replace('_', '-')}\b"
            assert re.search(usage, text), f"{cls.__name__}.{name}: {module} does not use it"


@pytest.mark.process
@pytest.mark.parametrize(
    ("cls", "name"), [pytest.param(cls, name, id=f"{cls.__name__}.{name}") for cls in PROOFS for name in PROOFS[cls]]
)
def test_a_setting_has_an_effect_or_is_rejected(
    cls: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The field's proof in the table shows the effect of another value."""
    PROOFS[cls][name](Scene(folder=tmp_path, patch=monkeypatch, log=caplog))
