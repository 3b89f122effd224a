"""Settings of health checks."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.config.base import Partial, require, require_finite

__all__ = ["HealthConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig(Partial):
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

    min_free_shm_gib: float = 0.0
    """Space that /dev/shm must have left, in GiB, for what your script puts there: batches of DataLoader workers,
    buffers of NCCL; 0 = any will do, as nothing of outlast's lies there."""

    min_free_memory_gib: float = 0.5
    """Memory that must be available on the node, or in this container, in GiB; heartbeats, staged generations and the
    memory tier take theirs from it."""

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

    before_joining: bool = True
    """Look at a node before it joins a job of ``outlast run``; one that fails does not join. It is done while torch is
    being imported, and takes a fraction of a second."""

    after_fault: bool = True
    """Look at a node again after a fault that began on it, while its workers are being ended, before others start
    there."""

    gpus: bool = True
    """Then look at its GPUs too, where there are any: before joining, and from the node's second fault on. It takes
    seconds."""

    retry_interval: float = 0.0
    """Seconds after which a node that was kept out is looked at again, to join once it is fit; 0 = its agent ends with
    exit code 19."""

    node_interval: float = 0.0
    """Seconds between two looks at a node while it trains, at all but its GPUs; 0 = none."""

    process_group_interval: int = 0
    """Steps after which all ranks ask each other whether they are there; 0 = never."""

    process_group_timeout: float = 60.0
    """Seconds that all ranks may take to answer then, the latest included: more than ranks are apart in a step."""

    simulate_wrong_gemm: str | None = None
    """Name of a node whose matrix product gets one bit flipped, to see what follows; none = no node."""

    def __post_init__(self) -> None:
        require_finite(self)
        for name in ("check_timeout", "device_timeout", "process_group_timeout"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be above 0 seconds")
        intervals = ("retry_interval", "node_interval", "process_group_interval")
        not_negative = ("max_clock_skew", "min_open_files", *intervals)
        sizes = ("min_free_disk_gib", "min_free_shm_gib", "min_free_memory_gib", "gpu_memory_test_gib")
        for name in (*not_negative, *sizes):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        for name in ("network_interfaces", "commands"):
            require(all(getattr(self, name)), f"{name} has an empty entry; leave it out")
