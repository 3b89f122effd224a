"""The link of a node to the coordinator of a call of a wrapped function, without an agent of ``outlast run``.

The agent process of each node has one :class:`AgentLink` for a call: the relay of the node's ranks
(:class:`outlast.launch.rank_relay.RankRelay`), and one connection to the coordinator, a part of one of the agent
processes (:class:`outlast.inprocess.coordinator.RankCoordinator`). Any process may die:

* Ranks of a node whose agent process is killed start another one, which listens at the same address.
* Nodes that lost the coordinator query the list of its successors in order. A process of the list coordinates where all
  processes before it are gone or were started in place of a killed one; such a process coordinates where only such ones
  are left. The relays send the next coordinator the standings of their ranks.
* A coordinator that does not respond counts as lost after the heartbeat timeout, or after ``_ANSWER_S`` where one of
  the node's ranks reports a fault.

The relay keeps the standings while there is no coordinator. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import selectors
import socket
import threading
from dataclasses import dataclass

from outlast import clock
from outlast.errors import OutlastError
from outlast.inprocess import protocol as m
from outlast.inprocess.coordinator import (
    Heartbeat,
    JoinCoordinator,
    NodeChannel,
    NodeLink,
    NotCoordinator,
    OnLink,
    RankCoordinator,
    Welcome,
)
from outlast.launch.protocol import RankOrder, RankReports
from outlast.launch.rank_relay import RECONNECT_S, RankRelay
from outlast.policy.inprocess_protocol import RankFault
from outlast.runtime.addresses import listen_at
from outlast.runtime.listener import Listener
from outlast.runtime.run_key import accept_offer, make_offer
from outlast.runtime.wire import MAX_MESSAGE_BYTES, Handshake

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Seconds in which the coordinator has to send a heartbeat after a fault."""
_LATE_S = 0.5
"""Seconds that this process may be late before the pause is not counted as silence of others."""
_JOIN_S = 5.0
"""Time limit in seconds for a new connection to authenticate and join."""
_MAX_JOIN_BYTES = 1 << 16
_MAX_NEWCOMERS = 256
_BACKLOG = 1024
_ATTEMPT_S = 1.0
"""Time limit in seconds for the response of an agent process."""
_PAUSE_S = 0.01
_FLUSH_S = 1.0


@dataclass(slots=True)
class _Search:
    """The search for the coordinator, until one accepts this node or this process has to coordinate."""

    end_s: float
    at: int = -1
    is_preceded: bool = False
    """A process that was queried in this round has precedence over this one."""
    link: NodeLink | None = None
    """To the process that is queried; ``None``: the next round is due at ``deadline_s``."""
    deadline_s: float = 0.0
    error: str = "no agent process was contacted"


