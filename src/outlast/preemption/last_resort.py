"""The last resort: the C library ends this process at a given time, also while no Python can run.

A thread of ours waits for a deadline, but it needs the interpreter's lock; a main thread that keeps that lock inside
C code for good would keep the process alive for good. So a POSIX timer calls ``_exit`` in a thread of the C library,
which asks nobody.

Rejected: a timer that sends a signal (a Python handler needs the main thread, and a signal's default action gives an
exit code of its own), a process beside it (one more process for each rank, for a second that hardly ever comes).
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

__all__ = ["LastResort"]

log = logging.getLogger(__name__)
_MONOTONIC, _SIGEV_THREAD = 1, 2


class _Event(ctypes.Structure):
    """``struct sigevent``; its value is the argument of the function, which takes it for a number."""

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
        event = _Event(
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
        """Let the process live on. Idempotent."""
        timer, self._timer = self._timer, None
        if timer is not None and self._pid == os.getpid():
            self._library.timer_delete(timer)
