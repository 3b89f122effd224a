"""Settings of the search for slow ranks."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.config.base import require, require_finite

__all__ = ["StragglerDetectionConfig"]


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
        require(
            self.report_time_interval > 0, f"report_time_interval={self.report_time_interval} must be above 0 seconds"
        )
        for name in ("gpu_relative_perf_threshold", "gpu_individual_perf_threshold", "noticeable_score"):
            require(0 <= getattr(self, name) <= 1, f"{name}={getattr(self, name)} must be from 0 to 1")
        require(
            self.num_gpu_perf_scores_to_print >= 0,
            f"num_gpu_perf_scores_to_print={self.num_gpu_perf_scores_to_print} must not be negative; "
            "0 = print only when a rank is named",
        )
        for name in ("profiling_interval", "confirmations"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        require(bool(self.logger_name), "logger_name must not be empty: that is the root logger, which is the script's")
        calculates = self.calc_relative_gpu_perf or self.calc_individual_gpu_perf
        require(
            not self.enabled or calculates,
            "enabled is on, but calc_relative_gpu_perf and calc_individual_gpu_perf are both off: "
            "nothing would be found; switch one of them on",
        )
        require(
            not self.stop_if_detected or calculates,
            "stop_if_detected is on, but calc_relative_gpu_perf and calc_individual_gpu_perf are both off: "
            "nothing would be detected; switch one of them on",
        )
