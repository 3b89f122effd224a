"""What wakes an agent beside its workers: its mailbox, with the events of threads and signal handlers, and timers.

What the coordinator sends arrives in the same mailbox: see :mod:`outlast.launch.protocol`.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from outlast import clock
from outlast.launch.protocol import Stop

if TYPE_CHECKING:
    from outlast.monitor.watchdog import HangReport

__all__ = [
    "Admitted",
    "HangSeen",
    "Mailbox",
    "NodeChecked",
    "NodeRefused",
    "RunDirectoryLost",
    "SignalReceived",
    "Timers",
    "WatchdogFailed",
    "WriterDied",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal requests this agent to shut down."""

    signal: int


@dataclass(frozen=True, slots=True)
class RunDirectoryLost:
    """Another job has taken the run directory over, while this one was stopped or cut off."""

    why: str


@dataclass(frozen=True, slots=True)
class WriterDied:
    """The node's checkpoint writer died by itself; its owner starts another."""

    summary: str


@dataclass(frozen=True, slots=True)
class HangSeen:
    """The watchdog saw ranks of a cycle exceed a timeout."""

    cycle: int
    report: HangReport


@dataclass(frozen=True, slots=True)
class WatchdogFailed:
    """The thread that watches the workers ended on an error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Admitted:
    """This node may join: it passed its health check, or none is made before."""


@dataclass(frozen=True, slots=True)
class NodeChecked:
    """The health check after a fault is done: workers that waited for it may start."""


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """This node failed its health check before it joined, and its agent ends."""

    stop: Stop


class Mailbox(Generic[T]):
    """An unbounded queue whose owner can wait for it with ``select``.

    Thread: :meth:`put` any, and signal handlers; the rest the owner only.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor that is readable while something is in the box."""
        return self._fd

    def put(self, item: T) -> None:
        """Put an item; never blocks."""
        self._queue.put(item)
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def take_all(self) -> list[T]:
        """Return what is in the box, oldest first; never blocks."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
        items: list[T] = []
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items

    def close(self) -> None:
        """Free the descriptor; items put later are kept nowhere."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Timers:
    """Named deadlines of one loop. Thread: the loop's."""

    def __init__(self) -> None:
        self._deadlines: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Call an action in ``seconds``; it replaces the one that the name stood for."""
        self._deadlines[name] = (clock.now_s() + seconds, action)

    def cancel(self, name: str) -> None:
        """Drop a timer, if it is set."""
        self._deadlines.pop(name, None)

    def is_set(self, name: str) -> bool:
        """Return whether a timer is set."""
        return name in self._deadlines

    def until_next_s(self) -> float | None:
        """Return the seconds until the next one; ``None`` = there is none."""
        next_s = min((at_s for at_s, _ in self._deadlines.values()), default=None)
        return None if next_s is None else max(0.0, next_s - clock.now_s())

    def fire(self) -> None:
        """Call the actions that are due."""
        now_s = clock.now_s()
        for name in [name for name, (at_s, _) in self._deadlines.items() if now_s >= at_s]:
            at_s, action = self._deadlines.get(name, (now_s + 1, None))
            if action is not None and now_s >= at_s:  # an earlier action may have dropped it, or set it anew
                del self._deadlines[name]
                action()
