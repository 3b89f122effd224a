"""Getting an actor's working thread out of the user's code, wherever it is.

Ray runs an actor's methods in a thread that is not the main one, where no signal is handled: so the exception is left
for that thread (``PyThreadState_SetAsyncExc``) and rises with its next line of Python. What waits in C for peers comes
back to Python because its connections are cut after that (:mod:`outlast.runtime.connections`): also a wait that gloo
ends as if its message had come raises, instead of going on with what is none. ``time.sleep`` and the like end first;
whoever does not come out in time is of no use any more.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from outlast import clock
from outlast.runtime import async_exceptions

__all__ = ["Abandoned", "Interruption", "Outcome"]

_UNSAFE_FILES = frozenset({logging.__file__, importlib.__file__})
_UNSAFE_PREFIX = "<frozen importlib"
_UNSAFE_NS = 3_000_000_000
"""How long an import or a line of log is waited for: half-done ones break what runs later."""
_CALM_NS = 1_000_000_000
"""How long the end of an update is waited for: a state that is left in the middle of one is of no use."""
_NUM_FRAMES = 40


class Abandoned(BaseException):
    """The incarnation is given up, and with it what runs in it; not to be caught."""


class Outcome:
    """What a function ended with: a value, or an exception."""

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value, self.error = value, error


class Interruption:
    """Raise :class:`Abandoned` in the thread that runs a function which is to be left.

    Thread: :meth:`run` and :meth:`calm` on the working thread, the others on any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outside = threading.Event()
        self._outside.set()
        self._thread = 0
        self._number = -1
        self._left = -1
        self._ordered_ns = 0
        self._num_calm = 0
        self._was_poked = False
        self._boundary: frozenset[CodeType] = frozenset(
            one.__code__ for one in (Interruption.run, Interruption._enter, Interruption._leave)
        )

    # -- the working thread ------------------------------------------------------------------------------------

    def run(self, number: int, function: Callable[[], Any]) -> Outcome:
        """Call a function that may be interrupted; return what it ended with. Never raises.

        Args:
            number: Of the incarnation that it belongs to.
            function: What to call.
        """
        # Whatever is left for this thread rises within one of the two ``try``: nothing between them is a call.
        outcome = Outcome()
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

    @contextmanager
    def calm(self) -> Iterator[None]:
        """Put interruptions off within, for up to 1 s: what is half done in here is of no use.

        Raises:
            Abandoned: Told to leave, before or meanwhile.
        """
        self.check()
        self._num_calm += 1
        try:
            yield
        finally:
            self._num_calm -= 1
        self.check()

    def check(self) -> None:
        """Raise if told to leave.

        Raises:
            Abandoned: So it is.
        """
        if self.is_wanted:
            raise Abandoned

    # -- any thread --------------------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether the working thread is inside and has to leave."""
        return self._number >= 0 and self._number <= self._left

    @property
    def thread(self) -> int:
        """Identity of the working thread; 0 = nothing has run yet."""
        return self._thread

    def is_left(self, number: int) -> bool:
        """Whether an incarnation is given up."""
        return number <= self._left

    def order(self, number: int) -> None:
        """Have every incarnation up to this one left."""
        with self._lock:
            if number > self._left:
                self._left, self._ordered_ns = number, clock.now_ns()

    def poke(self) -> None:
        """Interrupt the working thread if it has to leave; repeat it until it has. Blocks: never."""
        with self._lock:
            if not self.is_wanted:
                return
            # The thread may move on meanwhile, but not out of run(), which needs the lock.
            frame = sys._current_frames().get(self._thread)
            if frame is None or frame.f_code in self._boundary or self._is_unsafe(frame):
                return
            self._was_poked = True
            async_exceptions.leave_for(self._thread, Abandoned)

    def wait_outside(self, timeout_s: float) -> bool:
        """Wait until the working thread is inside of nothing; return whether it is. Blocks: up to ``timeout_s``."""
        return self._outside.wait(timeout_s)

    # -- details -----------------------------------------------------------------------------------------------

    def _enter(self, number: int) -> None:
        with self._lock:
            self._thread, self._num_calm = threading.get_ident(), 0
            if number <= self._left:
                raise Abandoned
            self._number = number
            self._outside.clear()

    def _leave(self, outcome: Outcome) -> None:
        with self._lock:
            if self.is_wanted and not isinstance(outcome.error, Abandoned):
                outcome.value, outcome.error = None, Abandoned()  # what it brought may be no message of a peer
            self._number = -1
            if self._was_poked:
                async_exceptions.settle()
                self._was_poked = False
            self._outside.set()

    def _is_unsafe(self, frame: FrameType | None) -> bool:
        passed_ns = clock.now_ns() - self._ordered_ns
        if self._num_calm and passed_ns < _CALM_NS:
            return True
        for _ in range(_NUM_FRAMES):
            if frame is None or passed_ns >= _UNSAFE_NS:
                return False
            name = frame.f_code.co_filename
            if name in _UNSAFE_FILES or name.startswith(_UNSAFE_PREFIX):
                return True
            frame = frame.f_back
        return False
