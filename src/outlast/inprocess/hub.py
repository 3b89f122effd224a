"""The hub: it passes what members report to the decision, and sends the orders that follow to the members.

A part of an event loop, inside one of the monitor processes. All decisions are made by
:mod:`outlast.policy.inprocess_restart`; what is decided here is only who is unreachable: a member whose link broke has
a short reconnect grace, one whose process is seen to be gone is lost at once. A hub that cannot reach most of the
members that it had aborts, since they may resume elsewhere.

Only the few candidates for its succession know who belongs to the group: they get all members once, and then what
changes. The others get who the candidates are, and orders in which ranks are runs and no fault comes twice: a loss
among ten thousand members costs each of them less than a hundred bytes. Who is a candidate stays one while it is
linked, so that members that join do not make each other candidates in turn, each with a copy of all members.

A hub that follows another one first waits for the members that lived; they report their standing.

Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import selectors
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from outlast import clock
from outlast.inprocess import protocol as m
from outlast.policy import inprocess_protocol as p
from outlast.policy import inprocess_restart as restart
from outlast.policy.inprocess_protocol import RestartLimits
from outlast.runtime.processes import open_pidfd
from outlast.runtime.wire import encode_frame

log = logging.getLogger(__name__)

_MAX_CANDIDATES = 4
_ANNOUNCE_S = 1e-4
"""Seconds for each member between two times that all are told of other candidates."""
_END_S = 2.0
"""Seconds in which the last order has to be delivered."""
RECONNECT_S = 5.0
"""Seconds that a member whose link broke has to come back: time for another monitor process to start on a machine
that is busy. One whose process is seen to be gone is not waited for."""
_TOGETHER_S = 0.5
"""Members whose time ends so soon after another's are judged with it: what took all of them away may have taken most,
and a restart for the first of them would begin in vain."""


def order_candidates(
    able: Iterable[p.HubCandidate], host: int, present: Container[int] = ()
) -> tuple[p.HubCandidate, ...]:
    """Return who may host the hub: the one that does, then one of each other node, then others; present ones first."""

    def preference(candidate: p.HubCandidate) -> tuple[bool, bool, int]:
        rank = candidate.initial_rank
        return rank != host, rank not in present, rank

    by_rank = sorted(able, key=preference)
    of_node: dict[str, p.HubCandidate] = {}
    for candidate in by_rank:
        of_node.setdefault(candidate.node, candidate)
    others = [candidate for candidate in by_rank if candidate is not of_node[candidate.node]]
    return (*of_node.values(), *others)[:_MAX_CANDIDATES]


@dataclass(slots=True)
class _Absence:
    """A member whose link broke and that is waited for."""

    until_s: float
    pidfd: int | None = None
    is_dead: bool = False


@dataclass(slots=True)
class _LinkedMember:
    """A member that is linked."""

    link: m.HubLink
    join: m.JoinHub
    early: list[m.OnLink] = field(default_factory=list)
    """What it sent before this hub could decide."""
    is_leaving: bool = False
    """It will close the link."""
    candidates: tuple[p.HubCandidate, ...] = ()
    """Those that it was sent last."""
    version: int = 0
    """Of the members that it was sent last; 0: none."""


class Hub:
    """Serve the members.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        world_size: Initial one.
        limits: Of restarts.
        heartbeat_timeout_s: Seconds of silence after which a link counts as broken.
        host: This process's own entry among the candidates.
        space: Where this process can see whether another process lives.
        predecessor: What the hub before this one published last; its members are waited for.
        patience_s: Seconds that they are waited for.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        world_size: int,
        limits: RestartLimits,
        heartbeat_timeout_s: float,
        host: p.HubCandidate,
        space: str,
        predecessor: m.HubCandidates | None = None,
        patience_s: float = RECONNECT_S,
    ) -> None:
        self._selector, self._world_size, self._limits = selector, world_size, limits
        self._heartbeat_timeout_s, self._host = heartbeat_timeout_s, host
        self._peers: dict[int, _LinkedMember] = {}
        self._space = space
        self._absent: dict[int, _Absence] = {}
        self._broken: dict[int, str] = {}
        self._candidates: tuple[p.HubCandidate, ...] = (host,)
        self._announce_s: float | None = None
        self._announced_s = 0.0
        self._version = 0
        self._change: m.HubCandidates | None = None
        self._earliest_end_s = math.inf
        self._places: dict[int, m.MemberPlace] = {}
        self._known: dict[int, m.MemberPlace] = {}
        self._out_of_reach: set[int] = set()
        self._lost_early: list[tuple[int, bool]] = []
        self._end_s: float | None = None
        self._next_silence_check_s = clock.now_s() + heartbeat_timeout_s
        self._state: restart.RestartState | None = None
        if predecessor is not None and predecessor.members:
            self._known = dict(predecessor.members)
            self._places = dict(predecessor.members)
            self._version = predecessor.version
            for rank, place in self._known.items():
                self._await(rank, place, patience_s)
        else:
            self._state = restart.begin(world_size, clock.now_s())

    # -- the loop's part ---------------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """When to call :meth:`look`."""
        due = [self._next_silence_check_s, self._earliest_end_s]
        if self._announce_s is not None:
            due.append(self._announce_s)
        if self._end_s is not None and clock.now_s() < self._end_s:
            due.append(self._end_s)  # later it only waits for its own rank to leave
        decision_s = None if self._state is None else restart.next_deadline_s(self._state, self._limits)
        return min([*due, decision_s] if decision_s is not None else due)

    @property
    def is_over(self) -> bool:
        """Whether the last order was given and delivered."""
        if self._end_s is None:
            return False
        return clock.now_s() >= self._end_s or not (self._peers or self._absent)

    def serves_others(self, rank: int) -> bool:
        """Return whether members other than this one are linked, or may come (back)."""
        state = self._state
        members = {} if state is None or state.end is not None else state.members
        expected = (other for other, member in members.items() if not member.is_here)
        return any(other != rank for other in itertools.chain(self._peers, self._absent, expected))

    def adopt(self, channel: m.HubChannel, join: m.JoinHub) -> None:
        """Take a member in; its greeting was found to be genuine."""
        rank = join.initial_rank
        if (old := self._peers.pop(rank, None)) is not None:
            old.link.close()
        self._end_absence(rank)
        self._broken.pop(rank, None)
        self._places[rank] = join.place
        link = m.HubLink(self._selector, channel, partial(self._on_messages, rank), partial(self._on_broken, rank))
        self._peers[rank] = _LinkedMember(link, join)
        before, self._candidates = self._candidates, self._add_candidate(rank)
        self._inform(rank)
        if self._candidates != before:
            self._announce_soon()
        if self._state is not None:
            self._advance(self._came(rank, join))
        elif rank not in self._known:
            self._send(p.Expel(reason="the others resumed without this rank"), (rank,))
        self._settle()

    def look(self) -> None:
        """Do what is due."""
        now_s = clock.now_s()
        if now_s >= self._next_silence_check_s:
            self._check_silence(now_s)
        if self._announce_s is not None and now_s >= self._announce_s:
            self._announce()
        self._settle()
        if self._state is not None:
            due_s = restart.next_deadline_s(self._state, self._limits)
            if due_s is not None and now_s >= due_s:
                self._advance(restart.TimePassed(at_s=now_s))
                self._settle()

    def discount_pause(self) -> None:
        """Discount the members' silence while this process did not run and could not receive."""
        now_ns = clock.now_ns()
        for peer in self._peers.values():
            peer.link.channel.received_ns = now_ns
        self._next_silence_check_s = clock.now_s() + self._heartbeat_timeout_s

    def close(self) -> None:
        """Let everybody go.

        Blocks: up to 0.5 s for each member that takes nothing.
        """
        for rank in list(self._absent):
            self._end_absence(rank)
        for peer in self._peers.values():
            peer.link.channel.drain(0.5)
            peer.link.close()
        self._peers.clear()

    # -- links -------------------------------------------------------------------------------------------------

    def _on_messages(self, rank: int, link: m.HubLink, came: list[m.OnLink]) -> None:
        peer = self._peers[rank]
        assert peer.link is link
        for message in came:
            self._take(rank, peer, message)
        self._settle()

    def _on_broken(self, rank: int, _: m.HubLink, error: OSError) -> None:
        self._broken.setdefault(rank, str(error))  # dealt with when everything that is under way is done

    def _take(self, rank: int, peer: _LinkedMember, message: m.OnLink) -> None:
        match message:
            case m.Beat():
                self._send(message, (rank,))
            case m.WantMembers():
                peer.candidates, peer.version = (), 0
                self._inform(rank)
            case m.Gone() | p.RankReady() | p.RankFault() | p.Completed() | p.Left() | p.Assigned() if (
                self._state is None
            ):
                peer.early.append(message)
            case m.Gone(fault=fault):
                peer.is_leaving = True
                self._advance(
                    restart.MemberLost(initial_rank=rank, kind=fault.kind, summary=fault.summary, at_s=clock.now_s())
                )
            case p.RankReady() | p.RankFault() | p.Completed() | p.Left() | p.Assigned():
                peer.is_leaving |= isinstance(message, p.Left)
                self._advance(restart.MemberReported(initial_rank=rank, report=message, at_s=clock.now_s()))
            case other:
                self._broken.setdefault(rank, f"it sent {type(other).__name__}")

    def _check_silence(self, now_s: float) -> None:
        """Give up links on which nothing has come for long."""
        oldest_s = now_s
        for rank, peer in self._peers.items():
            received_s = peer.link.channel.received_ns / 1e9
            if now_s >= received_s + self._heartbeat_timeout_s:
                self._broken.setdefault(rank, f"no sign of life for {now_s - received_s:.1f} s")
            else:
                oldest_s = min(oldest_s, received_s)
        self._next_silence_check_s = oldest_s + self._heartbeat_timeout_s

    def _send(self, message: m.OnLink, ranks: Iterable[int]) -> None:
        frame = encode_frame(message)
        for rank in ranks:
            if (peer := self._peers.get(rank)) is None:
                continue  # it gets it when it comes back
            peer.is_leaving |= isinstance(message, p.Expel | p.Finish | p.Abort)
            peer.link.send_frame(frame)

    def _settle(self) -> None:
        """Deal with links that broke and members that do not come back, until there are none."""
        while True:
            while self._broken:
                self._drop(*self._broken.popitem())
            now_s = clock.now_s()
            if now_s < self._earliest_end_s:
                break
            is_due = any(now_s >= absence.until_s and not absence.is_dead for absence in self._absent.values())
            until_s = now_s + (_TOGETHER_S if is_due else 0.0)
            ended = [(rank, absence.is_dead) for rank, absence in self._absent.items() if until_s >= absence.until_s]
            for rank, _ in ended:
                self._end_absence(rank)
            self._earliest_end_s = min((absence.until_s for absence in self._absent.values()), default=math.inf)
            if ended:
                self._lose(ended)
        if self._state is None and not self._absent:
            self._take_over()

    def _drop(self, rank: int, error: str) -> None:
        peer = self._peers.pop(rank, None)
        if peer is None:
            return
        peer.link.close()
        is_member = rank in (self._known if self._state is None else self._state.members)
        if is_member and not peer.is_leaving and self._end_s is None:
            log.info("the link to rank %d broke: %s", rank, error)
            self._await(rank, peer.join.place, RECONNECT_S)

    def _await(self, rank: int, place: m.MemberPlace, patience_s: float) -> None:
        """Give a member time to come back, unless its process is seen to end."""
        absence = self._absent[rank] = _Absence(clock.now_s() + patience_s)
        self._earliest_end_s = min(self._earliest_end_s, absence.until_s)
        if place.space != self._space:
            return
        try:
            absence.pidfd = open_pidfd(place.pid)
        except ProcessLookupError:
            absence.is_dead, absence.until_s = True, 0.0
            self._earliest_end_s = 0.0
            return
        except OSError as error:  # such as too many open files: its patience ends, whether it is dead or not
            log.warning("rank %d cannot be watched while it is away: %s", rank, error)
            return

        def see_death(_: int) -> None:
            absence.is_dead, absence.until_s = True, 0.0
            self._earliest_end_s = 0.0
            self._settle()

        self._selector.register(absence.pidfd, selectors.EVENT_READ, see_death)

    def _end_absence(self, rank: int) -> None:
        absence = self._absent.pop(rank, None)
        if absence is not None and absence.pidfd is not None:
            self._selector.unregister(absence.pidfd)
            os.close(absence.pidfd)

    # -- decisions ---------------------------------------------------------------------------------------------

    def _lose(self, ended: list[tuple[int, bool]]) -> None:
        """Resume without members that have not come back; the second of each: whether it is known to be dead."""
        self._out_of_reach.update(rank for rank, is_dead in ended if not is_dead)
        if self._state is None:
            self._lost_early += ended
            return
        if self._is_isolated():
            text = f"ranks {sorted(self._out_of_reach)} cannot be reached and may go on elsewhere"
            self._advance(restart.Isolated(reason=text, at_s=clock.now_s()))
            return
        for rank, is_dead in ended:
            kind = p.RankFaultKind.DIED if is_dead else p.RankFaultKind.LINK_LOST
            self._advance(restart.MemberLost(initial_rank=rank, kind=kind, at_s=clock.now_s()))

    def _is_isolated(self) -> bool:
        """Whether most members may live out of reach; of two halves the one with the lowest rank resumes."""
        if not self._known:
            return False
        num_lost, num_all = len(self._out_of_reach & self._known.keys()), len(self._known)
        return 2 * num_lost > num_all or (2 * num_lost == num_all and min(self._known) in self._out_of_reach)

    def _take_over(self) -> None:
        """Everybody who could come has come: go on where the hub before this one was."""
        standings = {rank: peer.join.standing for rank, peer in self._peers.items() if rank in self._known}
        nodes = {rank: place.node for rank, place in self._known.items()}
        self._state = restart.take_over(standings, nodes, self._world_size, clock.now_s())
        log.info("this process hosts the hub now: %s of call %d", self._state.phase, self._state.restart_count)
        for rank in standings:
            self._advance(self._came(rank, self._peers[rank].join))
        self._lose(self._lost_early)
        self._announce_soon()
        for rank, peer in list(self._peers.items()):
            early, peer.early = peer.early, []
            for message in early:
                self._take(rank, peer, message)
        self._settle()

    def _came(self, rank: int, join: m.JoinHub) -> restart.MemberJoined:
        place = join.place
        return restart.MemberJoined(
            initial_rank=rank, node=place.node, labels=place.labels, standing=join.standing, at_s=clock.now_s()
        )

    def _advance(self, event: restart.Event) -> None:
        assert self._state is not None
        before, num_members = self._state, len(self._state.members)
        self._state, actions = restart.advance(before, event, self._limits)
        if self._state.phase == restart.RestartPhase.RUNNING:
            if before.phase != restart.RestartPhase.RUNNING:
                self._announce()
            elif len(self._state.members) != num_members:
                self._announce_soon()  # within a call members only go
        if self._state.restart_count != before.restart_count or self._state.phase != before.phase:
            log.info("%s of call %d", self._state.phase, self._state.restart_count)
            if self._state.phase == restart.RestartPhase.RUNNING:
                self._out_of_reach.clear()
        for action in actions:
            self._send(action.order, action.to)
        if self._state.end is not None and self._end_s is None:
            self._end_s = clock.now_s() + _END_S

    def _announce_soon(self) -> None:
        """Tell all members what is new to them, less often the more they are: thousands may come or go at once."""
        if self._announce_s is None:
            self._announce_s = max(clock.now_s(), self._announced_s + _ANNOUNCE_S * len(self._peers))

    def _announce(self) -> None:
        """Tell all members what is new to them, and the candidates who belongs to the group."""
        self._announce_s, self._announced_s = None, clock.now_s()
        state = self._state
        if (
            state is not None
            and state.phase == restart.RestartPhase.RUNNING
            and state.members.keys() != self._known.keys()
        ):
            known = {rank: self._places[rank] for rank in state.members}
            changed = {rank: place for rank, place in known.items() if self._known.get(rank) != place}
            lost = tuple(rank for rank in self._known if rank not in known)
            self._change = m.HubCandidates(
                candidates=(), version=self._version + 1, base=self._version, members=changed, lost=lost
            )
            self._known, self._version = known, self._version + 1
            self._candidates = self._order_candidates()
        for rank in list(self._peers):
            self._inform(rank)

    def _inform(self, rank: int) -> None:
        """Tell a member who may host the hub, if it does not know; a candidate also who belongs to the group."""
        peer = self._peers[rank]
        version = self._version if any(one.initial_rank == rank for one in self._candidates) else 0
        if (peer.candidates, peer.version) == (self._candidates, version):
            return
        message = m.HubCandidates(candidates=self._candidates, version=version)
        if version:
            change = self._change
            if peer.version == version:
                message = msgspec.structs.replace(message, base=version)
            elif change is not None and change.version == version and 0 < peer.version == change.base:
                message = msgspec.structs.replace(change, candidates=self._candidates)
            else:
                message = msgspec.structs.replace(message, members=self._known)
        peer.candidates, peer.version = self._candidates, version
        self._send(message, (rank,))

    def _add_candidate(self, rank: int) -> tuple[p.HubCandidate, ...]:
        """Return the candidates with a member that came; without a look at all members, where those before are here."""
        if rank == self._host.initial_rank:
            return self._candidates
        others = [
            one.initial_rank for one in self._candidates if one.initial_rank not in (self._host.initial_rank, rank)
        ]
        if not all(self._is_able(other) for other in others):
            return self._order_candidates()
        return self._chosen_of([*others, rank])

    def _order_candidates(self) -> tuple[p.HubCandidate, ...]:
        return self._chosen_of(
            [rank for rank in self._peers if rank != self._host.initial_rank and self._is_able(rank)]
        )

    def _is_able(self, rank: int) -> bool:
        peer = self._peers.get(rank)
        return peer is not None and not peer.is_leaving

    def _chosen_of(self, ranks: list[int]) -> tuple[p.HubCandidate, ...]:
        """Return the candidates of the host and these linked members."""
        able = [self._host]
        for rank in ranks:
            place, life = self._peers[rank].join.place, self._peers[rank].join.life
            able.append(p.HubCandidate(initial_rank=rank, node=place.node, address=place.address, life=life))
        present = {one.initial_rank for one in self._candidates}
        return order_candidates(able, self._host.initial_rank, present)
