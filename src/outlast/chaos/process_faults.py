"""Faults of this process: signals, crashes, exceptions, sleeps and a held GIL; the only implementation."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

from outlast import clock
from outlast.chaos.plan import Fault, FaultKind

_LONGEST_S = 1000.0
"""Longest single call that sleeps; longer sleeps repeat it."""


class SimulatedError(RuntimeError):
    """Raised by the fault ``exception``."""


def send_signal(number: int) -> None:
    os.kill(os.getpid(), number)


def stop() -> None:
    """Send SIGSTOP to this process from the calling thread, which stops at once."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def crash() -> None:
    """Read an invalid address: the process ends by SIGSEGV."""
    ctypes.string_at(1)


def raise_in_main_thread(error: type[BaseException]) -> None:
    """Raise an exception in the main thread, at its next Python instruction."""
    ident = threading.main_thread().ident or 0
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


def sleep(duration_s: float | None) -> None:
    """Sleep; other threads continue. ``None``: forever."""
    _repeat(time.sleep, duration_s)


def hold_gil(duration_s: float | None) -> None:
    """Sleep in C code without releasing the GIL: no Python code of the process runs. ``None``: forever."""
    usleep = ctypes.PyDLL(None).usleep  # a function called through PyDLL keeps the GIL
    _repeat(lambda seconds: usleep(max(1, int(seconds * 1e6))), duration_s)


def inject_process_fault(fault: Fault, where: str) -> None:
    """Inject a fault into this process.

    Args:
        fault: A fault that is not numeric, not ``slow`` and not from outside.
        where: Rank and iteration, for an exception's message.

    Raises:
        SimulatedError: The fault is ``exception``.
        SystemExit: The fault is ``exit``.

    Blocks: for the fault's duration, which may be forever.
    """
    match FaultKind(fault.kind):
        case FaultKind.KILL:
            send_signal(signal.SIGKILL)
        case FaultKind.SIGTERM:
            send_signal(signal.SIGTERM)
        case FaultKind.STOP:
            stop()
        case FaultKind.EXCEPTION:
            raise SimulatedError(f"simulated failure, {where}")
        case FaultKind.EXIT:
            raise SystemExit(fault.exit_code)
        case FaultKind.SLEEP:
            sleep(fault.duration_s)
        case FaultKind.HOLD_GIL:
            hold_gil(fault.duration_s)


def _repeat(wait: Callable[[float], object], duration_s: float | None) -> None:
    end_s = float("inf") if duration_s is None else clock.now_s() + duration_s
    while (left_s := min(end_s - clock.now_s(), _LONGEST_S)) > 0:
        wait(left_s)
