"""In-process restarts end for every sequence of events and never mix calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.inprocess.protocol import MemberRecord
from outlast.policy import inprocess_protocol as o
from outlast.policy.inprocess_protocol import RestartLimits
from outlast.policy.inprocess_restart import (
    Event,
    MemberJoined,
    MemberLost,
    MemberReported,
    RestartPhase,
    RestartState,
    TimePassed,
    add_earlier_faults,
    advance,
    begin,
    next_deadline_s,
    take_over,
)

LIMITS = RestartLimits(barrier_timeout_s=120.0, completion_timeout_s=120.0, last_call_wait_s=1.0, max_iterations=6)


def names(faults: Iterable[o.RankFault]) -> set[tuple[int, int, o.RankFaultKind]]:
    return {(one.initial_rank, one.restart_count, one.kind) for one in faults}


@dataclass
class WrappedRank:
    """A member's actual state, with the messages on their way to and from it."""

    orders: deque[o.Order | dict[int, str]] = field(default_factory=deque)
    reports: deque[o.Report] = field(default_factory=deque)
    record: MemberRecord = field(default_factory=MemberRecord)
    known: dict[int, str] = field(default_factory=dict)
    """The members of the group as the coordinator last reported them."""
    lives: bool = True
    linked: bool = False
    in_fn: int | None = None
    entered: set[int] = field(default_factory=set)
    leaves_before: int = 0
    ended: bool = False
    restart: o.Restart | None = None
    stubborn: bool = False


