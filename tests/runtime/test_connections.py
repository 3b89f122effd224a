"""Collectives are left at any time, and one that was left never writes again."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from outlast.runtime import connections
from outlast.testing.ranks import RankProcesses

RANKS = Path(__file__).with_name("cut_ranks.py")


def connect() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_only_what_was_noted_is_cut() -> None:
    """A connection of the user's own is left alone."""
    own = connect()
    with connections.noting():
        noted = connect()
    connections.cut_all()
    own[1].sendall(b"x")
    assert own[0].recv(1) == b"x"
    assert noted[0].recv(1) == b""
    for one in (*own, *noted):
        one.close()
    connections.forget()


def test_connections_being_made_are_cut_too() -> None:
    """Ranks that are still looking for each other are not waited for."""
    with connections.noting():
        being_made = connect()
        connections.cut_all()
        assert being_made[0].recv(1) == b""
    for one in being_made:
        one.close()
    connections.forget()


def test_what_comes_after_an_interrupted_noting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A noting that was interrupted in its end cuts the connections of its time, and none of a new beginning."""
    look = connections.connected_sockets

    class Interrupted(BaseException):
        pass

    def interrupt() -> frozenset[tuple[int, int]]:
        raise Interrupted

    noted = list[socket.socket]()

    def connect_until_interrupted() -> None:
        with connections.noting():
            noted.extend(connect())
            monkeypatch.setattr(connections, "connected_sockets", interrupt)

    with pytest.raises(Interrupted):
        connect_until_interrupted()
    monkeypatch.setattr(connections, "connected_sockets", look)
    connections.cut_all()
    assert noted[0].recv(1) == b""
    connections.forget()
    own = connect()
    connections.cut_all()
    own[1].sendall(b"x")
    assert own[0].recv(1) == b"x"
    for one in (*own, *noted):
        one.close()
    connections.forget()


def test_a_descriptor_of_something_else_is_left_alone() -> None:
    """A number that was given to another file meanwhile is recognised."""
    with connections.noting():
        noted = connect()
    number = noted[0].fileno()
    other = connect()
    os.dup2(other[0].fileno(), number)
    connections.cut_all()
    other[1].sendall(b"x")
    assert other[0].recv(1) == b"x"
    for one in (*noted, *other):
        one.close()
    connections.forget()


def test_what_registers_is_cut_while_it_exists() -> None:
    """Other things that wait on peers are cut with the groups."""

    class Waiter:
        num_cuts = 0

        def cut(self) -> None:
            Waiter.num_cuts += 1

    waiter = Waiter()
    connections.register(waiter)
    connections.cut_all()
    del waiter
    connections.cut_all()
    assert Waiter.num_cuts == 1


@pytest.mark.process
def test_a_late_peer_does_not_complete_what_was_left(tmp_path: Path) -> None:
    """Tensors that were put back after leaving keep their values when the peer comes to the old collectives.

    One of them was waited for, two more were outstanding, and the group is still referred to.
    """
    (tmp_path / "words").mkdir()
    with RankProcesses(RANKS, "late", str(tmp_path / "words"), world_size=2, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=200) == [0, 0], ranks.tails()
        output = ranks.output(0)
        assert "left: " in output
        assert "at rest: True 0" in output
        assert "values: [100.0]" in output
        assert ranks.output(1).count("refused") + ranks.output(1).count("failed") == 3


@pytest.mark.process
def test_a_peer_stopped_in_the_middle_of_a_message_is_left(tmp_path: Path) -> None:
    """Whoever waits for the rest of a message comes back long before the group's timeout of ten minutes."""
    (tmp_path / "words").mkdir()
    with RankProcesses(RANKS, "stopped", str(tmp_path / "words"), world_size=2, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=200, ranks=[0]) == [0], ranks.tails()
        output = ranks.output(0)
        assert "left: " in output
        assert "at rest: True 0" in output
        assert "destroyed 0" in output


@pytest.mark.process
def test_a_group_of_ours_is_closed_beside_a_stopped_peer(tmp_path: Path) -> None:
    """Neither the thread that waits in it nor its end is held up until the group's timeout of ten minutes."""
    (tmp_path / "words").mkdir()
    with RankProcesses(RANKS, "closed", str(tmp_path / "words"), world_size=2, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=200, ranks=[0]) == [0], ranks.tails()
        assert "closed 0" in ranks.output(0)


def test_what_another_thread_opens_meanwhile_is_not_the_groups() -> None:
    """Of what was opened while a group was made, only what bears its marks is its own, or all where nothing does."""
    ours, others, of_another = connect(), connect(), connect()
    for one, timeout_s in ((ours[0], 17), (of_another[0], 600)):
        os.set_inheritable(one.fileno(), True)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", timeout_s, 0))
    named = [(one.fileno(), os.fstat(one.fileno()).st_ino) for one in (ours[0], others[0], of_another[0])]
    opened = frozenset(named)
    assert connections.of_group(opened, 17.0) == {named[0]}
    assert connections.of_group(opened) == {named[0], named[2]}
    assert connections.of_group(frozenset({named[1]}), 17.0) == {named[1]}
    for one in (*ours, *others, *of_another):
        one.close()
