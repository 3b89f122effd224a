"""A monitor process's link to the hub, and where the hub is: at another process, or in this one.

:class:`HubClient` reports for its member. While the hub is looked for nothing is lost: the member's
:class:`~outlast.inprocess.protocol.MemberRecord` is sent to the next one. :class:`PeerFailover` finds the hub, and
hosts it here if nobody else can: any rank may die, also the one whose monitor process is the host.

Every member knows the same list of candidates. A monitor process that loses the hub asks them in order. It hosts the
hub itself only where every candidate before it is gone; one that is there but hosts nothing (yet) is asked again. A
candidate that started anew since the list was made counts as gone: it knows nothing.

A new host probes the other members. Where a node is lost, nobody closes its connections: a member that has nothing to
report would notice the hub's silence only after the heartbeats' timeout. One that is probed looks for itself.

Each process listens. A connection has a few seconds for the proof of the job's secret and a
:class:`~outlast.inprocess.protocol.JoinHub`; any other is closed without an answer.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from outlast import clock
from outlast.errors import OutlastError
from outlast.inprocess import protocol as m
from outlast.inprocess.hub import RECONNECT_S, Hub
from outlast.policy import inprocess_protocol as p
from outlast.runtime.processes import machine_id
from outlast.runtime.wire import MAX_MESSAGE_BYTES, AuthenticationFailed, Handshake

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Seconds in which the hub has to show a sign of life when it is needed."""
_FINAL_REPORT_S = 1.0
"""Seconds that a process whose rank is gone has to reach the hub."""


