"""The arenas of one worker: as many saves can be under way at once."""

from __future__ import annotations

import queue
import threading

from outlast.checkpoint.arena import Arena
from outlast.errors import CheckpointError

__all__ = ["ArenaPool"]

NUM_ARENAS = 2


class ArenaPool:
    """Two arenas, taken by the training thread and given back once they are written.

    Args:
        limit_s: Longest time that :meth:`take` waits for one to come back.
    """

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._free: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        for _ in range(NUM_ARENAS):
            self._free.put(None)
        self._stop = threading.Event()

    def take(self, num_bytes: int) -> Arena:
        """Return an arena of at least that size.

        Raises:
            CheckpointError: None came back in time, or there is no memory.

        Blocks: while both are in use, up to the pool's limit.
        """
        try:
            arena = self._free.get(timeout=self._limit_s)
        except queue.Empty:
            raise CheckpointError("earlier saves neither end nor fail; does the store's host still run?") from None
        if arena is None or arena.num_bytes < num_bytes:
            if arena is not None:
                arena.close()
            try:
                arena = Arena(num_bytes + (num_bytes >> 6) + (1 << 16))  # plain values may grow a little
            except OSError as error:
                self._free.put(None)
                raise CheckpointError(f"there is no memory to copy {num_bytes} bytes of state into: {error}") from error
        return arena

    def give_back(self, arena: Arena) -> None:
        """Let an arena be used again. Thread: any."""
        self._free.put(arena)

    def prepare(self, num_bytes: int) -> None:
        """Have free arenas of that size touched in the background, in the place of smaller ones. Blocks: never."""
        fresh = []
        for _ in range(NUM_ARENAS):
            try:
                arena = self._free.get_nowait()
            except queue.Empty:
                break
            if arena is None or arena.num_bytes < num_bytes:
                if arena is not None:
                    arena.close()
                try:
                    arena = Arena(num_bytes)
                except OSError:
                    arena = None  # the save that needs it says so
                else:
                    fresh.append(arena)
            self._free.put(arena)
        if fresh:
            threading.Thread(target=self._touch, args=(fresh,), name="outlast-touch", daemon=True).start()

    def stop(self) -> None:
        """Touch nothing more."""
        self._stop.set()

    def close(self) -> None:
        """Let go of the memory of all arenas that are not in use."""
        self.stop()
        while not self._free.empty():
            if (arena := self._free.get()) is not None:
                arena.close()

    def _touch(self, arenas: list[Arena]) -> None:
        for arena in arenas:
            arena.touch(self._stop)
