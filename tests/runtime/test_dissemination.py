"""Every rank gets the largest of all ranks' numbers, in any world, or hears that a peer is gone."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from outlast import clock
from outlast.errors import OutlastError, PeerLost
from outlast.runtime.consensus import Dissemination, authenticate_peers
from outlast.runtime.wire import Handshake, MessageChannel


@contextmanager
def ranks_of(world_size: int, *, timeout_s: float = 10.0) -> Iterator[list[Dissemination]]:
    """Connect a world within this process."""
    rounds = [1 << number for number in range(math.ceil(math.log2(world_size)))]
    to: list[list[socket.socket]] = [[] for _ in range(world_size)]
    of: list[list[socket.socket]] = [[] for _ in range(world_size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for distance in rounds:
            for rank in range(world_size):
                to[rank].append(socket.create_connection(listener.getsockname()))
                of[(rank + distance) % world_size].append(listener.accept()[0])
    world = [Dissemination(to[rank], of[rank], timeout_s=timeout_s) for rank in range(world_size)]
    try:
        yield world
    finally:
        for rank in world:
            rank.cut()
            rank.close()


def everywhere(world: list[Dissemination], work: Callable[[int, Dissemination], Any]) -> list[Any]:
    """Do the same on all ranks at once; return what came of it, errors too."""

    def safely(rank: int) -> Any:
        try:
            return work(rank, world[rank])
        except OutlastError as error:
            return error

    with ThreadPoolExecutor(len(world)) as pool:
        return list(pool.map(safely, range(len(world))))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_all_ranks_get_the_largest(world_size: int) -> None:
    """One by one, negative and large ones too, many times over, in worlds that are and are no powers of two."""
    with ranks_of(world_size) as world:

        def work(rank: int, one: Dissemination) -> list[list[int]]:
            answers = []
            for number in range(20):
                one.start([(rank + number) % world_size, -rank, 2**63 - 1 - rank, number])
                answers.append(one.result())
            return answers

        expected = [[world_size - 1, 0, 2**63 - 1, number] for number in range(20)]
        assert everywhere(world, work) == [expected] * world_size


def test_a_rank_that_left_is_missed_by_those_who_need_it() -> None:
    """When one of five cuts its connections, no other gets an answer: each raises PeerLost, and may start no other."""
    with ranks_of(5) as world:

        def work(rank: int, one: Dissemination) -> list[int]:
            if rank == 3:
                one.cut()
                raise OutlastError("left")
            one.start([rank])
            try:
                return one.result()
            finally:
                one.cut()  # as the session does when it ends on an error

        ended = everywhere(world, work)
        assert [type(one) for one in ended] == [PeerLost, PeerLost, PeerLost, OutlastError, PeerLost]


def test_a_peer_that_does_not_come_is_said_to_be_late() -> None:
    """After the timeout the answer is PeerLost, not another wait."""
    with ranks_of(2, timeout_s=0.05) as world:
        world[0].start([1])
        with pytest.raises(PeerLost, match="timed out"):
            world[0].result()


def test_ranks_that_ask_different_things_are_told() -> None:
    """Different numbers of numbers are no answer but an error that names both."""
    with ranks_of(2) as world:

        def work(rank: int, one: Dissemination) -> list[int]:
            one.start([1] * (rank + 1))
            return one.result()

        first, second = everywhere(world, work)
        assert "agrees on 1 numbers, another one on 2" in str(first)
        assert "agrees on 2 numbers, another one on 1" in str(second)


def connect(listener: socket.socket, *, key: bytes, rank: int) -> socket.socket | None:
    """Come to a rank as another one, with a key; return the connection if the rank proves the key, too."""
    connection = socket.create_connection(listener.getsockname())
    channel = MessageChannel[Any](connection, Any)
    try:
        channel.authenticate(Handshake(key, "consensus", is_server=False, client_id=rank), within_s=5)
    except ConnectionError:
        channel.close()
        return None
    return connection


def test_a_stranger_is_nobody() -> None:
    """Who does not know the key, is silent, leaves early or is not expected is no rank, and delays none."""
    key = b"k" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        silent = socket.create_connection(listener.getsockname())
        early = socket.create_connection(listener.getsockname())
        early.sendall(b"short")
        early.close()
        met = pool.submit(authenticate_peers, listener, [], {4, 5}, rank=0, key=key, end_s=clock.now_s() + 60)
        others = [
            connect(listener, key=other_key, rank=rank)
            for other_key, rank in ((b"u" * 32, 4), (key, 6), (key, 4), (key, 4), (key, 5))
        ]
        came = met.result()
        assert others[0] is None
        assert came.keys() == {4, 5}
        for rank, own in ((4, others[2]), (5, others[4])):
            assert own is not None
            assert came[rank].getpeername() == own.getsockname()
        for one in (silent, *others, *came.values()):
            if one is not None:
                one.close()


def test_peers_that_do_not_come_end_the_wait() -> None:
    """Connecting has an end, also with a peer that accepts and says nothing, and with one of another run."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as peer:
        to = socket.create_connection(peer.getsockname())
        with to, pytest.raises(TimeoutError, match="not all ranks have come in time"):
            authenticate_peers(listener, [to], set(), rank=0, key=b"k" * 32, end_s=clock.now_s() + 0.1)
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, ours, theirs, ThreadPoolExecutor(1) as pool:
        channel = MessageChannel[Any](theirs, Any)
        other = Handshake(b"u" * 32, "consensus", is_server=True)
        served = pool.submit(channel.authenticate, other, within_s=5)
        pool_end = clock.now_s() + 60
        served.add_done_callback(lambda _: channel.close())
        with pytest.raises(ConnectionError):
            authenticate_peers(listener, [ours], set(), rank=0, key=b"k" * 32, end_s=pool_end)
