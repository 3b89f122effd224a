"""Processes: dying with one's parent, ending a whole group, saying what an exit means."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["describe_exit", "die_with_parent", "kill_group"]

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
