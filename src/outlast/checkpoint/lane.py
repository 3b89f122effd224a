"""What the ranks tell each other about saves: keys of a store, never collectives.

Training's collectives and these words cannot get into each other's way, and nobody waits longer than he said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from outlast import clock
from outlast.checkpoint.claim import DirectoryRefused
from outlast.decoding import from_json
from outlast.errors import CheckpointError

__all__ = ["NoWord", "PeerSilent", "SaveExchange", "SaveOutcome", "Stopped", "deadline"]


log = logging.getLogger(__name__)
POLL_S = 0.02
T = TypeVar("T", bound=msgspec.Struct)


class _Heard(msgspec.Struct, frozen=True):
    """Nothing needs to be said."""


class NoWord(Exception):
    """A peer said nothing in time."""


class Stopped(Exception):
    """This rank leaves; nobody waits any more."""


class PeerSilent(CheckpointError):
    """A save failed because a rank is gone, or says nothing: not for want of a place to write to."""


class SaveOutcome(msgspec.Struct, frozen=True):
    """What became of a save, or of a node's part of it."""

    error: str | None = None
    is_silence: bool = False
    """A rank is gone, or said nothing in time."""
    is_refused: bool = False
    """The directory is another run's."""

    @classmethod
    def of(cls, error: Exception, text: str | None = None) -> SaveOutcome:
        """Return the outcome of a save that failed."""
        return cls(text or str(error), isinstance(error, PeerSilent), isinstance(error, DirectoryRefused))

    def failure(self, what: str, *, rank: int, iteration: int) -> CheckpointError:
        """Return the error of a save that failed."""
        if self.is_refused:
            return DirectoryRefused(self.error or what, rank=rank, iteration=iteration)
        kind = PeerSilent if self.is_silence else CheckpointError
        return kind(f"{what}: {self.error}", rank=rank, iteration=iteration)


class SaveExchange:
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
        """Say something about the save of that ordinal.

        Raises:
            PeerSilent: The ranks' store is gone.
        """
        key = self._key(ordinal, name)
        with _store_errors():
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
            PeerSilent: The ranks' store is gone.
            Stopped: This rank leaves.

        Blocks: until it is said, up to ``left_s()``.
        """
        key = self._key(ordinal, name)
        pause_s = 0.001
        with _store_errors():
            while not self._store.check([key]):
                if self._stop.wait(pause_s):
                    raise Stopped
                if left_s() <= 0:
                    raise NoWord(name)
                pause_s = min(POLL_S, 2 * pause_s)
            word = bytes(self._store.get(key))
        return from_json(word, kind)

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
                f"the save of iteration {iteration} is abandoned: this rank is closing",
                rank=self._rank,
                iteration=iteration,
            ) from None
        except NoWord:
            raise PeerSilent(
                f"iteration {iteration}: no answer ({name}) after {timeout_s:g} s (save_timeout); "
                "see the log of that rank",
                rank=self._rank,
                iteration=iteration,
            ) from None

    def part(self, ordinal: int, num_ranks: int, left_s: Callable[[], float]) -> None:
        """Say that this rank has heard the last word about a save after which ranks leave.

        Rank 0, which may host the store, waits for all others, that none of them finds it gone.

        Args:
            ordinal: Number of the save.
            num_ranks: All ranks.
            left_s: Seconds to wait from now on.
        """
        try:
            self.post(ordinal, f"heard/{self._rank}", _Heard())
            for rank in range(num_ranks) if self._rank == 0 else ():
                self.await_word(ordinal, f"heard/{rank}", _Heard, left_s)
        except (NoWord, Stopped, PeerSilent):
            return  # the last word is what counts

    def forget(self, before: int) -> None:
        """Delete what this rank said about earlier saves: all ranks have taken part in a later one since."""
        try:
            for ordinal, key in self._posted:
                if ordinal < before:
                    self._store.delete_key(key)
        except RuntimeError as error:
            log.debug("the store is gone, and what was said there with it: %s", error)
        self._posted = [(ordinal, key) for ordinal, key in self._posted if ordinal >= before]

    def _key(self, ordinal: int, name: str) -> str:
        return f"outlast/checkpoint/{self._namespace}/{ordinal}/{name}"


@contextmanager
def _store_errors() -> Iterator[None]:
    """Tell the errors of a store whose host is gone as what they are."""
    try:
        yield
    except RuntimeError as error:  # torch's DistNetworkError and others
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerSilent(f"rank 0, which hosts the ranks' store, is gone ({what}); see the log of that rank") from None


def deadline(seconds: float) -> Callable[[], float]:
    """Return a function that tells the seconds left of ``seconds`` from now."""
    end_ns = clock.now_ns() + int(seconds * 1e9)
    return lambda: (end_ns - clock.now_ns()) / 1e9
