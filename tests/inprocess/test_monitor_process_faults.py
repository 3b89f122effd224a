"""Real agent processes and ranks without torch: the remaining ranks agree and continue after the death of agent
processes, nodes and connections.

``tests/policy/test_restarts.py`` has the decisions, ``test_wrapper.py`` the same faults with the real wrapper.
"""

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


def test_a_spare_replaces_a_dead_rank() -> None:
    """A spare replaces a dead rank; all ranks finish, and no process is left."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].send(signal.SIGKILL)
        order = ranks.go(1, excluding=(1,))
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert kinds(order) == {1: "died"}
        for rank in (0, 2, 3):
            ranks[rank].send_command("complete")
        for rank in (0, 2, 3):
            ranks[rank].wait_for("Finish")
        ranks.wait_monitors()


def test_a_rank_that_dies_before_the_first_call_is_excluded() -> None:
    """A rank that dies before all ranks have joined is excluded from the first call."""
    with FakeRanks(4, active=3) as ranks:
        ranks[3].send_command("unready")
        ranks.connect()
        ranks[3].wait_for("connected")
        ranks[3].send(signal.SIGKILL)
        order = ranks.go(0, excluding=(3,))
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2}


@pytest.mark.extended
@pytest.mark.slow
def test_a_rank_that_is_not_ready_in_time_is_expelled() -> None:
    """A rank that is not ready within the barrier timeout is ended by its agent process, and the other ranks
    continue."""
    with FakeRanks(4, active=3, barrier_timeout_s=6.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].send_command("unready")
        ranks[0].send_command("fault")
        order = ranks.go(1, excluding=(1,))
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert kinds(order)[1] == "barrier_timeout"
        assert ranks[1].wait_end() == -signal.SIGKILL or ranks[1].orders("Expel")


def test_a_killed_coordinating_agent_process_is_replaced() -> None:
    """The ranks of its node start a new agent process, which coordinates; no rank restarts."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks.kill_agent(0)
        ranks[2].send_command("fault")
        order = ranks.go(1)
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2, "3": None}
        assert kinds(order) == {2: "exception"}
        ranks[0].send(signal.SIGKILL)
        assert ranks.go(2, excluding=(0,))["ranks"] == {"1": 1, "2": 2, "3": 0}


def test_the_only_agent_process_is_replaced() -> None:
    """The ranks of a single node continue with a new agent process, which gets their state from them."""
    with FakeRanks(4, active=3, num_nodes=1) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks.kill_agent(0)
        ranks[1].send(signal.SIGKILL)
        order = ranks.go(1, excluding=(1,))
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert kinds(order) == {1: "died"}


def test_a_rank_killed_with_the_coordinating_agent_process() -> None:
    """The new agent process of the node learns from the node's other rank which process is lost; that rank is
    replaced."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[0].monitors[0], signal.SIGSTOP)
        ranks[0].send(signal.SIGKILL)
        os.kill(ranks[0].monitors[0], signal.SIGKILL)
        order = ranks.go(1, excluding=(0,))
        assert order["ranks"] == {"1": 1, "2": 2, "3": 0}
        assert kinds(order) == {0: "died"}


def test_a_rank_killed_with_another_nodes_agent_process() -> None:
    """With a live coordinator, the rank counts as dead once the node has reconnected."""
    with FakeRanks(4, active=4) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[3].monitors[0], signal.SIGSTOP)
        ranks[3].send(signal.SIGKILL)
        os.kill(ranks[3].monitors[0], signal.SIGKILL)
        restart = ranks[0].wait_for("Restart")
        assert kinds(restart) == {3: "died"}


def test_a_lost_coordinating_node_is_replaced() -> None:
    """If the agent process and all ranks of the coordinating node are killed, the next agent process of the list
    coordinates."""
    with FakeRanks(5, active=3, num_nodes=3) as ranks:
        ranks.connect()
        ranks.go(0)
        lost = tuple(child.rank for child in ranks.on_node(0))
        assert lost == (0, 1)
        os.kill(ranks[0].monitors[0], signal.SIGSTOP)
        for rank in lost:
            ranks[rank].send(signal.SIGKILL)
        os.kill(ranks[0].monitors[0], signal.SIGKILL)
        order = ranks.go(1, excluding=lost)
        assert order["ranks"] == {"2": 2, "3": 0, "4": 1}
        for rank in (2, 3, 4):
            ranks[rank].send_command("complete")
        for rank in (2, 3, 4):
            ranks[rank].wait_for("Finish")
        ranks.wait_monitors()


def test_a_restart_survives_its_coordinating_agent_process() -> None:
    """A restart continues with the next agent process and keeps the earlier reports."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[2].send_command("unready")
        ranks[1].send_command("fault")
        ranks[2].wait_for("Restart")
        ranks.kill_agent(0)
        ranks[2].send(signal.SIGKILL)
        assert ranks.go(1, excluding=(2,))["ranks"] == {"0": 0, "1": 1, "3": 2}


