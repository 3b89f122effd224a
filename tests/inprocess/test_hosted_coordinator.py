"""The coordinator of a launcher: real agent processes and relays, and a coordinator that is lost when it matters."""

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


def tell(ranks: FakeRanks, command: str) -> None:
    assert ranks.nodes is not None
    ranks.nodes.tell(command)


def finish(ranks: FakeRanks, *numbers: int) -> None:
    for rank in numbers:
        ranks[rank].tell("complete")
    for rank in numbers:
        ranks[rank].wait_for("Finish")
    ranks.wait_monitors()


def test_a_rank_that_dies_with_its_agent_process_is_done_without() -> None:
    """Nobody is left to say so, and the relay sees it."""
    with FakeRanks(4, active=3, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        os.kill(ranks[1].monitors[0], signal.SIGSTOP)
        ranks[1].send(signal.SIGKILL)
        os.kill(ranks[1].monitors[0], signal.SIGKILL)
        order = ranks.go(1, but=(1,))
        assert order["ranks"] == {"0": 0, "2": 2, "3": 1}
        assert kinds(order) == {1: "died"}
        finish(ranks, 0, 2, 3)


def test_what_happens_while_the_coordinator_is_away_is_not_lost() -> None:
    """A fault and a death without a coordinator: the next one restarts all for both."""
    with FakeRanks(5, active=3, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        tell(ranks, "lose")
        ranks[2].tell("fault")
        ranks[0].send(signal.SIGKILL)
        ranks[0].wait_end()
        tell(ranks, "adopt")
        order = ranks.go(1, but=(0,))
        assert order["ranks"] == {"1": 1, "2": 2, "3": 0, "4": None}
        assert kinds(order) == {0: "died", 2: "exception"}
        assert order["fault_counts"] == {"0": 1, "2": 1}
        finish(ranks, 1, 2, 3)


def test_a_quiet_call_goes_on_under_another_coordinator() -> None:
    """No rank is disturbed while none has a fault, and the last ones to complete are waited for."""
    with FakeRanks(4, active=3, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[0].tell("complete")
        tell(ranks, "lose")
        ranks[1].tell("complete")
        tell(ranks, "adopt")
        finish(ranks, 2)
        for rank in (0, 1, 3):
            ranks[rank].wait_for("Finish")
        assert not any(child.orders("Restart") for child in ranks.children)


def test_a_restart_that_forms_goes_on_under_another_coordinator() -> None:
    """Who was ready need not be asked again; who dies meanwhile is replaced in the same restart."""
    with FakeRanks(5, active=3, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        ranks[2].tell("unready")
        ranks[1].tell("fault")
        ranks[2].wait_for("Restart")
        tell(ranks, "lose")
        ranks[2].send(signal.SIGKILL)
        ranks[2].wait_end()
        tell(ranks, "adopt")
        assert ranks.go(1, but=(2,))["ranks"] == {"0": 0, "1": 1, "3": 2, "4": None}


def test_an_order_to_leave_that_reached_one_node_reaches_all() -> None:
    """A coordinator that is lost in the middle of it: the next one has the others leave, too, for the same restart."""
    with FakeRanks(4, active=4, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        tell(ranks, "tear")
        ranks[3].tell("fault")
        assert ranks.go(1)["ranks"] == {"0": 0, "1": 1, "2": 2, "3": 3}
        finish(ranks, 0, 1, 2, 3)
        assert all(len(child.orders("Go")) == 2 for child in ranks.children)


def test_go_is_given_again_where_only_one_node_went() -> None:
    """All end up in one call, with one store, in the ranks that they had."""
    with FakeRanks(4, active=4, has_launcher=True) as ranks:
        tell(ranks, "tear")
        ranks.connect()
        order = ranks.go(1)
        assert order["ranks"] == {"0": 0, "1": 1, "2": 2, "3": 3}
        finish(ranks, 0, 1, 2, 3)


def test_the_last_order_reaches_all() -> None:
    """Where one node was told that all have completed, the next coordinator tells the others."""
    with FakeRanks(4, active=4, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        tell(ranks, "tear")
        finish(ranks, 0, 1, 2, 3)
        assert not any(child.orders("Restart") for child in ranks.children)


def test_a_call_ends_when_the_agent_is_gone() -> None:
    """The ranks stop with the reason; so do those that begin after it."""
    with FakeRanks(2, num_nodes=1, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        assert ranks.nodes is not None
        ranks.nodes.__exit__()
        for child in ranks.children:
            assert "the agent of this node is gone" in child.wait_for("Abort")["reason"]
        ranks.wait_monitors()


def test_nobody_listens_but_the_agent() -> None:
    """Agent processes whose node's agent has a relay open no port."""
    with FakeRanks(2, num_nodes=1, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        for pid in ranks.monitors():
            inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            with open(f"/proc/{pid}/net/tcp") as file:
                rows = [line.split() for line in file.readlines()[1:]]
            assert not [row for row in rows if f"socket:[{row[9]}]" in inodes]
        finish(ranks, 0, 1)


def test_garbage_at_the_relay_disturbs_nobody() -> None:
    """What connects and says nothing sensible is dropped."""
    with FakeRanks(2, num_nodes=1, has_launcher=True) as ranks:
        ranks.connect()
        ranks.go(0)
        assert ranks.nodes is not None
        with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as silent:
            for one in (stranger, silent):
                one.connect(f"\0{ranks.nodes.addresses[0]}")
            stranger.sendall(b"\x05\0\0\0\x93\x01\x02\x03\x04")
            stranger.settimeout(100.0)
            assert stranger.recv(1) == b""
            ranks[1].tell("fault")
            ranks.go(1)
        finish(ranks, 0, 1)
