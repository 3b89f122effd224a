"""The in-process restart coordinator: cost, recipients of orders, and cleanup."""

from __future__ import annotations

import os
import select
import socket
from contextlib import closing
from typing import Any

import msgspec
import pytest

from outlast.inprocess.protocol import Gone, JoinRelay, MemberRecord
from outlast.launch import protocol as m
from outlast.launch.in_process_restarts import ANY_CALL, InProcessRestarts
from outlast.launch.rank_relay import RankRelay
from outlast.policy import inprocess_protocol as p
from outlast.runtime.wire import encode_frame

LIMITS = p.RestartLimits()


def store_of(rank: int) -> str:
    return f"10.123.{rank // 256}.{rank % 256} 43210"


def fault_of(rank: int, restart_count: int) -> Gone:
    fault = p.RankFault(initial_rank=rank, restart_count=restart_count, kind=p.RankFaultKind.DIED)
    return Gone(fault=fault)


class Nodes:
    """Simulated nodes whose ranks obey their orders; the bytes of all messages are counted in both directions.

    Args:
        num: Nodes.
        nproc: Ranks on each.
        num_spares: Ranks that are spares.
        is_batched: The ranks of a node report in one message, as when they do within a turn of its loop.
    """

    def __init__(self, num: int, nproc: int = 8, *, num_spares: int = 0, is_batched: bool = True) -> None:
        self.num, self.nproc, self.num_active = num, nproc, num * nproc - num_spares
        self.is_batched = is_batched
        self.num_bytes = 0
        self.num_messages = 0
        self.now_s = 0.0
        self.records = {rank: MemberRecord() for rank in range(num * nproc)}
        self.orders: dict[int, list[p.Order]] = {rank: [] for rank in self.records}
        self.dead: set[int] = set()
        self.busy: set[int] = set()
        """Ranks that do not get ready."""
        self.coordinator = InProcessRestarts()
        self.coordinator.begin(0, 1)

    def node_of(self, rank: int) -> str:
        return f"node-{rank // self.nproc}"

    def join(self, *, call: int = 0, except_for: tuple[int, ...] = ()) -> None:
        for rank in self.records.keys() - set(except_for) - self.dead:
            self.send_standing((rank,), call=call)
            self.report({rank: p.RankReady(restart_count=0, store_address=store_of(rank))}, call=call)
        self.settle()

    def standings(self, ranks: tuple[int, ...], call: int = 0) -> m.RankStandings:
        known = tuple(
            m.KnownRank(
                initial_rank=rank,
                standing=self.records[rank].standing,
                last_words=fault_of(rank, self.records[rank].standing.restart_count) if rank in self.dead else None,
            )
            for rank in ranks
        )
        return m.RankStandings(
            node=self.node_of(ranks[0]),
            epoch=self.node_of(ranks[0]),
            cycle=0,
            call=call,
            world_size=len(self.records),
            limits=LIMITS,
            ranks=known,
        )

    def send_standing(self, ranks: tuple[int, ...], *, call: int = 0) -> None:
        self.deliver(self.standings(ranks, call))

    def report(self, reports: dict[int, Any], *, call: int = 0) -> None:
        """Report for ranks of one node."""
        for rank, report in reports.items():
            if not isinstance(report, Gone):
                self.records[rank].note_report(report)
        batches = [reports] if self.is_batched else [{rank: report} for rank, report in reports.items()]
        for batch in batches:
            node = self.node_of(next(iter(batch)))
            self.deliver(m.RankReports(node=node, epoch=node, cycle=0, call=call, reports=tuple(batch.items())))

    def deliver(self, message: m.RankStandings | m.RankReports) -> None:
        counted = msgspec.structs.replace(message, node="", epoch="")  # the coordinator's side of the link adds both
        self.num_bytes += len(encode_frame(counted))
        self.num_messages += 1
        self.coordinator.take(message, self.now_s)

    def die(self, *ranks: int, restart_count: int) -> None:
        self.dead |= set(ranks)
        for rank in ranks:
            self.report({rank: fault_of(rank, restart_count)})
        self.settle()

    def settle(self) -> None:
        """Deliver orders and their consequences until nothing is left."""
        while self.coordinator.out:
            orders, self.coordinator.out = self.coordinator.out, []
            for node, _, order in orders:
                self.num_bytes += len(encode_frame(order))
                self.num_messages += 1
                self.obey(node, order)

    def obey(self, node: str, order: m.RankOrder) -> None:
        responses: dict[int, p.Report] = {}
        for first, num in order.runs:
            for rank in range(first, first + num):
                assert self.node_of(rank) == node
                if rank in self.dead:
                    continue
                self.records[rank].note_order(order.order)
                self.orders[rank].append(order.order)
                match order.order:
                    case p.Restart(restart_count=count) if rank not in self.busy:
                        responses[rank] = p.RankReady(restart_count=count, store_address=store_of(rank))
                    case p.Assign(ordinal=ordinal, members=members):
                        responses[rank] = p.Assigned(ordinal=ordinal, ranks=self.assign(members))
        if responses:
            self.report(responses, call=order.call)

    def assign(self, members: tuple[Any, ...]) -> dict[int, int | None]:
        ranks = {member.initial_rank: member.rank for member in members if member.alive}
        gaps = sorted(set(range(self.num_active)) - set(ranks.values()))
        spares = [number for number, rank in ranks.items() if rank is None]
        return ranks | dict(zip(spares, gaps, strict=False))

    def last(self, rank: int) -> p.Order:
        return self.orders[rank][-1]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_batched", [True, False])
