"""Settings of recovery from faults and of the detection of wrong or slow ranks: restarts, re-runs, comparisons."""

from __future__ import annotations

import os

from outlast.config.base import (
    Settings,
    require,
    require_above_zero,
    require_at_least,
    require_finite,
    require_one_of,
)

_SMALLER = (
    ("soft_timeout", "hard_timeout", "a rank is interrupted before it is ended"),
    ("hard_timeout", "barrier_timeout", "the others wait until a stuck rank has been ended"),
    ("heartbeat_interval", "heartbeat_timeout", "a rank must send a heartbeat before its timeout passes"),
    ("heartbeat_timeout", "barrier_timeout", "a lost node is detected before the others stop waiting for it"),
    ("monitor_process_interval", "heartbeat_timeout", "an agent process looks before its silence counts"),
    ("monitor_process_interval", "soft_timeout", "an agent process looks before a timeout has passed"),
    ("monitor_process_interval", "barrier_timeout", "an agent process looks before the others stop waiting"),
    ("monitor_thread_interval", "soft_timeout", "a monitor thread looks before a timeout has passed"),
    ("progress_watchdog_interval", "soft_timeout", "progress is seen before its absence counts"),
)
"""Pairs of settings of which the first must be smaller, and why."""


class InProcessRestartConfig(Settings):
    """Faults that ``outlast.inprocess.Wrapper`` detects, its timeouts, and how often it calls the function again.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message has the violated inequality.
    """

    enabled: bool = False
    """On = a session with these settings must run in a function that a ``Wrapper`` protects. Off, if set explicitly = a
    ``Wrapper`` with these settings calls its function without protection. Not set = a ``Wrapper`` protects."""

    active_world_size: int | None = None
    """Ranks that run the function; the others are warm spares. none = all."""

    granularity: str = "node"
    """What a spare replaces: ``node`` = if a node's own spares do not suffice, all its ranks move to another node;
    ``rank`` = any spare replaces any rank."""

    max_iterations: int | None = None
    """In-process restarts after which the job is handed to the launcher; none = no limit, 0 = no in-process restart."""

    max_no_progress_restarts: int = 10
    """Consecutive in-process restarts without progress after which the job is handed to the launcher. Progress is an
    iteration higher than any before, as a session, ``Restore`` or ``Handle.note_iteration()`` reports it; if none is
    reported, all restarts count."""

    soft_timeout: float = 60.0
    """Longest time in seconds that the function's main thread may make no progress while the rest of its process runs;
    then the thread is interrupted, and all ranks restart."""

    hard_timeout: float = 90.0
    """Longest time in seconds without progress if the main thread cannot be interrupted, for example because it holds
    the GIL or is stopped; then its node's agent process ends the rank."""

    heartbeat_interval: float = 30.0
    """Seconds between two heartbeats of an agent process; under ``outlast run`` its agents send them."""

    heartbeat_timeout: float = 60.0
    """Seconds without a heartbeat after which an agent process and the ranks of its node are declared lost; not used
    under ``outlast run``."""

    barrier_timeout: float = 120.0
    """Longest time in seconds that the ranks wait for one of them to return from the function; then it is ended, and
    they continue without it."""

    completion_timeout: float = 120.0
    """Longest time in seconds between the first active rank's return from the function and the last one's."""

    empty_cuda_cache: bool = True
    """Release the memory that the CUDA allocator caches before the function is called again."""

    max_rank_faults: int | None = None
    """Faults that may begin on one rank; at the next one it is permanently removed, and the others continue. none = no
    limit."""

    monitor_process_logdir: str | None = None
    """Folder for the logs of the agent processes, a file for each node; none = they write to the standard error of the
    rank that started them."""

    monitor_process_pidfile: str | None = None
    """Absolute path of a file to which the agent process that monitors a rank writes its process id; the file is not
    removed; ``{rank}`` in it is the rank that the process was started as. none = no file."""

    monitor_thread_interval: float = 1.0
    """Longest time in seconds between two polls of a rank's monitor thread."""

    monitor_process_interval: float = 1.0
    """Longest time in seconds between two checks of a rank by the agent process."""

    progress_watchdog_interval: float = 1.0
    """Longest time in seconds between two checks of the main thread's progress."""

    last_call_wait: float = 1.0
    """Longest time in seconds that the ranks wait for the root cause if only its consequences are known."""

    termination_grace_time: float = 1.0
    """Seconds between SIGTERM and SIGKILL for a rank that is ended while its main thread still runs; 0 = SIGKILL at
    once."""

    def _check(self) -> None:
        require_finite(self)
        require_above_zero(self, "soft_timeout", "hard_timeout", "heartbeat_interval", "heartbeat_timeout")
        require_above_zero(self, "barrier_timeout", "completion_timeout", "monitor_thread_interval")
        require_above_zero(self, "monitor_process_interval", "progress_watchdog_interval")
        require_at_least(self, 0, "last_call_wait", "termination_grace_time")
        require_one_of(self, "granularity", ("node", "rank"))
        require_at_least(self, 1, "active_world_size", what="; write none for all ranks")
        require_at_least(self, 0, "max_no_progress_restarts", what="; it cannot be switched off: write a large number")
        require_at_least(self, 0, "max_iterations", "max_rank_faults", what="; write none for no limit")
        require(self.monitor_process_logdir != "", "monitor_process_logdir must not be empty; write none for no files")
        path = self.monitor_process_pidfile
        text = f"monitor_process_pidfile={path!r} must be an absolute path; {{rank}} in it is the rank"
        require(path is None or os.path.isabs(path), text)
        for small, large, why in _SMALLER:
            low, high = getattr(self, small), getattr(self, large)
            require(low < high, f"{small}={low} must be smaller than {large}={high}: {why}")


