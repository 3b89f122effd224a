"""Settings of what training does about faults and wrong or slow ranks: restarts, re-runs, comparisons."""

from __future__ import annotations

import os
from dataclasses import dataclass

from outlast.config.base import (
    Partial,
    require,
    require_above_zero,
    require_at_least,
    require_finite,
    require_one_of,
)

_SMALLER = (
    ("soft_timeout", "hard_timeout", "a rank is interrupted before it is ended"),
    ("hard_timeout", "barrier_timeout", "the others wait until a stuck rank has been ended"),
    ("heartbeat_interval", "heartbeat_timeout", "a sign of life is due before it is missed"),
    ("heartbeat_timeout", "barrier_timeout", "a lost node is noticed before the others stop waiting for it"),
    ("monitor_process_interval", "heartbeat_timeout", "an agent process looks before its silence counts"),
    ("monitor_process_interval", "soft_timeout", "an agent process looks before a timeout has passed"),
    ("monitor_process_interval", "barrier_timeout", "an agent process looks before the others stop waiting"),
    ("monitor_thread_interval", "soft_timeout", "a monitor thread looks before a timeout has passed"),
    ("progress_watchdog_interval", "soft_timeout", "progress is seen before its absence counts"),
)
"""Pairs of settings of which the first must be smaller, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessRestartConfig(Partial):
    """What is noticed by ``outlast.inprocess.Wrapper``, after how long, and how often it calls the function again.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message is the inequality that broke.
    """

    enabled: bool = False
    """On: a session with these settings has to be in a function that a ``Wrapper`` protects. Off, where it is given: a
    ``Wrapper`` with these settings calls its function as it is. Where it is not given, a ``Wrapper`` protects."""

    active_world_size: int | None = None
    """Ranks that run the function; the others are warm spares. none = all."""

    granularity: str = "node"
    """What a spare replaces: ``node`` = a node whose own spares do not suffice is given up, and all its ranks go
    to another one; ``rank`` = any spare takes the place of any rank."""

    max_iterations: int | None = None
    """Restarts in process after which the job is given up to the launcher; none = no limit, 0 = none at all."""

    max_no_progress_restarts: int = 10
    """Restarts in process in a row without progress after which the job is given up to the launcher. Progress is an
    iteration higher than any before, as a session, ``Restore`` or ``Handle.note_iteration()`` reports it; where none
    is reported, all restarts count."""

    soft_timeout: float = 60.0
    """Longest time in seconds that the function's main thread may go without progress while the rest of its process
    runs; then it is interrupted, and all ranks restart."""

    hard_timeout: float = 90.0
    """Longest time in seconds without progress where the main thread cannot be interrupted, as when it holds the GIL
    or is stopped; then the rank is ended by its node's agent process."""

    heartbeat_interval: float = 30.0
    """Seconds between two heartbeats of an agent process; under ``outlast run`` its agents give them."""

    heartbeat_timeout: float = 60.0
    """Seconds without one after which an agent process and the ranks of its node count as lost; not under ``outlast
    run``."""

    barrier_timeout: float = 120.0
    """Longest time in seconds that the ranks wait for one of them to come back from the function; then it is ended,
    and they continue without."""

    completion_timeout: float = 120.0
    """Longest time in seconds between the first active rank's return from the function and the last one's."""

    empty_cuda_cache: bool = True
    """Give the memory that the CUDA allocator caches back before the function is called again."""

    max_rank_faults: int | None = None
    """Faults of its own that a rank may have; with one more it is permanently removed, and the others continue. none =
    no limit."""

    monitor_process_logdir: str | None = None
    """Folder for the logs of the agent processes, a file for each node; none = they write to the standard error of the
    rank that started them."""

    monitor_process_pidfile: str | None = None
    """Absolute path of a file to which the agent process that watches a rank writes its process id, and which stays;
    ``{rank}`` in it is the rank that the process was started as. none = no file."""

    monitor_thread_interval: float = 1.0
    """Longest time in seconds between two looks of a rank's monitor thread."""

    monitor_process_interval: float = 1.0
    """Longest time in seconds between two looks of the agent process at a rank."""

    progress_watchdog_interval: float = 1.0
    """Longest time in seconds between two looks at the main thread's progress."""

    last_call_wait: float = 1.0
    """Longest time in seconds that the ranks wait for the cause when all that is known are its consequences."""

    termination_grace_time: float = 1.0
    """Seconds between SIGTERM and SIGKILL for a rank that is ended while its main thread still runs; 0 = SIGKILL at
    once."""

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """After how long an actor counts as lost, what each step of a recovery may take, and how often there may be one.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    ping_interval: float = 0.5
    """Seconds between two questions to an actor whether it lives. It answers beside whatever it does, so that one that
    waits in a collective is not taken for dead."""

    ping_timeout: float = 5.0
    """Seconds without an answer after which an actor counts as lost: it is stopped, holds the interpreter's lock, or
    its node cannot be reached."""

    examine_timeout: float = 0.7
    """Seconds in which actors have to report where they are once one exceeded the timeout of a section; one that does
    not is unresponsive."""

    start_timeout: float = 300.0
    """Seconds in which an actor has to start: its process, its imports, its constructor."""

    store_timeout: float = 10.0
    """Seconds in which an actor has to open the store where the next incarnation meets, and a node that is new to the
    group to start its checkpoint writer."""

    abort_timeout: float = 5.0
    """Seconds in which an actor has to leave an interrupted call; who does not is lost, too."""

    join_timeout: float = 300.0
    """Seconds in which all actors have to be connected, set up, and have loaded their state."""

    collective_timeout: float = 1800.0
    """Timeout in seconds of the process groups. Sections find a hang much sooner."""

    spare_wait: float = 60.0
    """Seconds to wait for another actor to start when no spare is left; 0 = none."""

    close_timeout: float = 10.0
    """Seconds in which actors have to be gone when the group is closed."""

    drain_margin: float = 10.0
    """Seconds before a node goes that Ray drains: a call that has not ended until then is interrupted, and the node's
    actors are replaced. Between two calls they are replaced as soon as the notice has come and there are spares."""

    allow_shrink: bool = False
    """When no spare is left, continue at once with fewer data shards, from a generation of the global tier."""

    max_rounds: int = 4
    """Attempts of one recovery: each failure in it needs another one."""

    max_recoveries: int = 5
    """Recoveries in a row without progress; progress is a call that ends at a higher iteration than any before, or any
    call where actors keep no state."""

    def __post_init__(self) -> None:
        require_finite(self)
        require_above_zero(self, "ping_interval", "ping_timeout", "examine_timeout", "start_timeout", "store_timeout")
        require_above_zero(self, "abort_timeout", "join_timeout", "collective_timeout", "close_timeout")
        require_at_least(self, 0, "spare_wait", "drain_margin")
        require_at_least(self, 1, "max_rounds", "max_recoveries")
        require(
            self.ping_interval < self.ping_timeout,
            f"ping_interval={self.ping_interval} must be below ping_timeout={self.ping_timeout}: "
            "an answer is due before it is missed",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDigestConfig:
    """How often the replicas of a data-parallel group are compared.

    Raises:
        ConfigError: A value is out of range; the message names the range.
    """

    interval: int = 0
    """Optimizer steps between two comparisons of all replicas' parameters and optimizer state; they are compared before
    each save, too, which is not made if they differ. 0 = never, not even before saves."""

    def __post_init__(self) -> None:
        require_finite(self)
        require_at_least(self, 0, "interval", what="; 0 = never")


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunStateMachineConfig:
    """What counts as an invalid result, and what follows one.

    The names are Megatron's, and so are the defaults, but for ``rerun_mode``: Megatron's loop is built into every
    training and has to be switched on there; here a script chooses itself what is validated, by ``run.attempts()``
    and ``attempt.validate()``. A script that does not use them pays nothing.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    rerun_mode: str = "validate_results"
    """``validate_results``: judge what the script validates before the optimizer moves a weight, and run a step with
    an invalid result again; ``report_determinism_stats``: run every step twice, judge nothing, and count what differs;
    ``disabled``: run every step once, and raise for an invalid result, as Megatron does."""

    check_for_nan_in_loss: bool = True
    """A validated value that is NaN or infinite is invalid."""

    check_for_spiky_loss: bool = False
    """A validated value of at least ``spiky_loss_factor`` times the largest of late is run again; when it comes again
    it is trained on, with a warning."""

    spiky_loss_factor: float = 10.0
    """See ``check_for_spiky_loss``; raise it for large models."""

    spike_warmup: int = 100
    """Finite values before the first that can be a spike; they set the largest value."""

    spike_window: int = 1000
    """Newest finite values of which the largest counts."""

    max_same_device_reruns: int = 2
    """Restarts on the device that gave the invalid result, where no other is available, before it is judged without;
    0 = none."""

    error_injection_rate: int = 0
    """Turn one of this many validated values into NaN on purpose; 0 = none."""

    error_injection_type: str = "transient_error"
    """What it looks like: ``transient_error`` is gone when the step is run again, ``persistent_error`` comes again on
    the same device, ``correct_result`` on every device."""

    def __post_init__(self) -> None:
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
            f"error_injection_rate={self.error_injection_rate}, but rerun_mode={self.rerun_mode!r} would not notice; "
            "use 'validate_results'",
        )
        require(
            self.error_injection_rate == 0 or self.check_for_nan_in_loss,
            f"error_injection_rate={self.error_injection_rate} makes values NaN, but check_for_nan_in_loss is off",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerDetectionConfig:
    """How slow ranks are looked for, and what follows when one is found.

    The names are those of Megatron-Bridge and NeMo, and so are the defaults. ``gpu`` in a name stands for whatever the
    ranks compute on; on a machine without GPUs it is the CPU.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    enabled: bool = False
    """Time the steps of a session, and report. A ``StragglerDetector`` that a script makes itself is always on."""

    report_time_interval: float = 300.0
    """Seconds from one report to the next; what a report is about is its *window*."""

    calc_relative_gpu_perf: bool = True
    """Compare each rank with the others of its role."""

    calc_individual_gpu_perf: bool = True
    """Compare each rank with its own best windows so far."""

    num_gpu_perf_scores_to_print: int = 5
    """Worst and best ranks in a printed report; 0 = print only when a rank is named."""

    gpu_relative_perf_threshold: float = 0.7
    """Relative score, 0 to 1, below which a named rank is one to stop for (``stop_if_detected``)."""

    gpu_individual_perf_threshold: float = 0.7
    """The same for the individual score."""

    stop_if_detected: bool = False
    """End the cycle when a named rank is below a threshold, so that its node gives its slot to a spare."""

    enable_logging: bool = True
    """Give smallest, median and largest score of each report to the loggers."""

    profiling_interval: int = 1
    """Time one of this many steps; 1 = every step."""

    logger_name: str = "outlast.straggler"
    """Python logger that the reports go to."""

    confirmations: int = 3
    """Windows in a row in which a rank must be slow, and outside noise, before it is named."""

    noticeable_score: float = 0.9
    """Score, 0 to 1, below which a rank counts as slow in a window; a higher threshold takes its place."""

    profile_kernels: bool = False
    """Once a window, time the device's kernels (on a CPU: torch's operators) of a few steps with torch's profiler. It
    makes those steps slower, and waits for the device after them."""

    check_machine: bool = True
    """When a rank is named, time a matrix product, a memory copy and messages on it and on two others, which costs all
    ranks about a second: is the machine slow, or what it is given to do?"""

    def __post_init__(self) -> None:
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
