"""Interrupting a function in the thread that runs it, wherever that thread is.

An exception is raised in the thread repeatedly until the function has been left, as its code may swallow it:

* :class:`SignalInterruption`, for the main thread: by the Python handler of a real-time signal, which also interrupts
  sleeps, locks and queue waits.
* :class:`AsyncInterruption`, for any other thread (Ray runs an actor's methods in one): by
  ``PyThreadState_SetAsyncExc``, at the thread's next line of Python; a thread whose C call does not return in time is
  unusable.

Waits in collectives end because their connections are cut (:mod:`outlast.runtime.connections`): after an asynchronous
exception was set, so that a wait that gloo ends as if its message had arrived raises too.

A loop whose body is in a bare ``try: ... except:`` swallows every exception of a signal that arrives there. After some
attempts :class:`_Escape` therefore traces instructions and raises at a jump back to a loop's head with the fewest
handlers, according to the code's exception tables, in all frames up to the boundary. Only at jumps back: an exception
raised in the code that ends a handler would keep the handled exception and its frames alive.

Rejected: asynchronous exceptions for the main thread (delivered only when a C call has returned, so never in
``time.sleep``).
"""

from __future__ import annotations

import ctypes
import dis
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

from outlast import clock
from outlast.errors import ConfigError

_UNSAFE_FILES = frozenset({logging.__file__, importlib.__file__})
_UNSAFE_PREFIX = "<frozen importlib"
_UNSAFE_NS = 3_000_000_000
"""How long to wait for the end of an import or a log line, which later code needs whole."""
_UPDATE_NS = 1_000_000_000
"""How long to wait for the end of an update, as a half-updated state is unusable."""
_NUM_FRAMES = 40
_PLAIN_RAISES = 4
"""Attempts at the current instruction before the search for a better one."""


class Abandoned(BaseException):
    """The running call was given up; not to be caught."""


class _Nothing(BaseException):
    """Raised in :func:`clear_async_exceptions` only."""


