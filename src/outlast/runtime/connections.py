"""The connections over which this process waits for its peers, and how they are cut.

A gloo collective ends only with its peers, its timeout or its connections: neither ``abort()`` nor destroying the group
wakes it (torch 2.13), and an abandoned one still writes to its tensors when a late peer arrives. So while a
:class:`Noting` is active, the sockets of every process group and store client that ``torch.distributed`` makes are
recorded, and :func:`cut_all` shuts them down, together with the objects of :func:`register`. A reused descriptor is
recognised by its inode; listening sockets are left alone, as gloo aborts the process when its listener fails. Sockets
that other threads open while a group is made are separated from its own by the marks in :func:`of_group`.

At first only the reading side is shut down: gloo then closes the connection without losing outgoing data and wakes
every thread that waits on it, except one whose message was half transferred (torch 2.8 to 2.13:
``Pair::signalException`` skips what ``tx_`` and ``rx_`` point to). Such a thread sleeps on the condition variable of an
``UnboundBuffer`` until the group's timeout. Python cannot call ``UnboundBuffer::abortWaitRecv``, so the buffer is found
from outside: ``/proc/self/task/*/syscall`` shows the address on which a thread sleeps, and the buffer around it is
recognised by its virtual table. If any of this is not as expected, nothing is done. :func:`end_waits` requires that
every connection of the groups is closed and their collectives are given up: gloo continues as if the message had
arrived.

Rejected: comparing ``/proc/self/fd`` over the whole life of a group (cuts the user's own connections as well).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import logging
import math
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from outlast import clock

log = logging.getLogger(__name__)
_MAKERS = (
    ("torch.distributed.rendezvous", "_create_c10d_store"),
    ("torch.distributed.distributed_c10d", "_new_process_group_helper"),
)
"""Functions that open connections in ``torch.distributed``: module and name."""
_RESTING_LOOKS = 3
COLLECTIVES_THREAD = "pt_gloo_runloop"
"""Name of gloo's threads that run collectives."""
_CLASS = "N4gloo9transport3tcp13UnboundBuffer"
_MAX_OFFSET = 0x100
"""Bytes of a buffer before the futex words of its condition variables; 0x9c in torch 2.13."""
_FUTEX = {"x86_64": 202, "aarch64": 98}
_TRY_S = 0.3
"""Timeout of one attempt to connect to a store."""
_PAUSE_S = 0.01
_CLOSING_S = 0.03
"""Seconds in which gloo closes connections whose reading side was shut down, if it still polls them."""
_TIMEVAL = struct.Struct("@ll")
_TICK_S = 0.02
"""Precision with which the kernel keeps a socket's timeout."""


class Cuttable(Protocol):
    """An object that waits for peers and can be cut at any time, from any thread."""

    def cut(self) -> None:
        """Make every wait fail at once. Idempotent."""
        ...


_registered: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()
_noted: set[tuple[int, int]] = set()
_of_stores: set[tuple[int, int]] = set()
"""The subset of ``_noted`` that carries no tensor data; open as long as the store is referenced."""
_pending: list[frozenset[tuple[int, int]]] = []
"""Connections that were open when a :func:`noting` in progress began."""


def register(cuttable: Cuttable) -> None:
    """Have :func:`cut_all` cut this object as well, as long as it exists. Thread: any."""
    with _lock:
        _registered.add(cuttable)


@contextmanager
def noting(*, is_store: bool = False) -> Iterator[None]:
    """Record the connections that any thread opens within this context.

    Args:
        is_store: They belong to a store and carry no tensor data.
    """
    before = connected_sockets()
    with _lock:
        _pending.append(before)
    try:
        yield
    finally:
        opened = connected_sockets() - before
        if not is_store:
            opened = of_group(opened)
        with _lock:
            if before in _pending:  # else cleared by forget()
                _pending.remove(before)
            _noted.update(opened)
            if is_store:
                _of_stores.update(opened)


def cut_all(*, both_ways: bool = False) -> int:
    """Shut down every recorded connection and cut every registered object; return the number of connections.

    Idempotent; repeat while a thread still waits, since a group may be about to open another connection.

    Blocks: never. Thread: any.
    """
    with _lock:
        noted, pending, registered = set(_noted), list(_pending), list(_registered)
    for before in pending:
        noted |= connected_sockets() - before
    with _lock:
        _noted.update(noted)
    for fd, inode in noted:
        shut_down(fd, inode, how=socket.SHUT_RDWR if both_ways else socket.SHUT_RD)
    for cuttable in registered:
        cuttable.cut()
    return len(noted)


def shut_down(fd: int, inode: int, *, how: int = socket.SHUT_RDWR) -> bool:
    """Shut down a connection unless its descriptor was reused; return whether it was open.

    Blocks: never. Thread: any.
    """
    with _borrowed(fd, inode) as connection:
        if connection is None:
            return False
        with suppress(OSError):  # already closed by the peer
            connection.shutdown(how)
    return True


