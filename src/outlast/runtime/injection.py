"""Injection points: named places in the code where a fault can be made to happen, by chaos and by tests.

A point is one line, ``reach("checkpoint.rename", attempt=...)``, and costs a look into an empty dictionary while
nothing is armed. What happens there is armed from outside: in this process by :func:`armed`, in processes that it
starts by :func:`armed_in_children`, through the environment. No public constructor has an argument for it, so that no
user can meet one by mistake.
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


class DiskTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a file while it is written."""

    folder: str
    """In which it lies, at any depth."""
    delay_s: float = 0.0
    """Writing it takes so much longer; 0 = it fails: the disk is full."""


def _trouble_disk(troubles: str, path: str) -> None:
    """Do to a file what is to be done at present. Raises: OSError."""
    try:
        with open(troubles, "rb") as file:
            listed = from_json(file.read(), tuple[DiskTrouble, ...])
    except FileNotFoundError:
        return
    for trouble in listed:
        if path.startswith(os.path.join(trouble.folder, "")):
            if not trouble.delay_s:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            time.sleep(trouble.delay_s)


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """What happens at a point of a process that was started with it."""

    point: str
    do: Literal["kill", "wait", "disk"]
    """``kill``: end the process by SIGKILL; ``wait``: until somebody opens the FIFO ``path`` for writing; ``disk``:
    what the file ``path`` says of the folder in which the point's ``path`` lies, a list of :class:`DiskTrouble`."""
    path: str = ""
    once: str = ""
    """A file that is made when it happens, and while it is there it does not happen again; empty: each time."""

    def happen(self, facts: Mapping[str, object]) -> None:
        """Do it.

        Args:
            facts: Those of the point.

        Raises:
            OSError: A disk is to be full.
        """
        if self.do == "disk":
            return _trouble_disk(self.path, os.fspath(facts["path"]))  # type: ignore[call-overload]
        if self.once:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            except FileExistsError:
                return
        if self.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))


def reach(point: str, **facts: object) -> None:
    """Have happen what is armed at a point.

    Args:
        point: Its name, ``capability.place``.
        facts: What whoever armed it may want to know.
    """
    if (hook := _armed.get(point)) is not None:
        hook(**facts)
    for injection in _from_environment():
        if injection.point == point:
            injection.happen(facts)


@contextmanager
def armed(point: str, hook: Callable[..., object]) -> Iterator[None]:
    """Have ``hook`` called with a point's facts whenever this process reaches it; what it raises is raised there."""
    before = _armed.get(point)
    _armed[point] = hook
    try:
        yield
    finally:
        if before is None:
            del _armed[point]
        else:
            _armed[point] = before


@contextmanager
def armed_in_children(*injections: Injection) -> Iterator[None]:
    """Arm points in the processes that this one starts meanwhile."""
    before = env.update({env.INJECTIONS: msgspec.json.encode(injections).decode()})
    try:
        yield
    finally:
        env.update(before)


@cache
def _from_environment() -> tuple[Injection, ...]:
    """Return what this process was started with."""
    text = env.environ().get(env.INJECTIONS)
    return from_json(text.encode(), tuple[Injection, ...]) if text else ()


os.register_at_fork(after_in_child=_from_environment.cache_clear)
