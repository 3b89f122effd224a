"""Progress of the main thread is seen without running Python in it."""

from __future__ import annotations

import threading
import time

from outlast.inprocess.progress import MainThreadProgress


def signs_while(action: str) -> list[bool]:
    """Ask from another thread while the main thread is busy; return the answers."""
    progress = MainThreadProgress()
    progress.take()
    answers: list[bool] = []
    asked, looked = threading.Event(), threading.Event()

    def ask() -> None:
        asked.wait()
        progress.ask()
        looked.wait(0.1)
        answers.append(progress.take())

    thread = threading.Thread(target=ask)
    thread.start()
    if action == "sleep":
        threading.Timer(0.0, asked.set).start()
        time.sleep(0.5)
    else:
        asked.set()
        while not answers:
            pass
    thread.join()
    progress.take()
    return answers


def test_bytecode_is_progress() -> None:
    """A main thread that runs Python answers."""
    assert signs_while("spin") == [True]


def test_a_sleep_is_none() -> None:
    """A main thread that sleeps does not answer."""
    assert signs_while("sleep") == [False]
