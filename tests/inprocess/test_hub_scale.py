"""The hub with many real links in one loop."""

from __future__ import annotations

import errno
import resource
import selectors
import socket
from collections.abc import Iterable

import pytest
from fake_ranks import monitor_task

from outlast import clock
from outlast.inprocess import protocol as m
from outlast.inprocess.hub import Hub, order_candidates
from outlast.inprocess.hub_client import HubClient
from outlast.policy import inprocess_protocol as p
from outlast.policy.inprocess_protocol import RestartLimits
from outlast.runtime.run_key import make_offer
from outlast.runtime.wire import Handshake, ProtocolError, encode_frame

NUM = 64
TIMEOUT_S = 100.0


TASK = monitor_task(pid=1, initial_world_size=2)


def place_of(rank: int) -> m.MemberPlace:
    return m.MemberPlace(node=f"n{rank // 8}", space="there", pid=1, address=f"h {rank + 1}")


def store_of(rank: int) -> str:
    return f"10.123.{rank // 256}.{rank % 256} 43210"


class Members:
    """Members that do what they are ordered, in the loop of the hub itself."""

    def __init__(
        self,
        num: int,
        num_active: int,
        *,
        coming: Iterable[int] = (),
        standing: p.MemberStanding | None = None,
        predecessor: m.HubCandidates | None = None,
    ) -> None:
        self.selector = selectors.DefaultSelector()
        own = p.HubCandidate(initial_rank=0, node="n0", address="h 1", life="0")
        self.hub = Hub(
            self.selector,
            world_size=num,
            limits=RestartLimits(),
            heartbeat_timeout_s=60.0,
            host=own,
            space="here",
            predecessor=predecessor,
        )
        self.num_active = num_active
        self.num_bytes = 0
        self.num_places = 0
        self.links: dict[int, m.HubChannel] = {}
        self.known: dict[int, m.HubCandidates] = {}
        self.orders: dict[int, list[p.Order]] = {rank: [] for rank in range(num)}
        listener = socket.create_server(("127.0.0.1", 0), backlog=num)
        for rank in coming or range(num):
            connection = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
            link = self.links[rank] = m.HubChannel(connection, m.OnLink)
            self.selector.register(link, selectors.EVENT_READ, lambda _, rank=rank: self.hear(rank))
            self.hub.adopt(
                m.HubChannel(accepted, m.OnLink),
                m.JoinHub(
                    initial_rank=rank,
                    initial_world_size=num,
                    place=place_of(rank),
                    life=str(rank),
                    standing=standing or p.MemberStanding(),
                ),
            )
            if standing is None:
                link.send(p.RankReady(restart_count=0, store_address=store_of(rank)))
        listener.close()

    def hear(self, rank: int) -> None:
        for message in self.links[rank].receive():
            self.num_bytes += len(encode_frame(message))
            match message:
                case m.HubCandidates():
                    self.num_places += len(message.members)
                    known = message.follow(self.known.get(rank, m.HubCandidates(candidates=())))
                    assert known is not None
                    self.known[rank] = known
                case p.Restart(restart_count=restart_count):
                    self.links[rank].send(p.RankReady(restart_count=restart_count, store_address=store_of(rank)))
                case p.Assign(ordinal=ordinal, members=members):
                    ranks = {member.initial_rank: member.rank for member in members if member.alive}
                    gaps = sorted(set(range(self.num_active)) - set(ranks.values()))
                    spares = [number for number, rank in ranks.items() if rank is None]
                    ranks |= dict(zip(spares, gaps, strict=False))
                    self.links[rank].send(p.Assigned(ordinal=ordinal, ranks=ranks))
            if isinstance(message, p.Go | p.Restart | p.Finish | p.Abort | p.Expel):
                self.orders[rank].append(message)

    def turn(self, end_s: float) -> None:
        for key, events in self.selector.select(max(0.0, min(self.hub.deadline_s, end_s) - clock.now_s())):
            if key.fd in self.selector.get_map():
                key.data(events)
        self.hub.look()

    def run_until(self, what: type[p.Order], ranks: range | list[int], restart_count: int) -> None:
        end_s = clock.now_s() + TIMEOUT_S
        while not all(
            any(
                isinstance(order, what) and getattr(order, "restart_count", -1) == restart_count
                for order in self.orders[rank]
            )
            for rank in ranks
        ):
            assert clock.now_s() < end_s
            self.turn(end_s)

    def cut(self, rank: int) -> None:
        self.selector.unregister(self.links[rank])
        self.links[rank].close()

    def close(self) -> None:
        for rank, link in self.links.items():
            if link.fileno() >= 0:
                self.cut(rank)
        self.hub.close()
        self.selector.close()


