"""Every rank gets the largest of all ranks' numbers, in any world, or hears that a peer is gone."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from outlast.errors import OutlastError, PeerLost
from outlast.runtime.dissemination import _HELLO, Dissemination, _greet


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
                answers.append(one.finish())
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
                return one.finish()
            finally:
                one.cut()  # as the session does when it ends on an error

        ended = everywhere(world, work)
        assert [type(one) for one in ended] == [PeerLost, PeerLost, PeerLost, OutlastError, PeerLost]


def test_a_peer_that_does_not_come_is_said_to_be_late() -> None:
    """After the timeout the answer is PeerLost, not another wait."""
    with ranks_of(2, timeout_s=0.05) as world:
        world[0].start([1])
        with pytest.raises(PeerLost, match="did not come in time"):
            world[0].finish()


def test_ranks_that_ask_different_things_are_told() -> None:
    """Different numbers of numbers are no answer but an error that names both."""
    with ranks_of(2) as world:

        def work(rank: int, one: Dissemination) -> list[int]:
            one.start([1] * (rank + 1))
            return one.finish()

        first, second = everywhere(world, work)
        assert "agrees on 1 numbers, another one on 2" in str(first)
        assert "agrees on 2 numbers, another one on 1" in str(second)


def test_a_stranger_is_nobody() -> None:
    """Who does not know the secret, or leaves before it has said it, is not taken for a rank."""
    token = b"t" * 16
    for sent, rank in ((_HELLO.pack(token, 4), 4), (_HELLO.pack(b"u" * 16, 4), None), (b"short", None)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(sent)
            theirs.shutdown(socket.SHUT_WR)
            assert _greet(ours, token, timeout_s=5) == rank
