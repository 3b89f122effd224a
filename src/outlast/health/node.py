"""Whether a node is fit to train: everything but its accelerators."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outlast import env
from outlast.config.launching import HealthConfig
from outlast.health import tasks as t
from outlast.health.prober import Prober
from outlast.health.result import CheckResult

if TYPE_CHECKING:
    from outlast.config import Config

__all__ = ["check_node", "places_of"]


def check_node(
    config: HealthConfig | None = None,
    *,
    places: Sequence[str] = (),
    node: str | None = None,
    network: bool = True,
    num_products: int = 4,
    prober: Prober | None = None,
) -> tuple[CheckResult, ...]:
    """Look at this node: its disks, memory, clock, network, its CPU's arithmetic, the user's own checks.

    Every check is made in a process of its own, and answered for when it takes too long.

    Args:
        config: What the node must have.
        places: Folders and URLs of tiers, and the run directory; those that do not exist yet are looked at where they
            will be made.
        node: This node's name, for ``simulate_wrong_gemm``; the host's without it.
        network: Off: only interfaces that ``network_interfaces`` names must be up; for a job of one node.
        num_products: Matrix products of each number format; 0 = the arithmetic is not looked at.
        prober: What has the checks made, and stays open; one of its own without it.

    Blocks: up to ``check_timeout`` for each check; all of them together take a fraction of a second on a sound node.
    """
    config = config or HealthConfig()
    asked: list[tuple[t.Task, str, str]] = []
    for place in dict.fromkeys(places):
        if "://" in place and not place.startswith("file://"):
            asked.append((t.Store(url=place), "store", place))
        else:
            path = place.removeprefix("file://")
            asked.append((t.Disk(path=path, min_free_bytes=_bytes(config.min_free_disk_gib)), "disk", path))
            asked.append((t.Clock(path=path, max_skew_s=config.max_clock_skew), "clock", path))
    flip = config.simulate_wrong_gemm == (node or env.clean_name(env.hostname()))
    asked += [
        (t.SharedMemory(min_free_bytes=_bytes(config.min_free_shm_gib)), "shm", "/dev/shm"),
        (t.Memory(min_free_bytes=_bytes(config.min_free_memory_gib)), "memory", "node"),
        (t.OpenFiles(min_open_files=config.min_open_files), "files", "process"),
        *([(t.Compute(flip=flip, num_rounds=num_products), "compute", "cpu")] if num_products else []),
        *((t.Command(command=command), "command", command) for command in config.commands),
    ]
    if interfaces := config.network_interfaces:
        asked.append((t.Network(interfaces=interfaces), "network", ",".join(interfaces)))
    elif network:
        asked.append((t.Network(), "network", "any"))
    timeout_s = config.check_timeout
    with contextlib.nullcontext(prober) if prober is not None else Prober() as asking:
        return tuple(asking.ask(task, name, target, timeout_s=timeout_s) for task, name, target in asked)


def places_of(config: Config) -> tuple[str, ...]:
    """Return where a run writes, for ``places``: its run directory and its tiers, as far as they are named."""
    tiers = () if config.checkpoint is None else (config.checkpoint.directory, config.checkpoint.local_directory)
    return tuple(place for place in (config.run_dir, *tiers) if place is not None)


def _bytes(gib: float) -> int:
    return int(gib * 2**30)
