"""The in-process restart coordinator of a launcher: real agent processes and relays, and loss of the coordinator."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest
from fake_ranks import FakeRanks

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


def kinds(order: dict[str, Any]) -> dict[int, str]:
    return {fault["initial_rank"]: fault["kind"] for fault in order["faults"]}


def send_command(ranks: FakeRanks, command: str) -> None:
    assert ranks.nodes is not None
    ranks.nodes.send_command(command)


def finish(ranks: FakeRanks, *numbers: int) -> None:
    for rank in numbers:
        ranks[rank].send_command("complete")
    for rank in numbers:
        ranks[rank].wait_for("Finish")
    ranks.wait_monitors()


def test_a_rank_lost_with_its_agent_process_is_replaced() -> None:
    """The relay detects the death of a rank whose agent process died with it."""
    with FakeRanks(4, active=3, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[1].monitors[0], signal.SIGSTOP)
        ranks[1].send(signal.SIGKILL)
        os.kill(ranks[1].monitors[0], signal.SIGKILL)
        order = ranks.go(1, excluding=(1,))
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert kinds(order) == {1: "died"}
        finish(ranks, 0, 2, 3)


def test_faults_without_a_coordinator_are_not_lost() -> None:
    """After a fault and a death without a coordinator, the next coordinator restarts all ranks for both."""
    with FakeRanks(5, active=3, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        send_command(ranks, "lose")
        ranks[2].send_command("fault")
        ranks[0].send(signal.SIGKILL)
        ranks[0].wait_end()
        send_command(ranks, "adopt")
        order = ranks.go(1, excluding=(0,))
        assert order["ranks"] == {"1": 1, "2": 2, "3": 0, "4": None}
        assert kinds(order) == {0: "died", 2: "exception"}
        assert order["fault_counts"] == {"0": 1, "2": 1}
        finish(ranks, 1, 2, 3)


def test_a_call_without_faults_continues_after_a_takeover() -> None:
    """Without a fault a takeover interrupts no rank, and the call ends when the last ranks have completed."""
    with FakeRanks(4, active=3, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[0].send_command("complete")
        send_command(ranks, "lose")
        ranks[1].send_command("complete")
        send_command(ranks, "adopt")
        finish(ranks, 2)
        for rank in (0, 1, 3):
            ranks[rank].wait_for("Finish")
        assert not any(child.orders("Restart") for child in ranks.children)


def test_a_restart_continues_after_a_takeover() -> None:
    """The next coordinator does not query ready ranks again, and replaces a rank that died meanwhile in the same
    restart."""
    with FakeRanks(5, active=3, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[2].send_command("unready")
        ranks[1].send_command("fault")
        ranks[2].wait_for("Restart")
        send_command(ranks, "lose")
        ranks[2].send(signal.SIGKILL)
        ranks[2].wait_end()
        send_command(ranks, "adopt")
        assert ranks.go(1, excluding=(2,))["ranks"] == {"0": 0, "1": 1, "3": 2, "4": None}


def test_a_partly_sent_restart_order_reaches_all_nodes() -> None:
    """If the coordinator is lost while it sends a restart order, the next one sends the order of the same restart to
    the other nodes."""
    with FakeRanks(4, active=4, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        send_command(ranks, "tear")
        ranks[3].send_command("fault")
        assert ranks.go(1)["ranks"] == {"0": 0, "1": 1, "2": 2, "3": 3}
        finish(ranks, 0, 1, 2, 3)
        assert all(len(child.orders("Go")) == 2 for child in ranks.children)


def test_a_partly_sent_go_order_reaches_all_nodes() -> None:
    """All ranks enter one call, with one store and unchanged ranks."""
    with FakeRanks(4, active=4, has_launcher=True) as ranks:
        send_command(ranks, "tear")
        ranks.connect()
        order = ranks.go(1)
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2, "3": 3}
        finish(ranks, 0, 1, 2, 3)


def test_a_partly_sent_finish_order_reaches_all_nodes() -> None:
    """If one node has the order to finish, the next coordinator sends the order to the other nodes."""
    with FakeRanks(4, active=4, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        send_command(ranks, "tear")
        finish(ranks, 0, 1, 2, 3)
        assert not any(child.orders("Restart") for child in ranks.children)


def test_a_call_aborts_when_the_agent_is_lost() -> None:
    """The ranks of a node abort with the reason once the node's agent is lost."""
    with FakeRanks(2, num_nodes=1, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        assert ranks.nodes is not None
        ranks.nodes.__exit__()
        for child in ranks.children:
            assert "the agent of this node is gone" in child.wait_for("Abort")["reason"]
        ranks.wait_monitors()


def test_agent_processes_with_a_relay_do_not_listen() -> None:
    """Agent processes of a node whose agent has a relay open no port."""
    with FakeRanks(2, num_nodes=1, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        for pid in ranks.monitors():
            inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            with open(f"/proc/{pid}/net/tcp") as file:
                rows = [line.split() for line in file.readlines()[1:]]
            assert not [row for row in rows if f"socket:[{row[9]}]" in inodes]
        finish(ranks, 0, 1)


def test_the_relay_drops_invalid_connections() -> None:
    """The relay drops a connection with invalid data, and the ranks are not interrupted."""
    with FakeRanks(2, num_nodes=1, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        assert ranks.nodes is not None
        with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as silent:
            for connection in (stranger, silent):
                connection.connect(f"\0{ranks.nodes.addresses[0]}")
            stranger.sendall(b"\x05\0\0\0\x93\x01\x02\x03\x04")
            stranger.settimeout(100.0)
            assert stranger.recv(1) == b""
            ranks[1].send_command("fault")
            ranks.go(1)
        finish(ranks, 0, 1)
