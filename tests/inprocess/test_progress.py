"""Progress of the main thread is seen without running Python in it."""

from __future__ import annotations

import os
import threading

from outlast import clock
from outlast.inprocess.progress import MainThreadProgress

PATIENCE_S = 30.0


def await_answer(expected: bool, wait: int | None = None) -> bool:
    """Ask from another thread until the main thread's answer is this; return the last one.

    Args:
        expected: The answer.
        wait: Descriptor that the main thread waits for meanwhile; ``None``: it runs Python.
    """
    progress = MainThreadProgress()
    progress.take()
    answers: list[bool] = []
    over = threading.Event()

    def ask() -> None:
        end_s = clock.now_s() + PATIENCE_S
        while clock.now_s() < end_s and (not answers or answers[-1] != expected):
            progress.ask()
            threading.Event().wait(0.1)
            answers.append(progress.take())
        over.set()
        if wait is not None:
            os.eventfd_write(wait, 1)

    thread = threading.Thread(target=ask)
    thread.start()
    if wait is not None:
        os.eventfd_read(wait)
    while not over.is_set():
        pass
    thread.join()
    progress.take()
    return answers[-1]


def test_bytecode_is_progress() -> None:
    """A main thread that runs Python answers."""
    assert await_answer(expected=True) is True


def test_a_wait_is_none() -> None:
    """A main thread that waits in a call of the system does not answer."""
    waited_for = os.eventfd(0, os.EFD_CLOEXEC)
    assert await_answer(expected=False, wait=waited_for) is False
    os.close(waited_for)
