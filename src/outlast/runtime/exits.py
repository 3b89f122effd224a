"""What this package does when the interpreter ends, while its threads can still work.

``atexit`` is too late for that: by then ``concurrent.futures`` refuses work, and since Python 3.12 no thread can be
started. A thread of ours that is at work then fails, and its traceback follows the user's own. So what was registered
on the main thread is called as soon as that thread has ended. Other threads may train on after it, so what they
registered is left to ``atexit``.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - it registers its own end first, which then follows ours
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
_registered: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []


def at_exit(function: Callable[..., Any], *args: Any) -> None:
    """Call a function when the interpreter ends, before those that were registered earlier.

    It is not called in forked children. Thread: any; see above for the difference.
    """
    if threading.current_thread() is threading.main_thread():
        _registered.append((function, args))
    else:
        atexit.register(function, *args)


def forget_at_exit(function: Callable[..., Any]) -> None:
    """Call a function no more when the interpreter ends. Idempotent. Thread: any."""
    _registered[:] = [one for one in _registered if one[0] != function]
    atexit.unregister(function)


def _run_all() -> None:
    while _registered:
        function, args = _registered.pop()
        try:
            function(*args)
        except Exception:
            log.exception("the end of the process: %s failed", getattr(function, "__qualname__", function))


# What multiprocessing forks ends its threads, too, and must not end what is its parent's.
os.register_at_fork(after_in_child=_registered.clear)
threading._register_atexit(_run_all)  # type: ignore[attr-defined]
