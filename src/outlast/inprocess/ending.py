"""The ends of a rank's part that are not the function's: it leaves alone, all have to stop, or it was told so."""

from __future__ import annotations

import logging
import queue
from typing import NoReturn

from outlast import clock
from outlast.errors import RestartAbort
from outlast.inprocess import messages as m
from outlast.inprocess.announcements import Announcements
from outlast.inprocess.monitor_link import MonitorLink
from outlast.inprocess.monitor_thread import Notice
from outlast.inprocess.own_facts import OwnFacts
from outlast.inprocess.plugins import Plugins
from outlast.inprocess.rank_left import RankLeft

__all__ = ["Ending"]

log = logging.getLogger(__name__)

_LAST_WORD_S = 5.0


class Ending:
    """End a rank's part.

    Args:
        facts: What it knows.
        plugins: Their ``terminate`` is called.
        said: Tells the node's agent.
        link: Tells the others.
        inbox: Where the last order comes.

    Thread: the main thread.
    """

    def __init__(
        self,
        facts: OwnFacts,
        plugins: Plugins,
        said: Announcements,
        link: MonitorLink,
        inbox: queue.SimpleQueue[Notice],
    ) -> None:
        self._facts, self._plugins, self._said = facts, plugins, said
        self._link, self._inbox = link, inbox

    def part(self, reason: str, *, tell: bool) -> NoReturn:
        """Leave for good, alone.

        Args:
            reason: Why, in one line.
            tell: Whether the others do not know it yet.

        Raises:
            RankLeft: Always.
        """
        if tell:
            self._link.send(m.Left(reason=reason))
        self._said.leave()
        self._terminate()
        text = f"rank {self._facts.place.global_rank} is permanently removed: {reason}"
        log.warning("%s", text)
        raise RankLeft(text)

    def give_up(self, error: RestartAbort) -> NoReturn:
        """Have all ranks stop.

        Raises:
            RestartAbort: Always; with the counts of all ranks where they are heard of in time.

        Blocks: up to 5 s.
        """
        self._link.send(m.Left(reason=str(error), fatal=True))
        end_s = clock.now_s() + _LAST_WORD_S
        while (left_s := end_s - clock.now_s()) > 0:
            try:
                order = self._inbox.get(timeout=left_s)
            except queue.Empty:
                break
            if isinstance(order, m.Abort):
                raise self.abortion(order) from error
        self._terminate()
        raise error

    def abortion(self, order: m.Abort) -> RestartAbort:
        """Return what to raise where all were told to stop."""
        self._terminate()
        return RestartAbort(
            order.reason,
            counts={"restarts": order.iteration, "faults": sum(order.fault_counts.values())},
            rank=self._facts.place.global_rank,
            node=self._facts.place.node,
            iteration=self._facts.iteration,
        )

    def _terminate(self) -> None:
        try:
            self._plugins.terminate(self._facts.describe())
        except Exception:
            log.exception("the terminate plug-in failed")
