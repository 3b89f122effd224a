"""What the ranks tell each other about saves: keys of a store, never collectives.

Training's collectives and these words cannot get into each other's way, and nobody waits longer than he said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from outlast import clock
from outlast.errors import CheckpointError

__all__ = ["Exchange", "NoWord", "Stopped", "deadline"]

POLL_S = 0.02
T = TypeVar("T", bound=msgspec.Struct)


class NoWord(Exception):
    """A peer said nothing in time."""


class Stopped(Exception):
    """This rank leaves; nobody waits any more."""


class Exchange:
    """One thread's words to its peers.

    Args:
        store: A store connection for this thread alone.
        namespace: Unique for the ranks' processes and the thread's purpose.
        stop: Set when this rank leaves.
        rank: This rank, which errors name.

    Thread: the one that owns it.
    """

    def __init__(self, store: Any, namespace: str, stop: threading.Event, *, rank: int) -> None:
        self._store, self._namespace, self._stop, self._rank = store, namespace, stop, rank
        self._posted: list[tuple[int, str]] = []

    def post(self, ordinal: int, name: str, value: msgspec.Struct) -> None:
        """Say something about the save of that ordinal."""
        key = self._key(ordinal, name)
        self._store.set(key, msgspec.json.encode(value).decode())
        self._posted.append((ordinal, key))

    def await_word(self, ordinal: int, name: str, kind: type[T], left_s: Callable[[], float]) -> T:
        """Return what was said under that name.

        Args:
            ordinal: Number of the save.
            name: As given to :meth:`post`, by whichever rank.
            kind: Type of the value.
            left_s: Seconds to wait from now on.

        Raises:
            NoWord: Nothing was said in time.
            Stopped: This rank leaves.

        Blocks: until it is said, up to ``left_s()``.
        """
        key = self._key(ordinal, name)
        pause_s = 0.001
        while not self._store.check([key]):
            if self._stop.wait(pause_s):
                raise Stopped
            if left_s() <= 0:
                raise NoWord(name)
            pause_s = min(POLL_S, 2 * pause_s)
        return msgspec.json.decode(bytes(self._store.get(key)), type=kind)

    def hear(
        self, iteration: int, ordinal: int, name: str, kind: type[T], left_s: Callable[[], float], *, timeout_s: float
    ) -> T:
        """Do as :meth:`await_word`, with errors that tell people of the save.

        Args:
            iteration: What is saved.
            ordinal: Number of the save.
            name: As given to :meth:`post`.
            kind: Type of the value.
            left_s: Seconds to wait from now on.
            timeout_s: The save's own limit, which the error names.

        Raises:
            CheckpointError: Nothing was said in time, or this rank leaves.

        Blocks: until it is said, up to ``left_s()``.
        """
        try:
            return self.await_word(ordinal, name, kind, left_s)
        except Stopped:
            raise CheckpointError(
                f"iteration {iteration} is given up: this rank leaves", rank=self._rank, iteration=iteration
            ) from None
        except NoWord:
            raise CheckpointError(
                f"iteration {iteration}: no word of {name} after {timeout_s:g} s (save_timeout); "
                "see the log of that rank",
                rank=self._rank,
                iteration=iteration,
            ) from None

    def forget(self, before: int) -> None:
        """Delete what this rank said about earlier saves: all ranks have taken part in a later one since."""
        for ordinal, key in self._posted:
            if ordinal < before:
                self._store.delete_key(key)
        self._posted = [(ordinal, key) for ordinal, key in self._posted if ordinal >= before]

    def _key(self, ordinal: int, name: str) -> str:
        return f"outlast/checkpoint/{self._namespace}/{ordinal}/{name}"


def deadline(seconds: float) -> Callable[[], float]:
    """Return a function that tells the seconds left of ``seconds`` from now."""
    end_ns = clock.now_ns() + int(seconds * 1e9)
    return lambda: (end_ns - clock.now_ns()) / 1e9
