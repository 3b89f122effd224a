"""Waits of gloo that nothing ends but the group's timeout, and their end.

When a connection breaks, gloo wakes every thread that waits for a message on it, except one whose message was half sent
or half received (torch 2.6 to 2.13: ``Pair::signalException`` skips what ``tx_`` and ``rx_`` point to). Such
a thread sleeps on the condition variable of an ``UnboundBuffer`` until the group's timeout has passed, and destroying
the group waits for it. gloo can end such a wait, ``UnboundBuffer::abortWaitRecv``, and PyTorch exports that, but there
is no way to it from Python.

So the buffer is found from the outside: the kernel shows on which address a thread sleeps
(``/proc/self/task/*/syscall``), and the buffer that this address lies in is recognised by its virtual table. Where
any of this is not as expected, nothing is done.

To be used only when every connection of the groups is closed and the collectives are given up: gloo goes on as if the
message had come, until it looks at a connection again. Which group a waiting thread belongs to is known where it is one
of the group's own (:func:`group_threads`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["end_waits", "group_threads", "waiting_threads"]

log = logging.getLogger(__name__)

_CLASS = "N4gloo9transport3tcp13UnboundBuffer"
_MAX_OFFSET = 0x100
"""Bytes of a buffer before the futex words of its condition variables; 0x9c in torch 2.13."""
_FUTEX = {"x86_64": 202, "aarch64": 98}


class _Gloo(NamedTuple):
    table: int
    """What a buffer's first word is."""
    abort_receive: ctypes._NamedFuncPointer
    abort_send: ctypes._NamedFuncPointer


@cache
def _gloo() -> _Gloo | None:
    import torch

    if os.uname().machine not in _FUTEX:
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{_CLASS}E")) + 16
        receive, send = library[f"_Z{_CLASS}13abortWaitRecvEv"], library[f"_Z{_CLASS}13abortWaitSendEv"]
    except (OSError, ValueError, AttributeError) as error:
        log.debug("waits of gloo cannot be ended here: %s", error)
        return None
    for function in (receive, send):
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return _Gloo(table, receive, send)


def waiting_threads() -> dict[int, int]:
    """Return, by thread, the address of the buffer that it waits for. Blocks: never. Thread: any."""
    gloo = _gloo()
    if gloo is None:
        return {}
    found = {}
    number = str(_FUTEX[os.uname().machine])
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        for thread in os.listdir("/proc/self/task"):
            try:
                words = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
                if words[0] != number:
                    continue
                buffer = _buffer_around(memory, int(words[1], 16), gloo.table)
            except (OSError, ValueError, IndexError):
                continue  # ended, or running
            if buffer is not None:
                found[int(thread)] = buffer
    finally:
        os.close(memory)
    return found


def group_threads() -> frozenset[int]:
    """Return the threads of this process; those that are new after a group was made run its collectives.

    A thread that was just started does not bear its name yet; :func:`end_waits` looks at the names.
    """
    return frozenset(int(thread) for thread in os.listdir("/proc/self/task"))


def end_waits(threads: frozenset[int] | None = None) -> int:
    """End the waits for messages that cannot come any more; return the number of threads that waited.

    Args:
        threads: Those of a group, to end the waits of no other one; ``None``: all.

    Blocks: never.
    Thread: any.
    """
    gloo = _gloo()
    waiting = waiting_threads()
    if threads is not None:
        waiting = {thread: waiting[thread] for thread in waiting.keys() & threads if _runs_collectives(thread)}
    if gloo is None or not waiting:
        return 0
    for buffer in waiting.values():
        gloo.abort_receive(buffer)
        gloo.abort_send(buffer)
    return len(waiting)


def _runs_collectives(thread: int) -> bool:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text() == "pt_gloo_runloop\n"
    except OSError:
        return False  # ended meanwhile


def _buffer_around(memory: int, futex: int, table: int) -> int | None:
    """Return the address of the buffer that a futex word is part of; ``None``: it is part of something else."""
    start = (futex & ~7) - _MAX_OFFSET
    data = os.pread(memory, _MAX_OFFSET, start)  # fails, and does no harm, where nothing is mapped
    words = struct.unpack(f"={len(data) // 8}Q", data)
    for index in range(len(words) - 1, -1, -1):
        if words[index] == table:
            return start + 8 * index
    return None
