"""The time by which the process has ended, whatever it is doing."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from outlast import clock
from outlast.preemption.last_resort import LastResort

__all__ = ["Deadline"]

log = logging.getLogger(__name__)


class Deadline:
    """End this process at a time that can be brought forward.

    Some time before it (a fifth of what there was, 2 s at most) what is under way should be given up, so that the
    main thread can leave in order. If it has not by then, a thread says what is lost and ends the process, a little
    before the time; if that thread cannot run either, the C library does, at the time.

    Args:
        exit_code: Tells the exit code.
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
        now_s, reserve_s = clock.now_s(), min(2.0, after_s / 5)
        with self._changed:
            if self._closed:
                return
            if self._end_s is None or now_s + after_s < self._end_s:
                self._end_s = now_s + after_s
                self._hard_s = self._end_s - reserve_s / 2
                self._give_up_s = min(self._end_s - reserve_s, self._give_up_s or self._end_s)
                self._last_resort.arm(after_s, self._exit_code())
            if give_up_now:
                self._give_up_s = now_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="outlast-deadline", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Let the process live on. Idempotent. Blocks: never."""
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
