"""Real agent processes, with ranks that have no torch: whatever dies when, the others agree and go on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from fake_ranks import FakeRanks, shut_down_link

from outlast.inprocess import protocol as m
from outlast.inprocess.coordinator import JoinCoordinator, OnLink
from outlast.runtime.wire import AuthenticationFailed, Handshake, MessageChannel

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


def kinds(order: dict[str, Any]) -> dict[int, str]:
    return {fault["initial_rank"]: fault["kind"] for fault in order["faults"]}


def test_exception_restarts_all_with_ranks_unchanged() -> None:
    """A fault that one rank reports brings all into the next call; the spare stays one."""
    with FakeRanks(5, active=4) as ranks:
        ranks.connect()
        first = ranks.go(0)
        ranks[2].tell("fault")
        second = ranks.go(1)
        assert second["ranks"] == first["ranks"] == {"0": 0, "1": 1, "2": 2, "3": 3, "4": None}
        assert kinds(second) == {2: "exception"}
        assert second["fault_counts"] == {"2": 1}


@pytest.mark.parametrize("victim", [0, 1])
def test_death_brings_the_spare_in(victim: int) -> None:
    """The spare takes the place of a dead rank, of the hub's own, too; all finish, and no process is left."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[victim].send(signal.SIGKILL)
        order = ranks.go(1, but=(victim,))
        assert order["ranks"] == {str(rank): rank for rank in range(3) if rank != victim} | {"3": victim}
        assert kinds(order) == {victim: "died"}
        for rank in {0, 1, 2, 3} - {victim}:
            ranks[rank].tell("complete")
        for rank in {0, 1, 2, 3} - {victim}:
            ranks[rank].wait_for("Finish")
        ranks.wait_monitors()


def test_death_of_a_spare_disturbs_nobody() -> None:
    """Nobody restarts for a spare, and it is not in the next call."""
    with FakeRanks(4, active=2) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[3].send(signal.SIGKILL)
        ranks[3].wait_end()
        ranks[1].tell("fault")
        assert ranks.go(1, but=(3,))["ranks"] == {"0": 0, "1": 1, "2": None}


def test_two_deaths_at_once() -> None:
    """Two dead ranks, one of them the hub's, are both replaced in one or two restarts."""
    with FakeRanks(6, active=4) as ranks:
        ranks.connect()
        ranks.go(0)
        for victim in (0, 3):
            ranks[victim].send(signal.SIGKILL)
        while True:
            order = ranks[1].wait_for("Go")
            if set(order["ranks"]) == {"1", "2", "4", "5"}:
                break
        assert sorted(order["ranks"].values()) == [0, 1, 2, 3]
        assert (order["ranks"]["1"], order["ranks"]["2"]) == (1, 2)


def test_death_before_the_first_iteration() -> None:
    """A rank that dies before all have come is done without."""
    with FakeRanks(4, active=3) as ranks:
        ranks[3].tell("unready")
        ranks.connect()
        ranks[3].wait_for("connected")
        ranks[3].send(signal.SIGKILL)
        order = ranks.go(0, but=(3,))
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2}


def test_death_while_a_restart_forms() -> None:
    """A rank that dies instead of getting ready is replaced in the same restart."""
    with FakeRanks(5, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[2].tell("unready")
        ranks[1].tell("fault")
        ranks[2].wait_for("Restart")
        ranks[2].send(signal.SIGKILL)
        order = ranks.go(1, but=(2,))
        assert order["ranks"] == {"0": 0, "1": 1, "3": 2, "4": None}
        assert kinds(order) == {1: "exception", 2: "died"}


def test_death_of_the_one_who_assigns() -> None:
    """Where the rank that was asked for the assignment dies, the next one is asked."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[0].tell("dumb")
        ranks[1].tell("fault")
        ranks[0].wait_for("Assign", lambda said: said["restart_count"] == 1)
        ranks[0].send(signal.SIGKILL)
        order = ranks.go(1, but=(0,))
        assert order["ranks"] == {"1": 1, "2": 2, "3": 0}
        assert ranks[1].orders("Assign")


@pytest.mark.extended
@pytest.mark.slow
def test_member_that_does_not_leave_is_expelled() -> None:
    """A rank that is not ready in time is ended by its agent process, and the others go on."""
    with FakeRanks(4, active=3, barrier_timeout_s=6.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].tell("unready")
        ranks[0].tell("fault")
        order = ranks.go(1, but=(1,))
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert kinds(order)[1] == "barrier_timeout"
        assert ranks[1].wait_end() == -signal.SIGKILL or ranks[1].orders("Expel")


def test_coordinating_agent_process_killed() -> None:
    """The ranks of its node start another one, which coordinates in its place; nobody is disturbed."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks.kill_agent(0)
        ranks[2].tell("fault")
        order = ranks.go(1)
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2, "3": None}
        assert kinds(order) == {2: "exception"}
        ranks[0].send(signal.SIGKILL)
        assert ranks.go(2, but=(0,))["ranks"] == {"1": 1, "2": 2, "3": 0}