def test_a_loss_of_ten_thousand_ranks_costs_100_bytes_each(is_batched: bool) -> None:
    """All messages of a restart in both directions for one lost rank take at most 100 bytes per rank, and up to three
    times that for 64 lost ranks without neighbours among them."""
    nodes = Nodes(1280, num_spares=256, is_batched=is_batched)
    nodes.join()
    num = len(nodes.records)
    assert all(isinstance(orders[-1], p.Go) for orders in nodes.orders.values())
    lost: set[int] = set()
    cases = ((1, [9], 100), (2, [*range(1000, 1064)], 150), (3, [*range(2000, 8400, 100)], 300))
    for restart_count, victims, limit in cases:
        nodes.num_bytes = nodes.num_messages = 0
        nodes.die(*victims, restart_count=restart_count - 1)
        lost |= set(victims)
        for rank in nodes.records.keys() - lost:
            order = nodes.last(rank)
            assert isinstance(order, p.Go)
            assert order.restart_count == restart_count
        bytes_per_rank = nodes.num_bytes / num
        print(f"{num} ranks, {len(victims)} lost: {bytes_per_rank:.1f} bytes for each, {nodes.num_messages} messages")
        assert bytes_per_rank <= limit


def test_an_order_is_sent_once_per_node() -> None:
    """An order is sent once however many ranks a node has, without the ranks that are excluded from it."""
    nodes = Nodes(3, 4, num_spares=1)
    nodes.join()
    nodes.coordinator.take(
        m.RankReports(node="node-0", epoch="e", cycle=0, call=0, reports=((1, fault_of(1, 0)),)), nodes.now_s
    )
    assert [(node, order.runs) for node, _, order in nodes.coordinator.out] == [
        ("node-0", ((0, 1), (2, 2))),
        ("node-1", ((4, 4),)),
        ("node-2", ((8, 4),)),
    ]
    assert {order.term for _, _, order in nodes.coordinator.out} == {1}


def test_a_rank_that_died_early_is_not_awaited() -> None:
    """A rank that died before it joined is not awaited in the call that it was about to begin, nor in the next one if
    no rank has begun a call."""
    nodes = Nodes(2, 2, num_spares=1)
    nodes.dead.add(1)
    nodes.deliver(m.RankReports(node="node-0", epoch="e", cycle=0, call=ANY_CALL, reports=((1, fault_of(1, 0)),)))
    nodes.join()
    order = nodes.last(0)
    assert isinstance(order, p.Go)
    assert order.ranks == {0: 0, 2: 1, 3: 2}

    second = Nodes(2, 2, num_spares=1)
    second.join(except_for=(1,))
    assert not second.orders[0]
    second.dead.add(1)
    second.deliver(m.RankReports(node="node-0", epoch="e", cycle=0, call=ANY_CALL, reports=((1, fault_of(1, 0)),)))
    second.settle()
    order = second.last(0)
    assert isinstance(order, p.Go)
    assert order.ranks == {0: 0, 2: 1, 3: 2}


