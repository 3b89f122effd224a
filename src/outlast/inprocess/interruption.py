"""Getting the main thread out of the wrapped function, wherever it is.

The monitor thread sends the main thread a real-time signal whose Python handler raises :class:`RestartRequested`: a
signal interrupts sleeps, locks and queue waits, and its handler runs wherever bytecode runs. What waits in a
collective comes back to bytecode because its connections are cut (:mod:`outlast.runtime.connections`). Code may swallow
the exception, so it is raised again and again until the function has been left; see :mod:`outlast.inprocess.escape`
for code that swallows it each time.

Rejected: ``PyThreadState_SetAsyncExc`` (delivered only when a C call has returned, so never in ``time.sleep``).
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from outlast import clock
from outlast.errors import ConfigError
from outlast.inprocess.escape import Escape

__all__ = ["Interruption", "RestartRequested"]

_UNSAFE_FILES = frozenset({logging.__file__, importlib.__file__})
_UNSAFE_PREFIX = "<frozen importlib"
_UNSAFE_NS = 3_000_000_000
"""How long an import or a line of log is waited for: half-done ones break what runs later."""
_UPDATE_NS = 1_000_000_000
"""How long the end of an update is waited for: a state that is left in the middle of one is of no use."""
_NUM_FRAMES = 40
_PLAIN_RAISES = 4
"""How often the exception is raised where the code happens to be, before a place is looked for."""


class RestartRequested(BaseException):
    """All ranks leave the wrapped function now; not to be caught."""


class Interruption:
    """Raise :class:`RestartRequested` in the main thread while it is inside and was told to leave.

    Args:
        boundary: The function that calls the wrapped one; it is never interrupted itself.

    Thread: :meth:`order` and :meth:`poke` from any, everything else from the main thread.
    """

    def __init__(self, boundary: CodeType) -> None:
        self._iteration = -1
        self._next = 0
        self._inside = False
        self._atomic = 0
        self._updating = False
        self._ordered_ns = 0
        self._deferred_since_ns: int | None = None
        self._num_raised = 0
        own = (self.enter.__code__, self.leave.__code__)
        self._boundary: frozenset[CodeType] = frozenset((*own, boundary))
        self._escape = Escape(self._request, self._boundary)
        self._signal = 0
        self._main = 0
        self._earlier_unraisable: Callable[[Any], object] | None = None

    def install(self) -> None:
        """Take a real-time signal that nobody uses.

        Raises:
            ConfigError: Not on the main thread, or all real-time signals are in use.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "a Wrapper's function must be called on the main thread: only there can it be interrupted"
            )
        for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
            if signal.getsignal(number) == signal.SIG_DFL:
                break
        else:
            raise ConfigError("no real-time signal is free; a Wrapper needs one to interrupt the main thread")
        signal.signal(number, self._handle)
        self._signal, self._main = number, threading.get_ident()
        self._earlier_unraisable = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable

    def uninstall(self) -> None:
        """Give the signal back. Idempotent. Nobody may call :meth:`poke` any more."""
        if self._signal:
            self._escape.stop()
            signal.signal(self._signal, signal.SIG_DFL)
            self._signal = 0
            if sys.unraisablehook == self._on_unraisable and self._earlier_unraisable is not None:
                sys.unraisablehook = self._earlier_unraisable

    # -- the main thread ---------------------------------------------------------------------------------------

    def enter(self, iteration: int) -> bool:
        """Allow to be interrupted from here on; return ``False`` if told to leave this iteration already."""
        self._iteration, self._atomic, self._num_raised = iteration, 0, 0
        self._deferred_since_ns, self._updating = None, False
        self._inside = True
        if self._next > iteration:
            self._inside = False
            return False
        return True

    def leave(self) -> None:
        """Allow it no more. Never raises :class:`RestartRequested` once it has begun."""
        self._inside = False
        self._escape.stop()

    def enter_atomic(self) -> None:
        """Forbid it until :meth:`leave_atomic`; may be nested.

        Raises:
            RestartRequested: Told to leave before.
        """
        self._atomic += 1
        if self._atomic == 1 and self.is_wanted:
            self._atomic = 0
            raise self._request()

    def leave_atomic(self) -> None:
        """Allow it again.

        Raises:
            RestartRequested: Told to leave meanwhile.
        """
        self._atomic -= 1
        if self._atomic == 0 and self.is_wanted:
            raise self._request()

    def begin_update(self) -> None:
        """Put it off for a moment, as what training changes is not whole from here until :meth:`end_update`.

        Raises:
            RestartRequested: Told to leave before.
        """
        if self.is_wanted and not self._atomic and not self._updating:
            raise self._request()
        self._updating = True

    def end_update(self) -> None:
        """Put it off no more.

        Raises:
            RestartRequested: Told to leave meanwhile.
        """
        self._updating = False
        if self.is_wanted and not self._atomic:
            raise self._request()

    # -- any thread --------------------------------------------------------------------------------------------

    @property
    def is_inside(self) -> bool:
        """Whether the main thread can be interrupted."""
        return self._inside

    @property
    def is_wanted(self) -> bool:
        """Whether the main thread is inside and has to leave."""
        return self._inside and self._next > self._iteration

    def is_left(self, iteration: int) -> bool:
        """Whether the main thread is out of this iteration, or has to leave it."""
        return self._next > iteration or self._iteration != iteration or not self._inside

    @property
    def is_atomic(self) -> bool:
        """Whether the main thread must not be interrupted now."""
        return self._atomic > 0

    @property
    def is_put_off(self) -> bool:
        """Whether the main thread is in an update that may still end in time."""
        return self._updating and clock.now_ns() - self._ordered_ns < _UPDATE_NS

    def order(self, next_iteration: int) -> None:
        """Have every iteration below ``next_iteration`` left."""
        if next_iteration > self._next:
            self._ordered_ns = clock.now_ns()
        self._next = max(self._next, next_iteration)

    def poke(self) -> None:
        """Interrupt the main thread if it has to leave; repeat it until it has."""
        if self.is_wanted and not self._atomic and not self.is_put_off:
            signal.pthread_kill(self._main, self._signal)

    # -- in the main thread, by the signal ---------------------------------------------------------------------

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.is_wanted or self._atomic or self.is_put_off or self._is_unsafe(frame):
            return
        if frame is not None and frame.f_code in self._boundary:
            return  # it is out, or not in yet
        self._num_raised += 1
        if self._num_raised > _PLAIN_RAISES and frame is not None:
            self._escape.start(frame)
        raise self._request()

    def _request(self) -> RestartRequested:
        return RestartRequested(f"iteration {self._iteration} is left: iteration {self._next} follows")

    def _is_unsafe(self, frame: FrameType | None) -> bool:
        for _ in range(_NUM_FRAMES):
            if frame is None:
                break
            name = frame.f_code.co_filename
            if name in _UNSAFE_FILES or name.startswith(_UNSAFE_PREFIX):
                now_ns = clock.now_ns()
                if self._deferred_since_ns is None:
                    self._deferred_since_ns = now_ns
                return now_ns - self._deferred_since_ns < _UNSAFE_NS
            frame = frame.f_back
        self._deferred_since_ns = None
        return False

    def _on_unraisable(self, unraisable: Any) -> None:
        # A destructor that was interrupted: it is no news, and the signal comes again.
        if not isinstance(unraisable.exc_value, RestartRequested) and self._earlier_unraisable is not None:
            self._earlier_unraisable(unraisable)