def test_the_only_agent_process_killed() -> None:
    """The ranks of a single node go on with another one, which knows from them where they stand."""
    with FakeRanks(4, active=3, num_nodes=1) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks.kill_agent(0)
        ranks[1].send(signal.SIGKILL)
        order = ranks.go(1, but=(1,))
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert kinds(order) == {1: "died"}


def test_coordinating_agent_process_and_a_rank_killed_together() -> None:
    """The next agent process of the node knows from its other rank which process is gone; the others replace that
    rank."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[0].monitors[0], signal.SIGSTOP)
        ranks[0].send(signal.SIGKILL)
        os.kill(ranks[0].monitors[0], signal.SIGKILL)
        order = ranks.go(1, but=(0,))
        assert order["ranks"] == {"1": 1, "2": 2, "3": 0}
        assert kinds(order) == {0: "died"}


def test_agent_process_of_another_node_and_a_rank_killed_together() -> None:
    """The same, with a coordinator that lives: the rank counts as dead as soon as the node is back."""
    with FakeRanks(4, active=4) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[3].monitors[0], signal.SIGSTOP)
        ranks[3].send(signal.SIGKILL)
        os.kill(ranks[3].monitors[0], signal.SIGKILL)
        restart = ranks[0].wait_for("Restart")
        assert kinds(restart) == {3: "died"}


def test_coordinating_node_lost() -> None:
    """Where the agent process and all ranks of its node are killed, the next agent process of the list coordinates."""
    with FakeRanks(5, active=3, num_nodes=3) as ranks:
        ranks.connect()
        ranks.go(0)
        lost = tuple(child.rank for child in ranks.on_node(0))
        assert lost == (0, 1)
        os.kill(ranks[0].monitors[0], signal.SIGSTOP)
        for rank in lost:
            ranks[rank].send(signal.SIGKILL)
        os.kill(ranks[0].monitors[0], signal.SIGKILL)
        order = ranks.go(1, but=lost)
        assert order["ranks"] == {"2": 2, "3": 0, "4": 1}
        for rank in (2, 3, 4):
            ranks[rank].tell("complete")
        for rank in (2, 3, 4):
            ranks[rank].wait_for("Finish")
        ranks.wait_monitors()


def test_coordinating_agent_process_killed_while_a_restart_forms() -> None:
    """The restart goes on with the next one, with what was reported before."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[2].tell("unready")
        ranks[1].tell("fault")
        ranks[2].wait_for("Restart")
        ranks.kill_agent(0)
        ranks[2].send(signal.SIGKILL)
        assert ranks.go(1, but=(2,))["ranks"] == {"0": 0, "1": 1, "3": 2}


@pytest.mark.extended
def test_agent_processes_of_all_nodes_killed_one_after_the_other() -> None:
    """Each time another one takes over."""
    with FakeRanks(3, active=3, num_nodes=3) as ranks:
        ranks.connect()
        ranks.go(0)
        for node in range(3):
            ranks.kill_agent(node)
            ranks[2].tell("fault")
            assert ranks.go(node + 1)["ranks"] == {"0": 0, "1": 1, "2": 2}


