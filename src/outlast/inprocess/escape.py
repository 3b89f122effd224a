"""Raising an exception where nobody catches it.

A loop whose body is wrapped in a bare ``except:`` swallows every exception that is raised inside the ``try``; a signal
that always finds it there never gets it out. A trace function sees every instruction, also the few outside, such as the
jump back to the loop's head, and raises at such a jump. How well an instruction is guarded is read from its code's
exception table: the number of handlers that would see an exception one after the other, in all frames from there to
the boundary.

Only at jumps back: an exception out of the code that ends a handler would leave the handled one behind, and with it
all its frames.

Tracing slows the code down by far, which no longer matters: the function is being left.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any, NamedTuple

from outlast.runtime import async_exceptions

__all__ = ["Escape"]

_OWN_FILES = frozenset({__file__, __file__.replace("escape.py", "interruption.py"), async_exceptions.__file__})


class Escape:
    """Look for an instruction that is guarded less, and raise there.

    Args:
        make: Makes the exception.
        boundary: Functions in which the search ends; they are not interrupted.

    Thread: the main thread.
    """

    def __init__(self, make: Callable[[], BaseException], boundary: Collection[CodeType]) -> None:
        self._make, self._boundary = make, boundary
        self._allowed = 0
        self._active = False
        self._has_raised = False
        self._known: dict[CodeType, _Code] = {}

    def start(self, frame: FrameType) -> None:
        """Begin to look, from this frame on and in the frames that called it; again: be content with less."""
        if self._active and not self._has_raised:
            self._allowed += 1  # nothing was found since
        async_exceptions.settle()  # whoever left one: tracing would never get on
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
        if frame.f_code.co_filename in _OWN_FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self._active and self._may_raise(frame):
            self._has_raised = True
            # Python ends tracing when a trace function raises; it goes on in the frame that gets the exception.
            sys.setprofile(self._on_return)
            raise self._make()
        return self._trace

    def _on_return(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "return":
            sys.setprofile(None)
            if self._active:
                self._trace_from(frame.f_back)

    def _may_raise(self, frame: FrameType) -> bool:
        if frame.f_lasti not in self._code(frame).jumps_back:
            return False
        guard = 0
        caller: FrameType | None = frame
        while caller is not None and caller.f_code not in self._boundary:
            guard += self._code(caller).guards.get(caller.f_lasti, 0)
            caller = caller.f_back
        return guard <= self._allowed

    def _code(self, frame: FrameType) -> _Code:
        code = self._known.get(frame.f_code)
        if code is None:
            code = self._known[frame.f_code] = _Code.read(frame.f_code)
        return code


class _Code(NamedTuple):
    """What is known of a function's instructions, by their offsets."""

    jumps_back: frozenset[int]
    guards: dict[int, int]
    """How many handlers would see an exception one after the other; 0 when not in it."""

    @classmethod
    def read(cls, code: CodeType) -> _Code:
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