@pytest.mark.extended
def test_agent_processes_of_all_nodes_killed_in_turn() -> None:
    """Each time another agent process takes over."""
    with FakeRanks(3, active=3, num_nodes=3) as ranks:
        ranks.connect()
        ranks.go(0)
        for node in range(3):
            ranks.kill_agent(node)
            ranks[2].send_command("fault")
            assert ranks.go(node + 1)["ranks"] == {"0": 0, "1": 1, "2": 2}


def test_a_killed_agent_process_of_another_node_is_replaced() -> None:
    """The ranks of that node start a new agent process, and no rank restarts."""
    with FakeRanks(3, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks.kill_agent(1)
        for rank in range(3):
            ranks[rank].send_command("complete")
        for rank in range(3):
            assert ranks[rank].wait_for("Finish")["restart_count"] == 0
            assert not ranks[rank].orders("Restart")


def test_a_broken_connection_is_reestablished() -> None:
    """A node whose connection to the coordinator breaks reconnects, and no rank is lost."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        shut_down_link(ranks[3].monitors[0], int(ranks.first["address"].split(" ")[1]))
        ranks[2].send_command("fault")
        order = ranks.go(1)
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2, "3": None}
        assert kinds(order) == {2: "exception"}
        assert len(ranks[3].monitors) == 1


@pytest.mark.slow
def test_a_stopped_rank_is_killed_after_the_hard_timeout() -> None:
    """The agent process kills a stopped rank, and a spare replaces the rank."""
    with FakeRanks(4, active=3, soft_timeout_s=2.5, hard_timeout_s=6.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].send(signal.SIGSTOP)
        order = ranks.go(1, excluding=(1,))
        assert kinds(order) == {1: "hard_timeout"}
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert ranks[1].wait_end() == -signal.SIGKILL


@pytest.mark.extended
@pytest.mark.slow
def test_a_stopped_spare_is_killed_after_the_hard_timeout() -> None:
    """The agent process kills a stopped spare, no rank restarts, and a later restart does not wait for the spare."""
    with FakeRanks(4, active=2, soft_timeout_s=2.5, hard_timeout_s=6.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[2].send(signal.SIGSTOP)
        assert ranks[2].wait_end() == -signal.SIGKILL
        ranks[1].send(signal.SIGKILL)
        order = ranks.go(1, excluding=(1, 2))
        assert order["ranks"] == {"0": 0, "3": 1}
        assert kinds(order)[1] == "died"


def test_a_hanging_rank_restarts_after_the_soft_timeout() -> None:
    """A rank without progress restarts with all other ranks and keeps its place."""
    with FakeRanks(3, active=3, soft_timeout_s=1.5, hard_timeout_s=8.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].send_command("hang")
        order = ranks.go(1)
        assert kinds(order) == {1: "soft_timeout"}
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2}


@pytest.mark.slow
def test_a_rank_that_ignores_interruption_is_killed() -> None:
    """A rank that makes progress but does not leave the function is killed one hard timeout after the order."""
    with FakeRanks(3, active=2, soft_timeout_s=1.5, hard_timeout_s=5.0) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[1].send_command("stubborn")
        ranks[0].send_command("fault")
        order = ranks.go(1, excluding=(1,))
        assert order["ranks"] == {"0": 0, "2": 1}
        assert kinds(order) == {0: "exception", 1: "hard_timeout"}


@pytest.mark.extended
@pytest.mark.slow
def test_a_stopped_coordinating_agent_process_is_excluded() -> None:
    """A coordinating agent process without heartbeats is excluded; when it resumes, its ranks stop and do not affect
    the others."""
    with FakeRanks(5, active=3, num_nodes=3, heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[0].monitors[0], signal.SIGSTOP)
        order = ranks.go(1, excluding=(0, 1))
        assert order["ranks"] == {"2": 2, "3": 0, "4": 1}
        os.kill(ranks[0].monitors[0], signal.SIGCONT)
        for rank in (0, 1):
            ranks[rank].wait_end()
            assert not ranks[rank].orders("Go")[1:]
        for rank in (2, 3, 4):
            ranks[rank].send_command("complete")
        for rank in (2, 3, 4):
            assert ranks[rank].wait_for("Finish")["restart_count"] == 1


@pytest.mark.extended
@pytest.mark.slow
def test_a_silent_coordinating_node_is_detected_by_a_fault() -> None:
    """If the coordinating node stops responding, a fault on another node detects the loss early, and the other nodes
    continue."""
    times = {"soft_timeout_s": 1.5, "hard_timeout_s": 60.0, "heartbeat_interval_s": 2.0, "heartbeat_timeout_s": 8.0}
    with FakeRanks(5, active=3, num_nodes=3, **times) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[0].monitors[0], signal.SIGSTOP)
        for rank in (0, 1):
            ranks[rank].send(signal.SIGSTOP)
        ranks[2].send_command("hang")
        order = ranks.go(1, excluding=(0, 1))
        assert order["ranks"] == {"2": 2, "3": 0, "4": 1}
        assert kinds(order)[0] == "link_lost"


def test_a_coordinator_without_a_majority_aborts() -> None:
    """If most members are unreachable, they may continue elsewhere, so the remaining ranks abort without a restart."""
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


def test_agent_processes_end_with_their_ranks() -> None:
    """If all ranks are killed at once, their agent processes end soon."""
    with FakeRanks(4, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        for child in ranks.children:
            child.send(signal.SIGKILL)
        ranks.wait_monitors()


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "data_sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31) + b"x" * 64,
        struct.pack("<I", 5) + b"\x93\x01\x02\x03\x04",
        struct.pack("<I", 200) + b"not all of it",
    ],
    ids=["http", "huge", "garbage", "short"],
)
def test_unauthenticated_connections_are_dropped(data_sent: bytes) -> None:
    """A connection without the secret gets no response beyond the hello, and the members are not affected."""
    with FakeRanks(3, active=3) as ranks:
        ranks.connect()
        ranks.go(0)
        host, port = ranks.first["address"].split(" ")
        with socket.create_connection((host, int(port)), timeout=50.0) as stranger:
            stranger.sendall(data_sent)
            ranks[1].send_command("fault")
            assert ranks.go(1)["ranks"] == {"0": 0, "1": 1, "2": 2}
            stranger.settimeout(50.0)
            hello = Handshake(None, "", is_server=True).outgoing
            with contextlib.suppress(ConnectionResetError):
                received = b""
                while data := stranger.recv(100):
                    received += data
                assert len(received) == len(hello)


def test_a_wrong_secret_is_rejected() -> None:
    """A handshake that is correct except for the secret is rejected."""
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
        ranks[1].send_command("fault")
        assert ranks.go(1)["ranks"] == {"0": 0, "1": 1, "2": 2}


def test_the_agent_process_logs_to_the_configured_folder(tmp_path: Path) -> None:
    """With a folder for logs, an agent process logs the loss of its rank to its file."""
    with FakeRanks(2, active=1, log_dir=tmp_path) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[0].send(signal.SIGKILL)
        ranks.go(1, excluding=(0,))
        assert f"rank 0 (pid {ranks[0].pid}) is gone" in (tmp_path / "monitor.log").read_text()
