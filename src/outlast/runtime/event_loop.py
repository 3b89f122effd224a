"""Event sources of a process's loop: a mailbox for other threads and signal handlers, and named timers."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from outlast import clock

T = TypeVar("T")


class Mailbox(Generic[T]):
    """An unbounded queue whose owner can wait for it with ``select``.

    Thread: :meth:`put` any, and signal handlers; all other methods the owner.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return a descriptor that is readable while the mailbox is not empty."""
        return self._fd

    def put(self, item: T) -> None:
        """Add an item. Blocks: never."""
        self._queue.put(item)
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def take_all(self) -> list[T]:
        """Remove and return all items, oldest first. Blocks: never."""
        items: list[T] = []
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        with suppress(queue.Empty):
            while True:
                items.append(self._queue.get_nowait())
        return items

    def close(self) -> None:
        """Free the descriptor; items added later are lost."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Timers:
    """Named deadlines of one loop. Thread: the loop's."""

    def __init__(self) -> None:
        self._deadlines: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` in ``seconds``, instead of the previous action of this name."""
        self._deadlines[name] = (clock.now_s() + seconds, action)

    def cancel(self, name: str) -> None:
        self._deadlines.pop(name, None)

    def is_set(self, name: str) -> bool:
        return name in self._deadlines

    def until_next_s(self) -> float | None:
        """Return the seconds until the next timer; ``None`` = none is set."""
        next_s = min((at_s for at_s, _ in self._deadlines.values()), default=None)
        return None if next_s is None else max(0.0, next_s - clock.now_s())

    def fire(self) -> None:
        now_s = clock.now_s()
        for name in [name for name, (at_s, _) in self._deadlines.items() if now_s >= at_s]:
            at_s, action = self._deadlines.get(name, (now_s + 1, None))
            if action is not None and now_s >= at_s:  # an earlier action may have cancelled or reset it
                del self._deadlines[name]
                action()
