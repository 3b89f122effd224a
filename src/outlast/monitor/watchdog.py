"""The watchdog: a thread that detects when a rank exceeds a timeout.

It sleeps until the earliest deadline in the heartbeat memory (see :func:`outlast.policy.deadlines.wake_at_ns`); a
healthy job costs it a few wake-ups per timeout.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from outlast.clock import MONOTONIC, Clock
from outlast.incidents import Incident, IncidentKind
from outlast.policy.deadlines import Expired, Timeouts, expired, wake_at_ns
from outlast.runtime.board import Board, RankState

log = logging.getLogger(__name__)

_SUSPENDED_NS = 1_000_000_000
_LONGEST_SLEEP_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """A hang: every timeout that was exceeded when it was detected, and the states of all ranks."""

    expired: list[Expired]
    """The longest overdue of each rank first."""
    states: list[RankState]

    def incident(self, *, job: str, cycle: int, node: str) -> Incident:
        """Return the incident of the first rank that exceeded a timeout; the root cause is identified later."""
        first = self.expired[0]
        state = next(one for one in self.states if one.local_rank == first.local_rank)
        return Incident(
            kind=IncidentKind.WORKER_HUNG,
            job=job,
            cycle=cycle,
            node=node,
            rank=state.global_rank,
            pid=state.pid,
            section="/".join(section.name for section in state.sections) or None,
            iteration=state.iteration,
            detected_after_s=round(first.elapsed_s, 4),
            evidence={"summary": first.describe(node), "timeout_s": first.timeout_s},
        )


class Watchdog:
    """Watch a heartbeat memory, and report each hang once.

    A hang lasts from the first exceeded timeout until none is exceeded any more; further ranks that exceed theirs
    meanwhile are part of it and are not reported again.

    Args:
        board: The node's heartbeat memory.
        timeouts: Timeouts to enforce; ``None``: none until :meth:`enforce`.
        node: Name of the node.
        on_hang: Called from the watchdog's thread.
        on_error: Called from the watchdog's thread with the error that ended it: ranks are not watched any more.
        level: Of the log line that describes the timeouts.
        clock: Monotonic time.
    """

    def __init__(
        self,
        board: Board,
        timeouts: Timeouts | None,
        *,
        node: str,
        on_hang: Callable[[HangReport], None],
        on_error: Callable[[BaseException], None] | None = None,
        level: int = logging.INFO,
        clock: Clock = MONOTONIC,
    ) -> None:
        self._board = board
        self.timeouts = timeouts or Timeouts()
        self._has_timeouts = timeouts is not None
        self._node = node
        self._on_hang = on_hang
        self._on_error = on_error
        self._level = level
        self._clock = clock
        self._hanging = False
        self._wake_ns: int | None = None
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-watchdog", daemon=True)

    def start(self) -> None:
        if self._has_timeouts:
            self._log(self.timeouts.describe(), self._level)
        else:
            log.debug("the ranks are watched as soon as the script calls outlast.init() or makes a RankMonitor")
        self._thread.start()

    def enforce(self, timeouts: Timeouts, description: str) -> None:
        """Replace the timeouts; the log describes them at DEBUG. Thread: any."""
        self.timeouts = timeouts
        self._log(description, logging.DEBUG)
        self._wake.set()

    def _log(self, description: str, level: int) -> None:
        num = self._board.num_ranks
        log.log(level, "node %s watches %d %s: %s", self._node, num, "rank" if num == 1 else "ranks", description)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread; return whether it ended in time. Idempotent, also from ``on_hang``."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def look(self) -> None:
        """Check the ranks now, since deadlines may have changed. Thread: any."""
        self._wake.set()

    def check(self) -> int | None:
        """Check the ranks once, report a new hang, and return until when to sleep.

        Returns:
            Monotonic nanoseconds; ``None``: forever, no timeout is enforced.
        """
        now = self._clock.now_ns()
        states = self._board.read_all()
        if self._wake_ns is not None and now - self._wake_ns > _SUSPENDED_NS:
            # A paused container or a suspended machine stops the ranks, too: they get time before they are judged.
            log.warning(
                "node %s was suspended for %.1f s; its ranks get one more second",
                self._node,
                (now - self._wake_ns) / 1e9,
            )
            self._wake_ns = now + _SUSPENDED_NS
            return self._wake_ns
        late = self._late(states, now)
        if late and not self._hanging:
            # A hang is reported only if it is seen twice.
            states = self._board.read_all()
            seen = {_key(one) for one in late}
            late = [one for one in self._late(states, now) if _key(one) in seen]
        self._wake_ns = wake_at_ns(states, self.timeouts, now)
        if late and not self._hanging:
            for one in late:
                log.error("%s", one.describe(self._node))
            self._hanging = True
            self._on_hang(HangReport(expired=late, states=states))
            self._wake_ns = max(self._wake_ns or 0, self._clock.now_ns())
        elif not late:
            self._hanging = False
        return self._wake_ns

    def _late(self, states: list[RankState], now_ns: int) -> list[Expired]:
        return [one for state in states for one in expired(state, self.timeouts, now_ns)]

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                if self._stopping:
                    return
                wake = self.check()
                sleep_s = _LONGEST_SLEEP_S
                if wake is not None:
                    sleep_s = min(sleep_s, (wake - self._clock.now_ns()) / 1e9)
                self._wake.wait(max(0.0, sleep_s))
        except BaseException as error:  # the owner decides
            log.exception("node %s: the watchdog failed; its ranks are no longer watched", self._node)
            if self._on_error is not None:
                self._on_error(error)


def _key(one: Expired) -> tuple[int, str, str | None, int]:
    return one.local_rank, one.subject, one.section, one.since_ns
