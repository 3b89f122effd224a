"""What a monitor process is told when it is started.

Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from outlast.policy.restart_limits import RestartLimits

if TYPE_CHECKING:
    from outlast.config.in_process_restart import InProcessRestartConfig
    from outlast.env import WorkerEnv

__all__ = ["MonitorTask"]


class MonitorTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a monitor process is told, as JSON on its command line."""

    pid: int
    """The rank's process."""
    initial_rank: int
    initial_world_size: int
    node: str
    host: str
    """Address of this machine at which monitor processes of other machines reach this one."""
    limits: RestartLimits
    soft_timeout_s: float
    """Seconds without progress of the main thread while the interpreter is free."""
    hard_timeout_s: float
    """Seconds without progress after which the rank is ended."""
    thread_interval_s: float
    """Seconds between two beats of the rank's monitor thread."""
    process_interval_s: float
    """Longest time between two looks of the monitor process."""
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    """Of the link to the hub."""
    termination_grace_s: float
    """Seconds between SIGTERM and SIGKILL for a rank that is ended while its main thread still runs."""
    meeting: str = ""
    """Key of the meeting at which the ranks learn where the hub is; empty: nobody stands in for the rank there."""
    labels: dict[str, str] = {}
    """What this rank says of its place beyond its node, for those who assign ranks."""
    log_path: str = ""
    """File to which the monitor process writes its log; empty: the rank's standard error."""

    @classmethod
    def of(
        cls, config: InProcessRestartConfig, place: WorkerEnv, *, host: str, meeting: str, labels: Mapping[str, str]
    ) -> MonitorTask:
        """Return what the monitor process of this very process is told.

        Args:
            config: The settings.
            place: This process's place at its start.
            host: Address of this machine.
            meeting: Key of the meeting.
            labels: What this rank says of its place.
        """
        folder = config.monitor_process_logdir
        return cls(
            pid=os.getpid(),
            initial_rank=place.global_rank,
            initial_world_size=place.world_size,
            node=place.node,
            host=host,
            limits=RestartLimits(
                max_iterations=config.max_iterations,
                barrier_timeout_s=config.barrier_timeout,
                completion_timeout_s=config.completion_timeout,
                last_call_wait_s=config.last_call_wait,
            ),
            soft_timeout_s=config.soft_timeout,
            hard_timeout_s=config.hard_timeout,
            thread_interval_s=config.monitor_thread_interval,
            process_interval_s=config.monitor_process_interval,
            heartbeat_interval_s=config.heartbeat_interval,
            heartbeat_timeout_s=config.heartbeat_timeout,
            termination_grace_s=config.termination_grace_time,
            meeting=meeting,
            labels=dict(labels),
            log_path="" if folder is None else os.path.join(folder, f"inprocess-{place.global_rank}.log"),
        )
