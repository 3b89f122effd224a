"""The relay of a node: carries reports of its ranks' monitor processes to the coordinator, and orders back.

The relay forwards and does not decide (:mod:`outlast.launch.in_process_restarts` does); the node's one connection
carries the messages of all its ranks, batched per turn of the loop. The relay keeps the standing of each rank, so that
a new coordinator gets them in one message per call.

The relay detects failures on its node first. If a rank's duty (:mod:`outlast.inprocess.monitor_duty`) ends without a
final report, the rank is dead if its process is, which the relay detects at once; otherwise it has :data:`RECONNECT_S`
to begin another duty. The agent of ``outlast run`` reports ranks that ended before they had a duty.

Duties connect to an abstract Unix socket, which leaves no file behind; its name contains a random token, and the kernel
reports the user of the connecting process.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from outlast import clock
from outlast.inprocess.protocol import Gone, JoinRelay, MemberRecord, ToRelay
from outlast.launch import protocol as m
from outlast.launch.in_process_restarts import ANY_CALL
from outlast.policy import inprocess_protocol as p
from outlast.runtime.event_loop import Mailbox
from outlast.runtime.listener import Listener
from outlast.runtime.processes import open_pidfd
from outlast.runtime.wire import SelectedChannel, encode_frame

log = logging.getLogger(__name__)
RECONNECT_S = 5.0
"""Time limit for a rank or a node to reconnect: another process starts meanwhile, and the machine may be busy. A rank
whose process has ended is not waited for."""
_BACKLOG = 512
_JOIN_S = 30.0
"""How long a connection may take to identify its rank: a duty does so at once, unless its process is stopped."""
_MAX_NEWCOMERS = 1024
"""Connections without an identified rank; one more closes the oldest."""

DutyLink = SelectedChannel[ToRelay]


@dataclass(slots=True, kw_only=True)
class _RelayedRank:
    """A rank of this node in a call."""

    join: JoinRelay
    record: MemberRecord
    link: DutyLink | None
    """``None``: its duty is disconnected."""
    last_words: Gone | p.Left | None = None
    is_over: bool = False
    """The rank has received its last order."""
    until_s: float | None = None
    """Time limit for another duty."""
    pidfd: int | None = None


@dataclass(slots=True)
class _RelayedCall:
    """This node's part in a call of a wrapped function."""

    world_size: int
    limits: p.RestartLimits
    ranks: dict[int, _RelayedRank] = field(default_factory=dict)
    absent: dict[int, int] = field(default_factory=dict)
    """Initial rank to pidfd, of ranks whose duties were in an agent process that is gone."""
    end: p.Finish | p.Abort | None = None


