"""Progress of a rank: how the main thread is probed, the page that shows progress, and the rules that judge it.

Another thread probes the main thread without running Python in it: ``Py_AddPendingCall`` has it call a C function
between two instructions, here ``sem_post``, which runs no Python and cannot fail. A main thread that sleeps or waits in
a C function does not respond.

The page is shared memory of a few 64-bit words, each written by one thread of the rank and read by its agent process,
also while the rank cannot run; aligned stores of 8 bytes are not torn. Times are monotonic nanoseconds, one clock for
both processes; the rules get times as arguments. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from enum import IntEnum

from outlast.clock import now_ns
from outlast.inprocess.protocol import MonitorTask
from outlast.policy.inprocess_protocol import RankFault, RankFaultKind
from outlast.runtime.files import memory_file

_PAGE_BYTES = 4096
_HEARTBEAT, _PROGRESS, _PHASE, _RESTART_COUNT, _PAUSES = range(5)


class RankPhase(IntEnum):
    """Position of a rank's main thread."""

    WAITING = 0
    """In the wrapper, waiting for orders: a spare, or a rank that is ready."""
    STARTING = 1
    """Ordered to enter the function, and not in it yet."""
    IN_FN = 2
    """In the wrapped function."""
    LEAVING = 3
    """In the wrapped function, and ordered to leave it."""
    OUT = 4
    """Outside the function: cleaning up and running health checks."""
    COMPLETED = 5
    """The function returned; this rank waits for the others."""


class Page:
    """The words of one rank.

    Args:
        fd: Descriptor of the shared memory; this object owns it.

    Thread: in the rank, :meth:`heartbeat` is the monitor thread's, :meth:`stamp_progress` any thread's, other methods
    are the main thread's; the agent process only reads.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls) -> Page:
        fd = memory_file("outlast-inprocess")
        os.ftruncate(fd, _PAGE_BYTES)
        page = cls(fd)
        page.heartbeat()
        page.stamp_progress()
        return page

    def close(self) -> None:
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    # -- written by the rank -----------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        self._words[_HEARTBEAT] = now_ns()

    def stamp_progress(self) -> None:
        self._words[_PROGRESS] = now_ns()

    def set_phase(self, phase: RankPhase, restart_count: int | None = None) -> None:
        """Record the phase; except for ``LEAVING`` this counts as progress."""
        if phase != RankPhase.LEAVING:
            self._words[_PROGRESS] = now_ns()
        if restart_count is not None:
            self._words[_RESTART_COUNT] = restart_count
        self._words[_PHASE] = phase

    def pause(self) -> None:
        self._words[_PAUSES] += 1

    def resume(self) -> None:
        """Leave a part without hang protection; counts as progress."""
        self._words[_PROGRESS] = now_ns()
        self._words[_PAUSES] -= 1

    def reset_depths(self) -> None:
        """Leave all parts, after an exception."""
        self._words[_PAUSES] = 0

    # -- read by the agent process ---------------------------------------------------------------------------

    @property
    def heartbeat_ns(self) -> int:
        return self._words[_HEARTBEAT]

    @property
    def progress_ns(self) -> int:
        return self._words[_PROGRESS]

    @property
    def phase(self) -> RankPhase:
        return RankPhase(self._words[_PHASE])

    @property
    def restart_count(self) -> int:
        return self._words[_RESTART_COUNT]

    @property
    def is_paused(self) -> bool:
        return self._words[_PAUSES] > 0


_SEM_BYTES = 64  # sem_t has 32 on 64-bit Linux

_libc = ctypes.CDLL(None, use_errno=True)
_post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_semaphore = ctypes.create_string_buffer(_SEM_BYTES)
"""Never freed: the main thread may post it at any later time."""
if _libc.sem_init(ctypes.byref(_semaphore), 0, 0) != 0:
    raise OSError(ctypes.get_errno(), "sem_init failed")


class MainThreadProgress:
    """Probe the main thread.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self._asked = False

    def ask(self) -> None:
        """Send a probe, unless one is pending. Blocks: never."""
        if not self._asked:
            full = ctypes.pythonapi.Py_AddPendingCall(_post, ctypes.byref(_semaphore))
            self._asked = full == 0

    def take(self) -> bool:
        """Return whether the main thread responded since the last call. Blocks: never."""
        answered = False
        while _libc.sem_trywait(ctypes.byref(_semaphore)) == 0:
            answered = True
        if answered:
            self._asked = False
        return answered


_IN_FN = (RankPhase.IN_FN, RankPhase.LEAVING)
_IDLE = (RankPhase.WAITING, RankPhase.COMPLETED)
"""The main thread waits in the wrapper, and outlast does not hold the interpreter's lock."""
_HEARTBEAT_SLACK_S = 0.25
"""Seconds that a monitor thread may be late on a busy machine and still count as running."""


