"""The monitor thread: it hears orders while the main thread is busy, and gets it out of the function.

It runs in every rank as long as the wrapper's call. It tells the monitor process by the page that the interpreter is
free and that the main thread moves; the monitor process judges both.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Protocol

from outlast.errors import OutlastError
from outlast.inprocess import messages as m
from outlast.inprocess.interruption import Interruption
from outlast.inprocess.page import Page, RankPhase
from outlast.inprocess.progress import MainThreadProgress
from outlast.runtime import connections

__all__ = ["Link", "MonitorThread", "Notice"]

log = logging.getLogger(__name__)

_LONGEST_LOOK_S = 0.25
"""Both timeouts are kept within half a second, whatever the intervals."""
_FIRST_POKE_S, _LONGEST_POKE_S = 0.005, 0.05
_FOR_EVER = 1 << 62

Notice = m.Listening | m.Order | OutlastError
"""What the main thread is told: an order, or that there is nobody left to give orders."""


class Link(Protocol):
    """The way to the monitor process."""

    def fileno(self) -> int:
        """Return what is readable when there is something to hear."""
        ...

    def receive(self) -> tuple[m.Listening | m.Order, ...]:
        """Return what was said."""
        ...


class MonitorThread:
    """Hear orders; leave.

    Args:
        link: The way to the monitor process.
        page: What the monitor process sees.
        interruption: Gets the main thread out.
        interval_s: Longest time between two looks.
        abort: Called once for each order to leave, after the connections were cut; aborts what else waits on peers.

    Thread: make, start and stop it on the main thread.
    """

    def __init__(
        self,
        link: Link,
        page: Page,
        interruption: Interruption,
        *,
        interval_s: float,
        abort: Callable[[], None],
    ) -> None:
        self._link, self._page, self._interruption = link, page, interruption
        self._interval_s = min(interval_s, _LONGEST_LOOK_S)
        self._abort = abort
        self._progress = MainThreadProgress()
        self._pings_only = False
        self._must_abort = False
        self._poke_s = _FIRST_POKE_S
        self._is_stopped = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.inbox: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        """What the main thread has to hear, in order."""
        self._thread = threading.Thread(target=self._run, name="outlast-inprocess", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread. Idempotent. Blocks: up to ``timeout_s``, while a plug-in runs in it."""
        if self._is_stopped:
            return
        self._is_stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the monitor thread is still busy after %g s; it ends with the process", timeout_s)
        else:
            os.close(self._wake)

    def begin_iteration(self) -> None:
        """Let any progress of the main thread count again. Thread: the main thread."""
        self._pings_only = False

    def count_pings_only(self) -> None:
        """Let only pings count as progress until the next iteration. Thread: any."""
        self._pings_only = True

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._is_stopped:
            wait_s = self._look()
            for fd, _ in poll.poll(wait_s * 1e3):
                if fd != self._wake:
                    self._hear()

    def _look(self) -> float:
        """Tell the page how things are, and go on getting the main thread out; return when to look again."""
        self._page.beat()
        if self._progress.take() and not self._pings_only:
            self._page.stamp_progress()
        self._progress.ask()
        if not self._interruption.is_wanted:
            return self._interval_s
        return self._get_out()

    def _hear(self) -> None:
        try:
            received = self._link.receive()
        except OutlastError as error:
            log.error("%s", error)
            self._interruption.order(_FOR_EVER)
            self._must_abort, self._poke_s = True, _FIRST_POKE_S
            self.inbox.put(error)
            self._is_stopped = True
            while self._interruption.is_wanted:
                threading.Event().wait(self._get_out())
            return
        for message in received:
            if isinstance(message, m.Restart):
                self._leave_before(message.iteration)
            elif isinstance(message, m.Abort | m.Expel):
                self._leave_before(_FOR_EVER)
            self.inbox.put(message)

    def _leave_before(self, iteration: int) -> None:
        self._interruption.order(iteration)
        if self._interruption.is_wanted:
            self._page.set_phase(RankPhase.LEAVING)
        self._must_abort, self._poke_s = True, _FIRST_POKE_S

    def _get_out(self) -> float:
        """Cut whatever the main thread may wait on and interrupt it; return when to do it again."""
        if self._interruption.is_atomic:
            return _FIRST_POKE_S
        connections.cut_all(both_ways=self._poke_s >= _LONGEST_POKE_S)
        if self._interruption.is_put_off:
            return _FIRST_POKE_S
        self._interruption.poke()  # first: a wait that is woken below must not come back to the function
        if self._poke_s > _FIRST_POKE_S:
            connections.end_lost_waits()
        if self._must_abort:
            self._must_abort = False
            self._abort()
            self._interruption.poke()
        poke_s, self._poke_s = self._poke_s, min(2 * self._poke_s, _LONGEST_POKE_S)
        return poke_s
