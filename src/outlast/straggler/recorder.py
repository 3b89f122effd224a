"""How long sections take on this rank, at well under two microseconds each.

A section's time is its *own*: what sections within it took, and what was spent waiting or left out, is not part of it.
On the host it is told by the performance counter; on a device by a pair of events in the stream of the work, read once
both have happened, so that nothing ever waits for the device (:mod:`outlast.straggler.device_times`).

What is open is a stack of small lists: section, when it began (0: it is not timed), time that is not its own, and the
device's span. Rejected: one object a span with methods (twice as slow), and reading the thread's processor time to tell
waiting from work (a system call of 1 us, measured, and a busy neighbour looks like waiting).
"""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter_ns
from typing import Any

from outlast.policy.timings import Timing, summarise
from outlast.straggler.device_times import DeviceTimes, Span

__all__ = ["STEP", "Recorder"]

STEP = "step"
"""Name of a whole step's section."""
MAX_SAMPLES = 4096
"""Newest times of a section that its median is taken from."""
_WAITING = -1
_LEFT_OUT = -2


class Recorder:
    """Collect times by section.

    Args:
        device_times: Events on the device; ``None`` = the host's clock alone.

    Thread: sections are those of the thread that makes it; those of others are not timed.
    """

    def __init__(self, device_times: DeviceTimes | None = None) -> None:
        self.active = False
        """Whether sections that are entered now are timed."""
        self._device = device_times
        self._thread = threading.get_ident()
        self._indices: dict[str, int] = {}
        self._on_device: list[bool] = []
        self._times_ns: list[deque[int]] = []
        self._counts: list[int] = []
        self._ended: list[int] = []
        self._has_ended: list[bool] = []
        self._stack: list[list[Any]] = []
        self._left_out = 0

    def index(self, name: str, *, on_device: bool = True) -> int:
        """Return the number of a section, a new one for a new name.

        Args:
            name: The section's name.
            on_device: Time it on the device, where there is one.
        """
        if name not in self._indices:
            self._indices[name] = len(self._indices)
            self._on_device.append(on_device and self._device is not None)
            self._times_ns.append(deque(maxlen=MAX_SAMPLES))
            self._counts.append(0)
            self._has_ended.append(False)
        return self._indices[name]

    def enter(self, index: int) -> None:
        """Begin a section, or waiting (:data:`_WAITING`); one within itself is part of the one around it."""
        if threading.get_ident() != self._thread:
            return
        times = self.active and not self._left_out
        for entry in self._stack:
            times = times and entry[0] != index
        if times:
            span = None
            if self._device is not None and (index < 0 or self._on_device[index]):
                span = self._device.begin(index, self._span())
            self._stack.append([index, perf_counter_ns(), 0, span])
        else:
            self._stack.append([index, 0, 0, None])

    def leave(self, index: int, *, failed: bool = False) -> None:
        """End the innermost open section of that number, and what is still open in it; a failed one is not counted."""
        now_ns = perf_counter_ns()
        stack = self._stack
        if threading.get_ident() != self._thread:
            return
        while stack and stack[-1][0] != index:
            if not any(entry[0] == index for entry in stack):
                return
            stack.pop()  # an exception went past its end
        if not stack:
            return
        _, began_ns, inner_ns, span = stack.pop()
        if not began_ns:
            return
        took_ns = now_ns - began_ns
        if stack:
            stack[-1][2] += took_ns
        if span is not None:
            assert self._device is not None
            self._device.end(span, counts=not failed and index >= 0)
        if index >= 0 and not failed:
            self._times_ns[index].append(took_ns - inner_ns)
            self._counts[index] += 1
            if not self._has_ended[index]:
                self._has_ended[index] = True
                self._ended.append(index)

    def begin_waiting(self) -> None:
        """Let what follows be nobody's own time."""
        self.enter(_WAITING)

    def end_waiting(self) -> None:
        """End what :meth:`begin_waiting` began."""
        self.leave(_WAITING)

    def begin_left_out(self) -> None:
        """Let what follows be nobody's own time, and time no section in it."""
        if threading.get_ident() == self._thread:
            self.enter(_LEFT_OUT)
            self._left_out += 1

    def end_left_out(self) -> None:
        """End what :meth:`begin_left_out` began."""
        if threading.get_ident() == self._thread and self._left_out:
            self._left_out -= 1
            self.leave(_LEFT_OUT)

    def drop_open(self) -> None:
        """Forget what is open, as after an exception."""
        self._stack.clear()
        self._left_out = 0

    def poll(self) -> None:
        """Take in what the device has finished; asks once, and waits for nothing."""
        if self._device is not None:
            self._device.poll()

    def take(self, best_s: dict[str, float]) -> tuple[Timing, ...]:
        """Return the sections' summaries in the order in which they end within a step, and begin anew.

        Args:
            best_s: The own best of earlier windows, by section.
        """
        device_s = {} if self._device is None else self._device.take()
        names = list(self._indices)
        timings = []
        for index in self._ended:
            if self._on_device[index] and index in device_s:
                timings.append(summarise(names[index], device_s[index], best_s=best_s.get(names[index], 0.0)))
                continue
            values_s = [value / 1e9 for value in self._times_ns[index]]
            more = self._counts[index] - len(values_s)
            timings.append(summarise(names[index], values_s, best_s=best_s.get(names[index], 0.0), num_more=more))
        for times_ns in self._times_ns:
            times_ns.clear()
        self._counts = [0] * len(names)
        self._ended.clear()
        self._has_ended = [False] * len(names)
        return tuple(timings)

    def _span(self) -> Span | None:
        """Return the innermost open span on the device."""
        for entry in reversed(self._stack):
            if entry[3] is not None:
                span: Span = entry[3]
                return span
        return None
