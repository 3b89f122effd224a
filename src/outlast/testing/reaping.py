"""Processes that carry a token in their environment, found and ended wherever they got to."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
from pathlib import Path

import psutil

from outlast import clock
from outlast.errors import DeadlineExceeded

__all__ = ["TOKEN", "describe_process", "end_processes", "free_port", "processes_with"]

TOKEN = "OUTLAST_TEST_CLUSTER"
"""Environment variable that marks the processes of one test."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20000  # below, many programs have ports of their own, Ray's workers among them
_NUM_TRIES = 100


def processes_with(token: str) -> list[psutil.Process]:
    """Return every living process that was started with the token, orphans too."""
    return [process for process in psutil.process_iter() if _carries(process.pid, token)]


def end_processes(token: str, *, within_s: float = 10.0) -> None:
    """SIGKILL every process that was started with the token, and wait until all are gone.

    Blocks: up to ``within_s``.

    Raises:
        DeadlineExceeded: One could not be ended; the message names it.
    """
    deadline = clock.now_s() + within_s
    while left := processes_with(token):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=0.5)
        if clock.now_s() >= deadline:
            named = "; ".join(describe_process(process) for process in left)
            raise DeadlineExceeded(f"these processes of the test cannot be ended: {named}")


def describe_process(process: psutil.Process) -> str:
    """Return a line with the process's id, state and command."""
    try:
        return f"{process.pid} ({process.status()}) {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def free_port() -> int:
    """Return a TCP port of this machine that nobody listened on a moment ago.

    It is drawn at random from those that the kernel gives to no outgoing connection: neither such a connection nor
    another process that asks in the same moment is likely to take it before it is used.
    """
    low, high = _ephemeral_ports()
    candidates = [port for port in range(_FIRST_PORT, 1 << 16) if not low <= port <= high]
    draw = random.SystemRandom()  # a test's seed, or a fork, repeats no draw
    for port in [*draw.sample(candidates, min(_NUM_TRIES, len(candidates))), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # somebody has it
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError("this machine has no free TCP port; end what holds them")


def _ephemeral_ports() -> tuple[int, int]:
    try:
        low, high = _EPHEMERAL.read_text().split()
    except OSError:  # the kernel's default
        return 32768, 60999
    return int(low), int(high)


def _carries(pid: int, token: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or of another user
        return False
    return f"{TOKEN}={token}".encode() in environment.split(b"\0")  # a zombie's is empty
