"""Clocks: monotonic time for decisions, wall time for people.

Decisions take a :class:`Clock` so that tests can control time. All processes of a node share ``CLOCK_MONOTONIC``: its
readings may be compared between a worker and its agent, never between nodes.
"""

from __future__ import annotations

import datetime
import time
from typing import Protocol

now_ns = time.monotonic_ns


def now_s() -> float:
    return time.monotonic()


def wall_ns() -> int:
    """Return nanoseconds since the epoch, for the journal only; no decision may depend on it."""
    return time.time_ns()


def as_iso(epoch_ns: int) -> str:
    """Return nanoseconds since the epoch as ISO 8601 in UTC, to the millisecond: ``2026-11-23T04:12:05.250Z``."""
    whole_s, rest_ns = divmod(epoch_ns, 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(whole_s, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest_ns // 1_000_000:03d}Z"


def seconds_until(epoch_s: float) -> float:
    """Return the seconds from now until a time of day that another system set, such as a scheduler's time limit.

    Call once, and count down with the monotonic clock.
    """
    return epoch_s - wall_ns() / 1e9


class Clock(Protocol):
    """A monotonic clock."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""
        ...


class _Monotonic:
    __slots__ = ()

    def now_ns(self) -> int:
        return now_ns()


MONOTONIC: Clock = _Monotonic()
"""The machine's clock."""
