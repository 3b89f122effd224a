"""What a monitor process is told when it is started.

Nothing here imports torch.
"""

from __future__ import annotations

import msgspec

from outlast.policy.restart_limits import RestartLimits

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
