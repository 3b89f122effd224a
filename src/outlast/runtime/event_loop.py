"""What wakes the event loop of a process: a mailbox that other threads and signal handlers fill, and named timers."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Generic, TypeVar

from outlast import clock

T = TypeVar("T")


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