@contextmanager
def _borrowed(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """Yield a duplicate of a connection; ``None``: it is closed, or its descriptor was reused."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    if os.fstat(copy).st_ino != inode:
        os.close(copy)  # may not be a socket
        yield None
        return
    with socket.socket(fileno=copy) as connection:
        yield connection


def of_group(opened: frozenset[tuple[int, int]], timeout_s: float | None = None) -> frozenset[tuple[int, int]]:
    """Return the connections that have the marks of a process group; all of them if none has.

    Args:
        opened: Connections that were opened while a group was made.
        timeout_s: Timeout of a gloo group; ``None``: unknown.
    """
    return frozenset(one for one in opened if _is_marked(*one, timeout_s)) or opened


def _is_marked(fd: int, inode: int, timeout_s: float | None) -> bool:
    with _borrowed(fd, inode) as connection:
        try:
            if connection is None or not os.get_inheritable(fd):
                return False
            if timeout_s is None:
                return True
            data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size)
        except OSError:
            return False
    seconds, microseconds = _TIMEVAL.unpack(data)
    return bool(abs(seconds + microseconds / 1e6 - timeout_s) <= _TICK_S)


def cut_group(opened: Collection[tuple[int, int]], threads: frozenset[int]) -> None:
    """End every wait on the connections of one group, here and at peers; the group is unusable afterwards.

    Args:
        threads: Its threads that run collectives. A wait that gloo does not end by itself continues as if its message
            had arrived, so a caller that waits for a collective must check whether the group was cut.

    Blocks: a few milliseconds; up to 30 ms where gloo no longer polls a connection. Thread: any.
    """
    end_ns = clock.now_ns() + int(_CLOSING_S * 1e9)
    left = [one for one in opened if shut_down(*one, how=socket.SHUT_RD)]
    while left and clock.now_ns() < end_ns:
        time.sleep(0.001)  # releases the GIL
        left = [one for one in left if _is_open(*one)]
    for one in left:
        shut_down(*one)
    if opened and threads & waiting_threads().keys():
        time.sleep(_CLOSING_S / 10)  # gloo wakes the other threads
        end_waits(threads)


def end_lost_waits() -> int:
    """Wake the threads that wait for messages of closed connections and that gloo did not wake; return their number.

    Call it once the connections are cut and the main thread is about to exit. Does nothing while connections are open.

    Blocks: never. Thread: any.
    """
    return 0 if num_open() else end_waits()


def num_open() -> int:
    """Return how many recorded connections that may carry tensor data are open."""
    with _lock:
        _noted.difference_update([noted for noted in _noted if not _is_open(*noted)])
        _of_stores.intersection_update(_noted)
        return len(_noted) - len(_of_stores)


def wait_until_at_rest(timeout_s: float, *, patience_s: float = 0.03) -> bool:
    """Wait until no collective runs any more; return whether that is so.

    Gloo closes a connection once it has detected its shutdown, and from then on no byte of a peer reaches a tensor.
    Data read before is processed by the threads that run collectives: they must sleep, and not for a message, in
    several successive checks. Connections still open after ``patience_s`` (gloo no longer polls one whose message was
    abandoned) are not waited for; destroying their group closes them.

    Blocks: a few milliseconds if there are groups, at most ``timeout_s``.
    """
    begin_ns = clock.now_ns()
    num_resting = 0
    while True:
        passed_s = (clock.now_ns() - begin_ns) / 1e9
        is_closed = not num_open() or passed_s > patience_s
        statuses = named_threads(COLLECTIVES_THREAD).values()
        if not statuses and is_closed:
            return True
        is_running = any("\nState:\tS" not in status for status in statuses)
        woken = end_waits() if is_closed else 0
        num_resting = num_resting + 1 if is_closed and not is_running and not woken else 0
        if num_resting >= _RESTING_LOOKS:
            return True
        if passed_s > timeout_s:
            return False
        time.sleep(0.001)  # releases the GIL, which gloo's threads need


def forget() -> None:
    """Clear all records, once all groups are gone. Thread: any."""
    with _lock:
        _noted.clear()
        _of_stores.clear()
        _pending.clear()  # left by an interrupted noting(): it would record everything opened from now on


class Noting:
    """Record the connections that ``torch.distributed`` opens, from :meth:`start` to :meth:`stop`.

    Args:
        check: Called with backend and timeout in seconds of each group that is about to be made; may raise.

    Thread: the main thread.
    """

    def __init__(self, check: Callable[[str, float], None] | None = None) -> None:
        self._check = check
        self._originals: dict[tuple[str, str], Callable[..., Any]] = {}

    def start(self) -> None:
        if self._originals:
            return
        for module, name in _MAKERS:
            maker = getattr(importlib.import_module(module), name)
            self._originals[module, name] = maker
            setattr(sys.modules[module], name, self._noted_within(maker))

    def stop(self) -> None:
        for (module, name), maker in self._originals.items():
            setattr(sys.modules[module], name, maker)
        self._originals.clear()

    def _noted_within(self, maker: Callable[..., Any]) -> Callable[..., Any]:
        is_store = maker.__name__ == _MAKERS[0][1]
        check = None if is_store else self._check

        @functools.wraps(maker)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if check is not None:
                timeout = kwargs.get("timeout")
                backend = kwargs.get("backend", args[3] if len(args) > 3 else "")
                check(str(backend), timeout.total_seconds() if timeout is not None else math.inf)
            with noting(is_store=is_store):
                return _connect_to_store(maker, *args, **kwargs) if is_store else maker(*args, **kwargs)

        return noted


def _connect_to_store(maker: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Create a store client in attempts so short that the waiting thread can be interrupted between them.

    In a single attempt torch waits uninterruptibly for an absent store until the group's own timeout.
    """
    import torch.distributed as dist

    given = inspect.signature(maker).bind(*args, **kwargs).arguments
    if not sys.modules[_MAKERS[0][0]]._torchelastic_use_agent_store():
        return maker(**given)  # one of the ranks is about to host it
    timeout: timedelta = given["timeout"]
    end_s = clock.now_s() + timeout.total_seconds()
    while True:
        left_s = max(0.001, end_s - clock.now_s())
        try:
            socket.create_connection((given["hostname"], given["port"]), timeout=min(_TRY_S, left_s)).close()
            store = maker(**{**given, "timeout": timedelta(seconds=min(_TRY_S, left_s))})
        except (OSError, dist.DistError):
            if clock.now_s() >= end_s:
                raise
            time.sleep(_PAUSE_S)
        else:
            store.set_timeout(timeout)
            return store


def connected_sockets() -> frozenset[tuple[int, int]]:
    """Return descriptor and inode of every TCP connection of this process, also of those being set up."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:
            continue  # the listing's own descriptor, or one that closed meanwhile
        with socket.socket(fileno=copy) as connection:
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    connection.getpeername()
                    found.add((int(name), os.fstat(copy).st_ino))
            except OSError:
                continue  # not connected: a listener
    return frozenset(found)


def _is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def named_threads(name: str) -> dict[int, str]:
    """Return the threads of this process with a given name, each with its ``/proc`` status."""
    return {thread: status for thread, status in _read_threads("status") if status.startswith(f"Name:\t{name}\n")}


def _read_threads(file: str) -> Iterator[tuple[int, str]]:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # ended meanwhile
            yield int(thread), Path(f"/proc/self/task/{thread}/{file}").read_text()


class _Gloo(NamedTuple):
    table: int
    """First word of a buffer."""
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
    """Return each thread that waits for a buffer, with the buffer's address. Blocks: never. Thread: any."""
    gloo = _gloo()
    if gloo is None:
        return {}
    found = {}
    number = str(_FUTEX[os.uname().machine])
    for thread, call in _read_threads("syscall"):
        words = call.split()
        with suppress(OSError, ValueError, IndexError):  # ended, or running
            if words[0] == number and (buffer := _buffer_around(int(words[1], 16), gloo.table)) is not None:
                found[thread] = buffer
    return found


def group_threads() -> frozenset[int]:
    """Return the threads of this process; those that are new after a group was made run its collectives.

    A thread that was just started has no name yet; :func:`end_waits` checks the names.
    """
    return frozenset(int(thread) for thread in os.listdir("/proc/self/task"))


def end_waits(threads: frozenset[int] | None = None) -> int:
    """End waits for messages that cannot arrive any more; return the number of threads that waited.

    Args:
        threads: The threads of a group, to end only its waits; ``None``: all.

    Blocks: never. Thread: any.
    """
    gloo = _gloo()
    waiting = waiting_threads()
    if threads is not None:
        own = threads & named_threads(COLLECTIVES_THREAD).keys()
        waiting = {thread: buffer for thread, buffer in waiting.items() if thread in own}
    if gloo is None or not waiting:
        return 0
    for buffer in waiting.values():
        gloo.abort_receive(buffer)
        gloo.abort_send(buffer)
    return len(waiting)


def _buffer_around(futex: int, table: int) -> int | None:
    """Return the address of the buffer that contains a futex word; ``None``: it is not in a buffer."""
    start = (futex & ~7) - _MAX_OFFSET
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        data = os.pread(memory.fileno(), _MAX_OFFSET, start)  # fails harmlessly where nothing is mapped
    words = struct.unpack(f"={len(data) // 8}Q", data)
    for index in range(len(words) - 1, -1, -1):
        if words[index] == table:
            return start + 8 * index
    return None
