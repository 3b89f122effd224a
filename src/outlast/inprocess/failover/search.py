"""Who may host the hub after the one that does, and the search for it.

Every member knows the same list. A monitor process that loses the hub asks the candidates in order. It hosts the hub
itself only where every candidate before it is gone; one that is there but hosts nothing (yet) is asked again. A
candidate that started anew since the list was made counts as gone: it knows nothing.

A new host probes the other members. Where a node is lost, nobody closes its connections: a member that has nothing to
report would notice the hub's silence only after the heartbeats' timeout. One that is probed looks for itself.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from outlast import clock
from outlast.errors import OutlastError
from outlast.inprocess import protocol as m
from outlast.inprocess.link import Link, LinkBroken

__all__ = ["PeerProbes", "Search", "connect", "order_candidates", "split_address"]


_MAX_CANDIDATES = 4
_ATTEMPT_S = 1.0
"""Seconds that a candidate has to answer."""
_PAUSE_S = 0.01


def order_candidates(able: Iterable[m.HubCandidate], host: int) -> tuple[m.HubCandidate, ...]:
    """Return who may host the hub: the one that does, then one of each other node, then others."""
    by_rank = sorted(able, key=lambda candidate: candidate.initial_rank)
    chosen = [candidate for candidate in by_rank if candidate.initial_rank == host]
    nodes = {candidate.node for candidate in chosen}
    for candidate in by_rank:
        if candidate.node not in nodes:
            nodes.add(candidate.node)
            chosen.append(candidate)
    chosen += [candidate for candidate in by_rank if candidate not in chosen]
    return tuple(chosen[:_MAX_CANDIDATES])


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host port``.

    Raises:
        OutlastError: It is no such text.
    """
    host, _, port = address.rpartition(" ")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise OutlastError(f"{address!r} is no address; write 'host port'")
    return host, int(port)


def connect(address: str) -> Link:
    """Return a link that is about to be connected; it is when its descriptor is writable, or it is broken.

    Raises:
        OSError: Nobody listens there.
        OutlastError: ``address`` is none.

    Blocks: never; the host is a number.
    """
    host, port = split_address(address)
    family, kind, protocol, _, number = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    try:
        connection.connect(number)
    except BlockingIOError:
        pass
    except BaseException:
        connection.close()
        raise
    return Link(connection, is_trusted=True)


class Search:
    """Ask the candidates in order, without ever blocking, until one takes this member in or it has to host the hub.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        candidates: In this order; those behind this process's own entry are asked, too.
        make_join: Returns this member's greeting for the process of this life (empty: any).
        own_life: Names this process.
        can_host: Whether this process may host the hub where all before it are gone.
        on_found: Gets the link to the hub, and the messages that came on it.
        on_host: Called when this process has to host the hub.
        on_failed: Gets the reason once the time is over.
        timeout_s: Seconds that the search may take.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        candidates: Sequence[m.HubCandidate],
        *,
        make_join: Callable[[str], m.JoinHub],
        own_life: str,
        can_host: bool,
        on_found: Callable[[Link, list[m.OnLink]], None],
        on_host: Callable[[], None],
        on_failed: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        self._selector, self._candidates = selector, list(candidates)
        self._make_join, self._own_life, self._can_host = make_join, own_life, can_host
        self._on_found, self._on_host, self._on_failed = on_found, on_host, on_failed
        self._end_s = clock.now_s() + timeout_s
        self._at = -1
        self._before_are_gone = True
        self._link: Link | None = None
        self._greeted = False
        self._due_s: float | None = None
        self._error = "nobody was asked"

    def start(self) -> None:
        """Ask the first candidate."""
        self._next()

    @property
    def deadline_s(self) -> float | None:
        """When to call :meth:`look`."""
        return self._due_s

    def look(self) -> None:
        """Go on where an attempt has taken too long, or the next round is due."""
        if self._due_s is None or clock.now_s() < self._due_s:
            return
        if self._link is not None:
            self._give_up("it does not answer", is_gone=True)
        else:
            self._next()

    def close(self) -> None:
        """End the search; idempotent."""
        self._due_s = None
        self._drop()

    def _next(self) -> None:
        """Ask the next candidate."""
        while True:
            self._at += 1
            if self._at >= len(self._candidates):
                self._at, self._before_are_gone = -1, True
                now_s = clock.now_s()
                if now_s >= self._end_s:
                    self.close()
                    return self._on_failed(self._error)
                self._due_s = min(now_s + _PAUSE_S, self._end_s)
                return None
            candidate = self._candidates[self._at]
            if candidate.life == self._own_life:
                if self._before_are_gone and self._can_host:
                    self.close()
                    return self._on_host()
                continue
            try:
                return self._ask(candidate)
            except (OSError, OutlastError) as error:
                self._error = f"{candidate.address}: {error}"

    def _ask(self, candidate: m.HubCandidate) -> None:
        self._link, self._greeted = connect(candidate.address), False
        self._due_s = clock.now_s() + _ATTEMPT_S
        self._selector.register(self._link, selectors.EVENT_WRITE, self._on_event)

    def _on_event(self, events: int) -> None:
        link = self._link
        if link is None:
            return None
        try:
            if not self._greeted:
                link.send(self._make_join(self._candidates[self._at].life))
                self._greeted = True
                self._selector.modify(link, selectors.EVENT_READ, self._on_event)
                return
            if link.is_waiting:
                link.flush()
            found = link.receive()
        except LinkBroken as error:
            return self._give_up(str(error), is_gone=True)
        if not found:
            return None
        match found[0]:
            case m.NotHub(life=life, candidates=candidates):
                expected = self._candidates[self._at].life
                self._learn(candidates)
                self._give_up("it hosts no hub", is_gone=bool(expected) and life != expected)
            case m.HubCandidates():
                self._selector.unregister(link)
                self._link = None
                self.close()
                self._on_found(link, found)
            case other:
                self._give_up(f"it answered {type(other).__name__}", is_gone=True)

    def _learn(self, candidates: Sequence[m.HubCandidate]) -> None:
        """Ask those, too, whom somebody else knows."""
        lives = {candidate.life for candidate in self._candidates}
        self._candidates += [candidate for candidate in candidates if candidate.life not in lives]

    def _give_up(self, error: str, *, is_gone: bool) -> None:
        self._error = f"{self._candidates[self._at].address}: {error}"
        self._before_are_gone &= is_gone
        self._drop()
        self._next()

    def _drop(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None


log = logging.getLogger(__name__)

_CALL_S = 2.0


class PeerProbes:
    """Greet members at their doors; a member that is greeted by one that has lost the hub looks for itself.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        greeting: What to say.
    """

    def __init__(self, selector: selectors.BaseSelector, greeting: m.JoinHub) -> None:
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
