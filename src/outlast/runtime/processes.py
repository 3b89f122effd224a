"""Processes: dying with one's parent, ending a whole group, saying what an exit means."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = [
    "describe_exit",
    "describe_self",
    "die_with_parent",
    "is_running",
    "kill_group",
    "machine_id",
    "show_command",
]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``sig`` to this process when its parent's thread ends.

    Args:
        parent_pid: The parent that was there when this process was started; if it is gone already, this
            process ends at once.
        sig: The signal.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
    if os.getppid() != parent_pid:
        os._exit(128 + sig)


def show_command(argv: Sequence[str]) -> None:
    """Have ``ps``, ``pgrep -f`` and the like show another command for this process, cut to the room that there is.

    The command line lies in the process's own memory; where its last byte is not zero, the kernel shows it up to the
    first byte that is.
    """
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    if (room := end - start - 2) > 0:
        shown = " ".join(argv).encode(errors="surrogateescape")[:room]
        ctypes.memmove(start, shown + b"\0" * (end - start - len(shown) - 1) + b" ", end - start)


@cache
def machine_id() -> str:
    """Return a name for where this process's ids are valid: this boot of the machine, and this process namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def describe_self() -> dict[str, Any]:
    """Return what names this process for good, for :func:`is_running` in another one: its id may be given again."""
    pid = os.getpid()
    return {"pid": pid, "pid_started": _started(pid) or 0, "host": socket.gethostname(), "machine": machine_id()}


def is_running(pid: int, started: int, machine: str) -> bool | None:
    """Return whether a process that described itself still runs; ``None``: that cannot be told from here.

    Args:
        pid: Its id.
        started: Its start, in clock ticks since the boot; 0 = not known.
        machine: Where its id is valid.
    """
    if not machine or machine != machine_id() or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's: it is there
    now_started = _started(pid)
    return now_started is None or (now_started != 0 and started in (0, now_started))


def _started(pid: int) -> int | None:
    """Return a process's start in clock ticks since the boot; ``None``: not to be seen; 0: it has ended, unreaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def describe_exit(exit_code: int) -> str:
    """Return what an exit code means, for people; negative: the signal that ended the process."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"


def kill_group(pgid: int, sig: int) -> bool:
    """Send a signal to a process group; return whether anyone was there to get it."""
    try:
        os.killpg(pgid, sig)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Some member changed its user; the ones that we may signal got it.
        return True
    return True