class AgentLink:
    """Relay for the ranks of this node in one call, and find the coordinator or be it.

    Args:
        task: Of the node's first rank in the call.

    Raises:
        OSError: The system provides no socket.

    Thread: owns one; methods and properties may be used by any.
    """

    def __init__(self, task: m.MonitorTask) -> None:
        self._task = task
        self._selector = selectors.DefaultSelector()
        self._relay = RankRelay()
        self.relay_address = self._relay.address
        self._relay.begin_cycle(task.cycle)
        self._selector.register(self._relay, selectors.EVENT_READ, lambda _: None)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda _: os.eventfd_read(self._wake))
        self._orders: queue.SimpleQueue[m.Connect] = queue.SimpleQueue()
        self._is_new = False
        self.offer = make_offer()
        """All nodes derive their key from it where this agent process coordinates first."""
        self._key = accept_offer(self.offer, m.COORDINATION)
        self._has_begun = False
        self._listeners: list[Listener[OnLink]] = []
        self._own_addresses: set[str] = set()
        self.address = self._listen(0)
        self._own = JoinCoordinator(node=task.node, life=secrets.token_hex(8), address=self.address)
        self._addresses: tuple[str, ...] = ()
        self._ranks: dict[int, int] = {}
        self._search: _Search | None = None
        self._link: NodeLink | None = None
        self._answer_s: float | None = None
        self._next_heartbeat_s = 0.0
        self._was_silent = False
        self._coordinator: RankCoordinator | None = None
        self._looked_s = clock.now_s()
        self._is_needed = True
        self._thread = threading.Thread(target=self._run, name="outlast-agent-link", daemon=True)
        self._thread.start()

    @property
    def known(self) -> m.Coordinators:
        """The facts from which another agent process of this node can resume."""
        return m.Coordinators(addresses=self._addresses, ranks=self._ranks)

    def add_rank(self, rank: int, pid: int) -> None:
        """Record that a rank of this node has a duty. Thread: any; the caller holds a lock."""
        self._ranks = {**self._ranks, rank: pid}

    def remove_rank(self, rank: int) -> None:
        self._ranks = {one: pid for one, pid in self._ranks.items() if one != rank}

    def connect(self, order: m.Connect, *, is_new: bool) -> None:
        """Connect to the coordinator; later calls have no effect. Blocks: never.

        Args:
            order: The coordinator's address and offer.
            is_new: This agent process was started in place of one that was killed.
        """
        self._is_new |= is_new
        self._orders.put(order)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the link. Blocks: until no other node needs the coordinator here."""
        self._is_needed = False
        os.eventfd_write(self._wake, 1)
        self._thread.join()

    # -- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                due_s = self._look(clock.now_s())
                is_serving = self._coordinator is not None and self._coordinator.serves_others()
                if not self._is_needed and not is_serving:
                    for _ in range(3):  # the last reports: a connection is accepted first, and read later
                        self._report()
                    break
                for key, events in self._selector.select(max(0.0, due_s - clock.now_s())):
                    # An event before this one may have closed it, and its number may be in use again.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(events)
        except Exception:
            log.exception("the link to the coordinator of in-process restarts failed")
            self._relay.abandon("the agent process of this node failed; look at its log")
        finally:
            if self._search is not None and self._search.link is not None:
                self._search.link.close()
            if self._link is not None:
                self._link.channel.drain(_FLUSH_S)
                self._link.close()
            if self._coordinator is not None:
                self._coordinator.look(clock.now_s())
                self._coordinator.close()
            for listener in self._listeners:
                listener.close()
            self._relay.close()

    def _look(self, now_s: float) -> float:
        """Do what is due, and return when the next call is due."""
        if now_s > self._looked_s + self._task.process_interval_s + _LATE_S:
            log.info("this process did not run for a while")
            if self._link is not None:
                self._link.channel.received_ns = clock.now_ns()
            if self._coordinator is not None:
                self._coordinator.discount_pause()
        self._looked_s = now_s
        while not self._orders.empty():
            self._begin(self._orders.get())
        self._report()
        due = [now_s + self._task.process_interval_s]
        if self._link is not None and self._coordinator is None:
            due.append(self._look_at_link(now_s, self._link))
        if self._search is not None and now_s >= self._search.deadline_s:
            if self._search.link is None:
                self._ask_next(self._search)
            else:
                self._skip(self._search, "it does not respond")
        if self._search is not None:
            due.append(self._search.deadline_s)
        if self._coordinator is not None:
            self._coordinator.look(now_s)
            due.append(self._coordinator.deadline_s)
        for listener in self._listeners:
            listener.serve(now_s)
        later = [listener.deadline_s for listener in self._listeners] + [self._relay.deadline_s]
        return min([*due, *(one for one in later if one is not None)])

    def _report(self) -> None:
        for message in self._relay.serve():
            if self._link is not None:
                self._link.send(message)
            if isinstance(message, RankReports) and any(isinstance(one, RankFault) for _, one in message.reports):
                self._demand_answer()

    def _begin(self, order: m.Connect) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._key = accept_offer(order.offer, m.COORDINATION)
        self._addresses = order.addresses
        # Others look for an agent process that was killed at its address.
        for address in order.addresses:
            host, _, port = address.rpartition(" ")
            if host == self._task.host and address not in self._own_addresses:
                self._listen(int(port))
        self._find(self._task.limits.barrier_timeout_s)

    # -- the connection to the coordinator ---------------------------------------------------------------------

    def _use_link(self, link: NodeLink, term: int, came: list[OnLink]) -> None:
        self._search, self._was_silent = None, False
        self._link, self._answer_s = link, None
        self._next_heartbeat_s = clock.now_s() + self._task.heartbeat_interval_s
        link.on_messages, link.on_broken = self._on_messages, self._on_broken
        for message in self._relay.introduce(term):
            link.send(message)
        self._on_messages(link, came)

    def _on_messages(self, _: NodeLink, came: list[OnLink]) -> None:
        for message in came:
            match message:
                case RankOrder():
                    self._relay.obey(message)
                case Welcome(addresses=addresses):
                    self._addresses = addresses
                case Heartbeat():
                    pass  # the channel has recorded the time
                case other:
                    log.warning("unexpected message from the coordinator: %s", type(other).__name__)

    def _on_broken(self, link: NodeLink, error: OSError) -> None:
        if self._link is link:
            self._lose_link(str(error))

    def _lose_link(self, error: str, *, was_silent: bool = False) -> None:
        assert self._link is not None
        log.info("node %s: the connection to the coordinator of in-process restarts broke: %s", self._task.node, error)
        self._link.close()
        self._link = None
        if self._coordinator is not None or not self._is_needed:
            return
        self._was_silent |= was_silent
        self._find(self._task.heartbeat_timeout_s + _ANSWER_S)

    def _demand_answer(self) -> None:
        """Limit the time for a heartbeat of the coordinator: it is needed, or another node lost it."""
        if self._link is not None and self._answer_s is None:
            self._answer_s = clock.now_s() + _ANSWER_S
            self._link.send(Heartbeat())

    def _look_at_link(self, now_s: float, link: NodeLink) -> float:
        """Send a heartbeat if it is due, and close the connection to a silent coordinator."""
        received_s = link.channel.received_ns / 1e9
        if self._answer_s is not None and received_s > self._answer_s - _ANSWER_S:
            self._answer_s = None
        due_s = received_s + self._task.heartbeat_timeout_s
        if self._answer_s is not None:
            due_s = min(due_s, self._answer_s)
        if now_s >= due_s:
            self._lose_link(f"no heartbeat for {now_s - received_s:.1f} s", was_silent=True)
            return now_s
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + self._task.heartbeat_interval_s
            link.send(Heartbeat())
        return min(due_s, self._next_heartbeat_s)

    # -- the search for the coordinator ------------------------------------------------------------------------------

    def _find(self, timeout_s: float) -> None:
        self._search = _Search(clock.now_s() + timeout_s)
        self._ask_next(self._search)

    def _ask_next(self, search: _Search) -> None:
        addresses = self._addresses
        while True:
            search.at += 1
            if search.at >= len(addresses):
                if self._is_new and not search.is_preceded and self._own_addresses.intersection(addresses):
                    return self._coordinate()
                search.at, search.is_preceded = -1, False
                now_s = clock.now_s()
                if now_s >= search.end_s:
                    self._search = None
                    log.warning("node %s: no coordinator can be reached: %s", self._task.node, search.error)
                    return self._relay.abandon(f"no coordinator of in-process restarts can be reached ({search.error})")
                search.deadline_s = min(now_s + _PAUSE_S, search.end_s)
                return None
            address = addresses[search.at]
            if address in self._own_addresses:
                if not self._is_new and not search.is_preceded:
                    return self._coordinate()
                continue
            try:
                channel = self._call(address)
            except (OSError, OutlastError) as error:
                search.error = f"{address}: {error}"
                continue
            search.deadline_s = clock.now_s() + _ATTEMPT_S
            search.link = NodeLink(self._selector, channel, self._on_answer, self._on_no_answer)
            return None

    def _on_answer(self, link: NodeLink, came: list[OnLink]) -> None:
        assert self._search is not None
        match came[0]:
            case Welcome() as welcome:
                self._use_link(link, welcome.term, came)
            case NotCoordinator(is_new=is_new):
                is_before = not self._own_addresses.intersection(self._addresses[: self._search.at])
                self._search.is_preceded |= is_before if is_new == self._is_new else self._is_new
                self._skip(self._search, "it does not coordinate")
            case other:
                self._skip(self._search, f"it sent {type(other).__name__}")

    def _on_no_answer(self, _: NodeLink, error: OSError) -> None:
        assert self._search is not None
        self._skip(self._search, str(error))

    def _skip(self, search: _Search, error: str) -> None:
        assert search.link is not None
        search.error = f"{self._addresses[search.at]}: {error}"
        search.link.close()
        search.link = None
        self._ask_next(search)

    def _coordinate(self) -> None:
        """Start the coordinator here, and join it."""
        log.info("node %s: this agent process coordinates in-process restarts from now on", self._task.node)
        silent_s = self._task.heartbeat_timeout_s if self._was_silent else 0.0  # others have not detected it yet
        self._coordinator = RankCoordinator(
            self._selector, self._task, self._own, term=self._relay.term + 1, patience_s=RECONNECT_S + silent_s
        )
        here, there = socket.socketpair()
        self._search = _Search(clock.now_s() + _ATTEMPT_S, deadline_s=clock.now_s() + _ATTEMPT_S)
        self._search.link = NodeLink(self._selector, NodeChannel(here, OnLink), self._on_answer, self._on_no_answer)
        self._coordinator.adopt(NodeChannel(there, OnLink), self._own)

    def _call(self, address: str) -> NodeChannel:
        """Return a connection on which this node joins as soon as it is open. Blocks: never.

        Args:
            address: ``host port``; the host is a number.

        Raises:
            OSError: No process listens there.
            OutlastError: The address is invalid.
        """
        host, _, port = address.rpartition(" ")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise OutlastError(f"{address!r} is not an address; write 'host port'")
        family, kind, protocol, _, number = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            connection.connect(number)
        except BlockingIOError:
            pass
        except BaseException:
            connection.close()
            raise
        channel = NodeChannel(connection, OnLink, handshake=Handshake(self._key, m.COORDINATION, is_server=False))
        channel.send(self._own)  # it waits for the proof
        return channel

    # -- connections to this process --------------------------------------------------------------------------

    def _listen(self, port: int) -> str:
        """Listen at a port, 0: a free one, unless another process does; return the address."""
        listening = listen_at(self._task.host, backlog=_BACKLOG, port=port)
        address = f"{self._task.host} {listening.getsockname()[1]}"
        if port and listening.getsockname()[1] != port:
            listening.close()  # another process has the port
            return address
        listener: Listener[OnLink] = Listener(
            self._selector,
            [listening],
            OnLink,
            self._on_newcomer,
            name="the coordination of in-process restarts",
            join_s=_JOIN_S,
            max_newcomers=_MAX_NEWCOMERS,
            handshake=lambda: Handshake(self._key, m.COORDINATION, is_server=True),
            max_bytes=_MAX_JOIN_BYTES,
        )
        self._listeners.append(listener)
        self._own_addresses.add(address)
        return address

    def _on_newcomer(self, link: NodeLink, came: list[OnLink]) -> None:
        listener = next(one for one in self._listeners if one.is_newcomer(link))
        join = came[0]
        if not isinstance(join, JoinCoordinator):
            return listener.drop(link, f"it sent {type(join).__name__}")
        if not self._has_begun:  # the ranks' store has this address, and no rank here has reported that yet
            self._begin(m.Connect(addresses=(self.address,), offer=self.offer))
        if self._coordinator is None:
            link.send(NotCoordinator(is_new=self._is_new))
            link.channel.drain(0.05)
            if listener.is_newcomer(link):
                listener.drop(link, "this agent process does not coordinate")
            return self._demand_answer()  # that node lost the coordinator, and this one may have lost it, too
        listener.admit(link)
        channel = link.release()
        channel.max_bytes = MAX_MESSAGE_BYTES
        return self._coordinator.adopt(channel, join)


_lock = threading.Lock()
_links: dict[int, tuple[AgentLink, int]] = {}
"""By call: the link, and the number of ranks of this node that use it."""


def open_link(task: m.MonitorTask) -> AgentLink:
    """Return the link of this agent process for a call; each use needs a :func:`close_link`."""
    with _lock:
        link, num = _links.get(task.call, (None, 0))
        link = AgentLink(task) if link is None else link
        _links[task.call] = link, num + 1
        link.add_rank(task.initial_rank, task.pid)
        return link


def close_link(task: m.MonitorTask) -> None:
    """End a use of the link of a call. Blocks: the last use, while another node needs the coordinator here."""
    with _lock:
        link, num = _links.pop(task.call)
        link.remove_rank(task.initial_rank)
        if num > 1:
            _links[task.call] = link, num - 1
            return
    link.close()
