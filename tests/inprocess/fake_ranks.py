"""Fake ranks with real monitor processes, for tests."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from outlast import clock
from outlast.inprocess.monitor_task import MonitorTask
from outlast.policy.restart_limits import RestartLimits

TIMEOUT_S = 50.0
TOKEN = "5e" * 16
_PIDFD_GETFD = 438


class Child:
    """One fake rank."""

    def __init__(self, task: MonitorTask, active_world_size: int) -> None:
        self.rank = task.initial_rank
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("fake_rank.py")),
                msgspec.json.encode(task).decode(),
                str(active_world_size),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(self.rank), "WORLD_SIZE": str(task.initial_world_size)},
        )
        self.pid = self.process.pid
        self.said: list[dict[str, Any]] = []
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.monitors: list[int] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def wait_for(
        self,
        what: str,
        when: Callable[[dict[str, Any]], bool] = lambda _: True,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        """Return the next thing of this kind that the rank said."""
        end_s = clock.now_s() + timeout_s
        while True:
            said = self._queue.get(timeout=max(0.01, end_s - clock.now_s()))
            assert said is not None, f"rank {self.rank} ended without {what}; it said {self.said[-3:]}"
            self.said.append(said)
            if "monitor" in said:
                self.monitors.append(said["monitor"])
            if said["what"] == what and when(said):
                return said

    def wait_end(self) -> int:
        code = self.process.wait(timeout=TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        while (said := self._queue.get(timeout=TIMEOUT_S)) is not None:
            self.said.append(said)
        self._queue.put(None)
        return code

    def orders(self, what: str) -> list[dict[str, Any]]:
        return [said for said in self.said if said["what"] == what]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()


def is_monitor(pid: int) -> bool:
    """Return whether this is a monitor process that runs."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "outlast.inprocess.monitor_process" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


class FakeRanks:
    """A world of fake ranks; a context manager that leaves nothing behind.

    Args:
        num: Ranks.
        active: Of these; ``None``: all.
        log_dir: Of the monitor processes.
        short_lived: A rank that is killed as soon as it has started its monitor process.
        changes: Settings.
    """

    def __init__(
        self,
        num: int,
        *,
        active: int | None = None,
        log_dir: Path | None = None,
        short_lived: int | None = None,
        **changes: Any,
    ) -> None:
        self._short_lived = short_lived
        limits = {name: changes.pop(name) for name in RestartLimits.__struct_fields__ if name in changes}
        self.children = []
        for rank in range(num):
            values: dict[str, Any] = {
                "pid": 0,
                "initial_rank": rank,
                "initial_world_size": num,
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
                "log_path": str(log_dir / f"monitor-{rank}.log") if log_dir else "",
            } | changes
            self.children.append(Child(MonitorTask(**values), num if active is None else active))
        self.hub = ""

    def __enter__(self) -> FakeRanks:
        try:
            addresses = []
            for child in self.children:
                child.wait_for("started")
                if child.rank == self._short_lived:
                    child.send(signal.SIGKILL)
            for child in self.children:
                is_alive = child.rank != self._short_lived
                addresses.append(child.wait_for("Listening")["address"] if is_alive else "")
            self.hub = addresses[0]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, rank: int) -> Child:
        return self.children[rank]

    def connect(self, *ranks: int, token: str = TOKEN) -> None:
        for rank in ranks or set(range(len(self.children))) - {self._short_lived}:
            self[rank].tell(f"connect {self.hub} {token}")

    def go(self, iteration: int, *, but: tuple[int, ...] = (), timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Wait until everybody is told to enter this iteration; return the order."""
        orders = [
            child.wait_for("Go", lambda said: said["iteration"] == iteration, timeout_s)
            for child in self.children
            if child.rank not in but
        ]
        contents = [{name: value for name, value in order.items() if name != "at_ns"} for order in orders]
        assert all(content == contents[0] for content in contents)
        self.last_ns = max(order["at_ns"] for order in orders)
        return orders[0]

    def monitors(self) -> set[int]:
        return {pid for child in self.children for pid in child.monitors}

    def wait_monitors(self, timeout_s: float = TIMEOUT_S) -> None:
        """Every monitor process is gone within this time."""
        end_s = clock.now_s() + timeout_s
        while left := {pid for pid in self.monitors() if is_monitor(pid)}:
            assert clock.now_s() < end_s, f"monitor processes {left} live {timeout_s:g} s later"
            threading.Event().wait(0.005)

    def close(self) -> None:
        for pid in self.monitors():
            if is_monitor(pid):
                os.kill(pid, signal.SIGCONT)
        for child in self.children:
            child.process.kill()
        for child in self.children:
            child.close()
        self.wait_monitors()


def shut_down_link(pid: int, port: int) -> None:
    """Break another process's connection to a port of this machine, as a network would."""
    process = psutil.Process(pid)
    fd = next(c.fd for c in process.net_connections("tcp") if c.raddr and c.raddr.port == port)
    pidfd = os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    os.close(pidfd)
    assert copy >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=copy) as connection:
        connection.shutdown(socket.SHUT_RDWR)
