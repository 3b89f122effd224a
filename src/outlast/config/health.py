"""Settings of health checks."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.config.base import require, require_finite

__all__ = ["HealthConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """What a node must have to train, and how it is looked at.

    Raises:
        ConfigError: A value is out of range; the message says which.
    """

    check_timeout: float = 30.0
    """Seconds that one check may take; one that takes longer has failed."""

    device_timeout: float = 120.0
    """The same for a check of a GPU; the first one starts its driver."""

    min_free_disk_gib: float = 1.0
    """Space that each tier's disk, and the run directory's, must have left, in GiB."""

    min_free_shm_gib: float = 0.05
    """Space that /dev/shm must have left, in GiB: heartbeats and staged generations live there."""

    min_free_memory_gib: float = 0.5
    """Memory that must be available on the node, or in this container, in GiB."""

    min_open_files: int = 1024
    """Descriptors that a process may have open (``ulimit -n``)."""

    max_clock_skew: float = 30.0
    """Seconds that this node's clock may differ from that of a tier's file server."""

    network_interfaces: tuple[str, ...] = ()
    """Interfaces that must be up (``eth0``, ``ib0``, or an InfiniBand device such as ``mlx5_0``); none = any but the
    loopback."""

    commands: tuple[str, ...] = ()
    """Checks of your own, run by the shell: another exit code than 0 fails, the last line of output says why."""

    gpu_memory_test_gib: float = 1.0
    """Memory of each GPU that is written and read back, in GiB; 0 = none."""

    simulate_wrong_gemm: str | None = None
    """Name of a node whose matrix product gets one bit flipped, to see what follows; none = no node."""

    def __post_init__(self) -> None:
        require_finite(self)
        for name in ("check_timeout", "device_timeout"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be above 0 seconds")
        not_negative = ("max_clock_skew", "min_open_files")
        sizes = ("min_free_disk_gib", "min_free_shm_gib", "min_free_memory_gib", "gpu_memory_test_gib")
        for name in (*not_negative, *sizes):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        for name in ("network_interfaces", "commands"):
            require(all(getattr(self, name)), f"{name} has an empty entry; leave it out")
