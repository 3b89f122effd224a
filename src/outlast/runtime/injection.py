"""Injection points: named places in the code where chaos and tests can make a fault happen.

A point is one line, ``reach("checkpoint.rename", attempt=...)``, and costs a lookup in an empty dictionary while
nothing is armed. :func:`armed` arms a point in this process, :func:`armed_in_children` in processes that it starts,
through the environment. No public constructor has an argument for it, so users cannot trigger one by mistake.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Literal

import msgspec

from outlast import env
from outlast.decoding import from_json

_armed: dict[str, Callable[..., object]] = {}


class DiskFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of writes to a folder."""

    folder: str
    """Applies to files at any depth below it."""
    delay_s: float = 0.0
    """Seconds by which each write is delayed; 0 = writes fail, as if the disk were full."""


def _apply_disk_faults(list_path: str, path: str) -> None:
    """Apply the disk faults that the file ``list_path`` lists to a write. Raises: OSError."""
    try:
        with open(list_path, "rb") as file:
            listed = from_json(file.read(), tuple[DiskFault, ...])
    except FileNotFoundError:
        return
    for disk_fault in listed:
        if path.startswith(os.path.join(disk_fault.folder, "")):
            if not disk_fault.delay_s:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            time.sleep(disk_fault.delay_s)


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A fault at a point of a process that was started with it."""

    point: str
    do: Literal["kill", "wait", "disk"]
    """``kill``: end the process by SIGKILL; ``wait``: until another process opens the FIFO ``path`` for writing;
    ``disk``: apply the :class:`DiskFault` list of the file ``path`` to the point's ``path``."""
    path: str = ""
    once: str = ""
    """A file that is created when the fault happens, and prevents another one while it exists; empty: each time."""

    def happen(self, facts: Mapping[str, object]) -> None:
        """Inject the fault. Raises: OSError: The disk is to appear full."""
        if self.do == "disk":
            return _apply_disk_faults(self.path, os.fspath(facts["path"]))  # type: ignore[call-overload]
        if self.once:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            except FileExistsError:
                return
        if self.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))


def reach(point: str, **facts: object) -> None:
    """Inject the faults that are armed at a point."""
    if (hook := _armed.get(point)) is not None:
        hook(**facts)
    for injection in _from_environment():
        if injection.point == point:
            injection.happen(facts)


@contextmanager
def armed(point: str, hook: Callable[..., object]) -> Iterator[None]:
    """Call ``hook`` with a point's facts whenever this process reaches it; its exceptions are raised there."""
    before = _armed.get(point)
    _armed[point] = hook
    try:
        yield
    finally:
        del _armed[point]
        if before is not None:
            _armed[point] = before


@contextmanager
def armed_in_children(*injections: Injection) -> Iterator[None]:
    """Arm points in the processes that this one starts within this context."""
    before = env.update({env.INJECTIONS: msgspec.json.encode(injections).decode()})
    try:
        yield
    finally:
        env.update(before)


@cache
def _from_environment() -> tuple[Injection, ...]:
    text = env.environ().get(env.INJECTIONS)
    return from_json(text.encode(), tuple[Injection, ...]) if text else ()


os.register_at_fork(after_in_child=_from_environment.cache_clear)
