"""Settings of the restart in process."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.config.base import Partial, require, require_finite

__all__ = ["InProcessRestartConfig"]

_GRANULARITIES = ("node", "rank")
_ABOVE_ZERO = (
    "soft_timeout",
    "hard_timeout",
    "heartbeat_interval",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "monitor_thread_interval",
    "monitor_process_interval",
    "progress_watchdog_interval",
)
_NOT_NEGATIVE = ("last_call_wait", "termination_grace_time")
_SMALLER = (
    ("soft_timeout", "hard_timeout", "a rank is interrupted before it is ended"),
    ("hard_timeout", "barrier_timeout", "the others wait until a stuck rank has been ended"),
    ("heartbeat_interval", "heartbeat_timeout", "a sign of life is due before it is missed"),
    ("heartbeat_timeout", "barrier_timeout", "a lost node is noticed before the others stop waiting for it"),
    ("monitor_process_interval", "heartbeat_timeout", "a monitor process looks before its silence counts"),
    ("monitor_process_interval", "soft_timeout", "a monitor process looks before a timeout has passed"),
    ("monitor_process_interval", "barrier_timeout", "a monitor process looks before the others stop waiting"),
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

    soft_timeout: float = 60.0
    """Longest time in seconds that the function's main thread may go without progress while the rest of its process
    runs; then it is interrupted, and all ranks restart."""

    hard_timeout: float = 90.0
    """Longest time in seconds without progress where the main thread cannot be interrupted, as when it holds the GIL
    or is stopped; then the rank is ended by its monitor process."""

    heartbeat_interval: float = 30.0
    """Seconds between two signs of life of a monitor process."""

    heartbeat_timeout: float = 60.0
    """Seconds without one after which a monitor process and its rank count as lost."""

    barrier_timeout: float = 120.0
    """Longest time in seconds that the ranks wait for one of them to come back from the function; then it is ended,
    and they go on without."""

    completion_timeout: float = 120.0
    """Longest time in seconds between the first active rank's return from the function and the last one's."""

    empty_cuda_cache: bool = True
    """Give the memory that the CUDA allocator caches back before the function is called again."""

    max_rank_faults: int | None = None
    """Faults of its own that a rank may have; with one more it is permanently removed, and the others continue. none =
    no limit."""

    monitor_process_logdir: str | None = None
    """Folder for the logs of the monitor processes, a file each; none = they write to their rank's standard error."""

    monitor_thread_interval: float = 1.0
    """Longest time in seconds between two looks of a rank's monitor thread."""

    monitor_process_interval: float = 1.0
    """Longest time in seconds between two looks of a rank's monitor process."""

    progress_watchdog_interval: float = 1.0
    """Longest time in seconds between two looks at the main thread's progress."""

    last_call_wait: float = 1.0
    """Longest time in seconds that the ranks wait for the cause when all that is known are its consequences."""

    termination_grace_time: float = 1.0
    """Seconds between SIGTERM and SIGKILL for a rank that is ended while its main thread still runs; 0 = SIGKILL at
    once."""

    def __post_init__(self) -> None:
        require_finite(self)
        for name in _ABOVE_ZERO:
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be above 0 seconds")
        for name in _NOT_NEGATIVE:
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        require(
            self.granularity in _GRANULARITIES,
            f"granularity={self.granularity!r} must be {' or '.join(_GRANULARITIES)}",
        )
        require(
            self.active_world_size is None or self.active_world_size >= 1,
            f"active_world_size={self.active_world_size} must be at least 1; write none for all ranks",
        )
        require(
            self.max_iterations is None or self.max_iterations >= 0,
            f"max_iterations={self.max_iterations} must not be negative; write none for no limit",
        )
        require(
            self.max_rank_faults is None or self.max_rank_faults >= 0,
            f"max_rank_faults={self.max_rank_faults} must not be negative; write none for no limit",
        )
        require(self.monitor_process_logdir != "", "monitor_process_logdir must not be empty; write none for no files")
        for small, large, why in _SMALLER:
            low, high = getattr(self, small), getattr(self, large)
            require(low < high, f"{small}={low} must be smaller than {large}={high}: {why}")