class RankRelay:
    """Serve the duties of this node.

    Part of the loop of the agent's link (:class:`outlast.launch.control_link.ControlLink`), which waits for
    :meth:`fileno` or :attr:`deadline_s` and then calls :meth:`serve`.

    Raises:
        OSError: No socket can be opened.

    Thread: :meth:`begin_cycle`, :meth:`end_cycle` and :meth:`lose` any; the others the link's.
    """

    def __init__(self) -> None:
        self.address = f"outlast-relay-{secrets.token_hex(16)}"
        """Name of the abstract socket for duties, without its leading zero."""
        self._commands: Mailbox[Callable[[], None]] = Mailbox()
        self._selector = selectors.DefaultSelector()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"\0{self.address}")
        listening.listen(_BACKLOG)
        self._listener: Listener[ToRelay] = Listener(
            self._selector,
            [listening],
            ToRelay,
            self._on_newcomer,
            name="the relay of in-process restarts",
            join_s=_JOIN_S,
            max_newcomers=_MAX_NEWCOMERS,
        )
        self._selector.register(self._commands, selectors.EVENT_READ, lambda _: None)
        self._links: set[DutyLink] = set()
        """All links that have joined, also those of ended cycles."""
        self._is_closed = False
        self.term = 0
        """Highest term of a coordinator that was reached."""
        self._cycle: int | None = None
        self._calls: dict[int, _RelayedCall] = {}
        self._lost: dict[int, p.RankFault] = {}
        """Ranks that ended in this cycle before they had a duty."""
        self._events: list[tuple[int, m.KnownRank | tuple[int, Gone | p.Report]]] = []
        """Unsent events: the call, and a rank that joined it or a report."""

    # -- for the agent -----------------------------------------------------------------------------------------

    def begin_cycle(self, cycle: int) -> None:
        """Serve the ranks of a cycle from now on; to be called before they start."""
        self._commands.put(partial(self._use_cycle, cycle))

    def end_cycle(self) -> None:
        """Ignore later reports of the cycle's ranks."""
        self._commands.put(partial(self._use_cycle, None))

    def begin_job(self) -> None:
        """Obey another job's coordinator, whose terms begin again; later reports are ignored. Thread: the link's."""
        self.end_cycle()
        self.term = 0

    def lose(self, rank: int) -> None:
        """Note the end of a rank without which its cycle continues; reported only if it had no duty."""
        fault = p.RankFault(initial_rank=rank, restart_count=0, kind=p.RankFaultKind.DIED)
        self._commands.put(partial(self._lose, fault))

    # -- for the link ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._selector.fileno()

    @property
    def deadline_s(self) -> float | None:
        """When to call :meth:`serve` at the latest."""
        due = [self._listener.deadline_s] if self._listener.deadline_s is not None else []
        due += [rank.until_s for call in self._calls.values() for rank in call.ranks.values() if rank.until_s]
        return min(due, default=None)

    def serve(self) -> list[m.RankStandings | m.RankReports]:
        """Read the duties' reports; return the messages to the coordinator. Blocks: never."""
        self._run_commands()  # first: a worker's duty connects after its cycle has begun
        for key, events in self._selector.select(0):
            # Skip descriptors that an earlier event has closed; their numbers may be reused.
            if self._selector.get_map().get(key.fd) is key:
                key.data(events)
        now_s = clock.now_s()
        self._listener.serve(now_s)
        for call in self._calls.values():
            for rank in call.ranks.values():
                if rank.until_s is not None and now_s >= rank.until_s:
                    self._give_up(rank, p.RankFaultKind.LINK_LOST)
        return self._take_events()

    def introduce(self, term: int) -> list[m.RankStandings | m.RankReports]:
        """Return the standings of all ranks for a coordinator that was just reached; older terms are not obeyed any
        more."""
        self._run_commands()
        self.term = max(self.term, term)
        self._events.clear()  # contained in the standings
        if self._cycle is None:
            return []
        messages: list[m.RankStandings | m.RankReports] = [
            self._standings(number, [_describe(rank) for rank in call.ranks.values() if not rank.is_over])
            for number, call in self._calls.items()
        ]
        if self._lost:
            reports = tuple((rank, Gone(fault=fault)) for rank, fault in self._lost.items())
            messages.append(m.RankReports(cycle=self._cycle, call=ANY_CALL, reports=reports))
        return messages

    def obey(self, order: m.RankOrder) -> None:
        """Pass an order of the coordinator to ranks."""
        call = self._calls.get(order.call)
        if call is None or order.cycle != self._cycle or order.term < self.term:
            log.debug("an order of term %d to call %d of cycle %d is not obeyed", order.term, order.call, order.cycle)
            return
        if isinstance(order.order, p.Finish | p.Abort):
            call.end = order.order
        frame = encode_frame(order.order)
        for first, num in order.runs:
            for number in range(first, first + num):
                if (rank := call.ranks.get(number)) is not None and rank.link is not None:
                    self._give(rank, rank.link, order.order, frame)

    def abandon(self, reason: str) -> None:
        """Make all ranks stop: no coordinator can be reached any more."""
        for call in self._calls.values():
            standings = [rank.record.standing for rank in call.ranks.values()]
            newest = max(standings, key=lambda one: one.restart_count)
            count = max(0, newest.restart_count)
            call.end = p.Abort(reason=reason, restart_count=count, fault_counts=newest.fault_counts)
            for rank in call.ranks.values():
                if rank.link is not None and not rank.is_over:
                    self._give(rank, rank.link, call.end, encode_frame(call.end))

    def _run_commands(self) -> None:
        for command in self._commands.take_all():
            command()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._use_cycle(None)
        for link in self._links:
            link.close()
        self._links.clear()
        self._listener.close()
        self._commands.close()
        self._selector.close()

    # -- duties ------------------------------------------------------------------------------------------------

    def _on_newcomer(self, link: DutyLink, came: list[ToRelay]) -> None:
        join = came[0]
        if not isinstance(join, JoinRelay) or join.cycle != self._cycle:
            self._listener.drop(link, f"it is not the duty of a rank of cycle {self._cycle}")
            return
        self._listener.admit(link)
        self._links.add(link)
        call = self._calls.get(join.call)
        if call is None:
            call = _RelayedCall(join.initial_world_size, join.limits)
            # Ranks that are not in the call before the newest have been left behind.
            self._calls = {number: one for number, one in self._calls.items() if number >= join.call - 1}
            self._calls[join.call] = call
        self._forget_absent(call, join.initial_rank)
        if (old := call.ranks.get(join.initial_rank)) is not None:
            self._end_absence(old)
            if old.link is not None:
                self._drop(old.link)
        rank = _RelayedRank(join=join, record=MemberRecord(join.standing), link=link)
        call.ranks[join.initial_rank] = rank
        link.on_messages, link.on_broken = partial(self._on_messages, rank), partial(self._on_broken, rank)
        if call.end is not None:
            self._give(rank, link, call.end, encode_frame(call.end))
            return
        self._events.append((join.call, _describe(rank)))
        for number in join.ranks.keys() - call.ranks.keys() - call.absent.keys():
            self._watch_absent(call, join, number)
        if came[1:]:
            self._on_messages(rank, link, came[1:])

    def _on_messages(self, rank: _RelayedRank, link: DutyLink, came: list[ToRelay]) -> None:
        if rank.link is not link or rank.join.cycle != self._cycle:
            return
        for message in came:
            if isinstance(message, JoinRelay):
                self._on_broken(rank, link, ConnectionAbortedError("it joined twice"))
                return
            if isinstance(message, Gone | p.Left) and rank.last_words is None:
                rank.last_words = message  # the reason counts, not the exit that follows
            if not isinstance(message, Gone):
                rank.record.note_report(message)
            if not rank.is_over:
                self._events.append((rank.join.call, (rank.join.initial_rank, message)))

    def _on_broken(self, rank: _RelayedRank, link: DutyLink, error: OSError) -> None:
        self._drop(link)
        if rank.link is not link:
            return
        rank.link = None
        if rank.last_words is not None or rank.is_over:
            return
        log.info("the duty of rank %d is gone: %s", rank.join.initial_rank, error)
        rank.until_s = clock.now_s() + RECONNECT_S
        try:
            rank.pidfd = open_pidfd(rank.join.pid)
        except ProcessLookupError:
            self._give_up(rank, p.RankFaultKind.DIED)
        except OSError as failure:  # such as too many open files: its time limit applies, dead or not
            log.warning("rank %d cannot be watched while it has no duty: %s", rank.join.initial_rank, failure)
        else:
            see_death = partial(self._give_up, rank, p.RankFaultKind.DIED)
            self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda _: see_death())

    def _give_up(self, rank: _RelayedRank, kind: p.RankFaultKind) -> None:
        """Report that a rank without a duty is gone, or counts as gone."""
        self._end_absence(rank)
        join = rank.join
        restart_count = max(0, rank.record.standing.restart_count)
        rank.last_words = Gone(
            fault=p.RankFault(initial_rank=join.initial_rank, restart_count=restart_count, kind=kind)
        )
        self._events.append((join.call, (join.initial_rank, rank.last_words)))

    def _end_absence(self, rank: _RelayedRank) -> None:
        rank.until_s = None
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
            rank.pidfd = None

    def _watch_absent(self, call: _RelayedCall, join: JoinRelay, number: int) -> None:
        """Report that a rank is dead which may have been killed together with the agent process of its duty.

        A rank that lives begins another duty; until then it is the coordinator's to wait for it.
        """
        try:
            pidfd = open_pidfd(join.ranks[number])
        except ProcessLookupError:
            self._bury(call, join, number)
        except OSError as failure:
            log.warning("rank %d cannot be watched while it has no duty: %s", number, failure)
        else:
            call.absent[number] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, lambda _: self._bury(call, join, number))

    def _bury(self, call: _RelayedCall, join: JoinRelay, number: int) -> None:
        self._forget_absent(call, number)
        if self._calls.get(join.call) is not call:
            return
        fault = p.RankFault(initial_rank=number, restart_count=0, kind=p.RankFaultKind.DIED)
        dead = msgspec.structs.replace(join, initial_rank=number, standing=p.MemberStanding())
        rank = _RelayedRank(join=dead, record=MemberRecord(), link=None, last_words=Gone(fault=fault))
        call.ranks[number] = rank
        self._events.append((join.call, _describe(rank)))  # not a report: a new coordinator waits for its standing

    def _forget_absent(self, call: _RelayedCall, number: int) -> None:
        if (pidfd := call.absent.pop(number, None)) is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    def _drop(self, link: DutyLink) -> None:
        self._links.discard(link)
        link.close()

    def _give(self, rank: _RelayedRank, link: DutyLink, order: p.Order, frame: bytes) -> None:
        """Send an order to a rank, unless the rank has it: orders may cross the standings that request them."""
        standing, number = rank.record.standing, rank.join.initial_rank
        if isinstance(order, p.Go) and standing.restart_count >= order.restart_count:
            return
        if isinstance(order, p.Restart) and standing.restart >= order.restart_count:
            return
        rank.record.note_order(order)
        is_left_out = isinstance(order, p.Go) and number not in order.ranks
        rank.is_over |= is_left_out or isinstance(order, p.Finish | p.Abort | p.Expel)
        link.send_frame(frame)

    # -- the cycle ---------------------------------------------------------------------------------------------

    def _use_cycle(self, cycle: int | None) -> None:
        for call in self._calls.values():
            for number in list(call.absent):
                self._forget_absent(call, number)
            for rank in call.ranks.values():
                self._end_absence(rank)
                rank.is_over = True  # the connection stays open: its end would make the rank abort
        self._cycle, self._calls, self._lost = cycle, {}, {}
        self._events.clear()

    def _lose(self, fault: p.RankFault) -> None:
        number = fault.initial_rank
        if self._cycle is None or any(
            number in call.ranks and not call.ranks[number].is_over for call in self._calls.values()
        ):
            return  # its duty reports the reason, or its connection ends
        self._lost[number] = fault
        self._events.append((ANY_CALL, (number, Gone(fault=fault))))

    # -- what the coordinator has to know ----------------------------------------------------------------------

    def _take_events(self) -> list[m.RankStandings | m.RankReports]:
        """Return the unsent events as messages, in order; consecutive ones of one kind and call share a message."""
        messages: list[m.RankStandings | m.RankReports] = []
        events, self._events = self._events, []
        for (call, comes), group in groupby(events, key=lambda one: (one[0], isinstance(one[1], m.KnownRank))):
            some: list[Any] = [what for _, what in group]
            if comes:
                messages.append(self._standings(call, some))
            else:
                assert self._cycle is not None
                messages.append(m.RankReports(cycle=self._cycle, call=call, reports=tuple(some)))
        return messages

    def _standings(self, number: int, ranks: list[m.KnownRank]) -> m.RankStandings:
        call = self._calls[number]
        assert self._cycle is not None
        return m.RankStandings(
            cycle=self._cycle,
            call=number,
            world_size=call.world_size,
            limits=call.limits,
            ranks=tuple(ranks),
            end=call.end,
        )


def _describe(rank: _RelayedRank) -> m.KnownRank:
    return m.KnownRank(
        initial_rank=rank.join.initial_rank,
        standing=rank.record.standing,
        labels=rank.join.labels,
        last_words=rank.last_words,
    )
