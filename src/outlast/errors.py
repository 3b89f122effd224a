"""Errors and exit codes.

The whole tree::

    OutlastError
    +-- ConfigError (also a ValueError)      a setting is wrong; exit code 2
    +-- RendezvousError                      nodes could not agree on a cycle
    +-- PeerLost                             another rank or node is gone
    +-- DeadlineExceeded (also a TimeoutError)
    +-- CheckpointError
    |   +-- Incomplete                       a checkpoint lacks a part
    |   +-- Corrupt                          bytes differ from their digests
    |   +-- Untrusted                        complete, but from another run, rank or topology
    |   +-- Mismatch                         complete and trusted, but does not fit the live state
    |   +-- Unavailable                      a directory or object store cannot be read or written
    +-- NotFinite                            a loss or a gradient is NaN or infinite
    +-- UnhealthyRank                        a rank must be excluded
    +-- RestartAbort                         the ranks cannot be restarted in process
    +-- BudgetExhausted                      the recovery policy has no action left; exit code 93
    +-- SparesExhausted                      no node or actor is left to take a slot
    +-- ActorFailed                          a call on a group of actors failed permanently
    +-- RolledBack                           a group of actors rolled back to another iteration

Every error carries the rank, node and iteration if known, and its message ends with what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

__all__ = [
    "ActorFailed",
    "BudgetExhausted",
    "CheckpointError",
    "ConfigError",
    "Corrupt",
    "DeadlineExceeded",
    "ExitReason",
    "Incomplete",
    "Mismatch",
    "NotFinite",
    "OutlastError",
    "PeerLost",
    "RendezvousError",
    "RestartAbort",
    "RolledBack",
    "SparesExhausted",
    "Unavailable",
    "UnhealthyRank",
    "Untrusted",
]


class ExitReason(IntEnum):
    """The reason why a worker or the launcher ended; the value is the process exit code."""

    FINISHED = 0
    """The run is complete. A finished run is never re-queued."""
    FAILED = 1
    """A failure without a more specific exit code; the recovery policy decides."""
    BAD_INPUT = 2
    """The command line, a config or the script is wrong: nothing was started, or all ranks failed in the same way
    before the first step, so that a restart cannot help. Never re-queued."""
    RESUME_TO_DISAMBIGUATE = 16
    """An invalid result must be run again elsewhere before it can be judged."""
    FAILED_VALIDATION = 17
    """An invalid result was attributed to its cause; the diagnosis is in the journal."""
    STRAGGLER = 18
    """A straggler was identified and all ranks exited, with their state saved if there is a checkpoint directory; a
    spare takes its node's slot."""
    UNHEALTHY_NODE = 19
    """This node failed its health check and did not join; the others continue without it."""
    PREEMPTED = 75
    """Shutdown requested; there is a saved state to resume from. Does not count against the restart budget."""
    NO_PROGRESS = 93
    """The restart budget is used up without progress, a script failed twice in the same way without a session or before
    its first step, or a run or checkpoint directory belongs to another run. Never re-queued."""


class OutlastError(Exception):
    """Base of every error that outlast raises on purpose.

    Args:
        message: The problem and what to do next, in one line.
        rank: Global rank concerned, when known.
        node: Node name concerned, when known.
        iteration: Number of optimizer steps done, when known.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        node: str | None = None,
        iteration: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.node = node
        self.iteration = iteration


class ConfigError(OutlastError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class RendezvousError(OutlastError):
    """The nodes of a job could not agree on a cycle in time."""


class PeerLost(OutlastError):
    """Another rank or node that this one depends on is gone."""


class DeadlineExceeded(OutlastError, TimeoutError):
    """An operation did not complete in time."""


class CheckpointError(OutlastError):
    """A checkpoint could not be saved or loaded."""


class Incomplete(CheckpointError):
    """A checkpoint lacks a manifest, a shard, or bytes of a shard."""


class Corrupt(CheckpointError):
    """Bytes of a checkpoint differ from the digests recorded for them."""


class Untrusted(CheckpointError):
    """A checkpoint copy is complete, but belongs to another run, rank, iteration or topology."""


class Mismatch(CheckpointError):
    """A checkpoint is complete and trusted, but does not fit the state to load into."""


class Unavailable(CheckpointError):
    """A checkpoint directory or object store cannot be read or written."""


class NotFinite(OutlastError):
    """A loss or a gradient is NaN or infinite, and training must not continue with it."""


class UnhealthyRank(OutlastError):
    """A rank must be excluded; if a health check raises this error, the rank is permanently removed."""


class RestartAbort(OutlastError):
    """The ranks cannot be restarted in process; raised on all ranks.

    A plug-in that raises this error ends the restarts for all ranks.

    Args:
        message: The problem and what to do next, in one line.
        counts: Counts until then, by name: ``restarts``, ``faults``, ``living``, and others.
        rank: Global rank concerned, when known.
        node: Node name concerned, when known.
        iteration: Number of the restart, when known; 0 = the function's first call.
    """

    def __init__(
        self,
        message: str,
        *,
        counts: Mapping[str, int] | None = None,
        rank: int | None = None,
        node: str | None = None,
        iteration: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank, node=node, iteration=iteration)
        self.counts = dict(counts or {})


class BudgetExhausted(OutlastError):
    """The recovery policy has no action left that could help."""


class SparesExhausted(OutlastError):
    """A slot is empty and no node or actor is left to take the slot."""


class ActorFailed(OutlastError):
    """A call on a group of actors failed again after a retry, or actors are lost without any progress.

    The cause is the actor's exception, if there was one.
    """


class RolledBack(OutlastError):
    """A group of actors could only resume from another iteration than the one at which the interrupted call began.

    The call was not repeated. ``iteration`` is the group's iteration now: pass the data from there on.
    """
