"""Every rank gets the maximum of all ranks' numbers, in any world, or the loss of a peer."""

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


def run_on_all_ranks(world: list[Dissemination], work: Callable[[int, Dissemination], Any]) -> list[Any]:
    """Run ``work`` on all ranks at the same time; return results and errors."""

    def catch_errors(rank: int) -> Any:
        try:
            return work(rank, world[rank])
        except OutlastError as error:
            return error

    with ThreadPoolExecutor(len(world)) as pool:
        return list(pool.map(catch_errors, range(len(world))))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_all_ranks_get_the_maximum(world_size: int) -> None:
    """Each value, negative and large ones included, in repeated rounds, in worlds of any size."""
    with ranks_of(world_size) as world:

        def work(rank: int, one: Dissemination) -> list[list[int]]:
            answers = []
            for number in range(20):
                one.start([(rank + number) % world_size, -rank, 2**63 - 1 - rank, number])
                answers.append(one.result())
            return answers

        expected = [[world_size - 1, 0, 2**63 - 1, number] for number in range(20)]
        assert run_on_all_ranks(world, work) == [expected] * world_size


def test_exited_rank_raises_peer_lost_on_the_others() -> None:
    """When one of five ranks cuts its connections, each other rank raises PeerLost instead of a result."""
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

        ended = run_on_all_ranks(world, work)
        assert [type(one) for one in ended] == [PeerLost, PeerLost, PeerLost, OutlastError, PeerLost]


def test_missing_peer_raises_peer_lost_after_the_timeout() -> None:
    """After the timeout the result is PeerLost, not another wait."""
    with ranks_of(2, timeout_s=0.05) as world:
        world[0].start([1])
        with pytest.raises(PeerLost, match="timed out"):
            world[0].result()


def test_different_numbers_of_values_are_an_error() -> None:
    """Ranks with different numbers of values raise an error with both numbers."""
    with ranks_of(2) as world:

        def work(rank: int, one: Dissemination) -> list[int]:
            one.start([1] * (rank + 1))
            return one.result()

        first, second = run_on_all_ranks(world, work)
        assert "agrees on 1 numbers, another one on 2" in str(first)
        assert "agrees on 2 numbers, another one on 1" in str(second)


def connect(listener: socket.socket, *, key: bytes, rank: int) -> socket.socket | None:
    """Connect to a rank as another one, with a key; return the connection if that rank proves the key."""
    connection = socket.create_connection(listener.getsockname())
    channel = MessageChannel[Any](connection, Any)
    try:
        channel.authenticate(Handshake(key, "consensus", is_server=False, client_id=rank), within_s=5)
    except ConnectionError:
        channel.close()
        return None
    return connection


def test_stranger_is_not_accepted_as_a_rank() -> None:
    """A peer without the key, a silent one, one that disconnects early or an unexpected rank is not accepted, and
    delays no other."""
    key = b"k" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        silent = socket.create_connection(listener.getsockname())
        early = socket.create_connection(listener.getsockname())
        early.sendall(b"short")
        early.close()
        future = pool.submit(authenticate_peers, listener, [], {4, 5}, rank=0, key=key, end_s=clock.now_s() + 60)
        others = [
            connect(listener, key=other_key, rank=rank)
            for other_key, rank in ((b"u" * 32, 4), (key, 6), (key, 4), (key, 4), (key, 5))
        ]
        accepted = future.result()
        assert others[0] is None
        assert accepted.keys() == {4, 5}
        for rank, own in ((4, others[2]), (5, others[4])):
            assert own is not None
            assert accepted[rank].getpeername() == own.getsockname()
        for one in (silent, *others, *accepted.values()):
            if one is not None:
                one.close()


def test_connecting_ends_at_its_deadline() -> None:
    """Connecting ends at its deadline, also with a peer that accepts and sends nothing, and fails with a peer of
    another run."""
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
