"""One save: its record on the way through the lanes, the handle its caller holds, and what is committed already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from outlast import clock
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.manifest import TensorEntry
from outlast.errors import CheckpointError, DeadlineExceeded
from outlast.policy.recovery_point import Tier

__all__ = ["Committed", "PeerSilent", "Save", "SaveHandle", "SaveResult", "wait_for_all"]


class PeerSilent(CheckpointError):
    """A save failed because a rank is gone, or does not answer: not for want of a place to write to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """A committed save."""

    generation: int
    num_bytes: int
    """Of this rank's shard."""
    duration_s: float
    """From the call to the commit."""
    stall_s: float
    """What the training thread waited."""


class SaveHandle:
    """Wait for a save's commit, or ask for it.

    Args:
        iteration: Number of optimizer steps that the saved state had done.
        limit_s: Seconds from now after which nobody waits any more, whatever became of the save.
        attempt: Names what is saved.

    Thread: any.
    """

    def __init__(self, iteration: int, *, limit_s: float, attempt: str = "") -> None:
        self.iteration = iteration
        """Number of optimizer steps that the saved state had done."""
        self.attempt = attempt
        """The attempt that the saved state bears: two of one iteration are two states."""
        self._limit_ns = clock.now_ns() + int(limit_s * 1e9)
        self._finished = threading.Event()
        self._result: SaveResult | None = None
        self._error: CheckpointError | None = None

    @property
    def done(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._finished.is_set()

    @property
    def result(self) -> SaveResult | None:
        """The committed save; ``None`` while it is under way, or when it failed."""
        return self._result

    @property
    def error(self) -> CheckpointError | None:
        """Why the save failed; ``None`` while it is under way, or when it is committed."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for the commit and return it.

        Raises:
            CheckpointError: The save failed; earlier generations are what they were.
            DeadlineExceeded: It was neither committed nor failed in time; it continues.

        Blocks: up to ``timeout_s``; ``None``: until the save's own deadline, which also passes when the store of the
            ranks does not answer.
        """
        left_s = max(0.0, (self._limit_ns - clock.now_ns()) / 1e9)
        if not self._finished.wait(left_s if timeout_s is None else timeout_s):
            text = f"the save of iteration {self.iteration} is neither committed nor failed"
            if timeout_s is None:
                raise DeadlineExceeded(f"{text} at its deadline; is rank 0, which hosts the store, stopped?")
            raise DeadlineExceeded(f"{text} after {timeout_s} s; wait longer", iteration=self.iteration)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def succeed(self, result: SaveResult) -> None:
        """End it as committed; the first end counts."""
        if not self._finished.is_set():
            self._result = result
            self._finished.set()

    def fail(self, error: CheckpointError) -> None:
        """End it as failed; the first end counts."""
        if not self._finished.is_set():
            self._error = error
            self._finished.set()


def wait_for_all(handles: Iterable[SaveHandle], timeout_s: float) -> None:
    """Wait until each save is committed or has failed; what failed is in its handle.

    Raises:
        DeadlineExceeded: One of them still is under way.

    Blocks: up to ``timeout_s``.
    """
    end_ns = clock.now_ns() + int(timeout_s * 1e9)
    for handle in handles:
        try:
            handle.wait(max(0.0, (end_ns - clock.now_ns()) / 1e9))
        except DeadlineExceeded:
            raise
        except CheckpointError:
            continue


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save, staged or failed at that."""

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
    arena: Arena | None = None
    num_bytes: int = 0
    tensors: tuple[TensorEntry, ...] = ()
    guard: Callable[[], None] | None = None
    """Waits until the arena is filled; ``None`` = it is."""
    error: str | None = None
    """Why there is nothing staged on this rank: the others must be informed, or they would wait."""


@dataclass(slots=True)
class Committed:
    """Which generations are known to be committed, and which of all hold numbers that are infinite or NaN."""

    tiers: dict[int, set[Tier]] = field(default_factory=dict)
    """Each committed generation's tiers."""
    not_finite: set[int] = field(default_factory=set)
    """Generations that hold numbers that are infinite or NaN, committed here or newer."""

    def missing(self, save: Save) -> frozenset[Tier]:
        """Return the tiers that a save is meant for and its iteration is not in yet."""
        return save.tiers - self.tiers.get(save.iteration, set())

    def add(self, iteration: int, tiers: frozenset[Tier]) -> None:
        """Count an iteration as committed to these tiers, too."""
        self.tiers.setdefault(iteration, set()).update(tiers)

    def generations(self, tier: Tier) -> set[int]:
        """Return the generations that are committed to a tier."""
        return {generation for generation, tiers in self.tiers.items() if tier in tiers}

    def note_finite(self, iteration: int, *, finite: bool) -> None:
        """Note whether all numbers of a generation are finite."""
        (self.not_finite.discard if finite else self.not_finite.add)(iteration)

    def copy(self) -> Committed:
        """Return a copy that changes by itself."""
        return Committed({generation: set(tiers) for generation, tiers in self.tiers.items()}, set(self.not_finite))
