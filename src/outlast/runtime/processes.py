"""Processes: dying with one's parent, ending a whole group, finding one again, saying what an exit means."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from outlast.env import hostname
from outlast.policy.lease import Process

__all__ = [
    "describe_exit",
    "describe_self",
    "die_with_parent",
    "is_alive",
    "kill_group",
    "machine_id",
    "show_command",
    "this_process",
    "this_program",
]

_PR_SET_PDEATHSIG = 1
_ENDED = (b"Z", b"X", b"x")
"""States of a process that has ended and was not reaped yet."""
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
    fields = _stat("self")
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    if (room := end - start - 2) > 0:
        shown = " ".join(argv).encode(errors="surrogateescape")[:room]
        ctypes.memmove(start, shown + b"\0" * (end - start - len(shown) - 1) + b" ", end - start)


def this_process() -> Process:
    """Return what others find this process by: its number alone may be given again."""
    return Process(host=hostname(), machine=machine_id(), pid=os.getpid(), started=_started(_stat("self")))


def describe_self() -> dict[str, Any]:
    """Return :func:`this_process` as the journal's fields."""
    own = this_process()
    return {"pid": own.pid, "pid_started": own.started, "host": own.host, "machine": own.machine}


def this_program() -> str | None:
    """Return the path of the script that this process runs; ``None``: it runs none (``python -c``, a prompt)."""
    path = os.path.realpath(sys.argv[0]) if sys.argv and sys.argv[0] else ""
    return path if os.path.isfile(path) else None


def is_alive(process: Process) -> bool | None:
    """Return whether a process still runs, stopped or not; ``None``: that cannot be known from this machine."""
    if not process.machine or process.machine != machine_id() or process.pid <= 0:
        return None
    try:
        fields = _stat(str(process.pid))
    except (FileNotFoundError, ProcessLookupError):
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's, where /proc shows one's own alone
            return True
        return True
    return fields[0] not in _ENDED and process.started in (0, _started(fields))


@cache
def machine_id() -> str:
    """Name this start of the machine, and the space of process numbers that this process is in."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = hostname()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _stat(pid: str) -> list[bytes]:
    """Return the fields of proc(5) behind a process's name, from the third on."""
    return Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()


def _started(fields: list[bytes]) -> int:
    return int(fields[19])  # starttime, field 22 of proc(5)


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