class HubClient:
    """Report to the hub, and receive its orders.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        task: What the process has to do.
        locator: Finds the hub; this object owns it.
        on_order: Gets the hub's orders to the rank.
        on_candidates: Gets who could host the hub, whenever that changes.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        task: m.MonitorTask,
        locator: PeerFailover,
        *,
        on_order: Callable[[p.Order], None],
        on_candidates: Callable[[m.HubCandidates], None],
    ) -> None:
        self._selector, self._task, self._locator = selector, task, locator
        self._on_order, self._on_candidates = on_order, on_candidates
        self._record = m.MemberRecord()
        self._joined_with = self._record.standing
        self._channel: m.HubChannel | None = None
        self._final_report: m.Gone | p.Left | None = None
        self._rank_is_gone = False
        self._end_s: float | None = None
        self._next_beat_s = 0.0
        self._answer_s: float | None = None
        self.is_over = False
        """The hub has no more orders for the rank, or the rank no more reports for it."""
        locator.attach(self)

    # -- for the monitor process -------------------------------------------------------------------------------

    @property
    def restart_count(self) -> int:
        """The call that the rank was ordered to enter last; 0 before."""
        return max(0, self._record.standing.restart_count)

    @property
    def is_done(self) -> bool:
        """Whether nobody needs this process any more, once its rank is gone."""
        if self._locator.is_needed:
            return False
        return self._final_report is None or self.is_over or (self._end_s is not None and clock.now_s() >= self._end_s)

    def reconnect(self, known: m.Reconnect) -> None:
        """Join the hub in place of a process that is gone."""
        self._final_report = known.final_report
        self._record = m.MemberRecord(known.standing)
        self._locator.reconnect(known, self._task.heartbeat_timeout_s + _ANSWER_S)

    def report(self, report: p.Report) -> None:
        """Send the hub what the rank reported, or what is reported for it."""
        self._record.note_report(report)
        if isinstance(report, p.Left):
            self._final_report = report
        if self._channel is None:
            return  # its standing, or its final report, will have it
        self._send(report)
        if isinstance(report, p.RankFault):
            self.demand_answer()

    def end(self, final_report: m.Gone | p.Left) -> None:
        """Report that the rank is gone; :attr:`is_done` soon."""
        self._rank_is_gone = True
        if not self._locator.is_bootstrapped:
            self.is_over = True  # no member knows of it yet
        if self.is_over:
            return
        if self._final_report is None:
            self._final_report = final_report
        self._end_s = clock.now_s() + _FINAL_REPORT_S
        self._send_final_report()

    def look(self, now_s: float) -> float:
        """Do what is due, and return when to look again."""
        due: list[float | None] = [now_s + self._task.heartbeat_timeout_s, self._end_s]
        if self._channel is not None:
            due.append(self._look_at_link(now_s, self._channel))
        due.append(self._locator.look(now_s))
        return min(time_s for time_s in due if time_s is not None)

    def discount_pause(self) -> None:
        """This process did not run for a while: what others sent meanwhile is still to be read."""
        if self._channel is not None:
            self._channel.received_ns = clock.now_ns()
        self._locator.discount_pause()

    def close(self) -> None:
        """Let go of everything.

        Blocks: up to a second for each member that takes nothing.
        """
        self._locator.close()
        if self._channel is not None:
            self._channel.drain(_FINAL_REPORT_S)
        self._drop_link()

    # -- for the locator ---------------------------------------------------------------------------------------

    def take_standing(self) -> p.MemberStanding:
        """Return where the member stands, to be sent to the hub that it joins."""
        self._joined_with = self._record.standing
        return self._joined_with

    def use_link(self, channel: m.HubChannel, came: list[m.OnLink]) -> None:
        """The hub was found: use this link, on which these messages came already."""
        self._channel, self._answer_s = channel, None
        self._next_beat_s = clock.now_s() + self._task.heartbeat_interval_s
        self._selector.register(channel, selectors.EVENT_READ, partial(self._on_event, channel))
        if self._record.standing != self._joined_with:
            for report in self._record.reports():
                self._send(report)
        self._send_final_report()
        for message in came:
            self._take(message)

    def give_up(self, reason: str) -> None:
        """There is no hub for this member any more."""
        if self._rank_is_gone:
            return
        text = f"no hub can be reached ({reason})"
        log.warning("rank %d: %s", self._task.initial_rank, text)
        counts = self._record.standing.fault_counts
        self._order(p.Abort(reason=text, restart_count=self.restart_count, fault_counts=counts))

    def demand_answer(self) -> None:
        """The hub has to show soon that it lives: another member lost it."""
        if self._channel is not None and self._answer_s is None:
            self._answer_s = clock.now_s() + _ANSWER_S
            self._send(m.Beat())

    # -- the link ----------------------------------------------------------------------------------------------

    def _on_event(self, channel: m.HubChannel, _: int) -> None:
        if channel is not self._channel:
            return None
        try:
            came = m.exchange(self._selector, channel)
        except OSError as error:
            return self._lose_link(str(error))
        for message in came:
            self._take(message)
        return None

    def _take(self, message: m.OnLink) -> None:
        match message:
            case m.HubCandidates():
                self._locator.learn(message)
                self._on_candidates(message)
            case p.Restart() | p.Assign() | p.Go() | p.Finish() | p.Abort() | p.Expel():
                self._order(message)
            case m.Beat():
                pass  # the channel has noted when it came
            case other:
                log.warning("unexpected message from the hub: %s", type(other).__name__)

    def _order(self, order: p.Order) -> None:
        self._record.note_order(order)
        is_left_out = isinstance(order, p.Go) and self._task.initial_rank not in order.ranks
        if is_left_out or isinstance(order, p.Finish | p.Abort | p.Expel):
            self.is_over = True
            self._drop_link()
        self._on_order(order)

    def _send(self, message: m.OnLink) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(message)
        except OSError as error:
            self._lose_link(str(error))
        else:
            m.watch(self._selector, self._channel)

    def _send_final_report(self) -> None:
        channel, report = self._channel, self._final_report
        if channel is None or report is None:
            return
        self._send(report)
        if self._channel is channel and self._rank_is_gone:
            channel.drain(_FINAL_REPORT_S)
            self._drop_link()
            self.is_over = True

    def _look_at_link(self, now_s: float, channel: m.HubChannel) -> float:
        """Send a beat if it is due, and give up a hub that is silent."""
        received_s = channel.received_ns / 1e9
        if self._answer_s is not None and received_s > self._answer_s - _ANSWER_S:
            self._answer_s = None
        due_s = received_s + self._task.heartbeat_timeout_s
        if self._answer_s is not None:
            due_s = min(due_s, self._answer_s)
        if now_s >= due_s:
            self._lose_link(f"no sign of life for {now_s - received_s:.1f} s", was_silent=True)
            return now_s
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._task.heartbeat_interval_s
            self._send(m.Beat())
        return min(due_s, self._next_beat_s)

    def _drop_link(self) -> None:
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None

    def _lose_link(self, error: str, *, was_silent: bool = False) -> None:
        """The hub cannot be reached over this link: look for it elsewhere."""
        log.info("rank %d: the link to the hub broke: %s", self._task.initial_rank, error)
        self._drop_link()
        if self._locator.is_hosting or self.is_over:
            return
        timeout_s = _FINAL_REPORT_S if self._rank_is_gone else self._task.heartbeat_timeout_s + _ANSWER_S
        self._locator.find(timeout_s, may_host=not self._rank_is_gone, was_silent=was_silent)


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
    """Find the hub among the monitor processes, or host it. A part of an event loop; nothing here blocks.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        task: What the process has to do.
    """

    def __init__(self, selector: selectors.BaseSelector, task: m.MonitorTask) -> None:
        self._selector, self._task = selector, task
        self._seeker: HubClient
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

    def attach(self, seeker: HubClient) -> None:
        """Find the hub for this member; called once, before anything else."""
        self._seeker = seeker

    @property
    def is_hosting(self) -> bool:
        """Whether the hub is in this process."""
        return self._hub is not None

    @property
    def is_needed(self) -> bool:
        """Whether other members need what this process hosts."""
        if self._hub is not None and self._hub.is_over:
            self._end_hub()
        return self._hub is not None and self._hub.serves_others(self._task.initial_rank)

    @property
    def is_bootstrapped(self) -> bool:
        """Whether it is known how to find the hub."""
        return self._key is not None

    def connect(self, order: m.Connect) -> None:
        """Join the hub for the first time, or host it."""
        self._key = order.token.encode()
        if order.hub == self.address:
            return self.host_hub()
        first = p.HubCandidate(initial_rank=0, node="", address=order.hub, life="")
        self._known = m.HubCandidates(candidates=(first,))
        return self.find(self._task.limits.barrier_timeout_s, may_host=True)

    def reconnect(self, known: m.Reconnect, timeout_s: float) -> None:
        """Find the hub in place of a process that is gone."""
        self._key = known.token.encode()
        # It knows nothing of what a candidate must know, so it is the last one.
        others = [c for c in known.known.candidates if c.initial_rank != self._task.initial_rank]
        self._known = m.HubCandidates(candidates=(*others, self._describe()), members=known.known.members)
        self.find(timeout_s, may_host=True)

    def find(self, timeout_s: float, *, may_host: bool, was_silent: bool = False) -> None:
        """Find the hub again after its link broke.

        Args:
            timeout_s: Seconds that this may take.
            may_host: Whether this process may become its host.
            was_silent: The hub's process fell silent, which others may not have noticed.
        """
        self._was_silent |= was_silent
        self._search = _Search(self._selector, self, self._known.candidates, self._life, timeout_s, may_host=may_host)
        self._search.ask_next()

    def learn(self, known: m.HubCandidates) -> None:
        """Remember who could host the hub."""
        self._known = known

    def look(self, now_s: float) -> float | None:
        """Do what is due; return when to look again, ``None`` = nothing is due."""
        for channel in [channel for channel, until_s in self._newcomers.items() if now_s >= until_s]:
            self._shut_out(channel)
        for part in (self._search, self._probes, self._hub):
            if part is not None:
                part.look()
        parts = [part.deadline_s for part in (self._search, self._probes, self._hub) if part is not None]
        return min((due for due in (*self._newcomers.values(), *parts) if due is not None), default=None)

    def discount_pause(self) -> None:
        """This process did not run for a while: what others sent meanwhile is still to be read."""
        if self._hub is not None:
            self._hub.discount_pause()

    def close(self) -> None:
        """Let go of everything. Blocks: up to 0.5 s for each member that takes nothing."""
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
            found = m.exchange(self._selector, channel)
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
            is_answered = bool(m.exchange(self._selector, channel))
        except OSError as error:
            log.debug("a probe ended: %s", error)
            is_answered = True
        if is_answered:
            self._end(channel)

    def _end(self, channel: m.HubChannel) -> None:
        self._channels.discard(channel)
        self._selector.unregister(channel)
        channel.close()