def test_many_members_restart_and_finish() -> None:
    """Sixty-four members go, lose one, go again with another in its place, and finish; all know the candidates."""
    members = Members(NUM, 60)
    try:
        members.run_until(p.Go, range(NUM), 0)
        assert [c.initial_rank for c in members.known[5].candidates] == [0, 8, 16, 24]
        assert members.known[8].members.keys() == set(range(NUM))
        assert not members.known[5].members
        gone = p.RankFault(initial_rank=9, restart_count=0, kind=p.RankFaultKind.DIED)
        members.links[9].send(m.Gone(fault=gone))
        rest = [rank for rank in range(NUM) if rank != 9]
        members.run_until(p.Go, rest, 1)
        assert members.known[8].members.keys() == set(rest)
        for rank in rest:
            members.links[rank].send(p.Completed(restart_count=1))
        members.run_until(p.Finish, rest, 1)
        assert not any(isinstance(order, p.Restart) and order.restart_count > 1 for order in members.orders[5])
    finally:
        members.close()


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_a_change_at_ten_thousand_ranks_costs_each_a_hundred_bytes() -> None:
    """A lost rank costs each member 100 bytes at most, 64 at once ten times that; the candidates know all.

    With the fault as a monitor process reports it, a spare in the place of each, and addresses as they are.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    num = min(10_240, (hard - 500) // 2)
    members = Members(num, num - 256)
    try:
        members.run_until(p.Go, range(num), 0)
        lost: set[int] = set()
        for restart, victims, bar in ((1, range(9, 10), 100), (2, range(1000, 1064), 1000)):
            members.num_bytes = 0
            for rank in victims:
                gone = p.RankFault(initial_rank=rank, restart_count=restart - 1, kind=p.RankFaultKind.DIED)
                members.links[rank].send(m.Gone(fault=gone))
            lost |= set(victims)
            rest = [rank for rank in range(num) if rank not in lost]
            members.run_until(p.Go, rest, restart)
            print(f"{num} ranks, {len(victims)} lost: {members.num_bytes / num:.1f} bytes for each")
            assert members.num_bytes <= bar * num
            assert members.known[8].members.keys() == set(rest)
            assert members.known[8].base == 0
    finally:
        members.close()


def test_a_long_summary_goes_to_each_member_once() -> None:
    """What a rank says of its fault goes to all with the order to restart, and not again with the order to go."""
    members = Members(NUM, 60)
    try:
        members.run_until(p.Go, range(NUM), 0)
        members.num_bytes = 0
        fault = p.RankFault(initial_rank=9, restart_count=0, kind=p.RankFaultKind.EXCEPTION, summary="e" * 2000)
        members.links[9].send(fault)
        members.run_until(p.Go, range(NUM), 1)
        assert 2000 * NUM < members.num_bytes < 2150 * NUM
    finally:
        members.close()


@pytest.mark.parametrize("coming", [range(256), range(255, -1, -1), [*range(255, 0, -7), *range(256)]])
def test_few_get_all_members_however_they_join_the_next_hub(coming: Iterable[int]) -> None:
    """In whatever order members come to a hub that took over, a handful of copies of all members is sent."""
    num = 256
    runs = p.rank_runs({rank: rank for rank in range(num)})
    predecessor = m.HubCandidates(candidates=(), version=3, members={rank: place_of(rank) for rank in range(num)})
    order = list(dict.fromkeys(coming))
    standing = p.MemberStanding(restart_count=0, runs=runs)
    members = Members(num, num, coming=order, standing=standing, predecessor=predecessor)
    try:
        end_s = clock.now_s() + TIMEOUT_S
        while len(members.known) < num or members.hub._announce_s is not None:
            assert clock.now_s() < end_s
            members.turn(end_s)
        for rank in range(num):
            members.hear(rank)
        candidates = members.known[100].candidates
        assert len({one.node for one in candidates}) == 4
        assert members.num_places <= 10 * num
        for one in candidates[1:]:
            assert members.known[one.initial_rank].members.keys() == set(range(num))
    finally:
        members.close()


def test_a_missed_change_of_members_is_noticed() -> None:
    """A change of another version than the known one is not taken; what is taken has all members."""
    here = m.MemberPlace(node="n", space="s", pid=1, address="h 1")
    known = m.HubCandidates(candidates=(), version=3, members={1: here, 2: here})
    change = m.HubCandidates(candidates=(), version=4, base=3, members={5: here}, lost=(1,))
    taken = change.follow(known)
    assert taken is not None
    assert (taken.members.keys(), taken.version) == ({2, 5}, 4)
    assert change.follow(taken) is None
    assert known.follow(taken) == known


@pytest.mark.slow
def test_hub_that_loses_most_members_stops_the_rest() -> None:
    """Most may go on elsewhere, so those here must not; nobody restarts for it."""
    members = Members(5, 5)
    try:
        members.run_until(p.Go, range(5), 0)
        for rank in (2, 3, 4):
            members.cut(rank)
            noticed_s = clock.now_s() + 0.05  # one after the other, as a busy machine sees them
            while clock.now_s() < noticed_s:
                members.turn(noticed_s)
        members.run_until(p.Abort, [0, 1], 0)
        assert not any(isinstance(order, p.Restart) for order in members.orders[0])
    finally:
        members.close()


def test_candidates_are_spread_over_nodes() -> None:
    """The host comes first, then one of each other node, then others; four at most."""
    able = [
        p.HubCandidate(initial_rank=rank, node=node, address=f"h {rank + 1}", life=str(rank))
        for rank, node in enumerate(["a", "a", "b", "b", "c"])
    ]
    assert [c.initial_rank for c in order_candidates(able, 1)] == [1, 2, 4, 0]
    assert [c.initial_rank for c in order_candidates(able[:2], 1)] == [1, 0]


def test_a_hub_that_gave_its_last_order_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its own rank is not yet out of the wrapper, it waits for what comes instead of looking all the time."""
    members = Members(2, 2)
    try:
        members.run_until(p.Go, range(2), 0)
        for link in members.links.values():
            link.send(p.Completed(restart_count=0))
        members.run_until(p.Finish, range(2), 0)
        now_s = clock.now_s
        monkeypatch.setattr(clock, "now_s", lambda: now_s() + 10.0)
        assert members.hub.is_over
        assert members.hub.deadline_s > clock.now_s()
    finally:
        members.close()


