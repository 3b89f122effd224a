"""A mailbox: many threads put, one thread waits on it together with file descriptors."""

from __future__ import annotations

import os
import queue
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

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
