"""Fake ranks with real agent processes, for tests."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
from relaying_nodes import RelayingNodes

from outlast import clock
from outlast.errors import DeadlineExceeded
from outlast.inprocess.protocol import MonitorTask
from outlast.policy.inprocess_protocol import RestartLimits
from outlast.testing import RankProcesses

TIMEOUT_S = 100.0
TRAITS = {"dumb", "hang", "stubborn", "unready"}
REPORT_PREFIX = '{"what": '
_PIDFD_GETFD = 438


def monitor_task(**changes: Any) -> MonitorTask:
    """Return the task of a rank's agent process.

    Args:
        changes: Fields of the task and of its limits that differ from the defaults of the tests.
    """
    limits = {name: changes.pop(name) for name in RestartLimits.__struct_fields__ if name in changes}
    values: dict[str, Any] = {
        "pid": 0,
        "initial_rank": 0,
        "initial_world_size": 1,
        "node": "here",
        "host": "127.0.0.1",
        "limits": RestartLimits(**limits),
        "soft_timeout_s": 60.0,
        "hard_timeout_s": 90.0,
        "thread_interval_s": 0.2,
        "process_interval_s": 1.0,
        "heartbeat_interval_s": 30.0,
        "heartbeat_timeout_s": 60.0,
        "termination_grace_s": 0.0,
    }
    return MonitorTask(**values | changes)


class Child:
    """One fake rank."""

    def __init__(self, ranks: RankProcesses, rank: int) -> None:
        self.rank = rank
        self._ranks = ranks
        self.reported: list[dict[str, Any]] = []
        self.monitors: list[int] = []

    @property
    def pid(self) -> int:
        return self._ranks.pid(self.rank)

    def send_command(self, text: str) -> None:
        """Send a command; a command that changes the rank's behaviour is in effect on return."""
        self._ranks.send(self.rank, text)
        if text in TRAITS:
            self.wait_for("trait")

    def _next_report(self, timeout_s: float) -> dict[str, Any]:
        reported: dict[str, Any] = json.loads(self._ranks.next_line(self.rank, timeout_s, containing=REPORT_PREFIX))
        self.reported.append(reported)
        if "monitor" in reported:
            self.monitors.append(reported["monitor"])
        return reported

    def wait_for(
        self,
        event: str,
        condition: Callable[[dict[str, Any]], bool] = lambda _: True,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        """Return the next report of this kind."""
        end_s = clock.now_s() + timeout_s
        while True:
            reported = self._next_report(end_s - clock.now_s())
            if reported["what"] == event and condition(reported):
                return reported

    def wait_end(self) -> int:
        (code,) = self._ranks.wait(TIMEOUT_S, ranks=[self.rank])
        with contextlib.suppress(DeadlineExceeded):  # the rank has ended: there are no more reports
            while True:
                self._next_report(0.0)
        return code

    def orders(self, event: str) -> list[dict[str, Any]]:
        return [reported for reported in self.reported if reported["what"] == event]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def is_monitor(pid: int) -> bool:
    """Return whether a process is a running agent process."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "outlast.runtime.agent_process" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


class FakeRanks:
    """A world of fake ranks; a context manager that ends all its processes.

    Args:
        num: Number of ranks.
        active: Number of active ranks; ``None``: all.
        log_dir: Folder for the logs of the agent processes.
        num_nodes: Number of nodes, each with one agent process.
        has_launcher: A separate process runs the relays and the coordinator, as a launcher does.
        changes: Fields of the task that differ from the defaults of the tests.
    """

    def __init__(
        self,
        num: int,
        *,
        num_nodes: int = 2,
        has_launcher: bool = False,
        active: int | None = None,
        log_dir: Path | None = None,
        **changes: Any,
    ) -> None:
        self.nodes = RelayingNodes(num_nodes) if has_launcher else None
        addresses = self.nodes.addresses if self.nodes is not None else [""] * num_nodes
        self._homes = [rank * num_nodes // num for rank in range(num)]
        self._ranks = RankProcesses(
            Path(__file__).with_name("fake_rank.py"),
            msgspec.json.encode(monitor_task(initial_world_size=num, **changes)).decode(),
            str(num if active is None else active),
            str(log_dir or ""),
            world_size=num,
            stdin=True,
            environments=[
                {"OUTLAST_RELAY": addresses[home], "OUTLAST_NODE": f"n{home}", "GROUP_RANK": str(home)}
                for home in self._homes
            ],
        )
        self.children = [Child(self._ranks, rank) for rank in range(num)]
        self.first: dict[str, str] = {}
        """Address and offer of the first coordinating agent process."""

    def __enter__(self) -> FakeRanks:
        self._ranks.__enter__()
        try:
            for child in self.children:
                child.wait_for("started")
            if self.nodes is None:
                self.first = self.children[0].wait_for("Listening")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, rank: int) -> Child:
        return self.children[rank]

    def connect(self, *ranks: int) -> None:
        known = "" if self.nodes is not None else f" {self.first['address']} {self.first['offer']}"
        for rank in ranks or range(len(self.children)):
            self[rank].send_command(f"connect{known}")

    def on_node(self, number: int) -> list[Child]:
        """Return the ranks of a node."""
        return [self.children[rank] for rank, home in enumerate(self._homes) if home == number]

    def kill_agent(self, node: int, *, excluding: tuple[int, ...] = ()) -> None:
        """Kill a node's agent process, and wait until its ranks have a new one."""
        children = [child for child in self.on_node(node) if child.rank not in excluding]
        os.kill(children[0].monitors[-1], signal.SIGKILL)
        for child in children:
            child.wait_for("monitor")
        assert len({child.monitors[-1] for child in children}) == 1

    def go(
        self, restart_count: int, *, excluding: tuple[int, ...] = (), timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """Wait until all ranks have the order to enter this call; return the order."""
        orders = [
            child.wait_for("Go", lambda reported: reported["restart_count"] == restart_count, timeout_s)
            for child in self.children
            if child.rank not in excluding
        ]
        contents = [{name: value for name, value in order.items() if name != "at_ns"} for order in orders]
        assert all(content == contents[0] for content in contents)
        self.last_ns = max(order["at_ns"] for order in orders)
        return orders[0]

    def monitors(self) -> set[int]:
        return {pid for child in self.children for pid in child.monitors}

    def wait_monitors(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all agent processes have ended."""
        end_s = clock.now_s() + timeout_s
        while remaining := {pid for pid in self.monitors() if is_monitor(pid)}:
            assert clock.now_s() < end_s, f"agent processes {remaining} live {timeout_s:g} s later"
            threading.Event().wait(0.005)

    def close(self) -> None:
        try:
            for pid in self.monitors():
                if is_monitor(pid):
                    os.kill(pid, signal.SIGCONT)
            for child in self.children:
                self._ranks.kill(child.rank)
            self.wait_monitors()
        finally:
            self._ranks.close()
            if self.nodes is not None:
                self.nodes.__exit__()


def shut_down_link(pid: int, port: int) -> None:
    """Break another process's connection to a port of this machine, as a network fault does."""
    process = psutil.Process(pid)
    fd = next(c.fd for c in process.net_connections("tcp") if c.raddr and c.raddr.port == port)
    pidfd = os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    os.close(pidfd)
    assert copy >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=copy) as connection:
        connection.shutdown(socket.SHUT_RDWR)