def test_an_absent_rank_is_awaited_up_to_the_barrier_timeout() -> None:
    """After the barrier's timeout the other ranks continue without an absent one, which is expelled later."""
    nodes = Nodes(2, 2, num_spares=1)
    nodes.join(except_for=(3,))
    assert nodes.coordinator.deadline_s == LIMITS.barrier_timeout_s
    nodes.now_s = LIMITS.barrier_timeout_s
    nodes.coordinator.look(nodes.now_s)
    nodes.settle()
    order = nodes.last(0)
    assert isinstance(order, p.Go)
    assert order.ranks == {0: 0, 1: 1, 2: 2}
    nodes.send_standing((3,))
    nodes.settle()
    assert isinstance(nodes.last(3), p.Expel)


def test_each_call_has_its_own_state() -> None:
    """Each call has its own members, restarts and end; a rank that returns for the end of the previous call gets it."""
    nodes = Nodes(2, 2)
    nodes.join(call=0)
    for rank in range(4):
        nodes.report({rank: p.Completed(restart_count=0)}, call=0)
    nodes.settle()
    assert all(isinstance(nodes.last(rank), p.Finish) for rank in range(4))
    ended = nodes.records
    nodes.records = {rank: MemberRecord() for rank in range(4)}
    nodes.join(call=1)
    assert all(isinstance(nodes.last(rank), p.Go) for rank in range(4))
    nodes.report({2: p.RankFault(initial_rank=2, restart_count=0, kind=p.RankFaultKind.EXCEPTION)}, call=1)
    nodes.settle()
    order = nodes.last(0)
    assert isinstance(order, p.Go)
    assert order.restart_count == 1
    nodes.records = ended
    nodes.send_standing((3,), call=0)
    ((node, _, repeated),) = nodes.coordinator.out
    assert (node, repeated.call, repeated.runs) == ("node-1", 0, ((3, 1),))
    assert isinstance(repeated.order, p.Finish)


def test_reports_of_another_cycle_are_ignored() -> None:
    """Reports of ranks of an earlier cycle and reports after the cycle's end change nothing."""
    nodes = Nodes(2, 2)
    nodes.join()
    fault = p.RankFault(initial_rank=0, restart_count=0, kind=p.RankFaultKind.EXCEPTION)
    stale = m.RankReports(node="node-0", epoch="e", cycle=7, call=0, reports=((0, fault),))
    nodes.coordinator.take(stale, 0.0)
    nodes.coordinator.close()
    nodes.coordinator.take(msgspec.structs.replace(stale, cycle=0), 0.0)
    assert not nodes.coordinator.out
    assert nodes.coordinator.deadline_s is None


@pytest.mark.parametrize("dead_ranks", [(), (2,), (0, 2)])
def test_a_takeover_continues_from_the_ranks_state(dead_ranks: tuple[int, ...]) -> None:
    """A new coordinator disturbs no rank while all live, and restarts all once for those that died, in any order of
    reports."""
    nodes = Nodes(3, 2, num_spares=2)
    nodes.join()
    nodes.dead |= set(dead_ranks)
    before = {rank: len(orders) for rank, orders in nodes.orders.items()}
    nodes.coordinator = InProcessRestarts()
    for first in (4, 0, 2):
        nodes.coordinator.keep(nodes.standings((first, first + 1)))
    stale = msgspec.structs.replace(nodes.standings((0, 1)), node="lost", cycle=0)
    nodes.coordinator.keep(stale)
    nodes.coordinator.take_over(0, 2, ["node-0", "node-1", "node-2"], 5.0)
    nodes.settle()
    for rank in nodes.records.keys() - set(dead_ranks):
        if dead_ranks:
            order = nodes.last(rank)
            assert isinstance(order, p.Go)
            assert order.restart_count == 1
            assert sorted(active for active in order.ranks.values() if active is not None) == [0, 1, 2, 3]
            assert not order.ranks.keys() & set(dead_ranks)
        else:
            assert len(nodes.orders[rank]) == before[rank]