class World:
    def __init__(self, num: int) -> None:
        self.ranks = {rank: WrappedRank() for rank in range(num)}
        self.now_s = 0.0
        self.state: RestartState = begin(num, 0.0)
        self.reported_members: set[int] = set()
        self.gone_to: dict[int, dict[int, int | None]] = {}
        self.faults: dict[int, set[tuple[int, int, o.RankFaultKind]]] = {}

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def advance(self, event: Event) -> None:
        before = self.state
        self.state, actions = advance(before, event, LIMITS)
        members = list(self.state.members.values()) if len(self.ranks) < 8 else []
        assert not members or self.state.num_unready == sum(member.store_address is None for member in members)
        num_running = sum(one.active_rank is not None and not one.completed for one in members)
        assert not members or self.state.num_running == num_running
        assert self.state.num_causes == sum(not fault.is_consequence for fault in self.state.faults)
        if self.state.phase == RestartPhase.RUNNING and self.state.members.keys() != self.reported_members:
            self.reported_members = set(self.state.members)
            for rank in self.ranks.values():
                if rank.linked:
                    rank.orders.append({number: member.node for number, member in self.state.members.items()})
        for action in actions:
            if isinstance(action.order, o.Go):
                self.check_go(action.order)
                if before.faults:
                    self.faults[action.order.restart_count] = names(before.faults)
            for rank in action.to:
                if self.ranks[rank].linked:
                    self.ranks[rank].orders.append(action.order)

    def check_go(self, go: o.Go) -> None:
        for number in go.ranks:
            rank = self.ranks[number]
            if rank.lives and number in self.state.members:
                assert rank.in_fn is None or rank.in_fn == go.restart_count, "a member is still in an older call"

    # -- events ---------------------------------------------------------------------------------------

    def link(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.lives and not rank.ended:
            rank.orders.clear()
            rank.reports.clear()
            rank.linked = True
            self.advance(
                MemberJoined(initial_rank=number, node=f"n{number}", standing=rank.record.standing, at_s=self.now_s)
            )
            for report in rank.record.reports():
                rank.reports.append(report)

    def cut(self, number: int) -> None:
        rank = self.ranks[number]
        rank.linked = False
        rank.orders.clear()
        rank.reports.clear()

    def give_up_link(self, number: int) -> None:
        if not self.ranks[number].linked:
            self.advance(
                MemberLost(initial_rank=number, kind=o.RankFaultKind.LINK_LOST, summary="out of reach", at_s=self.now_s)
            )

    def die(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.lives:
            rank.lives, rank.in_fn = False, None
            self.cut(number)
            self.advance(MemberLost(initial_rank=number, kind=o.RankFaultKind.DIED, summary="killed", at_s=self.now_s))

    def replace_coordinator(self, number: int) -> None:
        """The coordinator is lost; another one takes over with the living members that can reach it."""
        for rank in range(len(self.ranks)):
            self.cut(rank)
        able = [n for n, r in self.ranks.items() if r.lives and not r.ended]
        if not able:
            return
        nodes = self.ranks[number if number in able else able[0]].known
        connected = [n for n in able if n in nodes] if nodes else able
        self.reported_members = set(nodes)
        self.state = take_over(
            {n: self.ranks[n].record.standing for n in connected}, nodes, len(self.ranks), self.now_s
        )
        for rank_number in able:
            self.link(rank_number)
        for other in nodes:
            if other not in connected:
                self.advance(
                    MemberLost(initial_rank=other, kind=o.RankFaultKind.DIED, summary="did not come", at_s=self.now_s)
                )

    def report(self, number: int, report: o.Report) -> None:
        rank = self.ranks[number]
        rank.record.note_report(report)
        if rank.linked:
            rank.reports.append(report)

    def receive_report(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.reports and rank.linked:
            self.advance(MemberReported(initial_rank=number, report=rank.reports.popleft(), at_s=self.now_s))

    def execute_order(self, number: int) -> None:
        rank = self.ranks[number]
        if not (rank.orders and rank.linked and rank.lives) or rank.ended:
            return
        order = rank.orders.popleft()
        if isinstance(order, dict):
            rank.known = order
            return
        rank.record.note_order(order)
        match order:
            case o.Restart():
                rank.restart = order
                rank.leaves_before = order.restart_count
            case o.Go():
                assert order.restart_count not in rank.entered, "ordered to enter a call twice"
                known_faults = names(add_earlier_faults(order, rank.restart).faults)
                assert len(known_faults) == 16 or known_faults >= self.faults.get(order.restart_count, set())
                rank.entered.add(order.restart_count)
                known = self.gone_to.setdefault(order.restart_count, order.ranks)
                if known != order.ranks:
                    before = [r for n, r in self.ranks.items() if r is not rank and order.restart_count in r.entered]
                    assert all(r.ended or not r.lives for r in before), "two orders to enter the same call"
                    self.gone_to[order.restart_count] = order.ranks
                assert rank.in_fn is None, "ordered to enter a call while in another one"
                if order.ranks.get(number) is not None:
                    rank.in_fn = order.restart_count
                elif number not in order.ranks:
                    rank.ended = True
            case o.Assign():
                living = [member for member in order.members if member.alive]
                ranks = {member.initial_rank: at for at, member in enumerate(living)}
                if len(ranks) > 2:
                    ranks[max(ranks)] = None  # a spare
                self.report(number, o.Assigned(ordinal=order.ordinal, ranks=ranks))
            case o.Finish() | o.Abort():
                rank.ended, rank.in_fn = True, None
            case o.Expel():
                rank.lives, rank.ended, rank.in_fn = False, True, None
        self.leave_function(number)

    def leave_function(self, number: int) -> None:
        """Exit the function if requested, and report it; a stubborn rank does not."""
        rank = self.ranks[number]
        if (
            rank.lives
            and not rank.ended
            and not rank.stubborn
            and rank.record.standing.restart_count < rank.leaves_before
        ):
            ready = rank.record.standing.ready
            if ready is None or ready.restart_count < rank.leaves_before:
                rank.in_fn = None
                self.report(number, o.RankReady(restart_count=rank.leaves_before, store_address=f"{number} 1"))

    def fail(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.in_fn is not None and rank.lives:
            self.report(number, self.fault(number, rank.in_fn, is_consequence=False))
            rank.leaves_before = max(rank.leaves_before, rank.in_fn + 1)
            rank.in_fn = None
            self.leave_function(number)

    def lose_peer(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.in_fn is not None and rank.lives:
            self.report(number, self.fault(number, rank.in_fn, is_consequence=True))
            rank.in_fn = None

    def fault(self, number: int, restart_count: int, *, is_consequence: bool) -> o.RankFault:
        return o.RankFault(
            initial_rank=number,
            restart_count=restart_count,
            kind=o.RankFaultKind.EXCEPTION,
            is_consequence=is_consequence,
        )

    def complete(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.in_fn is not None and rank.lives:
            self.report(number, o.Completed(restart_count=rank.in_fn))
            rank.in_fn = None

    def depart(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.lives and rank.linked and not rank.ended:
            self.report(number, o.Left(reason="unhealthy"))
            rank.ended, rank.in_fn = True, None

    def be_stubborn(self, number: int) -> None:
        self.ranks[number].stubborn = True

    def wait(self, _: int = 0) -> None:
        due_s = next_deadline_s(self.state, LIMITS)
        if due_s is not None:
            self.now_s = max(self.now_s, due_s)
            self.advance(TimePassed(at_s=self.now_s))

    # -- the end -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """No further faults: every message arrives, running ranks complete, and disconnected ranks reconnect."""
        for _ in range(200):
            for number, rank in self.ranks.items():
                if rank.lives and not rank.linked and not rank.ended:
                    self.link(number)
            progressed = True
            while progressed:
                progressed = False
                for number, rank in self.ranks.items():
                    while rank.reports and rank.linked:
                        self.receive_report(number)
                        progressed = True
                    while rank.orders and rank.linked and rank.lives and not rank.ended:
                        self.execute_order(number)
                        progressed = True
                    if rank.in_fn is not None and rank.lives and not rank.stubborn:
                        self.complete(number)
                        progressed = True
            if self.state.end is not None or all(r.ended or not r.lives for r in self.ranks.values()):
                return
            if self.state.phase == RestartPhase.RUNNING and next_deadline_s(self.state, LIMITS) is None:
                # Its agent process ends a rank that does not exit.
                for number, rank in self.ranks.items():
                    if rank.stubborn:
                        self.die(number)
            self.wait()


EVENTS = (
    *("receive_report", "execute_order") * 6,
    *(
        "link",
        "cut",
        "give_up_link",
        "die",
        "replace_coordinator",
        "fail",
        "lose_peer",
        "complete",
        "depart",
        "be_stubborn",
        "wait",
    ),
)


@settings(max_examples=600, deadline=None)
@given(
    num=st.integers(1, 5),
    early=st.booleans(),
    running=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 4)), max_size=80),
)
def test_every_sequence_of_events_ends(num: int, early: bool, running: bool, steps: list[tuple[str, int]]) -> None:
    """The restart ends in FINISHED or ABORTED; no rank enters a call twice, or while another is still in an older
    one."""
    world = World(num)
    for number in range(num):
        world.report(number, o.RankReady(restart_count=0, store_address=f"{number} 1"))
        if not early:
            world.link(number)
    if running:
        for _ in range(3):
            for number in range(num):
                world.receive_report(number)
                world.execute_order(number)
    for what, number in steps:
        getattr(world, what)(number % num)
    world.settle()
    assert all(rank.ended or not rank.lives for rank in world.ranks.values())


def test_world_of_512_restarts_once_and_finishes() -> None:
    """A death among 512 members costs every survivor one restart, and all decisions take less than a second."""
    world = World(512)
    for number in world.ranks:
        world.link(number)
        world.report(number, o.RankReady(restart_count=0, store_address=f"{number} 1"))
        world.receive_report(number)
    world.receive_report(0)
    for _ in range(2):
        for number in world.ranks:
            world.execute_order(number)
            world.receive_report(number)
    for number in world.ranks:
        world.execute_order(number)
    assert world.state.phase == RestartPhase.RUNNING
    begun_s = time.process_time()
    world.die(7)
    for number in world.ranks:
        world.execute_order(number)
        world.receive_report(number)
    for number in world.ranks:
        world.execute_order(number)
        world.receive_report(number)
    took_s = time.process_time() - begun_s
    assert (world.state.phase, world.state.restart_count) == (RestartPhase.RUNNING, 1)
    assert len(world.state.members) == 511
    print(f"{took_s:.3f} s")
