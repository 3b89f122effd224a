"""The page: what a rank's monitor process can see of it at any time, also while the rank cannot run.

Shared memory of a few 64-bit words, each written by one thread of the rank and read by its monitor process; aligned
stores of 8 bytes are not torn. Times are monotonic nanoseconds, one clock for both processes.

Nothing here imports torch.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

from outlast.clock import now_ns

__all__ = ["Page", "RankPhase"]

_PAGE_BYTES = 4096
_BEAT, _PROGRESS, _PHASE, _ITERATION, _PAUSES, _ATOMICS = range(6)


class RankPhase(IntEnum):
    """Where a rank's main thread is."""

    WAITING = 0
    """In the wrapper, waiting for orders (a reserve, or one that is ready)."""
    STARTING = 1
    """Told to go; the function is not entered yet."""
    IN_FN = 2
    """In the wrapped function."""
    LEAVING = 3
    """Still in it, and told to leave."""
    OUT = 4
    """Out of it; cleaning up and checking its health."""
    COMPLETED = 5
    """The function returned; the others are waited for."""


class Page:
    """The words of one rank.

    Args:
        fd: Descriptor of the shared memory; this object owns it.

    Thread: in the rank, :meth:`beat` is the monitor thread's, :meth:`stamp_progress` any thread's, all others are the
        main thread's; the monitor process only reads.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls) -> Page:
        """Return a new page."""
        fd = os.memfd_create("outlast-inprocess", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        page = cls(fd)
        page.beat()
        page.stamp_progress()
        return page

    def close(self) -> None:
        """Release the memory; idempotent."""
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    # -- written by the rank -----------------------------------------------------------------------------------

    def beat(self) -> None:
        """Say that the monitor thread runs."""
        self._words[_BEAT] = now_ns()

    def stamp_progress(self) -> None:
        """Say that the main thread made progress."""
        self._words[_PROGRESS] = now_ns()

    def set_phase(self, phase: RankPhase, iteration: int | None = None) -> None:
        """Say where the main thread is; this counts as progress, except for ``LEAVING``."""
        if phase != RankPhase.LEAVING:
            self._words[_PROGRESS] = now_ns()
        if iteration is not None:
            self._words[_ITERATION] = iteration
        self._words[_PHASE] = phase

    def pause(self) -> None:
        """Enter a part without hang protection; may be nested."""
        self._words[_PAUSES] += 1

    def resume(self) -> None:
        """Leave a part without hang protection; counts as progress."""
        self._words[_PROGRESS] = now_ns()
        self._words[_PAUSES] -= 1

    def reset_depths(self) -> None:
        """Forget parts that were left by an exception."""
        self._words[_PAUSES] = self._words[_ATOMICS] = 0

    def enter_atomic(self) -> None:
        """Enter a part in which no restart may happen; may be nested."""
        self._words[_ATOMICS] += 1

    def leave_atomic(self) -> None:
        """Leave such a part."""
        self._words[_ATOMICS] -= 1

    # -- read by the monitor process ---------------------------------------------------------------------------

    @property
    def beat_ns(self) -> int:
        """When the monitor thread ran last."""
        return self._words[_BEAT]

    @property
    def progress_ns(self) -> int:
        """When the main thread made progress last."""
        return self._words[_PROGRESS]

    @property
    def phase(self) -> RankPhase:
        """Where the main thread is."""
        return RankPhase(self._words[_PHASE])

    @property
    def iteration(self) -> int:
        """The iteration that it is in, or was in last."""
        return self._words[_ITERATION]

    @property
    def is_paused(self) -> bool:
        """Whether hang protection is off."""
        return self._words[_PAUSES] > 0

    @property
    def is_atomic(self) -> bool:
        """Whether no restart may happen now."""
        return self._words[_ATOMICS] > 0