def set_async_exception(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next line of Python, replacing one that is still pending.

    Args:
        thread: Its :func:`threading.get_ident`; ignored if it has ended.
        kind: Created without arguments.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def clear_async_exceptions() -> None:
    """Drop the pending exception of this thread, and reset the interpreter's flag that one is pending.

    CPython 3.11 keeps this flag until an exception is raised: it checks at every jump until then, and with a trace
    function it never gets past the start of the next function. Neither withdrawing the exception nor the end of its
    thread resets it. An exception pending for another thread is raised there a little later.
    """
    try:
        set_async_exception(threading.get_ident(), _Nothing)
        while True:  # raised at the next jump
            pass
    except _Nothing:
        pass


class Interruption:
    """Whether a thread may be interrupted, independent of the delivery. Calls of the function have rising numbers.

    Args:
        exception: The exception to raise; created without arguments.
        boundary: Code of the function's caller, which is not interrupted.

    Thread: :meth:`order`, :meth:`poke` and the properties any; all others the thread that runs the function.
    """

    def __init__(self, exception: type[BaseException], boundary: Iterable[CodeType]) -> None:
        self._exception, self._boundary = exception, frozenset(boundary)
        self._number = -1
        """The call that the thread is in; -1: none."""
        self._left = -1
        """Every call up to this one must be left."""
        self._ordered_ns = 0
        self._num_atomic = self._num_updates = 0
        self._deferred_since_ns: int | None = None

    # -- the thread that runs the function ----------------------------------------------------------------------

    def check(self) -> None:
        """Raise the exception if the call must be left, except in an atomic part."""
        if self.is_wanted and not self._num_atomic:
            raise self._exception

    def enter_atomic(self) -> None:
        """Forbid interruptions until :meth:`leave_atomic`; may be nested. Raises: as :meth:`check`."""
        self.check()
        self._num_atomic += 1

    def leave_atomic(self) -> None:
        """Allow interruptions again. Raises: as :meth:`check`."""
        self._num_atomic -= 1
        self.check()

    def begin_update(self) -> None:
        """Defer interruptions by up to 1 s until :meth:`end_update`; may be repeated. Raises: as :meth:`check`."""
        if not self._num_updates:
            self.check()
        self._num_updates = 1

    def end_update(self) -> None:
        """Stop deferring interruptions. Raises: as :meth:`check`."""
        self._num_updates = 0
        self.check()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Defer interruptions by up to 1 s within this context; may be nested. Raises: as :meth:`check`."""
        self.check()
        self._num_updates += 1
        try:
            yield
        finally:
            self._num_updates -= 1
        self.check()

    # -- any thread --------------------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether the thread must leave its current call."""
        return 0 <= self._number <= self._left

    @property
    def is_atomic(self) -> bool:
        return self._num_atomic > 0

    @property
    def is_put_off(self) -> bool:
        """Whether the thread is in an update that may still end in time."""
        return self._num_updates > 0 and clock.now_ns() - self._ordered_ns < _UPDATE_NS

    def is_left(self, number: int) -> bool:
        """Return whether this call must be left."""
        return number <= self._left

    def is_in(self, number: int) -> bool:
        """Return whether the thread is in this call and may stay in it."""
        return self._number == number and not self.is_left(number)

    def order(self, number: int) -> None:
        """Require the thread to leave every call up to this one."""
        if number > self._left:
            self._left, self._ordered_ns = number, clock.now_ns()

    def _may_raise(self, frame: FrameType | None) -> bool:
        if not self.is_wanted or self._num_atomic or self.is_put_off or self._is_unsafe(frame):
            return False
        return frame is None or frame.f_code not in self._boundary  # there it is outside the call

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


class SignalInterruption(Interruption):
    """Interrupt the main thread by a real-time signal.

    Args:
        boundary: The caller of the function to leave; never interrupted itself.
    """

    def __init__(self, exception: type[BaseException], boundary: CodeType) -> None:
        super().__init__(exception, (boundary, self.enter.__code__, self.leave.__code__))
        self._num_raised = 0
        self._escape = _Escape(exception, self._boundary)
        self._signal = 0
        self._main = 0
        self._earlier_unraisable: Callable[[Any], object] | None = None

    def install(self) -> None:
        """Reserve an unused real-time signal.

        Raises: ConfigError: Not on the main thread, or all real-time signals are in use.
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
        """Release the signal. Idempotent. :meth:`poke` must not be called any more."""
        if self._signal:
            self._escape.stop()
            signal.signal(self._signal, signal.SIG_DFL)
            self._signal = 0
            if sys.unraisablehook == self._on_unraisable and self._earlier_unraisable is not None:
                sys.unraisablehook = self._earlier_unraisable

    def enter(self, number: int) -> bool:
        """Allow interruptions of this call from now on; return ``False`` if it must be left already."""
        self._num_atomic = self._num_updates = self._num_raised = 0
        self._deferred_since_ns = None
        self._number = number
        if self._left >= number:
            self._number = -1
            return False
        return True

    def leave(self) -> None:
        """Forbid interruptions. Never raises the exception once it has begun."""
        self._number = -1
        self._escape.stop()

    def poke(self) -> None:
        """Interrupt the main thread if it must leave its call; repeat until it has."""
        if self.is_wanted and not self._num_atomic and not self.is_put_off:
            signal.pthread_kill(self._main, self._signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._may_raise(frame):
            return
        self._num_raised += 1
        if self._num_raised > _PLAIN_RAISES and frame is not None:
            self._escape.start(frame)
        raise self._exception

    def _on_unraisable(self, unraisable: Any) -> None:
        # An interrupted destructor needs no report, as the signal comes again.
        if not isinstance(unraisable.exc_value, self._exception) and self._earlier_unraisable is not None:
            self._earlier_unraisable(unraisable)


class CallOutcome:
    """Result of a function: a value or an exception."""

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value, self.error = value, error


class AsyncInterruption(Interruption):
    """Interrupt any thread by an asynchronous exception, :class:`Abandoned`."""

    def __init__(self) -> None:
        super().__init__(Abandoned, (one.__code__ for one in (self.run, self._enter, self._leave)))
        self._lock = threading.Lock()
        self._outside = threading.Event()
        self._outside.set()
        self._was_poked = False
        self.thread = 0
        """Identity of the last thread that ran a function; 0 = none yet."""

    def run(self, number: int, function: Callable[[], Any]) -> CallOutcome:
        """Call an interruptible function; return its outcome. Never raises."""
        # A pending exception is raised within one of the two ``try``: there is no call between them.
        outcome = CallOutcome()
        try:
            self._enter(number)
            outcome.value = function()
        except BaseException as error:  # noqa: BLE001 - whatever ended the function is dealt with outside
            outcome.error = error
        while True:
            try:
                self._leave(outcome)
                break
            except Abandoned:
                continue
        return outcome

    def order(self, number: int) -> None:
        with self._lock:
            super().order(number)

    def poke(self) -> None:
        """Interrupt the thread if it must leave its call; repeat until it has. Blocks: never."""
        with self._lock:
            # The thread may continue meanwhile, but cannot leave run(), which needs the lock.
            frame = sys._current_frames().get(self.thread) if self.is_wanted else None
            if frame is not None and self._may_raise(frame):
                self._was_poked = True
                set_async_exception(self.thread, Abandoned)

    def wait_outside(self, timeout_s: float) -> bool:
        """Wait until the thread is outside every call; return whether it is. Blocks: up to ``timeout_s``."""
        return self._outside.wait(timeout_s)

    def _enter(self, number: int) -> None:
        with self._lock:
            self.thread, self._num_updates, self._deferred_since_ns = threading.get_ident(), 0, None
            if number <= self._left:
                raise Abandoned
            self._number = number
            self._outside.clear()

    def _leave(self, outcome: CallOutcome) -> None:
        with self._lock:
            if self.is_wanted and not isinstance(outcome.error, Abandoned):
                outcome.value, outcome.error = None, Abandoned()  # the result may not come from a peer
            self._number = -1
            if self._was_poked:
                clear_async_exceptions()
                self._was_poked = False
            self._outside.set()


class _Escape:
    """Find an instruction with less protection, and raise there. Thread: the main thread."""

    def __init__(self, exception: type[BaseException], boundary: frozenset[CodeType]) -> None:
        self._exception, self._boundary = exception, boundary
        self._allowed = 0
        self._active = False
        self._has_raised = False
        self._known: dict[CodeType, _Guards] = {}

    def start(self, frame: FrameType) -> None:
        """Start the search in this frame and its callers; when repeated, accept more handlers."""
        if self._active and not self._has_raised:
            self._allowed += 1  # no instruction was found since
        clear_async_exceptions()  # a pending one would stop tracing
        self._active, self._has_raised = True, False
        self._trace_from(frame)

    def stop(self) -> None:
        """Stop the search. Idempotent."""
        if self._active:
            self._active = False
            sys.setprofile(None)
            sys.settrace(None)
        self._allowed = 0
        self._known.clear()

    def _trace_from(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code not in self._boundary:
            frame.f_trace = self._trace
            frame.f_trace_opcodes = True
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self._active and self._may_raise(frame):
            self._has_raised = True
            # Python ends tracing when a trace function raises; resume it in the frame that gets the exception.
            sys.setprofile(self._on_return)
            raise self._exception
        return self._trace

    def _on_return(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "return":
            sys.setprofile(None)
            if self._active:
                self._trace_from(frame.f_back)

    def _may_raise(self, frame: FrameType) -> bool:
        if frame.f_lasti not in self._guards_in(frame).jumps_back:
            return False
        num_handlers = 0
        caller: FrameType | None = frame
        while caller is not None and caller.f_code not in self._boundary:
            num_handlers += self._guards_in(caller).num_handlers.get(caller.f_lasti, 0)
            caller = caller.f_back
        return num_handlers <= self._allowed

    def _guards_in(self, frame: FrameType) -> _Guards:
        guards = self._known.get(frame.f_code)
        if guards is None:
            guards = self._known[frame.f_code] = _Guards.read(frame.f_code)
        return guards


class _Guards(NamedTuple):
    """Properties of a function's instructions, by offset."""

    jumps_back: frozenset[int]
    num_handlers: dict[int, int]
    """Handlers that would see an exception one after the other; absent = 0."""

    @classmethod
    def read(cls, code: CodeType) -> _Guards:
        jumps = {one.offset for one in dis.get_instructions(code) if "JUMP_BACKWARD" in one.opname}
        target_of: dict[int, int] = {}
        for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
            for offset in range(entry.start, entry.end, 2):
                target_of[offset] = entry.target
        guards = {}
        for offset in target_of:
            count, at = 0, offset
            while at in target_of and count < len(target_of):
                at, count = target_of[at], count + 1
            guards[offset] = count
        return cls(frozenset(jumps), guards)
