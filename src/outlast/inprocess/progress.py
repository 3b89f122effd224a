"""Whether the main thread makes progress, asked from another thread without running Python in the main thread.

``Py_AddPendingCall`` has the main thread call a C function between two instructions: here ``sem_post``, which runs no
Python and cannot fail. A main thread that sleeps, waits or holds on in a C function does not answer.
"""

from __future__ import annotations

import ctypes

__all__ = ["MainThreadProgress"]

_SEM_BYTES = 64  # sem_t has 32 on 64-bit Linux

_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[ctypes.Array[ctypes.c_char]] = []
"""Semaphores are never freed: the main thread may answer at any later time."""


class MainThreadProgress:
    """Ask the main thread for a sign of progress.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        if _kept:
            self._semaphore = _kept[0]
        else:
            self._semaphore = ctypes.create_string_buffer(_SEM_BYTES)
            if _libc.sem_init(ctypes.byref(self._semaphore), 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "sem_init failed")
            _kept.append(self._semaphore)
        self._post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
        self._asked = False

    def ask(self) -> None:
        """Ask for a sign, unless the last one is still owed. Blocks: never."""
        if not self._asked:
            full = ctypes.pythonapi.Py_AddPendingCall(self._post, ctypes.byref(self._semaphore))
            self._asked = full == 0

    def take(self) -> bool:
        """Return whether there was a sign since the last call. Blocks: never."""
        answered = False
        while _libc.sem_trywait(ctypes.byref(self._semaphore)) == 0:
            answered = True
        if answered:
            self._asked = False
        return answered
