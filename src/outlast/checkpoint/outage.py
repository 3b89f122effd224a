"""Joint wait of all ranks while a checkpoint directory or an object store does not respond."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from outlast import clock
from outlast.errors import PeerLost, Unavailable
from outlast.runtime.storage_calls import LOG_S

log = logging.getLogger(__name__)
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 10.0
AT_FAULT_FIRST_S = 5.0
"""Seconds that ranks which are not at fault wait before they fail."""
_SLEEP_S = 0.1
MIN_AGREEMENT_S = 3600.0
"""Shortest time limit of an agreement at a start: longer than any single rank's bounded wait."""


class Gatherer(Protocol):
    rank: int

    def gather(self, kind: Any, value: Any) -> list[Any]: ...


class Outage(Unavailable):
    """A checkpoint directory or an object store did not respond for as long as a start waits; a restart waits again."""


class UnavailableToPeer(Unavailable, PeerLost):
    """A directory does not respond on another rank's node: that rank raises Unavailable."""


class OutageWait:
    """Wait, all ranks together, for a directory or an object store that does not respond.

    Args:
        limit_s: Seconds from now on after which the wait ends; 0 = do not wait.
    """

    def __init__(self, peers: Gatherer, *, limit_s: float) -> None:
        self._peers, self._limit_s = peers, limit_s
        self._started_ns = clock.now_ns()
        self._pause_s, self._said_s = FIRST_PAUSE_S, 0.0
        self._partial_s: float | None = None
        """Value of :attr:`waited_s` since when the place responds for some ranks only."""
        self.waited_s = 0.0
        """Seconds since the start of the wait, measured by rank 0; the same on all ranks."""

    def pause(self, problem: str, *, partial_limit_s: float | None = None) -> bool:
        """Wait before another attempt; return whether to make one.

        Args:
            problem: The place, its rank, and the error; the same on all ranks.
            partial_limit_s: If the place responds for some ranks only: the seconds for which that may last without a
                break (an object store that has just returned does so, too). ``None`` = it responds for no rank.

        Raises:
            PeerLost: A peer is gone.

        Collective: all ranks, with the same ``problem``.
        Blocks: up to 10 s.
        """
        own_s = (clock.now_ns() - self._started_ns) / 1e9
        mine = own_s, self._limit_s, partial_limit_s or 0.0
        # Those of rank 0, since the ranks' settings may differ.
        self.waited_s, limit_s, partial_s = self._peers.gather(tuple[float, float, float], mine)[0]
        if partial_limit_s is None:
            self._partial_s = None
        else:
            self._partial_s = self.waited_s if self._partial_s is None else self._partial_s
            limit_s = min(limit_s, self._partial_s + partial_s)
        if self.waited_s >= limit_s:
            return False
        if self._peers.rank == 0 and (not self._said_s or self.waited_s - self._said_s >= LOG_S - FIRST_PAUSE_S):
            self._said_s = self.waited_s or FIRST_PAUSE_S
            log.warning(
                "the start has waited %.0f s for a checkpoint directory and continues to wait, up to %.0f s: %s",
                *(self.waited_s, limit_s, problem),
            )
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        pause(min(pause_s, max(limit_s - self.waited_s, 0.0)))
        return True


def pause(seconds: float) -> None:
    """Sleep in short pieces, between which an in-process restart can interrupt. Blocks: for that time."""
    end_ns = clock.now_ns() + int(seconds * 1e9)
    while (left_ns := end_ns - clock.now_ns()) > 0:
        time.sleep(min(_SLEEP_S, left_ns / 1e9))


def describe_outage(problem: str, waited_s: float) -> str:
    return (
        f"no checkpoint could be looked up for {waited_s:.0f} s: {problem}; start again once it responds: nothing was "
        "changed (checkpoint.restore_timeout sets how long a start waits)"
    )
