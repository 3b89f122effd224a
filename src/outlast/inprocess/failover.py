"""The hub among the monitor processes: who may host it after the one that does, how it is found, and hosting it here.

Every member knows the same list of candidates. A monitor process that loses the hub asks them in order. It hosts the
hub itself only where every candidate before it is gone; one that is there but hosts nothing (yet) is asked again. A
candidate that started anew since the list was made counts as gone: it knows nothing.

A new host probes the other members. Where a node is lost, nobody closes its connections: a member that has nothing to
report would notice the hub's silence only after the heartbeats' timeout. One that is probed looks for itself.

Each process listens. A connection has a few seconds for the proof of the job's secret and a
:class:`~outlast.inprocess.protocol.JoinHub`; any other is closed without an answer.

Nothing here imports torch."""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
from collections.abc import Iterable, Sequence
from functools import partial

from outlast import clock
from outlast.errors import OutlastError
from outlast.inprocess import protocol as m
from outlast.inprocess.hub import RECONNECT_S, Hub
from outlast.inprocess.hub_client import HubSeeker
from outlast.policy import inprocess_protocol as p
from outlast.runtime.processes import machine_id
from outlast.runtime.wire import MAX_MESSAGE_BYTES, AuthenticationFailed, Handshake

log = logging.getLogger(__name__)

_PROTOCOL = "inprocess hub"
_MAX_JOIN_BYTES = 1 << 16
_JOIN_S = 5.0
"""Seconds that a new connection has to prove the secret and to join."""
_MAX_NEWCOMERS = 256
_ATTEMPT_S = 1.0
"""Seconds that a candidate has to answer."""
_PAUSE_S = 0.01
_PROBE_S = 2.0
_SILENT_S = 5.0
"""Seconds that others have more to come after a hub that fell silent: they notice it when they are probed."""


