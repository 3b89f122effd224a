"""Progress of the main thread is detected without running Python code in the main thread."""

from __future__ import annotations

import os
import threading

from outlast import clock
from outlast.inprocess.progress import MainThreadProgress

PATIENCE_S = 30.0


def wait_for_result(expected: bool, wait: int | None = None) -> bool:
    """Query from another thread until the result is the expected one; return the last result.

    Args:
        expected: The result.
        wait: Descriptor that the main thread waits for meanwhile; ``None``: it runs Python code.
    """
    progress = MainThreadProgress()
    progress.take()
    results: list[bool] = []
    is_over = threading.Event()

    def ask() -> None:
        end_s = clock.now_s() + PATIENCE_S
        while clock.now_s() < end_s and (not results or results[-1] != expected):
            progress.ask()
            threading.Event().wait(0.1)
            results.append(progress.take())
        is_over.set()
        if wait is not None:
            os.eventfd_write(wait, 1)

    thread = threading.Thread(target=ask)
    thread.start()
    if wait is not None:
        os.eventfd_read(wait)
    while not is_over.is_set():
        pass
    thread.join()
    progress.take()
    return results[-1]


def test_bytecode_is_progress() -> None:
    """A main thread that runs Python code makes progress."""
    assert wait_for_result(expected=True) is True


def test_a_blocking_system_call_is_not_progress() -> None:
    """A main thread that waits in a call of the system does not answer."""
    waited_for = os.eventfd(0, os.EFD_CLOEXEC)
    assert wait_for_result(expected=False, wait=waited_for) is False
    os.close(waited_for)
