"""``nvidia_resiliency_ext.shared_utils.inject_fault``: an injected fault of this process after a delay.

For tests of a job. :mod:`outlast.chaos` causes the faults; its fault plans inject faults into a whole run.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM
from types import FrameType
from typing import Any

from outlast import env
from outlast.chaos.process_faults import crash, hold_gil, raise_in_main_thread, send_signal
from outlast.config.base import require

log = logging.getLogger(__name__)
_START_S = 5.0
"""How long a fault without a delay waits until the injecting call has started the timer."""


class WorkloadFault(Enum):
    """Kind of an injected fault."""

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
    """A thread holds the GIL forever."""
    SEGFAULT = auto()
    SIGINT = auto()
    SIGKILL = auto()
    SIGTERM = auto()
    SIGSTOP = auto()


class InjectedException(Exception):
    """An injected exception."""


_wanted = threading.Event()


def maybe_raise_workload_exception() -> None:
    """Raise :class:`InjectedException` once, if a fault ``WORKLOAD_EXC`` is due."""
    if _wanted.is_set():
        _wanted.clear()
        raise InjectedException("a fault that was injected on purpose")


def clear_workload_exception() -> None:
    """Drop a fault ``WORKLOAD_EXC`` that is due."""
    _wanted.clear()


def dispatch_fault_injection(fault: WorkloadFault, delay: float, callback: Callable[[], Any] | None) -> None:
    """Inject a fault into this process.

    Args:
        fault: The kind.
        delay: Seconds from now.
        callback: Called right before the fault, in a separate thread; ``None`` = nothing.

    Raises:
        ConfigError: The fault cannot be caused, or the delay is negative.

    Thread: the main thread for ``SIGNAL_EXC``, otherwise any.
    """
    require(isinstance(fault, WorkloadFault), f"{fault!r} is not a fault; give one of Fault")
    require(delay >= 0, f"delay={delay} must be at least 0 seconds")
    if fault in _registered:
        _registered[fault](delay, callback)
        return
    text = f"{fault.name} is not supported; hang or kill the rank instead: Fault.SIGSTOP, Fault.SIGKILL"
    require(fault in _CAUSES, text)
    if fault == WorkloadFault.SIGNAL_EXC:
        signal.signal(signal.SIGUSR1, _raise_in_handler)

    has_started = threading.Event()

    def inject() -> None:
        has_started.wait(_START_S)  # an exception within start() would corrupt threading's list of threads
        log.critical("rank's process %d: the fault %s is injected on purpose", os.getpid(), fault.name)
        if callback is not None:
            callback()
        _CAUSES[fault]()

    timer = threading.Timer(delay, inject)
    timer.daemon = True
    timer.name = "outlast-injected-fault"
    timer.start()
    has_started.set()


def register_fault(
    fault_name_or_enum: str | WorkloadFault, handler: Callable[[float, Callable[[], Any] | None], Any]
) -> WorkloadFault:
    """Set the function that causes a fault.

    Args:
        fault_name_or_enum: A member of ``Fault``, or the name of a new member.
        handler: Called by :func:`dispatch_fault_injection` with its delay and callback, in the caller's thread.

    Returns:
        The member of ``Fault``.
    """
    fault = fault_name_or_enum
    if not isinstance(fault, WorkloadFault):
        name, members = fault, WorkloadFault._member_map_
        if name not in members:
            # NVRx's own protocol: a registered name becomes a member of Fault. Enum has no public way to add one.
            added = object.__new__(WorkloadFault)
            added._name_, added._value_ = name, 1 + max(one.value for one in WorkloadFault)
            members[name] = WorkloadFault._value2member_map_[added._value_] = added
            WorkloadFault._member_names_.append(name)
        fault = WorkloadFault[name]
    _registered[fault] = handler
    return fault


def inject_fault(
    faults: tuple[WorkloadFault, ...],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callable[[], Any] | None = None,
) -> None:
    """Inject a fault into randomly drawn ranks; all ranks draw the same.

    Args:
        faults: The faults to draw one from.
        num_faults: The number of ranks, or the smallest and largest number to draw from.
        keep_alive: The first ranks, this many, get no fault.
        delay: Seconds from now, or the smallest and largest number to draw from.
        seed: Seed of the draw, the same on all ranks.
        callback: As for :func:`dispatch_fault_injection`.

    Raises:
        ConfigError: There is no fault to draw, or a number is out of range.
    """
    worker, generator = env.read_worker(), random.Random(seed)
    fewest, most = (num_faults, num_faults) if isinstance(num_faults, int) else num_faults
    shortest_s, longest_s = (delay, delay) if isinstance(delay, int | float) else delay
    require(bool(faults), "faults is empty; give at least one of Fault")
    form = "or two numbers in ascending order"
    require(0 <= fewest <= most, f"num_faults={num_faults} must be at least 0, {form}")
    num = worker.world_size
    require(0 <= keep_alive <= num, f"keep_alive={keep_alive} must be from 0 to the number of ranks, {num}")
    require(0 <= shortest_s <= longest_s, f"delay={delay} must be at least 0 seconds, {form}")
    drawn_s = generator.uniform(shortest_s, longest_s)
    others = range(keep_alive, worker.world_size)
    ranks = generator.sample(others, min(generator.randint(fewest, most), len(others)))
    fault = generator.choice(faults)
    if worker.global_rank in ranks:
        log.info("rank %d: the fault %s follows in %.3f s (seed %d)", worker.global_rank, fault.name, drawn_s, seed)
        dispatch_fault_injection(fault, drawn_s, callback)


def _raise_in_handler(number: int, frame: FrameType | None) -> None:
    raise InjectedException(f"a fault that was injected on purpose, by {signal.Signals(number).name}")


_registered: dict[WorkloadFault, Callable[[float, Callable[[], Any] | None], Any]] = {}
"""Functions from :func:`register_fault`."""
_CAUSES: dict[WorkloadFault, Callable[[], object]] = {
    WorkloadFault.WORKLOAD_EXC: _wanted.set,
    WorkloadFault.ASYNC_EXC: partial(raise_in_main_thread, InjectedException),
    WorkloadFault.SIGNAL_EXC: partial(send_signal, signal.SIGUSR1),
    WorkloadFault.OS_ABORT: os.abort,
    WorkloadFault.LOCK_GIL: partial(hold_gil, None),
    WorkloadFault.SEGFAULT: crash,
    **{WorkloadFault[one.name]: partial(send_signal, one) for one in (SIGINT, SIGKILL, SIGTERM, SIGSTOP)},
}
