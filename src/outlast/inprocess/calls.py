"""Calls on members that may not know yet that their hub is lost: they look, and then come here.

Where a node is lost, nobody closes its connections: a member that has nothing to tell the hub would notice its silence
only after the heartbeats' timeout.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import selectors
from functools import partial

from outlast import clock
from outlast.errors import OutlastError
from outlast.inprocess import messages as m
from outlast.inprocess.candidates import connect
from outlast.inprocess.link import Link, LinkBroken

__all__ = ["Calls"]

log = logging.getLogger(__name__)

_CALL_S = 2.0


class Calls:
    """Greet members at their doors; a member that is greeted by one that has lost the hub looks for itself.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        greeting: What to say.
    """

    def __init__(self, selector: selectors.BaseSelector, greeting: m.Join) -> None:
        self._selector, self._greeting = selector, greeting
        self._links: set[Link] = set()
        self._end_s = clock.now_s() + _CALL_S

    @property
    def deadline_s(self) -> float | None:
        """When to call :meth:`look`."""
        return self._end_s if self._links else None

    def begin(self, address: str) -> None:
        """Call on a member, without waiting for it."""
        try:
            link = connect(address)
        except (OSError, OutlastError) as error:
            log.debug("nobody is at %s: %s", address, error)
            return
        self._links.add(link)
        self._selector.register(link, selectors.EVENT_WRITE, partial(self._on_event, link))

    def look(self) -> None:
        """End calls that take too long."""
        if clock.now_s() >= self._end_s:
            self.close()

    def close(self) -> None:
        """End all calls; idempotent."""
        for link in list(self._links):
            self._end(link)

    def _on_event(self, link: Link, events: int) -> None:
        if link not in self._links:
            return
        try:
            if events & selectors.EVENT_WRITE:
                link.send(self._greeting)
                self._selector.modify(link, selectors.EVENT_READ, partial(self._on_event, link))
            elif link.receive():
                self._end(link)
        except LinkBroken as error:
            log.debug("a call ended: %s", error)
            self._end(link)

    def _end(self, link: Link) -> None:
        self._links.discard(link)
        self._selector.unregister(link)
        link.close()
