"""What a fault of a process does to the process that it befalls."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

from outlast import clock
from outlast.chaos.fault import Fault, FaultKind

__all__ = ["SimulatedError", "strike_process"]

_SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.SIGTERM: signal.SIGTERM}
_LONGEST_S = 1000.0
"""One call that sleeps lasts no longer; then the next one begins."""


class SimulatedError(RuntimeError):
    """What the fault ``exception`` raises."""


def strike_process(fault: Fault, where: str) -> None:
    """Let a fault befall this process.

    Args:
        fault: One whose kind is not numeric.
        where: What to say in an exception's message.

    Raises:
        SimulatedError: The fault is ``exception``.
        SystemExit: The fault is ``exit``.

    Blocks: for the fault's duration, which may be for ever.
    """
    kind = FaultKind(fault.kind)
    if kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])
    elif kind == FaultKind.STOP:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # stops all threads, and this one before it goes on
    elif kind == FaultKind.EXCEPTION:
        raise SimulatedError(f"simulated failure, {where}")
    elif kind == FaultKind.EXIT:
        raise SystemExit(fault.exit_code)
    else:
        end_s = float("inf") if fault.duration_s is None else clock.now_s() + fault.duration_s
        while (left_s := min(end_s - clock.now_s(), _LONGEST_S)) > 0:
            if kind == FaultKind.SLEEP:
                time.sleep(left_s)
            else:
                ctypes.PyDLL(None).usleep(max(1, int(left_s * 1e6)))  # called through PyDLL it keeps the GIL
