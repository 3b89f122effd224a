"""A monitor process's way to the hub: where the hub is (at another process, or in this one), and the link to it.

While the hub is looked for nothing is lost: the member's :class:`~outlast.inprocess.protocol.MemberRecord` is sent to
the next one. Any rank may die, also the one whose monitor process is the host.

Every member knows the same list of candidates; only the candidates know the members. A monitor process that loses the
hub asks them in order. It hosts the hub itself only where every candidate before it is gone; one that is there but
hosts nothing (yet) is asked again. A candidate that started anew since the list was made counts as gone: it knows
nothing.

A new host probes the other members. Where a node is lost, nobody closes its connections: a member that has nothing to
report would notice the hub's silence only after the heartbeats' timeout. One that is probed looks for itself.

Each process listens. A connection has a few seconds for the proof of the group's key and a
:class:`~outlast.inprocess.protocol.JoinHub`; any other is closed without an answer.

Nothing here imports torch.
"""

from __future__ import annotations

import errno
import logging
import secrets
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from outlast import clock
from outlast.errors import OutlastError
from outlast.inprocess import protocol as m
from outlast.inprocess.hub import RECONNECT_S, Hub
from outlast.policy import inprocess_protocol as p
from outlast.runtime.addresses import listen_at
from outlast.runtime.processes import machine_id, raise_descriptor_limit
from outlast.runtime.run_key import accept_offer
from outlast.runtime.wire import MAX_MESSAGE_BYTES, AuthenticationFailed, Handshake

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Seconds in which the hub has to show a sign of life when it is needed."""
_FINAL_REPORT_S = 1.0
"""Seconds that a process whose rank is gone has to reach the hub."""
_MAX_JOIN_BYTES = 1 << 16
_JOIN_S = 5.0
"""Seconds that a new connection has to prove the secret and to join."""
_MAX_NEWCOMERS = 256
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ATTEMPT_S = 1.0
"""Seconds that a candidate has to answer."""
_PAUSE_S = 0.01
_MAX_MEMBERS_FOR_RANK = 256
_FULL_S = 1.0
"""Seconds until a listener looks again for which no descriptor was left."""
_PROBE_S = 2.0
_SILENT_S = 5.0
"""Seconds that others have more to come after a hub that fell silent: they notice it when they are probed."""


@dataclass(slots=True)
class _Search:
    """Which candidate is asked for the hub, until one takes this member in or it has to host the hub."""

    candidates: list[p.HubCandidate]
    end_s: float
    may_host: bool
    at: int = -1
    before_are_gone: bool = True
    """The candidates that were asked before this one."""
    link: m.HubLink | None = None
    """To the one that is asked; ``None``: the next round is waited for."""
    deadline_s: float = 0.0
    """When the attempt has taken too long, or the next round is due."""
    error: str = "nobody was asked"


class HubClient:
    """Report to the hub, and receive its orders; find the hub, or host it. Part of an event loop; close() alone blocks.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        task: What the process has to do.
        on_order: Gets the hub's orders to the rank.
        on_candidates: Gets who could host the hub, whenever that changes.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        task: m.MonitorTask,
        *,
        on_order: Callable[[p.Order], None],
        on_candidates: Callable[[m.HubCandidates], None],
    ) -> None:
        self._selector, self._task = selector, task
        self._on_order, self._on_candidates = on_order, on_candidates
        self._record = m.MemberRecord()
        self._joined_with = self._record.standing
        self._link: m.HubLink | None = None
        self._final_report: m.Gone | p.Left | None = None
        self._rank_is_gone = False
        self._end_s: float | None = None
        self._next_beat_s = 0.0
        self._answer_s: float | None = None
        self.is_over = False
        """The hub has no more orders for the rank, or the rank no more reports for it."""
        self._key: bytes | None = None
        self._known = m.HubCandidates(candidates=())
        self._hub: Hub | None = None
        self._search: _Search | None = None
        self._was_silent = False
        self._newcomers: dict[m.HubLink, float] = {}
        self._listen_s: float | None = None
        self._probes: dict[m.HubLink, float] = {}
        self._listener = listen_at(task.host, backlog=1024)
        self._listener.setblocking(False)
        self.address = f"{task.host} {self._listener.getsockname()[1]}"
        """``host port`` where this process listens."""
        self._own = p.HubCandidate(
            initial_rank=task.initial_rank, node=task.node, address=self.address, life=secrets.token_hex(8)
        )
        self._place = m.MemberPlace(
            node=task.node, space=machine_id(), pid=task.pid, address=self.address, labels=task.labels
        )
        selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    # -- for the monitor process -------------------------------------------------------------------------------

    @property
    def restart_count(self) -> int:
        """The call that the rank was ordered to enter last; 0 before."""
        return max(0, self._record.standing.restart_count)

    @property
    def is_done(self) -> bool:
        """Whether nobody needs this process any more, once its rank is gone."""
        if self._hub is not None and self._hub.is_over:
            self._hub.close()
            self._hub = None
        if self._hub is not None and self._hub.serves_others(self._task.initial_rank):
            return False
        return self._final_report is None or self.is_over or (self._end_s is not None and clock.now_s() >= self._end_s)

    def connect(self, order: m.Connect) -> None:
        """Join the hub for the first time, or host it."""
        self._key = accept_offer(order.offer, m.HUB)
        if order.hub == self.address:
            return self._host_hub()
        first = p.HubCandidate(initial_rank=0, node="", address=order.hub, life="")
        self._known = m.HubCandidates(candidates=(first,))
        return self._find(self._task.limits.barrier_timeout_s)

    def reconnect(self, known: m.Reconnect) -> None:
        """Join the hub in place of a process that is gone."""
        self._final_report = known.final_report
        self._record = m.MemberRecord(known.standing)
        self._key = accept_offer(known.offer, m.HUB)
        # This process knows nothing of what a candidate must know, so it is the last one.
        others = [c for c in known.known.candidates if c.initial_rank != self._task.initial_rank]
        # Without the members it must not begin anew: it hosts only where it knows them, or no call was formed yet.
        own = (self._own,) if known.known.members or known.standing.restart_count < 0 else ()
        self._known = m.HubCandidates(
            candidates=(*others, *own), version=known.known.version, members=known.known.members
        )
        self._find(self._task.heartbeat_timeout_s + _ANSWER_S)

    def report(self, report: p.Report) -> None:
        """Send the hub what the rank reported, or what is reported for it."""
        self._record.note_report(report)
        if isinstance(report, p.Left):
            self._final_report = report
        if self._link is None:
            return  # its standing, or its final report, will have it
        self._send(report)
        if isinstance(report, p.RankFault):
            self._demand_answer()

    def end(self, final_report: m.Gone | p.Left) -> None:
        """Report that the rank is gone; :attr:`is_done` soon."""
        self._rank_is_gone = True
        if self._key is None:
            self.is_over = True  # no member knows of it yet
        if self.is_over:
            return
        if self._final_report is None:
            self._final_report = final_report
        self._end_s = clock.now_s() + _FINAL_REPORT_S
        self._send_final_report()

    def look(self, now_s: float) -> float:
        """Do what is due, and return when to look again."""
        due = [now_s + self._task.heartbeat_timeout_s]
        if self._end_s is not None and now_s < self._end_s:
            due.append(self._end_s)  # later, the hub in this process may still be needed
        if self._link is not None:
            due.append(self._look_at_link(now_s, self._link.channel))
        for links in (self._newcomers, self._probes):  # all of one kind have the same time: the oldest end first
            while links and now_s >= next(iter(links.values())):
                self._end_link(next(iter(links)))
        if self._search is not None and now_s >= self._search.deadline_s:
            if self._search.link is None:
                self._ask_next(self._search)
            else:
                self._skip(self._search, "it does not answer", is_gone=True)
        if self._listen_s is not None:
            if now_s >= self._listen_s:
                self._listen_s = None
                self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)
            else:
                due.append(self._listen_s)
        if self._hub is not None:
            self._hub.look()
            due.append(self._hub.deadline_s)
        if self._search is not None:
            due.append(self._search.deadline_s)
        due += [next(iter(links.values())) for links in (self._newcomers, self._probes) if links]
        return min(due)

    def discount_pause(self) -> None:
        """This process did not run for a while: what others sent meanwhile is still to be read."""
        if self._link is not None:
            self._link.channel.received_ns = clock.now_ns()
        if self._hub is not None:
            self._hub.discount_pause()

    def close(self) -> None:
        """Close everything.

        Blocks: up to a second for each member that takes nothing.
        """
        if self._search is not None and self._search.link is not None:
            self._search.link.close()
        if self._hub is not None:
            self._hub.close()
            self._hub = None
        for link in self._newcomers | self._probes:
            self._end_link(link)
        if self._listen_s is None:
            self._selector.unregister(self._listener)
        self._listener.close()
        if self._link is not None:
            self._link.channel.drain(_FINAL_REPORT_S)
        self._drop_link()

    # -- the link ----------------------------------------------------------------------------------------------

    def _use_link(self, link: m.HubLink, came: list[m.OnLink]) -> None:
        """The hub was found: use this link, on which these messages came already."""
        self._search, self._was_silent = None, False
        self._link, self._answer_s = link, None
        self._next_beat_s = clock.now_s() + self._task.heartbeat_interval_s
        link.on_messages, link.on_broken = self._on_messages, self._on_broken
        if self._record.standing != self._joined_with:
            for report in self._record.reports():
                self._send(report)
        self._send_final_report()
        self._on_messages(link, came)

    def _on_messages(self, _: m.HubLink, came: list[m.OnLink]) -> None:
        for message in came:
            match message:
                case m.HubCandidates():
                    self._note_candidates(message)
                case p.Restart() | p.Assign() | p.Go() | p.Finish() | p.Abort() | p.Expel():
                    self._order(message)
                case m.Beat():
                    pass  # the channel has noted when it came
                case other:
                    log.warning("unexpected message from the hub: %s", type(other).__name__)

    def _note_candidates(self, message: m.HubCandidates) -> None:
        if (known := message.follow(self._known)) is None:
            return self._send(m.WantMembers())
        self._known = known
        # The rank gets the members only where they fit into a packet; without them no other process hosts for it.
        is_small = len(known.members) <= _MAX_MEMBERS_FOR_RANK
        self._on_candidates(known if is_small else msgspec.structs.replace(known, version=0, members={}))
        return None

    def _order(self, order: p.Order) -> None:
        self._record.note_order(order)
        is_left_out = isinstance(order, p.Go) and self._task.initial_rank not in order.ranks
        if is_left_out or isinstance(order, p.Finish | p.Abort | p.Expel):
            self.is_over = True
            self._drop_link()
        self._on_order(order)

    def _send(self, message: m.OnLink) -> None:
        if self._link is not None:
            self._link.send(message)

    def _send_final_report(self) -> None:
        link, report = self._link, self._final_report
        if link is None or report is None:
            return
        self._send(report)
        if self._link is link and self._rank_is_gone:
            link.channel.drain(_FINAL_REPORT_S)
            self._drop_link()
            self.is_over = True

    def _demand_answer(self) -> None:
        """The hub has to show soon that it lives: it is needed, or another member lost it."""
        if self._link is not None and self._answer_s is None:
            self._answer_s = clock.now_s() + _ANSWER_S
            self._send(m.Beat())

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
        if self._link is not None:
            self._link.close()
            self._link = None

    def _on_broken(self, _: m.HubLink, error: OSError) -> None:
        self._lose_link(str(error))

    def _lose_link(self, error: str, *, was_silent: bool = False) -> None:
        """The hub cannot be reached over this link: look for it elsewhere."""
        log.info("rank %d: the link to the hub broke: %s", self._task.initial_rank, error)
        self._drop_link()
        if self._hub is not None or self.is_over:
            return
        self._was_silent |= was_silent
        self._find(_FINAL_REPORT_S if self._rank_is_gone else self._task.heartbeat_timeout_s + _ANSWER_S)

    # -- where the hub is --------------------------------------------------------------------------------------

    def _find(self, timeout_s: float) -> None:
        """Look for the hub; a process whose rank is gone does not become its host."""
        end_s = clock.now_s() + timeout_s
        self._search = _Search(list(self._known.candidates), end_s, may_host=not self._rank_is_gone)
        self._ask_next(self._search)

    def _ask_next(self, search: _Search) -> None:
        while True:
            search.at += 1
            if search.at >= len(search.candidates):
                search.at, search.before_are_gone = -1, True
                now_s = clock.now_s()
                if now_s >= search.end_s:
                    return self._give_up(search.error)
                search.deadline_s = min(now_s + _PAUSE_S, search.end_s)
                return None
            candidate = search.candidates[search.at]
            if candidate.life == self._own.life:
                if search.before_are_gone and search.may_host:
                    return self._host_hub()
                continue
            try:
                channel = self._call(candidate.address, candidate.life)
            except (OSError, OutlastError) as error:
                search.error = f"{candidate.address}: {error}"
                continue
            search.deadline_s = clock.now_s() + _ATTEMPT_S
            search.link = m.HubLink(self._selector, channel, self._on_answer, self._on_no_answer)
            return None

    def _on_answer(self, link: m.HubLink, found: list[m.OnLink]) -> None:
        search = self._search
        assert search is not None
        match found[0]:
            case m.NotHub(life=life, candidates=candidates):
                expected = search.candidates[search.at].life
                lives = {candidate.life for candidate in search.candidates}
                search.candidates += [candidate for candidate in candidates if candidate.life not in lives]
                self._skip(search, "it hosts no hub", is_gone=bool(expected) and life != expected)
            case m.HubCandidates():
                self._use_link(link, found)
            case other:
                self._skip(search, f"it answered {type(other).__name__}", is_gone=True)

    def _on_no_answer(self, _: m.HubLink, error: OSError) -> None:
        assert self._search is not None
        self._skip(self._search, str(error), is_gone=True)

    def _skip(self, search: _Search, error: str, *, is_gone: bool) -> None:
        """Ask the next candidate, after this one did not answer as the hub."""
        assert search.link is not None
        search.error = f"{search.candidates[search.at].address}: {error}"
        search.before_are_gone &= is_gone
        search.link.close()
        search.link = None
        self._ask_next(search)

    def _give_up(self, reason: str) -> None:
        """There is no hub for this member any more."""
        self._search = None
        if self._rank_is_gone:
            return
        text = f"no hub can be reached ({reason})"
        log.warning("rank %d: %s", self._task.initial_rank, text)
        counts = self._record.standing.fault_counts
        self._order(p.Abort(reason=text, restart_count=self.restart_count, fault_counts=counts))

    def _host_hub(self) -> None:
        """Host the hub, and join it."""
        raise_descriptor_limit()  # a connection for each member
        patience_s = min(_SILENT_S, self._task.heartbeat_timeout_s) if self._was_silent else 0.0
        self._hub = Hub(
            self._selector,
            world_size=self._task.initial_world_size,
            limits=self._task.limits,
            heartbeat_timeout_s=self._task.heartbeat_timeout_s,
            host=self._own,
            space=self._place.space,
            predecessor=self._known if self._known.members else None,
            patience_s=RECONNECT_S + patience_s,
        )
        if self._was_silent:
            for rank, place in self._known.members.items():
                if rank != self._task.initial_rank:
                    self._probe(place.address)
        here, there = socket.socketpair()
        self._hub.adopt(m.HubChannel(there, m.OnLink), self._make_join(""))
        channel: m.HubChannel = m.HubChannel(here, m.OnLink)
        self._use_link(m.HubLink(self._selector, channel, self._on_messages, self._on_broken), [])

    def _probe(self, address: str) -> None:
        """Join at another member's listener; one that is joined by a member that lost the hub looks for the hub."""
        try:
            channel = self._call(address, "")
        except (OSError, OutlastError) as error:
            log.debug("nobody is at %s: %s", address, error)
            return
        link = m.HubLink(self._selector, channel, self._end_link, self._end_link)
        self._probes[link] = clock.now_s() + _PROBE_S

    def _call(self, address: str, wants: str) -> m.HubChannel:
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
        proof = Handshake(self._key, m.HUB, is_server=False, client_id=self._task.initial_rank)
        channel: m.HubChannel = m.HubChannel(connection, m.OnLink, handshake=proof)
        channel.send(self._make_join(wants))  # it waits for the proof
        return channel

    def _make_join(self, wants: str) -> m.JoinHub:
        self._joined_with = self._record.standing
        return m.JoinHub(
            initial_rank=self._task.initial_rank,
            initial_world_size=self._task.initial_world_size,
            place=self._place,
            life=self._own.life,
            wants=wants,
            standing=self._joined_with,
        )

    # -- who connects to this process --------------------------------------------------------------------------

    def _on_connection(self, _: int) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._pause_listening(error)
            else:
                log.debug("no connection after all: %s", error)
            return
        if len(self._newcomers) >= _MAX_NEWCOMERS:
            self._end_link(next(iter(self._newcomers)))  # the oldest: who holds on to places must not keep members out
        proof = Handshake(self._key, m.HUB, is_server=True)
        channel: m.HubChannel = m.HubChannel(connection, m.OnLink, handshake=proof, max_bytes=_MAX_JOIN_BYTES)
        link = m.HubLink(self._selector, channel, self._on_newcomer, self._on_lost_newcomer)
        self._newcomers[link] = clock.now_s() + _JOIN_S

    def _pause_listening(self, error: OSError) -> None:
        """Do not listen for a while: the connection stays in the backlog, and the loop would not rest."""
        log.warning("rank %d: no connection can be accepted for %g s: %s", self._task.initial_rank, _FULL_S, error)
        if self._newcomers:
            self._end_link(next(iter(self._newcomers)))
        self._selector.unregister(self._listener)
        self._listen_s = clock.now_s() + _FULL_S

    def _on_lost_newcomer(self, link: m.HubLink, error: OSError) -> None:
        if isinstance(error, AuthenticationFailed):
            log.warning("refused a connection without this job's secret; is another job using the same port?")
        else:
            log.debug("a connection ended before it joined: %s", error)
        self._end_link(link)

    def _on_newcomer(self, link: m.HubLink, came: list[m.OnLink]) -> None:
        join, size = came[0], self._task.initial_world_size
        if not isinstance(join, m.JoinHub) or join.initial_world_size != size or not 0 <= join.initial_rank < size:
            log.warning("refused a member of another world; is another job using the same port?")
            return self._end_link(link)
        del self._newcomers[link]
        channel = link.release()
        channel.max_bytes = MAX_MESSAGE_BYTES
        if self._hub is not None and join.wants in ("", self._own.life):
            return self._hub.adopt(channel, join)
        try:
            channel.send(m.NotHub(life=self._own.life, candidates=self._known.candidates))
            channel.drain(0.05)
        except OSError as error:
            log.debug("it is gone again: %s", error)
        channel.close()
        self._demand_answer()  # that member lost the hub: perhaps this process has, too, and has not noticed
        return None

    def _end_link(self, link: m.HubLink, reason: object = None) -> None:
        if isinstance(reason, OSError):
            log.debug("a probe ended: %s", reason)
        self._newcomers.pop(link, None)
        self._probes.pop(link, None)
        link.close()
