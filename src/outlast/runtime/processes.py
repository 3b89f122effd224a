"""Processes: dying with one's parent, ending a whole group."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_parent", "is_alive", "kill_group"]

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


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
