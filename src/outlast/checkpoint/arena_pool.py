"""The arenas of one worker: the writer's memory for this rank, mapped here."""

from __future__ import annotations

import logging
import os
import threading

from outlast import clock
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.frames import Take, Taken
from outlast.checkpoint.writer_client import WriterClient
from outlast.errors import CheckpointError

__all__ = ["ArenaPool"]

log = logging.getLogger(__name__)


class ArenaPool:
    """Arenas that the writer owns, taken by the training thread and given back once nobody reads them.

    Args:
        writer: Who owns the memory.
        rank: This rank.
        limit_s: Longest time that :meth:`take` waits for an arena to come back.
        answer_s: Longest time that the writer may take to answer; one that hangs is replaced after it.
        may_steal: Whether the memory of the newest committed generation may be taken when the other arena is in use.
    """

    def __init__(self, writer: WriterClient, rank: int, *, limit_s: float, answer_s: float, may_steal: bool) -> None:
        self._writer, self._rank, self._may_steal = writer, rank, may_steal
        self._limit_s, self._answer_s = limit_s, answer_s
        self._known: dict[int, Arena] = {}
        self._busy: set[int] = set()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None
        self._is_given_up = False

    def take(self, num_bytes: int) -> Arena:
        """Return an arena of at least that size.

        Raises:
            CheckpointError: None came back in time, there is no memory, or no writer; or it is given up.

        Blocks: while both are in use, up to the pool's limit.
        """
        end_ns = clock.now_ns() + int(self._limit_s * 1e9)
        with self._changed:
            while (arena := self._ask(num_bytes, self._may_steal)) is None:
                left_s = (end_ns - clock.now_ns()) / 1e9
                if self._is_given_up or left_s <= 0 or not self._changed.wait(left_s):
                    raise CheckpointError("earlier saves neither end nor fail; does the store's host still run?")
            return arena

    def give_back(self, arena: Arena) -> None:
        """Say that this process needs an arena no more. Idempotent. Thread: any."""
        with self._changed:
            self._busy.discard(arena.inode)
            self._changed.notify_all()

    def prepare(self, num_bytes: int) -> None:
        """Have free arenas of that size touched in the background, so that the first save finds warm pages.

        Blocks: never. Thread: the training thread.
        """
        if self._toucher is not None and self._toucher.is_alive():
            return  # it is at it
        try:
            self._writer.start()  # here, since a process of its own dies with the thread that starts it
        except CheckpointError:
            return  # the save that needs it says so
        self._toucher = threading.Thread(target=self._prepare, args=(num_bytes,), name="outlast-touch", daemon=True)
        self._toucher.start()

    def stop(self) -> None:
        """Touch nothing more."""
        self._stop.set()

    def give_up(self) -> None:
        """Have :meth:`take` wait no more. Thread: any."""
        self._is_given_up = True
        if self._changed.acquire(blocking=False):  # else the writer is being asked; the next call comes through
            self._changed.notify_all()
            self._changed.release()

    def close(self) -> None:
        """Unmap all arenas; the writer keeps what it keeps."""
        self.stop()
        if self._toucher is not None:
            self._toucher.join(2.0)
        with self._changed:
            for arena in self._known.values():
                arena.close()
            self._known.clear()

    def _ask(self, num_bytes: int, may_steal: bool) -> Arena | None:
        request = Take(rank=self._rank, num_bytes=num_bytes, busy=tuple(self._busy), may_steal=may_steal)
        taken, fd = self._writer.ask(request, Taken, timeout_s=self._answer_s)
        if fd is None:
            return None
        inode = os.fstat(fd).st_ino
        if inode in self._known:
            os.close(fd)
        else:
            self._forget_dropped(inode)
            self._known[inode] = Arena(fd, taken.num_bytes)
        self._busy.add(inode)
        return self._known[inode]

    def _forget_dropped(self, newest: int) -> None:
        """Unmap what the writer has replaced by larger memory: only what is in use and one more can still be its."""
        idle = [inode for inode in self._known if inode not in self._busy and inode != newest]
        for inode in idle[:-1]:
            self._known.pop(inode).close()

    def _prepare(self, num_bytes: int) -> None:
        """Take all free arenas, give them back, and touch them. Thread: the toucher's."""
        arenas = []
        with self._changed:
            try:
                while (arena := self._ask(num_bytes, False)) is not None:
                    arenas.append(arena)
            except CheckpointError as error:
                log.debug("no memory is prepared for saves: %s", error)  # the save that needs it says so
        for arena in arenas:
            self.give_back(arena)
        for arena in arenas:
            arena.touch(self._stop)
