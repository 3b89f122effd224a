"""Functions to call when the interpreter ends, while threads still work.

``atexit`` is too late: by then ``concurrent.futures`` refuses work and, since Python 3.12, no thread can be started, so
a working thread of this package would fail with a traceback after the user's own. Functions registered on the main
thread are therefore called as soon as that thread has ended. Other threads may train on after it, so functions that
they register go to ``atexit``.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its own hook first, which then runs after ours
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
_registered: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []


def at_exit(function: Callable[..., Any], *args: Any) -> None:
    """Register a function to call when the interpreter ends, in reverse order of registration; not in forked children.

    Thread: any; the module's head describes the difference.
    """
    if threading.current_thread() is threading.main_thread():
        _registered.append((function, args))
    else:
        atexit.register(function, *args)


def forget_at_exit(function: Callable[..., Any]) -> None:
    """Remove a function registered by :func:`at_exit`. Idempotent. Thread: any."""
    _registered[:] = [one for one in _registered if one[0] != function]
    atexit.unregister(function)


def _run_all() -> None:
    while _registered:
        function, args = _registered.pop()
        try:
            function(*args)
        except Exception:
            log.exception("the end of the process: %s failed", getattr(function, "__qualname__", function))


# multiprocessing's forked children end their threads as well, and must not run the parent's functions.
os.register_at_fork(after_in_child=_registered.clear)
threading._register_atexit(_run_all)  # type: ignore[attr-defined]
