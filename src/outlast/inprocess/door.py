"""The door of a monitor process: it listens, and lets in who knows the secret.

A connection has a few seconds to send :class:`~outlast.inprocess.protocol.JoinHub` with the secret; any other is closed
without an answer.

Nothing here imports torch.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
from collections.abc import Callable
from functools import partial

from outlast import clock
from outlast.inprocess import protocol as m
from outlast.inprocess.link import Link, LinkBroken

__all__ = ["HubListener"]

log = logging.getLogger(__name__)

_GREETING_S = 5.0
_MAX_STRANGERS = 256


class HubListener:
    """Listen at an address.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        host: Address of this machine.
        world_size: Initial one.
        on_join: Gets the link and the greeting of a member; the link is its own from then on.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        host: str,
        *,
        world_size: int,
        on_join: Callable[[Link, m.JoinHub], None],
    ) -> None:
        self._selector, self._world_size, self._on_join = selector, world_size, on_join
        self.token = ""
        """The secret; nobody is let in before it is known."""
        self._strangers: dict[Link, float] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.address = f"{host} {self._listener.getsockname()[1]}"
        """``host port``."""
        selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    @property
    def deadline_s(self) -> float | None:
        """When to call :meth:`look`."""
        return min(self._strangers.values(), default=None)

    def look(self) -> None:
        """Shut out those who have said nothing for too long."""
        now_s = clock.now_s()
        for link in [link for link, until_s in self._strangers.items() if now_s >= until_s]:
            self._shut_out(link)

    def close(self) -> None:
        """Listen no more."""
        for link in list(self._strangers):
            self._shut_out(link)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _on_connection(self, _: int) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError as error:
            log.debug("no connection after all: %s", error)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            connection.close()
            return
        link = Link(connection, is_trusted=False)
        self._strangers[link] = clock.now_s() + _GREETING_S
        self._selector.register(link, selectors.EVENT_READ, partial(self._on_stranger, link))

    def _on_stranger(self, link: Link, _: int) -> None:
        if link not in self._strangers:
            return None
        try:
            came = link.receive()
        except LinkBroken as error:
            log.debug("a stranger: %s", error)
            return self._shut_out(link)
        if not came:
            return None
        join = came[0]
        if not isinstance(join, m.JoinHub) or not self._is_genuine(join):
            log.warning("refused a connection without this job's secret; is another job using the same port?")
            return self._shut_out(link)
        del self._strangers[link]
        self._selector.unregister(link)
        link.trust()
        return self._on_join(link, join)

    def _is_genuine(self, join: m.JoinHub) -> bool:
        return (
            bool(self.token)
            and hmac.compare_digest(join.token.encode(), self.token.encode())
            and join.initial_world_size == self._world_size
            and 0 <= join.initial_rank < self._world_size
        )

    def _shut_out(self, link: Link) -> None:
        del self._strangers[link]
        self._selector.unregister(link)
        link.close()