def test_agent_process_of_another_node_killed() -> None:
    """Its ranks start another one, and nobody is disturbed."""
    with FakeRanks(3, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks.kill_agent(1)
        for rank in range(3):
            ranks[rank].tell("complete")
        for rank in range(3):
            assert ranks[rank].wait_for("Finish")["restart_count"] == 0
            assert not ranks[rank].orders("Restart")


def test_broken_connection_is_made_again() -> None:
    """A node whose connection to the coordinator breaks comes back, and nobody is disturbed."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        shut_down_link(ranks[3].monitors[0], int(ranks.first["address"].split(" ")[1]))
        ranks[2].tell("fault")
        order = ranks.go(1)
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2, "3": None}
        assert kinds(order) == {2: "exception"}
        assert len(ranks[3].monitors) == 1


@pytest.mark.slow
def test_stopped_rank_is_ended_after_the_hard_timeout() -> None:
    """Its agent process kills it, and the spare takes its place."""
    with FakeRanks(4, active=3, soft_timeout_s=2.5, hard_timeout_s=6.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].send(signal.SIGSTOP)
        order = ranks.go(1, but=(1,))
        assert kinds(order) == {1: "hard_timeout"}
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert ranks[1].wait_end() == -signal.SIGKILL


@pytest.mark.extended
@pytest.mark.slow
def test_stopped_spare_is_ended_after_the_hard_timeout() -> None:
    """Its agent process kills it, nobody is disturbed, and nobody waits for it when a spare is needed."""
    with FakeRanks(4, active=2, soft_timeout_s=2.5, hard_timeout_s=6.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[2].send(signal.SIGSTOP)
        assert ranks[2].wait_end() == -signal.SIGKILL
        ranks[1].send(signal.SIGKILL)
        order = ranks.go(1, but=(1, 2))
        assert order["ranks"] == {"0": 0, "3": 1}
        assert kinds(order)[1] == "died"


def test_rank_without_progress_is_interrupted_after_the_soft_timeout() -> None:
    """It is told to restart with all others, and stays."""
    with FakeRanks(3, active=3, soft_timeout_s=1.5, hard_timeout_s=8.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].tell("hang")
        order = ranks.go(1)
        assert kinds(order) == {1: "soft_timeout"}
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2}


@pytest.mark.slow
def test_rank_that_cannot_be_interrupted_is_ended() -> None:
    """A rank that makes progress but does not leave has the hard timeout from the order on."""
    with FakeRanks(3, active=2, soft_timeout_s=1.5, hard_timeout_s=5.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].tell("stubborn")
        ranks[0].tell("fault")
        order = ranks.go(1, but=(1,))
        assert order["ranks"] == {"0": 0, "2": 1}
        assert kinds(order) == {0: "exception", 1: "hard_timeout"}


@pytest.mark.extended
@pytest.mark.slow
def test_stopped_coordinating_agent_process_is_left() -> None:
    """One that shows no heartbeat for long is left by all; when it wakes up, its ranks stop and disturb nobody."""
    with FakeRanks(5, active=3, num_nodes=3, heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[0].monitors[0], signal.SIGSTOP)
        order = ranks.go(1, but=(0, 1))
        assert order["ranks"] == {"2": 2, "3": 0, "4": 1}
        os.kill(ranks[0].monitors[0], signal.SIGCONT)
        for rank in (0, 1):
            ranks[rank].wait_end()
            assert not ranks[rank].orders("Go")[1:]
        for rank in (2, 3, 4):
            ranks[rank].tell("complete")
        for rank in (2, 3, 4):
            assert ranks[rank].wait_for("Finish")["restart_count"] == 1


@pytest.mark.extended
@pytest.mark.slow
def test_silent_loss_of_the_coordinating_node() -> None:
    """Where the coordinator's node falls silent, a fault elsewhere shows it soon, and the others go on together."""
    times = {"soft_timeout_s": 1.5, "hard_timeout_s": 60.0, "heartbeat_interval_s": 2.0, "heartbeat_timeout_s": 8.0}
    with FakeRanks(5, active=3, num_nodes=3, **times) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[0].monitors[0], signal.SIGSTOP)
        for rank in (0, 1):
            ranks[rank].send(signal.SIGSTOP)
        ranks[2].tell("hang")
        order = ranks.go(1, but=(0, 1))
        assert order["ranks"] == {"2": 2, "3": 0, "4": 1}
        assert kinds(order)[0] == "link_lost"