class PeerFailover:
    """Locate the hub among the monitor processes; see :class:`~outlast.inprocess.hub_client.HubLocator`.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        task: What the process has to do.
    """

    def __init__(self, selector: selectors.BaseSelector, task: m.MonitorTask) -> None:
        self._selector, self._task = selector, task
        self._seeker: HubSeeker
        self._life = secrets.token_hex(8)
        self._space = machine_id()
        self._key: bytes | None = None
        self._known = m.HubCandidates(candidates=())
        self._hub: Hub | None = None
        self._search: _Search | None = None
        self._probes: _PeerProbes | None = None
        self._was_silent = False
        self._newcomers: dict[m.HubChannel, float] = {}
        family = socket.AF_INET6 if ":" in task.host else socket.AF_INET
        self._listener = socket.create_server((task.host, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.address = f"{task.host} {self._listener.getsockname()[1]}"
        selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    # -- for the hub client ------------------------------------------------------------------------------------

    def attach(self, seeker: HubSeeker) -> None:
        self._seeker = seeker

    @property
    def is_hosting(self) -> bool:
        return self._hub is not None

    @property
    def is_needed(self) -> bool:
        if self._hub is not None and self._hub.is_over:
            self._end_hub()
        return self._hub is not None and self._hub.serves_others(self._task.initial_rank)

    @property
    def is_bootstrapped(self) -> bool:
        return self._key is not None

    def connect(self, order: m.Connect) -> None:
        self._key = order.token.encode()
        if order.hub == self.address:
            return self.host_hub()
        first = p.HubCandidate(initial_rank=0, node="", address=order.hub, life="")
        self._known = m.HubCandidates(candidates=(first,))
        return self.find(self._task.limits.barrier_timeout_s, may_host=True)

    def reconnect(self, known: m.Reconnect, timeout_s: float) -> None:
        self._key = known.token.encode()
        # It knows nothing of what a candidate must know, so it is the last one.
        others = [c for c in known.known.candidates if c.initial_rank != self._task.initial_rank]
        self._known = m.HubCandidates(candidates=(*others, self._describe()), members=known.known.members)
        self.find(timeout_s, may_host=True)

    def find(self, timeout_s: float, *, may_host: bool, was_silent: bool = False) -> None:
        self._was_silent |= was_silent
        self._search = _Search(self._selector, self, self._known.candidates, self._life, timeout_s, may_host=may_host)
        self._search.ask_next()

    def learn(self, known: m.HubCandidates) -> None:
        self._known = known

    def look(self, now_s: float) -> float | None:
        for channel in [channel for channel, until_s in self._newcomers.items() if now_s >= until_s]:
            self._shut_out(channel)
        for part in (self._search, self._probes, self._hub):
            if part is not None:
                part.look()
        parts = [part.deadline_s for part in (self._search, self._probes, self._hub) if part is not None]
        return min((due for due in (*self._newcomers.values(), *parts) if due is not None), default=None)

    def discount_pause(self) -> None:
        if self._hub is not None:
            self._hub.discount_pause()

    def close(self) -> None:
        for part in (self._search, self._probes):
            if part is not None:
                part.close()
        if self._hub is not None:
            self._end_hub()
        for channel in list(self._newcomers):
            self._shut_out(channel)
        self._selector.unregister(self._listener)
        self._listener.close()

    # -- the search's results ----------------------------------------------------------------------------------

    def call(self, address: str, wants: str) -> m.HubChannel:
        """Return a connection on which this member joins as soon as it is there. Blocks: never.

        Args:
            address: ``host port``; the host is a number.
            wants: Life of the process that is called; empty: any.

        Raises:
            OSError: Nobody listens there.
            OutlastError: The address is none.
        """
        host, _, port = address.rpartition(" ")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise OutlastError(f"{address!r} is no address; write 'host port'")
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
        proof = Handshake(self._key, _PROTOCOL, is_server=False, client_id=self._task.initial_rank)
        channel: m.HubChannel = m.HubChannel(connection, m.OnLink, handshake=proof)
        channel.send(self._make_join(wants))  # it waits for the proof
        return channel

    def use(self, channel: m.HubChannel, came: list[m.OnLink]) -> None:
        """The hub was found."""
        self._search, self._was_silent = None, False
        self._seeker.use_link(channel, came)

    def fail(self, reason: str) -> None:
        """The hub was not found in time."""
        self._search = None
        self._seeker.give_up(reason)

    def host_hub(self) -> None:
        """Host the hub, and join it."""
        self._search = None
        patience_s = min(_SILENT_S, self._task.heartbeat_timeout_s) if self._was_silent else 0.0
        self._hub = Hub(
            self._selector,
            world_size=self._task.initial_world_size,
            limits=self._task.limits,
            heartbeat_timeout_s=self._task.heartbeat_timeout_s,
            host=self._describe(),
            space=self._space,
            predecessor=self._known if self._known.members else None,
            patience_s=RECONNECT_S + patience_s,
        )
        if self._was_silent:
            others = {rank: place for rank, place in self._known.members.items() if rank != self._task.initial_rank}
            self._probes = _PeerProbes(self._selector, self, [place.address for place in others.values()])
        here, there = socket.socketpair()
        self._hub.adopt(m.HubChannel(there, m.OnLink), self._make_join(""))
        self.use(m.HubChannel(here, m.OnLink), [])

    # -- details -----------------------------------------------------------------------------------------------

    def _end_hub(self) -> None:
        assert self._hub is not None
        self._hub.close()
        self._hub = None

    def _describe(self) -> p.HubCandidate:
        task = self._task
        return p.HubCandidate(initial_rank=task.initial_rank, node=task.node, address=self.address, life=self._life)

    def _make_join(self, wants: str) -> m.JoinHub:
        task = self._task
        return m.JoinHub(
            initial_rank=task.initial_rank,
            initial_world_size=task.initial_world_size,
            place=m.MemberPlace(
                node=task.node, space=self._space, pid=task.pid, address=self.address, labels=task.labels
            ),
            life=self._life,
            wants=wants,
            standing=self._seeker.take_standing(),
        )

    def _on_connection(self, _: int) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError as error:
            log.debug("no connection after all: %s", error)
            return
        if len(self._newcomers) >= _MAX_NEWCOMERS:
            connection.close()
            return
        proof = Handshake(self._key, _PROTOCOL, is_server=True)
        channel: m.HubChannel = m.HubChannel(connection, m.OnLink, handshake=proof, max_bytes=_MAX_JOIN_BYTES)
        self._newcomers[channel] = clock.now_s() + _JOIN_S
        self._selector.register(channel, selectors.EVENT_READ, partial(self._on_newcomer, channel))

    def _on_newcomer(self, channel: m.HubChannel, _: int) -> None:
        if channel not in self._newcomers:
            return
        try:
            came = channel.receive()
        except AuthenticationFailed:
            log.warning("refused a connection without this job's secret; is another job using the same port?")
            return self._shut_out(channel)
        except OSError as error:
            log.debug("a connection ended before it joined: %s", error)
            return self._shut_out(channel)
        if not came:
            return
        join, size = came[0], self._task.initial_world_size
        if not isinstance(join, m.JoinHub) or join.initial_world_size != size or not 0 <= join.initial_rank < size:
            log.warning("refused a member of another world; is another job using the same port?")
            return self._shut_out(channel)
        del self._newcomers[channel]
        self._selector.unregister(channel)
        channel.max_bytes = MAX_MESSAGE_BYTES
        if self._hub is not None and join.wants in ("", self._life):
            return self._hub.adopt(channel, join)
        try:
            channel.send(m.NotHub(life=self._life, candidates=self._known.candidates))
            channel.drain(0.05)
        except OSError as error:
            log.debug("it is gone again: %s", error)
        channel.close()
        self._seeker.demand_answer()  # that member lost the hub: perhaps this process has, too, and has not noticed

    def _shut_out(self, channel: m.HubChannel) -> None:
        del self._newcomers[channel]
        self._selector.unregister(channel)
        channel.close()


class _Search:
    """Ask the candidates in order, without ever blocking, until one takes this member in or it has to host the hub."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        failover: PeerFailover,
        candidates: Sequence[p.HubCandidate],
        own_life: str,
        timeout_s: float,
        *,
        may_host: bool,
    ) -> None:
        self._selector, self._failover, self._candidates = selector, failover, list(candidates)
        self._own_life, self._may_host = own_life, may_host
        self._end_s = clock.now_s() + timeout_s
        self._at = -1
        self._before_are_gone = True
        self._channel: m.HubChannel | None = None
        self._error = "nobody was asked"
        self.deadline_s: float | None = None
        """When to call :meth:`look`."""

    def look(self) -> None:
        """Go on where an attempt has taken too long, or the next round is due."""
        if self.deadline_s is None or clock.now_s() < self.deadline_s:
            return
        if self._channel is not None:
            self._give_up("it does not answer", is_gone=True)
        else:
            self.ask_next()

    def close(self) -> None:
        """End the search. Idempotent."""
        self.deadline_s = None
        self._drop()

    def ask_next(self) -> None:
        """Ask the next candidate."""
        while True:
            self._at += 1
            if self._at >= len(self._candidates):
                self._at, self._before_are_gone = -1, True
                now_s = clock.now_s()
                if now_s >= self._end_s:
                    self.close()
                    return self._failover.fail(self._error)
                self.deadline_s = min(now_s + _PAUSE_S, self._end_s)
                return None
            candidate = self._candidates[self._at]
            if candidate.life == self._own_life:
                if self._before_are_gone and self._may_host:
                    self.close()
                    return self._failover.host_hub()
                continue
            try:
                self._channel = self._failover.call(candidate.address, candidate.life)
            except (OSError, OutlastError) as error:
                self._error = f"{candidate.address}: {error}"
                continue
            self.deadline_s = clock.now_s() + _ATTEMPT_S
            self._selector.register(self._channel, selectors.EVENT_READ, self._on_event)
            return None

    def _on_event(self, _: int) -> None:
        channel = self._channel
        if channel is None:
            return None
        try:
            channel.flush()
            found = channel.receive()
            m.watch(self._selector, channel)
        except OSError as error:
            return self._give_up(str(error), is_gone=True)
        if not found:
            return None
        match found[0]:
            case m.NotHub(life=life, candidates=candidates):
                expected = self._candidates[self._at].life
                lives = {candidate.life for candidate in self._candidates}
                self._candidates += [candidate for candidate in candidates if candidate.life not in lives]
                self._give_up("it hosts no hub", is_gone=bool(expected) and life != expected)
            case m.HubCandidates():
                self._selector.unregister(channel)
                self._channel = None
                self.close()
                self._failover.use(channel, found)
            case other:
                self._give_up(f"it answered {type(other).__name__}", is_gone=True)

    def _give_up(self, error: str, *, is_gone: bool) -> None:
        self._error = f"{self._candidates[self._at].address}: {error}"
        self._before_are_gone &= is_gone
        self._drop()
        self.ask_next()

    def _drop(self) -> None:
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None


class _PeerProbes:
    """Join at other members' listeners; one that is joined by a member that lost the hub looks for the hub itself."""

    def __init__(self, selector: selectors.BaseSelector, failover: PeerFailover, peers: Iterable[str]) -> None:
        self._selector = selector
        self._channels: set[m.HubChannel] = set()
        self._end_s = clock.now_s() + _PROBE_S
        for address in peers:
            try:
                channel = failover.call(address, "")
            except (OSError, OutlastError) as error:
                log.debug("nobody is at %s: %s", address, error)
                continue
            self._channels.add(channel)
            selector.register(channel, selectors.EVENT_READ, partial(self._on_event, channel))

    @property
    def deadline_s(self) -> float | None:
        """When to call :meth:`look`."""
        return self._end_s if self._channels else None

    def look(self) -> None:
        """End probes that take too long."""
        if clock.now_s() >= self._end_s:
            self.close()

    def close(self) -> None:
        """End all probes. Idempotent."""
        for channel in list(self._channels):
            self._end(channel)

    def _on_event(self, channel: m.HubChannel, _: int) -> None:
        if channel not in self._channels:
            return
        try:
            channel.flush()
            is_answered = bool(channel.receive())
            m.watch(self._selector, channel)
        except OSError as error:
            log.debug("a probe ended: %s", error)
            is_answered = True
        if is_answered:
            self._end(channel)

    def _end(self, channel: m.HubChannel) -> None:
        self._channels.discard(channel)
        self._selector.unregister(channel)
        channel.close()
