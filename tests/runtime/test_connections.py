"""Connections of process groups: collectives can be left at any time, and a left collective never writes again."""

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


def test_only_recorded_connections_are_cut() -> None:
    """A connection that the user's code opened is not cut."""
    unrelated = connect()
    with connections.noting():
        recorded = connect()
    connections.cut_all()
    unrelated[1].sendall(b"x")
    assert unrelated[0].recv(1) == b"x"
    assert recorded[0].recv(1) == b""
    for one in (*unrelated, *recorded):
        one.close()
    connections.forget()


def test_pending_connections_are_cut() -> None:
    """Ranks that are still connecting to each other are not waited for."""
    with connections.noting():
        pending = connect()
        connections.cut_all()
        assert pending[0].recv(1) == b""
    for one in pending:
        one.close()
    connections.forget()


def test_interrupted_recording_does_not_cut_later_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that was interrupted at its end cuts the connections opened during it, and none opened later."""
    original = connections.connected_sockets

    class Interrupted(BaseException):
        pass

    def interrupt() -> frozenset[tuple[int, int]]:
        raise Interrupted

    recorded = list[socket.socket]()

    def connect_until_interrupted() -> None:
        with connections.noting():
            recorded.extend(connect())
            monkeypatch.setattr(connections, "connected_sockets", interrupt)

    with pytest.raises(Interrupted):
        connect_until_interrupted()
    monkeypatch.setattr(connections, "connected_sockets", original)
    connections.cut_all()
    assert recorded[0].recv(1) == b""
    connections.forget()
    unrelated = connect()
    connections.cut_all()
    unrelated[1].sendall(b"x")
    assert unrelated[0].recv(1) == b"x"
    for one in (*unrelated, *recorded):
        one.close()
    connections.forget()


def test_reused_descriptor_is_not_cut() -> None:
    """A descriptor number that now belongs to another file is detected."""
    with connections.noting():
        recorded = connect()
    number = recorded[0].fileno()
    other = connect()
    os.dup2(other[0].fileno(), number)
    connections.cut_all()
    other[1].sendall(b"x")
    assert other[0].recv(1) == b"x"
    for one in (*recorded, *other):
        one.close()
    connections.forget()


def test_registered_objects_are_cut_while_they_exist() -> None:
    """Other objects that wait for peers are cut with the groups."""

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
def test_late_peer_does_not_complete_a_left_collective(tmp_path: Path) -> None:
    """Tensors that were restored after leaving keep their values when the peer enters the old collectives.

    One collective was waited for, two more were outstanding, and the group is still referenced.
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
def test_collective_with_a_stopped_peer_can_be_left(tmp_path: Path) -> None:
    """A rank that waits for the rest of a message returns long before the group's timeout of ten minutes."""
    (tmp_path / "words").mkdir()
    with RankProcesses(RANKS, "stopped", str(tmp_path / "words"), world_size=2, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=200, ranks=[0]) == [0], ranks.tails()
        output = ranks.output(0)
        assert "left: " in output
        assert "at rest: True 0" in output
        assert "destroyed 0" in output


@pytest.mark.process
def test_group_with_a_stopped_peer_can_be_closed(tmp_path: Path) -> None:
    """Neither the thread that waits in the group nor its close is delayed until the group's timeout of ten minutes."""
    (tmp_path / "words").mkdir()
    with RankProcesses(RANKS, "closed", str(tmp_path / "words"), world_size=2, directory=tmp_path) as ranks:
        assert ranks.wait(timeout_s=200, ranks=[0]) == [0], ranks.tails()
        assert "closed 0" in ranks.output(0)


def test_group_does_not_own_other_threads_connections() -> None:
    """Of the connections opened while a group was created, only those with its marks belong to it, or all if none is
    marked."""
    ours, others, of_another = connect(), connect(), connect()
    for one, timeout_s in ((ours[0], 17), (of_another[0], 600)):
        os.set_inheritable(one.fileno(), True)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", timeout_s, 0))
    entries = [(one.fileno(), os.fstat(one.fileno()).st_ino) for one in (ours[0], others[0], of_another[0])]
    opened = frozenset(entries)
    assert connections.of_group(opened, 17.0) == {entries[0]}
    assert connections.of_group(opened) == {entries[0], entries[2]}
    assert connections.of_group(frozenset({entries[1]}), 17.0) == {entries[1]}
    for one in (*ours, *others, *of_another):
        one.close()
