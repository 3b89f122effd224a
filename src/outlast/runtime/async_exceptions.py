"""Exceptions that are left for a thread, to rise with its next line of Python."""

from __future__ import annotations

import ctypes
import threading

__all__ = ["leave_for", "settle"]


class _Nothing(BaseException):
    """Rises in :func:`settle` alone."""


def leave_for(thread: int, kind: type[BaseException]) -> None:
    """Have an exception rise in a thread; it takes the place of one that has not risen yet.

    Args:
        thread: Its identity, as :func:`threading.get_ident` gives it; of a thread that has ended nothing is known.
        kind: Made without arguments.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def settle() -> None:
    """Drop what is left for this thread, and have the interpreter forget that something was left for any.

    CPython 3.11 keeps that in mind until an exception rises: it looks for one at every jump until then, and with a
    trace function it never gets beyond the beginning of the next function. Taking the exception back does not end it,
    nor does the end of its thread. One that is left for another thread rises there a little later.
    """
    try:
        leave_for(threading.get_ident(), _Nothing)
        while True:  # it rises at the next jump
            pass
    except _Nothing:
        pass