class RecoveryConfig(Settings):
    """When an actor is declared lost, how long each step of a recovery may take, and how many recoveries are allowed.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    ping_interval: float = 0.5
    """Seconds between two pings of an actor. An actor responds while it executes a call, so that an actor that waits in
    a collective is not declared lost."""

    ping_timeout: float = 5.0
    """Seconds without a response after which an actor is declared lost: it is stopped, holds the interpreter's lock, or
    its node cannot be reached."""

    examine_timeout: float = 0.7
    """Seconds in which actors must report their position once one exceeded the timeout of a section; an actor that does
    not is unresponsive."""

    start_timeout: float = 300.0
    """Seconds in which an actor must start: its process, its imports, its constructor."""

    store_timeout: float = 10.0
    """Seconds in which an actor must open the TCPStore of the next incarnation, and in which a node that is new to the
    group must start its checkpoint writer."""

    abort_timeout: float = 5.0
    """Seconds in which an actor must end an interrupted call; an actor that does not is declared lost, too."""

    join_timeout: float = 300.0
    """Seconds in which all actors must be connected, set up, and have loaded their state."""

    collective_timeout: float = 1800.0
    """Timeout in seconds of the process groups. Sections detect a hang much sooner."""

    spare_wait: float = 60.0
    """Seconds to wait for another actor to start when no spare is left; 0 = none."""

    close_timeout: float = 10.0
    """Seconds in which actors must exit when the group is closed."""

    drain_margin: float = 10.0
    """Seconds before Ray removes a node that it drains: a call that has not ended by then is interrupted, and the
    node's actors are replaced. Between two calls they are replaced as soon as the drain is announced and there are
    spares."""

    allow_shrink: bool = False
    """If no spare is left, continue at once with fewer data shards, from a checkpoint of the global tier."""

    max_rounds: int = 4
    """Attempts per recovery: each failure during the recovery needs another attempt."""

    max_recoveries: int = 5
    """Consecutive recoveries without progress; progress is a call that ends at a higher iteration than any before, or
    any call if actors keep no state."""

    def _check(self) -> None:
        require_finite(self)
        require_above_zero(self, "ping_interval", "ping_timeout", "examine_timeout", "start_timeout", "store_timeout")
        require_above_zero(self, "abort_timeout", "join_timeout", "collective_timeout", "close_timeout")
        require_at_least(self, 0, "spare_wait", "drain_margin")
        require_at_least(self, 1, "max_rounds", "max_recoveries")
        require(
            self.ping_interval < self.ping_timeout,
            f"ping_interval={self.ping_interval} must be below ping_timeout={self.ping_timeout}: "
            "a response must be possible before the timeout passes",
        )


class ReplicaDigestConfig(Settings):
    """How often the replicas of a data-parallel group are compared.

    Raises:
        ConfigError: A value is out of range; the message names the range.
    """

    interval: int = 0
    """Optimizer steps between two comparisons of all replicas' parameters and optimizer state; they are also compared
    before each save, which is skipped if they differ. 0 = never, not even before saves."""

    def _check(self) -> None:
        require_finite(self)
        require_at_least(self, 0, "interval", what="; 0 = never")


class RerunStateMachineConfig(Settings):
    """Which results are invalid, and the action on an invalid result.

    Names and defaults are Megatron's, except for ``rerun_mode``: Megatron's loop is built into every training and must
    be switched on there; here a script selects the values to validate, by ``run.attempts()`` and
    ``attempt.validate()``. A script that does not use them pays nothing.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    rerun_mode: str = "validate_results"
    """``validate_results``: check the values that the script validates before the optimizer changes a weight, and run a
    step with an invalid result again; ``report_determinism_stats``: run every step twice, reject no result, and count
    the differences; ``disabled``: run every step once, and raise for an invalid result, as Megatron does."""

    check_for_nan_in_loss: bool = True
    """A validated value that is NaN or infinite is invalid."""

    check_for_spiky_loss: bool = False
    """A step with a validated value of at least ``spiky_loss_factor`` times the largest recent one is run again; if the
    value is reproduced, training continues with it, with a warning."""

    spiky_loss_factor: float = 10.0
    """Used by ``check_for_spiky_loss``; raise it for large models."""

    spike_warmup: int = 100
    """Number of finite values before the first that can be a spike; they determine the largest value."""

    spike_window: int = 1000
    """Number of newest finite values among which the largest is taken."""

    max_same_device_reruns: int = 2
    """Restarts on the device that computed the invalid result, if no other device is available, before the result is
    attributed without a run on another device; 0 = none."""

    error_injection_rate: int = 0
    """For tests: turn one of this many validated values into NaN; 0 = none."""

    error_injection_type: str = "transient_error"
    """Type of the injected error: ``transient_error`` does not occur when the step is run again, ``persistent_error``
    occurs again on the same device, ``correct_result`` on every device."""

    def _check(self) -> None:
        require_finite(self)
        require_one_of(self, "rerun_mode", ("disabled", "validate_results", "report_determinism_stats"))
        require_one_of(self, "error_injection_type", ("transient_error", "persistent_error", "correct_result"))
        require(
            self.spiky_loss_factor > 1,
            f"spiky_loss_factor={self.spiky_loss_factor} must be above 1, or every largest value is a spike",
        )
        require_at_least(self, 1, "spike_warmup", what=" value")
        require(
            self.spike_window >= self.spike_warmup,
            f"spike_window={self.spike_window} must be at least spike_warmup={self.spike_warmup}",
        )
        require_at_least(self, 0, "max_same_device_reruns", "error_injection_rate")
        validates = self.rerun_mode == "validate_results"
        require(
            validates or not self.check_for_spiky_loss,
            f"check_for_spiky_loss is on, but rerun_mode={self.rerun_mode!r} judges nothing; use 'validate_results'",
        )
        require(
            validates or self.error_injection_rate == 0,
            f"error_injection_rate={self.error_injection_rate}, but rerun_mode={self.rerun_mode!r} would not detect "
            "the injected errors; use 'validate_results'",
        )
        require(
            self.error_injection_rate == 0 or self.check_for_nan_in_loss,
            f"error_injection_rate={self.error_injection_rate} makes values NaN, but check_for_nan_in_loss is off",
        )


