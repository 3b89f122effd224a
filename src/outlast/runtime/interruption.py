"""Getting a thread out of a function that it runs, wherever it is.

An exception is raised in the thread, again and again until the function has been left, as its code may swallow it.
There are two deliveries:

* :class:`SignalInterruption`, for the main thread: a real-time signal whose Python handler raises the exception. A
  signal interrupts sleeps, locks and queue waits, and its handler runs wherever bytecode runs.
* :class:`AsyncInterruption`, for any other thread, where no signal is handled (Ray runs the methods of an actor in
  one): the exception is set for the thread (``PyThreadState_SetAsyncExc``) and rises with its next line of Python.
  ``time.sleep`` and the like end first; a thread that does not come out in time is unusable.

What waits in a collective comes back to bytecode because its connections are cut (:mod:`outlast.runtime.connections`):
for an asynchronous exception after it was set, so that a wait that gloo ends as if its message had come raises too.

A loop whose body is wrapped in a bare ``except:`` swallows every exception that is raised inside the ``try``; a signal
that always finds it there never gets it out. So after some attempts :class:`_Escape` looks for a better place: a trace
function sees every instruction, also the few outside, such as the jump back to the loop's head, and raises at such a
jump. How well an instruction is guarded is read from its code's exception table: the number of handlers that would see
an exception one after the other, in all frames from there to the boundary. Only at jumps back: an exception out of the
code that ends a handler would leave the handled one behind, and with it all its frames. Tracing slows the code down by
far, which no longer matters: the function is being left.

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
"""How long an import or a line of log is waited for: half-done ones break what runs later."""
_UPDATE_NS = 1_000_000_000
"""How long the end of an update is waited for: a state that is left in the middle of one is unusable."""
_NUM_FRAMES = 40
_PLAIN_RAISES = 4
"""How often the exception is raised where the code happens to be, before a place is looked for."""


class Abandoned(BaseException):
    """What runs here was given up; not to be caught."""


class _Nothing(BaseException):
    """Rises in :func:`clear_async_exceptions` alone."""


def set_async_exception(thread: int, kind: type[BaseException]) -> None:
    """Have an exception rise in a thread with its next line of Python; it replaces one that has not risen yet.

    Args:
        thread: Its identity, as :func:`threading.get_ident` gives it; one that has ended is ignored.
        kind: Made without arguments.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def clear_async_exceptions() -> None:
    """Drop what is set for this thread, and have the interpreter forget that something was set for any.

    CPython 3.11 keeps that in mind until an exception rises: it looks for one at every jump until then, and with a
    trace function it never gets beyond the beginning of the next function. Taking the exception back does not end it,
    nor does the end of its thread. One that is set for another thread rises there a little later.
    """
    try:
        set_async_exception(threading.get_ident(), _Nothing)
        while True:  # it rises at the next jump
            pass
    except _Nothing:
        pass