def test_a_coordinator_that_loses_most_members_stops_the_rest() -> None:
    """Most may still train elsewhere, so those here must not; nobody restarts for it."""
    with FakeRanks(5, num_nodes=3) as ranks:
        ranks.connect()
        ranks.go(0)
        for node in (1, 2):
            os.kill(ranks.on_node(node)[0].monitors[0], signal.SIGSTOP)
        for node in (1, 2):
            for child in ranks.on_node(node):
                child.send(signal.SIGKILL)
            os.kill(ranks.on_node(node)[0].monitors[0], signal.SIGKILL)
        for rank in (0, 1):
            assert "cannot be reached and may continue elsewhere" in ranks[rank].wait_for("Abort")["reason"]
            assert not ranks[rank].orders("Restart")


def test_everything_killed_leaves_nothing() -> None:
    """Where all ranks are killed at once, their agent processes end soon."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        for child in ranks.children:
            child.send(signal.SIGKILL)
        ranks.wait_monitors()


def test_error_in_the_assignment_stops_all() -> None:
    """What the assignment says is the reason everywhere, with the counts."""
    with FakeRanks(3, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].send(signal.SIGKILL)
        for rank in (0, 2):
            order = ranks[rank].wait_for("Abort")
            assert order["reason"] == "no spare is left"
            assert order["fault_counts"] == {"1": 1}
        ranks.wait_monitors()


def test_fatal_leave_stops_all() -> None:
    """Where one rank says that all have to stop, all do."""
    with FakeRanks(3, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[2].tell("left fatal")
        for rank in (0, 1):
            assert ranks[rank].wait_for("Abort")["reason"] == "told to"
        ranks.wait_monitors()


def test_leaving_is_no_fault_of_a_ready_rank() -> None:
    """A rank that leaves while a restart forms is done without."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].tell("unready")
        ranks[0].tell("fault")
        ranks[1].wait_for("Restart")
        ranks[1].tell("left")
        order = ranks.go(1, but=(1,))
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert kinds(order) == {0: "exception"}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31) + b"x" * 64,
        struct.pack("<I", 5) + b"\x93\x01\x02\x03\x04",
        struct.pack("<I", 200) + b"not all of it",
    ],
    ids=["http", "huge", "garbage", "short"],
)
def test_strangers_are_shut_out(words: bytes) -> None:
    """A connection without the secret gets no answer beyond the hello, and the members notice nothing."""
    with FakeRanks(3, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        host, port = ranks.first["address"].split(" ")
        with socket.create_connection((host, int(port)), timeout=50.0) as stranger:
            stranger.sendall(words)
            ranks[1].tell("fault")
            assert ranks.go(1)["ranks"] == {"0": 0, "1": 1, "2": 2}
            stranger.settimeout(50.0)
            hello = Handshake(None, "", is_server=True).outgoing
            with contextlib.suppress(ConnectionResetError):
                received = b""
                while data := stranger.recv(100):
                    received += data
                assert len(received) == len(hello)


def test_wrong_secret_is_refused() -> None:
    """A greeting that is right in all but the secret is not taken."""
    with FakeRanks(3, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        join = JoinCoordinator(node="here", life="x", address="x 1")
        host, port = ranks.first["address"].split(" ")
        with socket.create_connection((host, int(port)), timeout=50.0) as connection:
            stranger: MessageChannel[OnLink] = MessageChannel(connection, OnLink)
            proof = Handshake(b"0" * 32, m.COORDINATION, is_server=False)
            with pytest.raises(AuthenticationFailed):
                stranger.authenticate(proof, within_s=50.0)
            with contextlib.suppress(ConnectionError):
                stranger.send(join)
                assert stranger.receive() is None
        ranks[1].tell("fault")
        assert ranks.go(1)["ranks"] == {"0": 0, "1": 1, "2": 2}


def test_world_of_one() -> None:
    """A rank alone restarts with itself, and finishes."""
    with FakeRanks(1, num_nodes=1) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[0].tell("fault")
        ranks.go(1)
        ranks[0].tell("complete")
        ranks[0].wait_for("Finish")


def test_log_goes_where_it_is_told(tmp_path: Path) -> None:
    """With a folder for logs, an agent process says in its file what became of its rank."""
    with FakeRanks(2, active=1, log_dir=tmp_path) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[0].send(signal.SIGKILL)
        ranks.go(1, but=(0,))
        assert f"rank 0 (pid {ranks[0].pid}) is gone" in (tmp_path / "monitor.log").read_text()