class StragglerDetectionConfig(Settings):
    """How slow ranks are detected, and the action on a detected one.

    Names and defaults are those of Megatron-Bridge and NeMo. ``gpu`` in a name means the device that the ranks compute
    on; on a machine without GPUs it is the CPU.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    enabled: bool = False
    """Measure the steps of a session, and report. A ``StragglerDetector`` that a script creates is always on."""

    report_time_interval: float = 300.0
    """Seconds from one report to the next; the time that a report covers is its *window*."""

    calc_relative_gpu_perf: bool = True
    """Compare each rank with the others of its role."""

    calc_individual_gpu_perf: bool = True
    """Compare each rank with its own best windows so far."""

    num_gpu_perf_scores_to_print: int = 5
    """Number of worst and best ranks in a printed report; 0 = print only when a straggler is identified."""

    gpu_relative_perf_threshold: float = 0.7
    """Relative score, 0 to 1, below which an identified straggler ends the cycle (``stop_if_detected``)."""

    gpu_individual_perf_threshold: float = 0.7
    """The same for the individual score."""

    stop_if_detected: bool = False
    """End the cycle when an identified straggler is below a threshold, so that a spare takes its node's slot."""

    enable_logging: bool = True
    """Send the smallest, median and largest score of each report to the loggers."""

    profiling_interval: int = 1
    """Measure one of this many steps; 1 = every step."""

    logger_name: str = "outlast.straggler"
    """Python logger that the reports go to."""

    confirmations: int = 3
    """Consecutive windows in which a rank must be slow, and outside noise, before it is identified as a straggler."""

    noticeable_score: float = 0.9
    """Score, 0 to 1, below which a rank counts as slow in a window; a higher threshold replaces it."""

    profile_kernels: bool = False
    """Once per window, measure the device's kernels (on a CPU: torch's operators) of a few steps with torch's profiler.
    These steps are slower and end with a device synchronization."""

    check_machine: bool = True
    """When a straggler is identified, measure a matrix product, a memory copy and messages on it and on two other
    ranks, to distinguish a slow machine from a larger workload; this costs all ranks about a second."""

    def _check(self) -> None:
        require_finite(self)
        require_above_zero(self, "report_time_interval")
        for name in ("gpu_relative_perf_threshold", "gpu_individual_perf_threshold", "noticeable_score"):
            require(0 <= getattr(self, name) <= 1, f"{name}={getattr(self, name)} must be from 0 to 1")
        require_at_least(self, 0, "num_gpu_perf_scores_to_print", what="; 0 = print only when a rank is named")
        require_at_least(self, 1, "profiling_interval", "confirmations")
        require(bool(self.logger_name), "logger_name must not be empty: that is the root logger, which is the script's")
        calculates = self.calc_relative_gpu_perf or self.calc_individual_gpu_perf
        for switch, what in (("enabled", "found"), ("stop_if_detected", "detected")):
            require(
                not getattr(self, switch) or calculates,
                f"{switch} is on, but calc_relative_gpu_perf and calc_individual_gpu_perf are both off: "
                f"nothing would be {what}; switch one of them on",
            )
