"""No setting is accepted for nothing: each field of each config changes what happens, or is refused by name."""

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
"""The settings whose effect is verified here."""
REFUSED = "ground/test_config_values.py::test_bad_value_is_refused_when_made"
WAITS = "checkpoint/test_restore_waits.py::test_"
SAVES = "checkpoint/test_saves.py::test_"
UNHEALTHY = "health/test_node_health.py::test_"
ASSIGNED = "policy/test_rank_assignment.py::test_node_without_enough_spares_is_given_up_as_a_whole"
REFUSALS = "integrations/test_nvrx_inprocess_refusals.py::test_"
STUCK = "inprocess/test_monitor_process_faults.py::test_"
LIMITS = "launch/test_settings_in_force.py::test_cleared_script_settings_restore_the_launchers"
TIMEOUTS = "policy/test_deadlines.py::test_config_gives_the_timeouts"
SIMULATED = "chaos/test_simulated_fault.py::test_"
NODES = "launch/test_unhealthy_nodes.py::test_"
LEAVING = "session/test_session_preemption.py::test_"
RERUN = "numerics/test_rerun_in_place.py::test_"
EVERYTHING_ON = "session/test_own_groups.py::test_a_session_with_everything_on_has_three_groups_of_its_own"
PRINTED = "straggler/test_straggler_report.py::test_what_is_printed_is_configurable"
FIGURES = "session/test_own_loop.py::test_figures_reach_the_logger_under_their_documented_names"
GROUPS = "ray/test_group_limits.py::test_"
ELSEWHERE: dict[type, dict[str, str]] = {
    CheckpointConfig: {
        "non_persistent_save_interval": "session/test_rhythm.py::test_fixed_intervals_count_iterations_of_the_run",
        "rank_mttf_hours": "session/test_rhythm.py::test_auto_measures_first_and_then_keeps_the_optimum",
        "overlap_staging": "checkpoint/test_device_states.py::test_every_save_is_the_state_of_its_call",
        "replication_parity": "checkpoint/test_parity_tier.py::test_a_lost_node_is_rebuilt",
        "most_recent_k": "policy/test_retention.py::test_the_newest_are_kept",
        "suspect_window": "dcp/test_failed_global_saves.py::"
        "test_old_checkpoints_go_but_for_one_beyond_the_suspect_window",
        "local_most_recent_k": f"{SAVES}retention_and_saving_again",
        "save_retain_interval": "dcp/test_turns.py::test_a_checkpoint_that_is_kept_for_ever_is_not_replaced",
        "max_consecutive_save_failures": f"{SAVES}a_full_disk_fails_saves_until_there_is_room",
        "save_timeout": f"{SAVES}a_stopped_writer_fails_its_save_and_is_replaced",
        "max_durable_lag": "faults/test_behind_tier.py::test_a_run_whose_commits_are_overdue_stops",
        "response_timeout": f"{WAITS}a_directory_that_hangs_for_good_ends_the_start_with_one_sentence",
        "restore_timeout": f"{WAITS}a_start_that_must_not_wait_ends_at_the_first_failure",
        "missing": "session/test_missing_state.py::test_what_the_checkpoint_lacks_keeps_its_value",
        "prefer_finite": "checkpoint/test_not_finite.py::test_a_newer_checkpoint_with_nan_is_passed_over_and_named",
        "resume_from_other_run": "session/test_one_writer.py::"
        "test_what_another_run_saved_is_gone_on_from_only_when_it_is_asked_for",
        **dict.fromkeys(("non_persistent_local_ckpt_algo", "non_persistent_ckpt_type", "ckpt_format"), REFUSED),
    },
    Config: {
        "rerun_state_machine": "session/test_nonfinite_weights.py::test_a_nan_loss_raises_where_nothing_is_run_again",
        "replica_digest": EVERYTHING_ON,
        "straggler_detection": EVERYTHING_ON,
        "in_process": "session/test_session_in_process.py::test_in_process_needs_a_wrapped_function",
        "preemption": f"{LEAVING}sigusr1_leaves_too_and_others_only_if_named",
        "fault_plan": "session/test_own_loop.py::test_a_step_runs_again_after_an_invalid_result",
    },
    FaultToleranceConfig: {
        "enable_ft_package": "launch/test_settings_in_force.py::test_script_can_disable_hang_detection",
        "calc_ft_timeouts": "monitor/test_rank_monitor.py::test_timeouts_are_learned_without_an_agent",
        **dict.fromkeys(
            ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_section_timeouts"), TIMEOUTS
        ),
        **dict.fromkeys(("rank_out_of_section_timeout", "num_warmup_iterations"), TIMEOUTS),
        "exit_timeout": "launch/test_lingering_ranks.py::test_a_rank_that_does_not_exit_is_ended",
        **dict.fromkeys(("max_no_progress_cycles", "max_restart_delay", "max_node_faults", "min_nodes"), LIMITS),
        "node_heartbeat_timeout": "launch/test_impersonated_nodes.py::"
        "test_an_agent_gets_its_name_from_one_that_does_nothing",
        "shutdown_grace": "launch/test_shutdown_in_restore.py::test_job_shut_down_during_its_restore_is_requeued",
        **dict.fromkeys(
            ("gpu_memory_reclaim_timeout", "gpu_memory_tolerance_mb", "gpu_memory_poll_interval"),
            "launch/test_device_memory.py::test_memory_that_stays_is_waited_for_once",
        ),
        **dict.fromkeys(
            ("simulate_fault", "simulated_fault_type", "simulated_fault_rank"), f"{SIMULATED}it_comes_once_a_run"
        ),
        "simulated_fault_base_delay": f"{SIMULATED}it_waits_for_its_delay_and_for_something_to_come_back_from",
    },
    HealthConfig: {
        "check_timeout": f"{UNHEALTHY}check_that_hangs_is_answered_for_and_ended",
        "min_free_disk_gib": f"{UNHEALTHY}disk_nearly_full",
        "min_free_shm_gib": f"{UNHEALTHY}shared_memory_that_nothing_needs",
        **dict.fromkeys(("min_free_memory_gib", "min_open_files"), f"{UNHEALTHY}what_is_lacking_is_named"),
        "before_joining": f"{NODES}a_full_or_hung_disk_never_prevents_training",
        "retry_interval": f"{NODES}node_that_recovers_joins",
        "node_interval": f"{NODES}node_that_falls_ill_while_training_is_replaced",
        "simulate_wrong_gemm": f"{UNHEALTHY}wrong_arithmetic_is_found_on_the_named_node_alone",
    },
    InProcessRestartConfig: {
        **dict.fromkeys(("active_world_size", "granularity"), ASSIGNED),
        "max_iterations": "inprocess/test_restart_plugins.py::test_limits_of_restarting_end_it_with_the_counts",
        "max_rank_faults": "inprocess/test_restart_plugins.py::test_rank_that_fails_too_often_leaves",
        "max_no_progress_restarts": f"{REFUSALS}restarts_without_progress_end",
        "monitor_process_pidfile": f"{REFUSALS}the_monitor_process_writes_its_pid_to_a_file",
        "termination_grace_time": f"{REFUSALS}a_rank_that_cannot_be_interrupted_gets_a_signal_that_its_script_handles",
        "soft_timeout": f"{STUCK}rank_without_progress_is_interrupted_after_the_soft_timeout",
        "hard_timeout": f"{STUCK}stopped_rank_is_ended_after_the_hard_timeout",
        "barrier_timeout": f"{STUCK}member_that_does_not_leave_is_expelled",
        "empty_cuda_cache": "gpu/test_nccl_in_process.py::test_cached_memory_goes_back",
    },
    PreemptionConfig: {
        "preempt_time": f"{LEAVING}the_end_of_slurms_time_limit_is_a_notice",
        "shutdown_timeout": f"{LEAVING}a_rank_that_never_comes_back_is_gone_by_the_deadline",
        "notice_file": f"{LEAVING}a_file_seen_by_one_rank_stops_all",
    },
    RecoveryConfig: {
        "start_timeout": f"{GROUPS}without_room_for_another_the_group_gives_up",
        "spare_wait": f"{GROUPS}without_spares_another_actor_is_started",
        "drain_margin": "ray/test_drained_nodes.py::test_a_call_that_does_not_end_is_interrupted_in_time",
        "allow_shrink": f"{GROUPS}without_spares_a_group_may_shrink",
        "max_recoveries": f"{GROUPS}a_plain_class_begins_anew",
    },
    ReplicaDigestConfig: {"interval": EVERYTHING_ON},
    RerunStateMachineConfig: {
        "rerun_mode": f"{RERUN}disabled_machine_runs_every_step_once",
        "check_for_nan_in_loss": f"{RERUN}disabled_machine_that_accepts_nan_warns_once",
        **dict.fromkeys(
            ("check_for_spiky_loss", "spike_warmup", "spike_window"),
            f"{RERUN}spike_is_run_again_and_then_trained_on",
        ),
        "error_injection_rate": "numerics/test_error_injection.py::test_one_of_so_many_is_struck",
        "error_injection_type": "numerics/test_error_injection.py::test_kind_is_found_out_elsewhere",
    },
    StragglerDetectionConfig: {
        **dict.fromkeys(("enabled", "report_time_interval"), FIGURES),
        **dict.fromkeys(
            ("calc_relative_gpu_perf", "calc_individual_gpu_perf"),
            "policy/test_stragglers.py::test_only_what_is_asked_for_is_calculated",
        ),
        **dict.fromkeys(("num_gpu_perf_scores_to_print", "enable_logging", "logger_name"), PRINTED),
        "stop_if_detected": "session/test_session_slow_ranks.py::"
        "test_all_ranks_leave_for_a_slow_one_and_nothing_is_lost",
        "profiling_interval": "straggler/test_recorder.py::test_steps_are_left_out_as_configured",
        "confirmations": "policy/test_stragglers.py::"
        "test_a_rank_that_is_ten_times_as_slow_is_not_hidden_by_its_own_variation",
        "profile_kernels": "straggler/test_kernel_times.py::"
        "test_the_steps_that_are_looked_at_are_the_same_on_all_ranks",
    },
}
"""The settings whose effect a test of another folder proves."""


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
    assert PROOFS.keys() == ELSEWHERE.keys() == configs()
    for cls in PROOFS:
        fields = {field.name for field in dataclasses.fields(cls)}
        verified = [*PROOFS[cls], *ELSEWHERE[cls]]
        assert sorted(verified) == sorted(fields), f"{cls.__name__}: {set(verified) ^ fields}"


def test_every_proof_of_another_folder_exists() -> None:
    """The test is there, and its module uses the setting, by its name or by its option."""
    for cls, tests in ELSEWHERE.items():
        for name, test in tests.items():
            module, _, function = test.partition("::")
            text = (Path(__file__).parents[1] / module).read_text(encoding="utf-8")
            assert f"def {function}(" in text, f"{cls.__name__}.{name}: there is no {test}"
            uses = rf"\b{name}\b|--ft-{name.replace('_', '-')}\b"
            assert re.search(uses, text), f"{cls.__name__}.{name}: {module} does not use it"


@pytest.mark.process
@pytest.mark.parametrize(
    ("cls", "name"), [pytest.param(cls, name, id=f"{cls.__name__}.{name}") for cls in PROOFS for name in PROOFS[cls]]
)
def test_setting_changes_something_or_is_refused(
    cls: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its proof, a function of this field's name in the table, shows what another value does."""
    PROOFS[cls][name](Scene(folder=tmp_path, patch=monkeypatch, log=caplog))
