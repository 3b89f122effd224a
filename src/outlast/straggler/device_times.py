"""Times on the device: of sections, by pairs of events in the stream of the work, and of kernels, by torch's profiler.

An event is put into the stream where a section begins and one where it ends; the device records when it gets there.
Both are read later, after asking whether they have happened, which waits for nothing. When too many are pending (the
device is far behind), further sections are not timed; a section too many is never a reason to wait.

The profiler slows down the steps that it traces, and waits for the device when it ends. So it has to be asked for, it
traces a few steps of a window, the same ones on all ranks, and no section is timed in those. Kernels of collectives are
left out: they take as long as their ranks wait. Without a device, torch's operators are timed instead.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from outlast.policy.slowness import Timing, summarise
from outlast.runtime.device import kernel_seconds, profiled_activities

__all__ = ["MAX_SAMPLES", "NUM_KERNEL_STEPS", "DeviceSpan", "DeviceTimes", "KernelTimes", "StreamEvent"]

log = logging.getLogger(__name__)
NUM_KERNEL_STEPS = 2
"""Steps whose kernels are timed in a window."""
MAX_KERNELS = 50
"""Kernels of a rank that are reported, those that took most time."""
MAX_PENDING = 4096
"""Spans that may be pending."""
MAX_SAMPLES = 4096
"""Newest times of a section that its median is taken from."""


class StreamEvent(Protocol):
    """A mark in a stream, as :func:`outlast.runtime.device.timing_event` makes them."""

    def record(self) -> None:
        """Put it into the current stream."""

    def query(self) -> bool:
        """Return whether the device has reached it; waits for nothing."""

    def elapsed_time(self, end_event: StreamEvent, /) -> float:
        """Return the milliseconds from this one to another one; both have happened."""


@dataclass(slots=True)
class DeviceSpan:
    """A section on the device, from one event to another."""

    section: int
    begin: StreamEvent
    end: StreamEvent
    outer: DeviceSpan | None
    inner_s: float = 0.0
    """Seconds that are not its own."""
    counts: bool = True


class DeviceTimes:
    """Spans that are open, pending, and done.

    Args:
        make_event: Makes an event that keeps time.

    Thread: one at a time.
    """

    def __init__(self, make_event: Callable[[], StreamEvent]) -> None:
        self._make_event = make_event
        self._free: list[StreamEvent] = []
        self._pending: deque[DeviceSpan] = deque()
        self._done_s: dict[int, deque[float]] = {}

    def begin(self, section: int, outer: DeviceSpan | None) -> DeviceSpan | None:
        """Mark the begin of a section; ``None``: too many are pending."""
        if len(self._pending) >= MAX_PENDING:
            return None
        span = DeviceSpan(section, self._event(), self._event(), outer)
        span.begin.record()
        return span

    def end(self, span: DeviceSpan, *, counts: bool) -> None:
        """Mark the end of a section; without ``counts`` its time is only taken from the section around it."""
        span.end.record()
        span.counts = counts
        self._pending.append(span)

    def poll(self) -> None:
        """Read the spans that the device has finished, oldest first."""
        pending = self._pending
        while pending and pending[0].end.query():
            span = pending.popleft()
            took_s = span.begin.elapsed_time(span.end) / 1e3
            if span.outer is not None:
                span.outer.inner_s += took_s
            if span.counts:
                done_s = self._done_s.setdefault(span.section, deque(maxlen=MAX_SAMPLES))
                done_s.append(max(0.0, took_s - span.inner_s))
            self._free += (span.begin, span.end)

    def take(self) -> dict[int, list[float]]:
        """Return the seconds of all spans that are done, by section, and forget them; the others count next time."""
        self.poll()
        done_s = {section: list(times) for section, times in self._done_s.items()}
        self._done_s = {}
        return done_s

    def _event(self) -> StreamEvent:
        return self._free.pop() if self._free else self._make_event()


class KernelTimes:
    """Trace the kernels of a few steps, once a window.

    Thread: that of the training loop.
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self._times_s: dict[str, list[float]] = {}
        self._is_off = False

    @property
    def is_running(self) -> bool:
        """Whether the profiler traces the current step."""
        return self._profile is not None

    def start(self) -> None:
        """Begin to trace. A profiler that cannot start, as another one runs, is logged once and not tried again."""
        if self._is_off or self._profile is not None:
            return
        from torch.profiler import profile

        started = profile(activities=profiled_activities())
        try:
            started.start()
        except RuntimeError as error:
            self._is_off = True
            log.warning("kernels are not timed: torch's profiler cannot start (%s)", error)
            return
        self._profile = started

    def stop(self) -> None:
        """End the trace, and add the times in it.

        Blocks: until the device has done what it was given, and while the events are read.
        """
        if self._profile is None:
            return
        stopped, self._profile = self._profile, None
        stopped.stop()
        for event in stopped.events() or ():
            if seconds := kernel_seconds(event):
                self._times_s.setdefault(event.name, []).append(seconds)

    def take(self, best_s: dict[str, float]) -> tuple[Timing, ...]:
        """Return the summaries of the kernels that took most time, and forget them all.

        Args:
            best_s: The own best of earlier windows, by kernel.
        """
        timings = [summarise(name, values, best_s=best_s.get(name, 0.0)) for name, values in self._times_s.items()]
        self._times_s = {}
        return tuple(sorted(timings, key=lambda timing: -timing.total_s)[:MAX_KERNELS])
