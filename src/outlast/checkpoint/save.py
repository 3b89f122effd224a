"""One save: its record in the lanes, its caller's handle, and its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast import clock
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.places import Places
from outlast.checkpoint.shard import TensorSpan
from outlast.errors import CheckpointError, DeadlineExceeded
from outlast.policy.lineage import UNKNOWN_BRANCH, Branch
from outlast.policy.recovery_point import Tier


class PeerSilent(CheckpointError):
    """A save failed because a rank is gone, or does not respond; the directories are not at fault."""


class Replaced(CheckpointError):
    """A save was not written to a tier that was behind, since a newer save replaced it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """A committed save."""

    checkpoint: int
    num_bytes: int
    """Bytes of this rank's shard."""
    duration_s: float
    """Seconds from the call to the commit."""
    stall_s: float
    """Seconds that the training thread waited."""


class SaveHandle:
    """Wait for a save's commit, or query its state.

    Args:
        iteration: Number of optimizer steps that the saved state had done.
        limit_s: Seconds from now after which all waits end, even without an outcome.
        attempt: Name of the saved state.

    Thread: any.
    """

    def __init__(self, iteration: int, *, limit_s: float, attempt: str = "") -> None:
        self.iteration = iteration
        """Number of optimizer steps that the saved state had done."""
        self.attempt = attempt
        """Name of the saved state: two attempts of one iteration are two states."""
        self._limit_ns = clock.now_ns() + int(limit_s * 1e9)
        self._finished, self._settled, self._first_end = threading.Event(), threading.Event(), threading.Lock()
        self._result: SaveResult | None = None
        self._error: CheckpointError | None = None

    @property
    def done(self) -> bool:
        """Whether the save is committed or has failed; a save that failed in a tier may still be retried there."""
        return self._finished.is_set()

    @property
    def is_settled(self) -> bool:
        """Whether the save is done and is not retried in any tier."""
        return self._settled.is_set()

    @property
    def result(self) -> SaveResult | None:
        """The committed save; ``None`` while it is under way, or when it failed."""
        return self._result

    @property
    def error(self) -> CheckpointError | None:
        """Why the save failed; ``None`` while it is under way, or when it is committed, even if only after retries."""
        return self._error

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until the save is committed to all of its tiers or is no longer retried; return whether it is.

        Blocks: up to ``timeout_s``.
        """
        return self._settled.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for the commit and return it.

        Raises:
            CheckpointError: The save failed; earlier checkpoints are unchanged.
            DeadlineExceeded: It was neither committed nor failed in time; it continues.

        Blocks: up to ``timeout_s``; ``None`` = until the save's own deadline, which also passes when the ranks' store
            does not respond.
        """
        left_s = max(0.0, (self._limit_ns - clock.now_ns()) / 1e9)
        if not self._finished.wait(left_s if timeout_s is None else timeout_s):
            text = f"the save of iteration {self.iteration} is neither committed nor failed"
            if timeout_s is None:
                raise DeadlineExceeded(f"{text} at its deadline; does a directory, or rank 0, not respond?")
            raise DeadlineExceeded(f"{text} after {timeout_s} s; wait longer", iteration=self.iteration)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def succeed(self, result: SaveResult) -> None:
        """End the save as committed, also after a failure that was retried."""
        if self._first_end.acquire(blocking=False) or not self._settled.is_set():
            self._result, self._error = result, None
        self._finished.set()
        self._settled.set()

    def fail(self, error: CheckpointError, *, is_retried: bool = False) -> None:
        """End the save as failed, unless it has ended; with ``is_retried``, it may still succeed."""
        if self._first_end.acquire(blocking=False):
            self._error = error
            self._finished.set()
        if not is_retried:
            self._settled.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    iteration: int
    attempt: SaveAttempt
    handle: SaveHandle
    started_ns: int
    stall_s: float
    tiers: frozenset[Tier]
    suspect: bool = False
    """For diagnosis only: never loaded, never kept in memory."""
    restored_from: int | None = None
    restored_attempt: str | None = None
    branch: Branch = UNKNOWN_BRANCH
    arena: Arena | None = None
    num_bytes: int = 0
    tensors: tuple[TensorSpan, ...] = ()
    infinite: Mapping[str, str] = field(default_factory=dict)
    """Digests of the buffers that held infinities before training, by their name in the save."""
    guard: Callable[[], None] | None = None
    """Waits until the arena is filled; ``None`` = it is."""
    error: str | None = None
    """Why nothing is staged on this rank; the other ranks need it."""
    is_replaced: bool = False
    """Nothing is staged any more, since a newer save replaced this one."""

    def manifest_fields(self, places: Places) -> dict[str, Any]:
        return {
            "run": places.run,
            "topology": places.topology,
            "world_size": len(places.nodes),
            "iteration": self.iteration,
            "attempt": str(self.attempt),
            "restored_from": self.restored_from,
            "restored_attempt": self.restored_attempt,
            "era": self.branch.era,
            "forks": self.branch.forks,
        }

    def result(self) -> SaveResult:
        duration_s = (clock.now_ns() - self.started_ns) / 1e9
        return SaveResult(
            checkpoint=self.iteration, num_bytes=self.num_bytes, duration_s=duration_s, stall_s=self.stall_s
        )
