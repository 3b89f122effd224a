"""A worker of a cycle, as its node's agent knows it."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.incidents import Incident

__all__ = ["WorkerProcess"]


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker of this cycle."""

    local_rank: int
    global_rank: int
    pid: int = 0
    started_ns: int = 0
    """When it was known to run, on the node's monotonic clock; 0 = not yet."""
    exit_code: int | None = None
    ended_ns: int = 0
    """When its end was seen, on the node's monotonic clock; 0 = it runs."""
    lost: Incident | None = None
    """What ended it, where the others go on without it; else ``None``."""