def test_a_hub_that_outlives_its_rank_does_not_spin() -> None:
    """A monitor process that only hosts the hub for the others waits for what comes."""
    selector = selectors.DefaultSelector()
    client = HubClient(selector, TASK, on_order=lambda _: None, on_candidates=lambda _: None)
    try:
        client.connect(m.Connect(hub=client.address, offer=make_offer()))
        client.end(m.Gone(fault=p.RankFault(initial_rank=0, restart_count=0, kind=p.RankFaultKind.DIED)))
        later_s = clock.now_s() + 5.0
        assert not client.is_done
        assert client.look(later_s) > later_s
    finally:
        client.close()
        selector.close()


def test_small_pieces_make_whole_messages() -> None:
    """A message arrives whole, however its bytes come; what is too large breaks the link."""
    ours, theirs = socket.socketpair()
    channel = m.HubChannel(theirs, m.OnLink)
    try:
        sent = p.Completed(restart_count=7)
        for byte in encode_frame(sent):
            ours.send(bytes([byte]))
            found = channel.receive()
        assert found == [sent]
        ours.send((1 << 30).to_bytes(4, "little"))
        with pytest.raises(ProtocolError, match="announced"):
            channel.receive()
    finally:
        channel.close()
        ours.close()


def test_without_a_descriptor_the_listener_rests_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that cannot be accepted does not keep the loop busy; it is accepted when there is room again."""
    selector = selectors.DefaultSelector()
    client = HubClient(selector, TASK, on_order=lambda _: None, on_candidates=lambda _: None)
    host, port = client.address.split(" ")
    try:
        with socket.create_connection((host, int(port))) as member:
            listener = client._listener

            class Exhausted:
                def accept(self) -> None:
                    raise OSError(errno.EMFILE, "too many open files")

            ((key, events),) = selector.select(TIMEOUT_S)
            monkeypatch.setattr(client, "_listener", Exhausted())
            monkeypatch.setattr(selector, "unregister", lambda _: type(selector).unregister(selector, listener))
            key.data(events)
            monkeypatch.undo()
            assert selector.select(0) == []
            now_s = clock.now_s()
            assert now_s < client.look(now_s) <= now_s + 1.0
            client.look(now_s + 1.0)
            ((key, events),) = selector.select(TIMEOUT_S)
            key.data(events)
            assert member.recv(4) == b"OLw1"
    finally:
        client.close()
        selector.close()


def test_strangers_that_say_nothing_keep_nobody_out() -> None:
    """Of more connections than are kept the oldest are closed, so that the newest has a place."""
    selector = selectors.DefaultSelector()
    client = HubClient(selector, TASK, on_order=lambda _: None, on_candidates=lambda _: None)
    host, port = client.address.split(" ")
    strangers = []
    try:
        for _ in range(300):
            strangers.append(socket.create_connection((host, int(port))))
            ((key, events),) = selector.select(TIMEOUT_S)
            key.data(events)
        assert len(client._newcomers) == 256
        greeting = Handshake(None, "", is_server=True).outgoing
        assert len(strangers[0].recv(100)) == len(greeting)
        assert strangers[0].recv(1) == b""
        assert strangers[-1].recv(100)[:4] == greeting[:4]
    finally:
        for stranger in strangers:
            stranger.close()
        client.close()
        selector.close()
