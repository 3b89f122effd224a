"""Where a session runs: as which rank, beside what, and what of its protection is missing there."""

from __future__ import annotations

import dataclasses
import logging

from outlast.config import CheckpointConfig, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.policy.deadlines import Timeouts

__all__ = ["as_initialised", "has_near_tier", "is_initialised", "say_what_is_off"]

log = logging.getLogger(__name__)


def is_initialised() -> bool:
    """Return whether ``torch.distributed`` is initialised."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def as_initialised(place: WorkerEnv) -> WorkerEnv:
    """Return the place that ``torch.distributed`` knows, if the script initialised it itself."""
    if not is_initialised():
        return place
    import torch.distributed as dist

    return dataclasses.replace(place, global_rank=dist.get_rank(), world_size=dist.get_world_size())


def has_near_tier(checkpoint: CheckpointConfig, place: WorkerEnv) -> bool:
    """Return whether something near keeps what a worker saves: a local folder, or the memory of the agent's writer."""
    return checkpoint.local_directory is not None or place.writer is not None


def say_what_is_off(
    checkpoint: CheckpointConfig | None,
    place: WorkerEnv,
    fault_tolerance: FaultToleranceConfig,
    *,
    watches_signals: bool,
) -> None:
    """Say in one line what does not protect this run, and how to have it."""
    missing = []
    if checkpoint is None:
        missing.append("nothing is saved or restored (set checkpoint.directory)")
    elif checkpoint.non_persistent_save_interval != 0 and not has_near_tier(checkpoint, place):
        missing.append(
            "non_persistent_save_interval has nothing to save to (set checkpoint.local_directory, or start the script "
            "with outlast run)"
        )
    if Timeouts.from_config(fault_tolerance).smallest_s() is None:
        missing.append("a hung rank is not noticed (set fault_tolerance.rank_section_timeouts)")
    if not watches_signals:
        missing.append("SIGTERM ends this process at once (call outlast.init() in the main thread)")
    if place.launcher == "python":
        missing.append("nothing restarts the script (start it with outlast run)")
    if missing:
        log.warning("off: %s", "; ".join(missing))
