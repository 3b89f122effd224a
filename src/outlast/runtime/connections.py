"""The connections over which this process waits for its peers, and the cutting of them.

A collective of gloo ends only with its peers, its timeout or its connections: neither ``abort()`` nor destroying the
group wakes it (torch 2.13, measured), and one that nobody waits for any more still writes into its tensors when a late
peer comes. Whoever has to leave a group at any time therefore has to know its sockets. While a :class:`Noting` is in
force, every process group and every store client that ``torch.distributed`` makes has its sockets noted, and
:func:`cut_all` shuts them down, those of a group whose ranks are still looking for each other, too.

Other things that wait on peers say so by :func:`register`. A descriptor that meanwhile belongs to something else is
recognised by its inode. Listening sockets are left alone: gloo ends the process when its listener fails.

Rejected: to diff ``/proc/self/fd`` over the whole life of a group (cuts the user's own connections as well).
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from outlast import clock

__all__ = ["Noting", "connected_sockets", "cut_all", "noting", "register", "shut_down", "wait_until_at_rest"]

log = logging.getLogger(__name__)
_MAKERS = (
    ("torch.distributed.rendezvous", "_create_c10d_store"),
    ("torch.distributed.distributed_c10d", "_new_process_group_helper"),
)
"""What opens connections in ``torch.distributed``: module and name."""
_RESTING_LOOKS = 3


class Cuttable(Protocol):
    """Something that waits on peers and can be cut at any time, from any thread."""

    def cut(self) -> None:
        """Make every wait fail at once. Idempotent."""
        ...


_registered: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()
_noted: set[tuple[int, int]] = set()
_pending: dict[int, frozenset[tuple[int, int]]] = {}
_uncounted = 0


def register(cuttable: Cuttable) -> None:
    """Have :func:`cut_all` cut this, too, for as long as it exists. Thread: any."""
    with _lock:
        _registered.add(cuttable)


@contextmanager
def noting() -> Iterator[None]:
    """Note the connections that are opened within, by whatever thread."""
    global _uncounted
    before = connected_sockets()
    with _lock:
        _uncounted += 1
        number = _uncounted
        _pending[number] = before
    try:
        yield
    finally:
        opened = connected_sockets() - before
        with _lock:
            _pending.pop(number, None)
            _noted.update(opened)


def cut_all() -> int:
    """Shut down every noted connection and cut whatever is registered; return the number of connections.

    Idempotent; repeat it while somebody still waits, since a group may be about to open another connection.

    Blocks: never.
    Thread: any.
    """
    with _lock:
        noted = set(_noted)
        pending = list(_pending.values())
        registered = list(_registered)
    for before in pending:
        noted |= connected_sockets() - before
    with _lock:
        _noted.update(noted)
    for fd, inode in noted:
        shut_down(fd, inode)
    for cuttable in registered:
        cuttable.cut()
    return len(noted)


def shut_down(fd: int, inode: int) -> bool:
    """Shut down a connection unless its descriptor is something else by now; return whether it was there.

    Blocks: never.
    Thread: any.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return False  # closed by its owner
    if os.fstat(copy).st_ino != inode:
        os.close(copy)  # it belongs to something else by now, perhaps no socket at all
        return False
    with socket.socket(fileno=copy) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # its other end was faster
    return True


def wait_until_at_rest(timeout_s: float) -> bool:
    """Wait until nothing that was cut can write into a tensor any more; return whether that is so.

    Gloo closes a connection once it has seen that it was shut down, and from then on no byte of a peer reaches a
    tensor. What it read before is dealt with by the threads that run collectives: they have to sleep, at several looks
    in a row. What is proved to be closed is forgotten.

    Blocks: a few milliseconds where there are groups, at most ``timeout_s``.
    """
    end_ns = clock.now_ns() + int(timeout_s * 1e9)
    num_resting = 0
    while True:
        with _lock:
            _noted.difference_update([noted for noted in _noted if not _is_open(*noted)])
            still_open = len(_noted)
        running = _runs_collectives()
        if running is None:
            return True  # the groups are gone, and with them all that could write
        num_resting = num_resting + 1 if not running else 0
        if num_resting >= _RESTING_LOOKS and not still_open:
            return True
        if clock.now_ns() >= end_ns:
            return False
        time.sleep(0.001)  # with the interpreter's lock free, which gloo's threads need


def forget() -> None:
    """Forget what was noted: for a new beginning, once all groups are gone. Thread: any."""
    with _lock:
        _noted.clear()


class Noting:
    """Note what ``torch.distributed`` opens, from :meth:`start` to :meth:`stop`.

    Args:
        check: Called with backend and timeout in seconds of each group that is about to be made; it may raise.

    Thread: the main thread.
    """

    def __init__(self, check: Callable[[str, float], None] | None = None) -> None:
        self._check = check
        self._originals: dict[tuple[str, str], Callable[..., Any]] = {}

    def start(self) -> None:
        """Begin to note. Idempotent."""
        if self._originals:
            return
        for module, name in _MAKERS:
            maker = getattr(importlib.import_module(module), name)
            self._originals[module, name] = maker
            setattr(sys.modules[module], name, self._noted_within(maker))

    def stop(self) -> None:
        """Note no more. Idempotent."""
        for (module, name), maker in self._originals.items():
            setattr(sys.modules[module], name, maker)
        self._originals.clear()

    def _noted_within(self, maker: Callable[..., Any]) -> Callable[..., Any]:
        check = self._check if maker.__name__ == "_new_process_group_helper" else None

        @functools.wraps(maker)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if check is not None:
                timeout = kwargs.get("timeout")
                backend = kwargs.get("backend", args[3] if len(args) > 3 else "")
                check(str(backend), timeout.total_seconds() if timeout is not None else math.inf)
            with noting():
                return maker(*args, **kwargs)

        return noted


def connected_sockets() -> frozenset[tuple[int, int]]:
    """Return descriptor and inode of every TCP connection of this process, also of those being made."""
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


def _runs_collectives() -> bool | None:
    """Say whether a thread of gloo runs a collective; ``None``: there is no such thread."""
    num_threads = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            stat = Path(f"/proc/self/task/{thread}/stat").read_text()
        except OSError:
            continue  # ended meanwhile
        name, _, rest = stat.partition(" (")[2].rpartition(") ")
        if name == "pt_gloo_runloop":
            num_threads += 1
            if rest[:1] != "S":
                return True
    return False if num_threads else None
