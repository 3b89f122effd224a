"""``nvidia_resiliency_ext.shared_utils.inject_fault``: a fault of this process on purpose, some seconds from now.

For tests of a job. Faults of a whole run, at an iteration or in a section and only once in it, are
:mod:`outlast.chaos`'s.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from enum import Enum, auto
from types import FrameType
from typing import Any

from outlast.errors import ConfigError

log = logging.getLogger(__name__)
_START_S = 5.0
"""How long a fault without a delay waits for the call that injects it to have begun it."""


class WorkloadFault(Enum):
    """What happens."""

    GPU_ERROR = auto()
    """Refused."""
    GPU_SLEEP = auto()
    """Refused."""
    WORKLOAD_EXC = auto()
    """The next :func:`maybe_raise_workload_exception` raises."""
    ASYNC_EXC = auto()
    """The main thread raises, wherever it runs Python code."""
    SIGNAL_EXC = auto()
    """A handler of SIGUSR1 raises in the main thread."""
    OS_ABORT = auto()
    LOCK_GIL = auto()
    """A thread keeps the interpreter's lock for hours."""
    SEGFAULT = auto()
    SIGINT = auto()
    SIGKILL = auto()
    SIGTERM = auto()
    SIGSTOP = auto()


class InjectedException(Exception):
    """The exception that was asked for."""


_wanted = threading.Event()


def maybe_raise_workload_exception() -> None:
    """Raise :class:`InjectedException` once, if a fault ``WORKLOAD_EXC`` has come due."""
    if _wanted.is_set():
        _wanted.clear()
        raise InjectedException("a fault that was injected on purpose")


def clear_workload_exception() -> None:
    """Forget a fault ``WORKLOAD_EXC`` that has come due."""
    _wanted.clear()


def dispatch_fault_injection(fault: WorkloadFault, delay: float, callback: Callable[[], Any] | None) -> None:
    """Cause a fault of this process.

    Args:
        fault: Which.
        delay: Seconds from now.
        callback: Called right before, in a thread of its own; ``None`` = nothing.

    Raises:
        ConfigError: It is none that can be caused, or the delay is below 0.

    Thread: the main thread for ``SIGNAL_EXC``, otherwise any.
    """
    if not isinstance(fault, WorkloadFault):
        raise ConfigError(f"{fault!r} is no fault; give one of Fault")
    if fault in (WorkloadFault.GPU_ERROR, WorkloadFault.GPU_SLEEP):
        raise ConfigError(f"{fault.name} is not supported; hang or kill the rank instead: Fault.SIGSTOP, Fault.SIGKILL")
    if not delay >= 0:
        raise ConfigError(f"delay={delay} must be at least 0 seconds")
    if fault == WorkloadFault.SIGNAL_EXC:
        signal.signal(signal.SIGUSR1, _raise_in_handler)

    has_started = threading.Event()

    def strike() -> None:
        has_started.wait(_START_S)  # an exception within start() would leave the threads' list torn
        log.critical("rank's process %d: the fault %s is injected on purpose", os.getpid(), fault.name)
        if callback is not None:
            callback()
        _CAUSES[fault]()

    timer = threading.Timer(delay, strike)
    timer.daemon = True
    timer.name = "outlast-injected-fault"
    timer.start()
    has_started.set()


def _raise_in_handler(number: int, frame: FrameType | None) -> None:
    raise InjectedException(f"a fault that was injected on purpose, by {signal.Signals(number).name}")


def _raise_in_main_thread() -> None:
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(InjectedException))


def _send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


_CAUSES: dict[WorkloadFault, Callable[[], object]] = {
    WorkloadFault.WORKLOAD_EXC: _wanted.set,
    WorkloadFault.ASYNC_EXC: _raise_in_main_thread,
    WorkloadFault.SIGNAL_EXC: _send(signal.SIGUSR1),
    WorkloadFault.OS_ABORT: os.abort,
    WorkloadFault.LOCK_GIL: lambda: re.match(r"(a?){40}a{40}", "a" * 40),  # a match in C, which never lets go
    WorkloadFault.SEGFAULT: lambda: ctypes.string_at(1),
    WorkloadFault.SIGINT: _send(signal.SIGINT),
    WorkloadFault.SIGKILL: _send(signal.SIGKILL),
    WorkloadFault.SIGTERM: _send(signal.SIGTERM),
    WorkloadFault.SIGSTOP: _send(signal.SIGSTOP),
}
