"""The time by which the process has ended, whatever it is doing.

A thread of ours waits for the deadline, but it needs the interpreter's lock; a main thread that keeps that lock inside
C code would keep the process alive forever. So a POSIX timer calls ``_exit`` in a thread of the C library, which needs
no lock.

Rejected: a timer that sends a signal (a Python handler needs the main thread, and a signal's default action gives an
exit code of its own), a process beside it (one more process for each rank, for a second that hardly ever comes).
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from outlast import clock

__all__ = ["ExitDeadline", "LastResort"]

log = logging.getLogger(__name__)
_MONOTONIC, _SIGEV_THREAD = 1, 2


class ExitDeadline:
    """End this process at a time that can be brought forward.

    Some time before it (a fifth of what there was, 2 s at most) what is under way should be given up, so that the
    main thread can leave in order. If it has not by then, a thread logs what is lost and ends the process, a little
    before the time; if that thread cannot run either, the C library ends it, at the time.

    Args:
        exit_code: Returns the exit code.
        before_exit: Called in the thread just before it ends the process.
    """

    def __init__(self, exit_code: Callable[[], int], before_exit: Callable[[int], None] | None = None) -> None:
        self._exit_code, self._before_exit = exit_code, before_exit
        self._end_s: float | None = None
        self._give_up_s: float | None = None
        self._hard_s = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._last_resort = LastResort()
        self._closed = False

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the process is ended; ``None`` = nothing ends it."""
        return None if self._end_s is None else max(0.0, self._end_s - clock.now_s())

    @property
    def give_up_in_s(self) -> float | None:
        """Seconds until what is under way should be given up; ``None`` = it may take as long as it takes."""
        return None if self._give_up_s is None else max(0.0, self._give_up_s - clock.now_s())

    def bring_forward(self, after_s: float, *, give_up_now: bool = False) -> None:
        """End the process after so many seconds, unless that is due earlier.

        Args:
            after_s: Seconds from now.
            give_up_now: Nothing is to be waited for any more.
        """
        now_s, margin_s = clock.now_s(), min(2.0, after_s / 5)
        with self._changed:
            if self._closed:
                return
            if self._end_s is None or now_s + after_s < self._end_s:
                self._end_s = now_s + after_s
                self._hard_s = self._end_s - margin_s / 2
                self._give_up_s = min(self._end_s - margin_s, self._give_up_s or self._end_s)
                self._last_resort.arm(after_s, self._exit_code())
            if give_up_now:
                self._give_up_s = now_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="outlast-deadline", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel the deadline. Idempotent. Blocks: never."""
        with self._changed:
            self._closed = True
            self._last_resort.disarm()
            self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed and (left_s := self._hard_s - clock.now_s()) > 0:
                self._changed.wait(left_s)
            if self._closed:
                return
            code = self._exit_code()
        try:
            if self._before_exit is not None:
                self._before_exit(code)
            log.warning("the deadline has passed and the main thread has not returned; exiting with code %d", code)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


class _SignalEvent(ctypes.Structure):
    """``struct sigevent``; its value is the argument of the function, which reads it as a number."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_int * 8),
    ]


class _Times(ctypes.Structure):
    """``struct itimerspec``: period and first time, each in seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("period_s", "period_ns", "first_s", "first_ns")]


class LastResort:
    """End this process at a given time, whatever it is doing.

    A forked child has no such timer. What keeps a process from ending is a thread of it that the kernel cannot
    interrupt (state D: a dead file server, a driver): nothing ends that.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        self._pid = os.getpid()
        self._library: Any = ctypes.CDLL(None, use_errno=True)

    def arm(self, after_s: float, exit_code: int) -> bool:
        """End the process after so many seconds, in place of what was armed before.

        Returns:
            Whether that is possible here.
        """
        self.disarm()
        try:
            create = self._library.timer_create
        except AttributeError:
            log.warning("this C library has no timers: the deadline cannot end a process that is stuck in C code")
            return False
        event = _SignalEvent(
            value=exit_code,
            notify=_SIGEV_THREAD,
            function=ctypes.cast(self._library._exit, ctypes.c_void_p),
        )
        timer = ctypes.c_void_p()
        whole_s, rest_s = divmod(max(after_s, 1e-6), 1.0)
        times = _Times(first_s=int(whole_s), first_ns=int(rest_s * 1e9))
        if create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0 or (
            self._library.timer_settime(timer, 0, ctypes.byref(times), None) != 0
        ):
            log.warning("the deadline has no timer: %s", os.strerror(ctypes.get_errno()))
            return False
        self._timer = timer
        return True

    def disarm(self) -> None:
        """Cancel the timer. Idempotent."""
        timer, self._timer = self._timer, None
        if timer is not None and self._pid == os.getpid():
            self._library.timer_delete(timer)
