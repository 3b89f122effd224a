"""Times on the device, by pairs of events in the stream of the work.

An event is put into the stream where a section begins and one where it ends; the device notes when it gets there. Both
are looked at later, by asking whether they have happened, which waits for nothing. When too many are under way (the
device is far behind), further sections are not timed; a section too many is never a reason to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["DeviceTimes", "Event", "Span"]

MAX_PENDING = 4096
"""Spans that may be under way."""
MAX_SAMPLES = 4096
"""Newest times of a section that its median is taken from."""


class Event(Protocol):
    """A mark in a stream, as :func:`outlast.runtime.device.timing_event` makes them."""

    def record(self) -> None:
        """Put it into the current stream."""

    def query(self) -> bool:
        """Return whether the device has reached it; waits for nothing."""

    def elapsed_time(self, end_event: Event, /) -> float:
        """Return the milliseconds from this one to another one; both have happened."""


@dataclass(slots=True)
class Span:
    """A section on the device, from one event to another."""

    section: int
    begin: Event
    end: Event
    outer: Span | None
    inner_s: float = 0.0
    """Seconds that are not its own."""
    counts: bool = True


class DeviceTimes:
    """Spans that are open, under way, and done.

    Args:
        make_event: Makes an event that keeps time.

    Thread: one at a time.
    """

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._free: list[Event] = []
        self._pending: deque[Span] = deque()
        self._done_s: dict[int, deque[float]] = {}

    def begin(self, section: int, outer: Span | None) -> Span | None:
        """Mark the begin of a section; ``None``: too many are under way."""
        if len(self._pending) >= MAX_PENDING:
            return None
        span = Span(section, self._event(), self._event(), outer)
        span.begin.record()
        return span

    def end(self, span: Span, *, counts: bool) -> None:
        """Mark the end of a section; without ``counts`` its time is only taken from the section around it."""
        span.end.record()
        span.counts = counts
        self._pending.append(span)

    def poll(self) -> None:
        """Take in the spans that the device has finished, oldest first."""
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

    def _event(self) -> Event:
        return self._free.pop() if self._free else self._make_event()