class RankWatch:
    """Judge the progress of one rank.

    Args:
        page: Its page.
        task: Timeouts.
    """

    def __init__(self, page: Page, task: MonitorTask) -> None:
        self._page, self._task = page, task
        self._soft_ns, self._hard_ns = int(task.soft_timeout_s * 1e9), int(task.hard_timeout_s * 1e9)
        self._start_ns = int(task.limits.barrier_timeout_s * 1e9)
        self._fresh_ns = int((task.thread_interval_s + _HEARTBEAT_SLACK_S) * 1e9)
        self._reported_soft = -1
        self._went: tuple[int, int] | None = None
        self._ordered_to_leave_ns: int | None = None
        self._is_over = False

    def note_end(self) -> None:
        """Record that the rank leaves the wrapper: its monitor thread need not run any more."""
        self._is_over = True

    def note_go(self, restart_count: int, now_ns: int) -> None:
        self._went = (restart_count, now_ns)
        self._ordered_to_leave_ns = None

    def note_leave(self, now_ns: int) -> None:
        self._went = None
        if self._ordered_to_leave_ns is None:
            self._ordered_to_leave_ns = now_ns

    def describe_idle(self, now_ns: int) -> RankFault | None:
        """Return a fault if a rank in the function has made no progress for half a soft timeout, once per call."""
        page = self._page
        since_ns = now_ns - page.progress_ns
        is_judged = page.phase == RankPhase.IN_FN and not page.is_paused and self._reported_soft < page.restart_count
        if not is_judged or self._ordered_to_leave_ns is not None or since_ns < self._soft_ns // 2:
            return None
        self._reported_soft = page.restart_count
        summary = f"no progress for {since_ns / 1e9:.1f} s while others waited"
        return self._fault(page.restart_count, RankFaultKind.SOFT_TIMEOUT, summary)

    def look(self, now_ns: int) -> tuple[RankFault | None, int | None]:
        """Return a fault if a timeout was exceeded, and when to check again; ``None``: at the next event.

        After a soft timeout the interpreter is free; after a hard one the rank has to be ended.
        """
        page, restart_count = self._page, self._page.restart_count
        phase = page.phase
        if self._went is not None:
            if page.restart_count >= self._went[0] and phase not in (RankPhase.WAITING, RankPhase.STARTING):
                self._went = None
            elif now_ns >= (due := self._went[1] + self._start_ns):
                text = f"the function was not entered within {self._task.limits.barrier_timeout_s:g} s"
                return self._fault(self._went[0], RankFaultKind.HARD_TIMEOUT, text), None
            else:
                found, silent_ns = self._check_heartbeat(self._went[0], now_ns, "before the function was entered")
                return found, due if silent_ns is None else min(due, silent_ns)
        if phase in _IDLE:
            return self._check_heartbeat(restart_count, now_ns, "outside the function")
        if phase not in _IN_FN:
            return None, None
        if page.is_paused:
            return None, now_ns + self._soft_ns
        progress_ns = page.progress_ns
        base_ns = progress_ns if self._ordered_to_leave_ns is None else min(progress_ns, self._ordered_to_leave_ns)
        hard_ns = base_ns + self._hard_ns
        if now_ns >= hard_ns:
            return self._fault(restart_count, RankFaultKind.HARD_TIMEOUT, self._why_hard(now_ns)), None
        if self._ordered_to_leave_ns is not None or self._reported_soft >= restart_count:
            return None, hard_ns
        soft_ns = progress_ns + self._soft_ns
        if now_ns < soft_ns:
            return None, soft_ns
        fresh_until_ns = page.heartbeat_ns + self._fresh_ns
        if now_ns <= fresh_until_ns:
            self._reported_soft = restart_count
            text = f"no progress for {(now_ns - progress_ns) / 1e9:.1f} s (soft_timeout={self._task.soft_timeout_s:g})"
            return self._fault(restart_count, RankFaultKind.SOFT_TIMEOUT, text), hard_ns
        # The monitor thread does not run either: a long call may hold the interpreter's lock.
        return None, min(hard_ns, now_ns + self._fresh_ns // 4)

    def _check_heartbeat(self, restart_count: int, now_ns: int, where: str) -> tuple[RankFault | None, int | None]:
        """Judge a rank whose main thread may wait, such as a spare, by the heartbeats of its monitor thread."""
        if self._is_over:
            return None, None
        silent_ns = self._page.heartbeat_ns + self._hard_ns
        if now_ns < silent_ns:
            return None, silent_ns
        since_s = (now_ns - self._page.heartbeat_ns) / 1e9
        text = f"no thread of it has run for {since_s:.1f} s {where}; it was stopped, or held the interpreter's lock"
        text += f" (hard_timeout={self._task.hard_timeout_s:g})"
        return self._fault(restart_count, RankFaultKind.HARD_TIMEOUT, text), None

    def _fault(self, restart_count: int, kind: RankFaultKind, summary: str) -> RankFault:
        return RankFault(initial_rank=self._task.initial_rank, restart_count=restart_count, kind=kind, summary=summary)

    def _why_hard(self, now_ns: int) -> str:
        text = f"no progress for {(now_ns - self._page.progress_ns) / 1e9:.1f} s"
        if now_ns > self._page.heartbeat_ns + self._fresh_ns:
            text += "; it was stopped, or held the interpreter's lock"
        elif self._ordered_to_leave_ns is not None:
            text = "it could not be interrupted"
        return text + f" (hard_timeout={self._task.hard_timeout_s:g})"
