"""The in-process restart coordinator: takes the ranks' reports and gives orders to them.

:mod:`outlast.policy.inprocess_restart` makes all decisions on a call of a wrapped function. Each node's relay
(:mod:`outlast.launch.rank_relay`) reports which ranks came, which are gone and what the others report; each node gets
an order once. Under ``outlast run`` a lost node ends the cycle; elsewhere (:mod:`outlast.inprocess.coordinator`) the
others resume without it if they can reach most of the members.

The state is soft: a coordinator that takes over a running cycle rebuilds it from the relays' standings, and a relay
that reconnects sends them again and gets the orders that it missed. No I/O happens here; part of
:class:`outlast.launch.coordinator.Coordinator` or :class:`outlast.inprocess.coordinator.RankCoordinator`.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from outlast.inprocess.protocol import Gone
from outlast.launch import protocol as m
from outlast.policy import inprocess_protocol as p
from outlast.policy import inprocess_restart as restart

log = logging.getLogger(__name__)
ANY_CALL = -1
"""In reports: the next call of the rank."""

Life = tuple[str, str]
"""A node and the epoch of its agent."""


@dataclass(slots=True)
class _RankCall:
    """One call of a wrapped function on all ranks."""

    number: int
    limits: p.RestartLimits
    state: restart.RestartState
    homes: dict[int, Life] = field(default_factory=dict)
    """Agents of the ranks that have joined, by initial rank."""
    members: frozenset[int] = frozenset()
    """Members of the last order to go; empty: there was none."""
    out_of_reach: frozenset[int] = frozenset()
    """Members that may be alive on unreachable nodes."""


class InProcessRestarts:
    """Bring the ranks of the running cycle through faults without ending it.

    Methods put the orders to send into :attr:`out`: node, epoch, order.
    """

    def __init__(self) -> None:
        self.out: list[tuple[str, str, m.RankOrder]] = []
        self.term = 0
        """Term of the coordinator, which orders carry."""
        self._cycle = -1
        self._calls: dict[int, _RankCall] = {}
        self._dead: dict[int, p.RankFault] = {}
        """Ranks that ended in this cycle: later calls do not wait for them."""
        self._kept: list[m.RankStandings | m.RankReports] = []

    def begin(self, cycle: int, term: int) -> None:
        """Begin with a cycle that this coordinator has formed or taken over."""
        self.close()
        self._cycle, self.term = cycle, term

    def close(self) -> None:
        """End the cycle: later reports of its ranks are ignored."""
        self._cycle = -1
        self._calls, self._dead, self._kept = {}, {}, []

    @property
    def deadline_s(self) -> float | None:
        """When to call :meth:`look`; ``None``: not before a message comes."""
        due = [due_s for one in self._calls.values() if (due_s := _deadline_s(one)) is not None]
        return min(due, default=None)

    def look(self, now_s: float) -> None:
        for call in list(self._calls.values()):
            if (due_s := _deadline_s(call)) is not None and now_s >= due_s:
                self._advance(call, restart.TimePassed(at_s=now_s))

    def take(self, message: m.RankStandings | m.RankReports, now_s: float) -> None:
        """Take the report of a relay whose node has a slot in the running cycle."""
        if message.cycle != self._cycle:
            log.debug("ranks of node %s reported of cycle %d, which is over", message.node, message.cycle)
            return
        if isinstance(message, m.RankStandings):
            self._seat(self._open(message, now_s), message, now_s)
        elif message.call == ANY_CALL:
            self._bury(message.reports, now_s)
        elif (call := self._calls.get(message.call)) is not None:
            for rank, report in message.reports:
                if rank in call.homes:
                    self._report(call, rank, report, now_s)

    @property
    def is_over(self) -> bool:
        """Whether every call has had its last order."""
        return all(call.state.end is not None for call in self._calls.values())

    def is_home(self, life: str) -> bool:
        """Return whether an agent's life has ranks that a call in progress needs."""
        calls = [call for call in self._calls.values() if call.state.end is None]
        return any(
            home[1] == life and rank in call.state.members for call in calls for rank, home in call.homes.items()
        )

    def is_waiting(self) -> bool:
        """Return whether a call in progress waits for ranks that have not joined yet."""
        calls = [call for call in self._calls.values() if call.state.end is None]
        return any(not member.is_here for call in calls for member in call.state.members.values())

    def lose(self, lives: Container[str], now_s: float) -> None:
        """Resume without the ranks of unreachable agents."""
        for call in self._calls.values():
            self._lose(call, [rank for rank, home in call.homes.items() if home[1] in lives], now_s)

    def _lose(self, call: _RankCall, ranks: Iterable[int], now_s: float) -> None:
        """Resume a call without ranks that may be alive; stop it if they are most: they may resume without these."""
        lost = [rank for rank in ranks if rank in call.state.members]
        call.out_of_reach |= call.members.intersection(lost)
        num_lost, num_all = len(call.out_of_reach), len(call.members)
        # Of two halves the one with the lowest rank resumes.
        if 2 * num_lost > num_all or (lost and 2 * num_lost == num_all and min(call.members) in call.out_of_reach):
            text = f"ranks {sorted(call.out_of_reach)} cannot be reached and may continue elsewhere"
            return self._advance(call, restart.Isolated(reason=text, at_s=now_s))
        for rank in lost:
            count = max(0, call.state.restart_count)
            fault = p.RankFault(initial_rank=rank, restart_count=count, kind=p.RankFaultKind.LINK_LOST)
            self._report(call, rank, Gone(fault=fault), now_s)
        return None

    # -- taking over -------------------------------------------------------------------------------------------

    @property
    def has_kept(self) -> bool:
        return bool(self._kept)

    def missing(self) -> frozenset[int]:
        """Return the members of the newest call's last order to go that no kept message mentions."""
        standings = [one for one in self._kept if isinstance(one, m.RankStandings)]
        known = {rank.initial_rank: rank for one in _newest_call(standings) for rank in one.ranks}
        newest = max((rank.standing for rank in known.values()), key=lambda one: one.restart_count, default=None)
        return frozenset(() if newest is None else newest.ranks).difference(known)

    def keep(self, message: m.RankStandings | m.RankReports) -> None:
        """Keep a report until it is known whether the cycle continues."""
        self._kept.append(message)

    def take_over(self, cycle: int, term: int, holders: Iterable[str] | None, now_s: float) -> None:
        """Continue a running cycle after all of its nodes have sent their standings.

        Args:
            cycle: Number of the cycle.
            term: Term of this coordinator.
            holders: Nodes of the cycle; ``None``: not known: members without standings are unreachable.
            now_s: Monotonic seconds.
        """
        names = None if holders is None else frozenset(holders)
        kept = [one for one in self._kept if one.cycle == cycle and (names is None or one.node in names)]
        missing = self.missing() if names is None else frozenset[int]()
        self.begin(cycle, term)
        standings = [one for one in kept if isinstance(one, m.RankStandings)]
        for number in sorted({one.call for one in standings}):
            self._resume([one for one in standings if one.call == number], missing, now_s)
        for message in kept:
            if isinstance(message, m.RankReports):
                self.take(message, now_s)

    def _resume(self, standings: list[m.RankStandings], missing: frozenset[int], now_s: float) -> None:
        first = standings[0]
        ranks = {rank.initial_rank: (rank, one.node) for one in standings for rank in one.ranks}
        living = {number: rank.standing for number, (rank, _) in ranks.items() if rank.last_words is None}
        state = restart.begin(first.world_size, now_s)
        end = next((one.end for one in standings if one.end is not None), None)
        if end is not None:
            phase = restart.RestartPhase.FINISHED if isinstance(end, p.Finish) else restart.RestartPhase.ABORTED
            state = msgspec.structs.replace(state, phase=phase, restart_count=end.restart_count, end=end)
        elif living:
            nodes = {number: node for number, (_, node) in ranks.items()} | dict.fromkeys(missing, "")
            state = restart.take_over(living, nodes, first.world_size, now_s)
        call = self._calls[first.call] = _RankCall(first.call, first.limits, state)
        newest = max((standing for standing in living.values()), key=lambda one: one.restart_count, default=None)
        call.members = frozenset(() if newest is None else newest.ranks)
        log.info("took over call %d of the ranks: %s, restart %d", call.number, state.phase, state.restart_count)
        for one in standings:  # all first, as lost members matter to those that are here
            self._seat(call, one, now_s, ends=False)
        for one in standings:
            self._part(call, one, now_s)
        self._lose(call, missing, now_s)

    # -- a call ------------------------------------------------------------------------------------------------

    def _open(self, message: m.RankStandings, now_s: float) -> _RankCall:
        """Return the call that ranks joined; the first of them begins it."""
        call = self._calls.get(message.call)
        if call is None:
            call = _RankCall(message.call, message.limits, restart.begin(message.world_size, now_s))
            # Ranks that are not in the call before the newest have been left behind.
            self._calls = {number: one for number, one in self._calls.items() if number >= message.call - 1}
            self._calls[message.call] = call
            for rank, fault in list(self._dead.items()):
                self._report(call, rank, Gone(fault=fault), now_s)
        return call

    def _seat(self, call: _RankCall, message: m.RankStandings, now_s: float, *, ends: bool = True) -> None:
        for rank in message.ranks:
            call.homes[rank.initial_rank] = message.node, message.epoch
            if rank.last_words is None:
                came = restart.MemberJoined(
                    initial_rank=rank.initial_rank,
                    node=message.node,
                    labels=rank.labels,
                    standing=rank.standing,
                    at_s=now_s,
                )
                self._advance(call, came)
        if ends:
            self._part(call, message, now_s)

    def _part(self, call: _RankCall, message: m.RankStandings, now_s: float) -> None:
        for rank in message.ranks:
            if rank.last_words is not None:
                self._report(call, rank.initial_rank, rank.last_words, now_s)

    def _bury(self, reports: Iterable[tuple[int, Gone | p.Report]], now_s: float) -> None:
        """Record ranks that ended before a monitor process reported for them, in each call that waits for them."""
        for rank, report in reports:
            if isinstance(report, Gone):
                self._dead[rank] = report.fault
                for call in self._calls.values():
                    if rank not in call.homes:  # otherwise it was a member, which the call has lost already
                        self._report(call, rank, report, now_s)

    def _report(self, call: _RankCall, rank: int, report: Gone | p.Report, now_s: float) -> None:
        if isinstance(report, Gone):
            fault = report.fault
            if fault.kind != p.RankFaultKind.LINK_LOST:
                self._dead[rank] = fault
            lost = restart.MemberLost(initial_rank=rank, kind=fault.kind, summary=fault.summary, at_s=now_s)
            self._advance(call, lost)
        else:
            self._advance(call, restart.MemberReported(initial_rank=rank, report=report, at_s=now_s))

    def _advance(self, call: _RankCall, event: restart.Event) -> None:
        before = call.state
        call.state, actions = restart.advance(before, event, call.limits)
        if (call.state.restart_count, call.state.phase) != (before.restart_count, before.phase):
            log.debug("call %d of the ranks: %s, restart %d", call.number, call.state.phase, call.state.restart_count)
            if call.state.phase == restart.RestartPhase.RUNNING:
                call.members, call.out_of_reach = frozenset(call.state.members), frozenset()
        for action in actions:
            self._send(call, action)

    def _send(self, call: _RankCall, action: restart.Send) -> None:
        """Send an order once to each node of the ranks concerned."""
        runs: dict[Life, list[tuple[int, int]]] = {}
        for rank in action.to:
            if (life := call.homes.get(rank)) is None:
                continue  # sent when it joins
            known = runs.setdefault(life, [])
            if known and sum(known[-1]) == rank:
                known[-1] = known[-1][0], known[-1][1] + 1
            else:
                known.append((rank, 1))
        for (node, epoch), some in runs.items():
            order = m.RankOrder(
                term=self.term, cycle=self._cycle, call=call.number, runs=tuple(some), order=action.order
            )
            self.out.append((node, epoch, order))


def _newest_call(standings: Sequence[m.RankStandings]) -> list[m.RankStandings]:
    number = max((one.call for one in standings), default=0)
    return [one for one in standings if one.call == number]


def _deadline_s(call: _RankCall) -> float | None:
    return restart.next_deadline_s(call.state, call.limits)
