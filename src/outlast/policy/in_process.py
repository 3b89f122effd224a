"""A cycle whose workers can restart inside their processes: whose end it survives, and for how long it is waited.

Such a worker is *armed*: it runs a function that :class:`outlast.inprocess.Wrapper` calls again after a fault. Its
peers go on without it, so that its end need not end the cycle; if they cannot, they say so by ending themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol

__all__ = ["HAS_BEGUN", "InProcessState", "Standing", "has_resumed", "is_survivable", "needs_restart", "newest_begun"]


class InProcessState(IntEnum):
    """How a worker stands with restarts inside its process."""

    OFF = 0
    """It is in no wrapped function: its end is a failure of the cycle."""
    ACTIVE = 1
    """It runs the function."""
    RESTARTING = 2
    """It left the function because of a fault somewhere, or is about to, and has not begun it anew."""
    RETURNED = 3
    """All are done with the function; what the worker does now is like any other worker's."""
    LEFT = 4
    """It left its peers for good, and they go on without it."""
    GAVE_UP = 5
    """The restart inside the processes is abandoned: whoever started them must start them again."""
    RESERVE = 6
    """It waits to take the place of another."""
    COMPLETED = 7
    """It is done with the function, others are not."""


_SURVIVABLE = frozenset(
    {
        InProcessState.ACTIVE,
        InProcessState.RESTARTING,
        InProcessState.LEFT,
        InProcessState.RESERVE,
        InProcessState.COMPLETED,
    }
)
_GOING_ON = _SURVIVABLE - {InProcessState.LEFT} | {InProcessState.RETURNED}
HAS_BEGUN = frozenset(
    {InProcessState.ACTIVE, InProcessState.RESERVE, InProcessState.COMPLETED, InProcessState.RETURNED}
)
"""States of a worker that knows why the restart iteration before was left."""
_DISPENSABLE = _SURVIVABLE - {InProcessState.ACTIVE, InProcessState.RESTARTING}


class Standing(Protocol):
    """What must be known of a worker, as on the heartbeat board."""

    @property
    def in_process(self) -> InProcessState: ...
    @property
    def in_process_call(self) -> int: ...
    @property
    def in_process_iteration(self) -> int: ...


def is_survivable(
    worker: Standing, *, living: Iterable[Standing], done: Iterable[Standing], has_unseen_peers: bool
) -> bool:
    """Return whether a cycle can go on after a worker's end.

    Args:
        worker: The one that ended with anything but 0.
        living: Those of its node that run.
        done: Those of its node that ended in order.
        has_unseen_peers: There are peers on other nodes.
    """
    if worker.in_process not in _SURVIVABLE:
        return False
    if has_unseen_peers or any(peer.in_process in _GOING_ON for peer in living):
        return True
    return worker.in_process in _DISPENSABLE and any(peer.in_process != InProcessState.LEFT for peer in done)


def needs_restart(worker: Standing) -> bool:
    """Return whether the peers of a worker that ended must restart to go on without it."""
    return worker.in_process in (InProcessState.ACTIVE, InProcessState.RESTARTING)


def newest_begun(workers: Iterable[Standing]) -> tuple[int, int]:
    """Return the newest call and restart iteration that a worker has begun, whatever it does in it."""
    begun = [(one.in_process_call, one.in_process_iteration) for one in workers if one.in_process in HAS_BEGUN]
    return max(begun, default=(0, 0))


def has_resumed(worker: Standing, reached: tuple[int, int]) -> bool:
    """Return whether others got on after the end of a worker that was in the function, or on its way to it.

    Args:
        worker: How it stood at its end.
        reached: The newest call and restart iteration that others have begun.
    """
    return reached >= (
        worker.in_process_call,
        worker.in_process_iteration + (worker.in_process == InProcessState.ACTIVE),
    )