class Interruption:
    """When a thread may be interrupted, whatever the delivery. Calls of the function are numbered in rising order.

    Args:
        exception: What is raised; made without arguments.
        boundary: Code that is not interrupted: of what calls the function.

    Thread: :meth:`order`, :meth:`poke` and the properties any; everything else the thread that runs the function.
    """

    def __init__(self, exception: type[BaseException], boundary: Iterable[CodeType]) -> None:
        self._exception, self._boundary = exception, frozenset(boundary)
        self._number = -1
        """The call that the thread is inside of; -1: it is outside."""
        self._left = -1
        """Every call up to this one has to be left."""
        self._ordered_ns = 0
        self._num_atomic = self._num_updates = 0
        self._deferred_since_ns: int | None = None

    # -- the thread that runs the function ----------------------------------------------------------------------

    def check(self) -> None:
        """Raise the exception if the call has to be left, unless an atomic part runs."""
        if self.is_wanted and not self._num_atomic:
            raise self._exception

    def enter_atomic(self) -> None:
        """Forbid interruptions until :meth:`leave_atomic`; may be nested. Raises: the call had to be left before."""
        self.check()
        self._num_atomic += 1

    def leave_atomic(self) -> None:
        """Allow interruptions again. Raises: the call has to be left since."""
        self._num_atomic -= 1
        self.check()

    def begin_update(self) -> None:
        """Defer interruptions by up to 1 s until :meth:`end_update`; may be called repeatedly.

        Raises: the call had to be left before.
        """
        if not self._num_updates:
            self.check()
        self._num_updates = 1

    def end_update(self) -> None:
        """Defer interruptions no more. Raises: the call has to be left since."""
        self._num_updates = 0
        self.check()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Defer interruptions by up to 1 s within; may be nested. Raises: the call has to be left, before or since."""
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
        """Whether the thread is inside and has to leave."""
        return 0 <= self._number <= self._left

    @property
    def is_atomic(self) -> bool:
        """Whether the thread must not be interrupted now."""
        return self._num_atomic > 0

    @property
    def is_put_off(self) -> bool:
        """Whether the thread is in an update that may still end in time."""
        return self._num_updates > 0 and clock.now_ns() - self._ordered_ns < _UPDATE_NS

    def is_left(self, number: int) -> bool:
        """Whether this call has to be left."""
        return number <= self._left

    def is_in(self, number: int) -> bool:
        """Whether the thread is in this call, and may stay there."""
        return self._number == number and not self.is_left(number)

    def order(self, number: int) -> None:
        """Have every call up to this one left."""
        if number > self._left:
            self._left, self._ordered_ns = number, clock.now_ns()

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Return whether the thread, which is in this frame, is to be interrupted right there."""
        if not self.is_wanted or self._num_atomic or self.is_put_off or self._is_unsafe(frame):
            return False
        return frame is None or frame.f_code not in self._boundary  # there it is out, or not in yet

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
        exception: What is raised; made without arguments.
        boundary: The function that calls the one to leave; it is never interrupted itself.
    """

    def __init__(self, exception: type[BaseException], boundary: CodeType) -> None:
        super().__init__(exception, (boundary, self.enter.__code__, self.leave.__code__))
        self._num_raised = 0
        self._escape = _Escape(exception, self._boundary)
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

    def enter(self, number: int) -> bool:
        """Allow interruptions of this call from here on; return ``False`` if it has to be left already."""
        self._num_atomic = self._num_updates = self._num_raised = 0
        self._deferred_since_ns = None
        self._number = number
        if self._left >= number:
            self._number = -1
            return False
        return True

    def leave(self) -> None:
        """Allow interruptions no more. Never raises the exception once it has begun."""
        self._number = -1
        self._escape.stop()

    def poke(self) -> None:
        """Interrupt the main thread if it has to leave; repeat it until it has."""
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
        # A destructor that was interrupted is not worth a report, and the signal comes again.
        if not isinstance(unraisable.exc_value, self._exception) and self._earlier_unraisable is not None:
            self._earlier_unraisable(unraisable)


class CallOutcome:
    """What a function ended with: a value, or an exception."""

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
        """Identity of the thread that ran a function last; 0 = none yet."""

    def run(self, number: int, function: Callable[[], Any]) -> CallOutcome:
        """Call a function that may be interrupted; return what it ended with. Never raises.

        Args:
            number: Of the call that it belongs to.
            function: What to call.
        """
        # Whatever is set for this thread rises within one of the two ``try``: nothing between them is a call.
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
        """Have every call up to this one left."""
        with self._lock:
            super().order(number)

    def poke(self) -> None:
        """Interrupt the thread if it has to leave; repeat it until it has. Blocks: never."""
        with self._lock:
            # The thread may move on meanwhile, but not out of run(), which needs the lock.
            frame = sys._current_frames().get(self.thread) if self.is_wanted else None
            if frame is not None and self._may_raise(frame):
                self._was_poked = True
                set_async_exception(self.thread, Abandoned)

    def wait_outside(self, timeout_s: float) -> bool:
        """Wait until the thread is outside of every call; return whether it is. Blocks: up to ``timeout_s``."""
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
                outcome.value, outcome.error = None, Abandoned()  # what it brought may be no message of a peer
            self._number = -1
            if self._was_poked:
                clear_async_exceptions()
                self._was_poked = False
            self._outside.set()


class _Escape:
    """Look for an instruction that is guarded less, and raise there.

    Args:
        exception: What is raised; made without arguments.
        boundary: Functions in which the search ends; they are not interrupted.

    Thread: the main thread.
    """

    def __init__(self, exception: type[BaseException], boundary: frozenset[CodeType]) -> None:
        self._exception, self._boundary = exception, boundary
        self._allowed = 0
        self._active = False
        self._has_raised = False
        self._known: dict[CodeType, _Guards] = {}

    def start(self, frame: FrameType) -> None:
        """Begin to look, from this frame on and in the frames that called it; again: accept more handlers."""
        if self._active and not self._has_raised:
            self._allowed += 1  # nothing was found since
        clear_async_exceptions()  # if one is set, tracing never gets on
        self._active, self._has_raised = True, False
        self._trace_from(frame)

    def stop(self) -> None:
        """Look no more. Idempotent."""
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
            # Python ends tracing when a trace function raises; it goes on in the frame that gets the exception.
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
    """What is known of a function's instructions, by their offsets."""

    jumps_back: frozenset[int]
    num_handlers: dict[int, int]
    """How many handlers would see an exception one after the other; 0 when not in it."""

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