def test_spares_replace_the_ranks_of_an_unreachable_node() -> None:
    """Where no launcher ends the cycle of an unreachable node, spares on other nodes take the places of its ranks."""
    nodes = Nodes(3, 4, num_spares=4)
    nodes.join()
    nodes.dead |= set(range(4))
    nodes.coordinator.lose({"node-0"}, nodes.now_s)
    nodes.settle()
    order = nodes.last(4)
    assert isinstance(order, p.Go)
    assert order.restart_count == 1
    assert order.ranks.keys() == set(range(4, 12))
    assert sorted(rank for rank in order.ranks.values() if rank is not None) == list(range(8))


def test_a_minority_of_the_members_stops() -> None:
    """A minority stops, since the others may resume elsewhere; of two halves the one with the lowest rank resumes."""
    cases = [(3, {"node-1", "node-2"}, True), (3, {"node-1"}, False), (2, {"node-0"}, True), (2, {"node-1"}, False)]
    for num, lost, stops in cases:
        nodes = Nodes(num, 2)
        nodes.join()
        nodes.coordinator.lose(lost, nodes.now_s)
        nodes.settle()
        order = nodes.last(2 if "node-0" in lost else 0)
        assert ("cannot be reached" in getattr(order, "reason", "")) == stops


def test_a_takeover_waits_for_members_of_unknown_nodes() -> None:
    """A coordinator without a list of nodes waits for the members that no node has reported, and finally resumes
    without them."""
    nodes = Nodes(3, 2, num_spares=2)
    nodes.join()
    nodes.coordinator = InProcessRestarts()
    nodes.coordinator.keep(nodes.standings((0, 1)))
    assert nodes.coordinator.missing() == {2, 3, 4, 5}
    nodes.coordinator.keep(nodes.standings((4, 5)))
    assert nodes.coordinator.missing() == {2, 3}
    nodes.dead |= {2, 3}
    nodes.coordinator.take_over(0, 2, None, nodes.now_s)
    nodes.settle()
    order = nodes.last(0)
    assert isinstance(order, p.Go)
    assert (order.restart_count, order.ranks) == (1, {0: 0, 1: 1, 4: 2, 5: 3})


def test_orders_of_an_earlier_term_are_ignored() -> None:
    """An agent accepts orders of its coordinator's current term, and none of an earlier coordinator."""
    relay, coordinator = RankRelay(), InProcessRestarts()
    with closing(relay), socket.socket(socket.AF_UNIX) as duty:
        coordinator.begin(0, 1)
        relay.begin_cycle(0)
        duty.connect(f"\0{relay.address}")
        join = JoinRelay(
            cycle=0,
            call=0,
            initial_rank=0,
            initial_world_size=1,
            pid=os.getpid(),
            labels={},
            limits=LIMITS,
            standing=p.MemberStanding(),
        )
        duty.sendall(encode_frame(join))
        came: list[m.RankStandings | m.RankReports] = []
        while not came:
            select.select([relay], [], [], 100.0)
            came += relay.serve()
        coordinator.term = 3
        assert relay.introduce(3) == came
        coordinator.take(msgspec.structs.replace(came[0], node="n", epoch="e"), 0.0)
        coordinator.take(
            m.RankReports(
                node="n", epoch="e", cycle=0, call=0, reports=((0, p.RankReady(restart_count=0, store_address="s 1")),)
            ),
            0.0,
        )
        ((_, _, order),) = coordinator.out
        relay.obey(msgspec.structs.replace(order, term=2))
        duty.setblocking(False)
        with pytest.raises(BlockingIOError):
            duty.recv(1)
        relay.obey(order)
        assert duty.recv(1000)
