"""Data loaders' workers that live on when the whole process group is told to leave.

A scheduler signals every process of a job. A worker that dies of it takes the training's next batch with it, and the
rank fails before it could save. So a worker keeps such signals waiting, and takes them itself, in a thread: one from
its parent ends it, as torch's own handler would; others wait until the parent is gone, then count after all.

Rejected for forked workers: ``SIG_IGN``, and a Python handler: torch puts its own handler in their place when a worker
starts, and neither tells who sent the signal, so a loader could not end its workers any more.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection

__all__ = ["outlive_signals", "outlive_sigterm"]

_LOOK_S = 0.5
_outlived: frozenset[int] = frozenset()


def outlive_signals(signals: Collection[int]) -> None:
    """Let this process, just forked by one that trains, live through signals until its parent leaves.

    A signal that the parent itself sends still ends this process, and so do those of others once the parent is gone.

    Thread: the main thread, before others are started: they would still die of the signals.
    """
    global _outlived
    numbers = frozenset(int(number) for number in signals) - _outlived
    if numbers:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        _outlived |= numbers
        _start(numbers)


def outlive_sigterm(worker_id: int) -> None:
    """Let a loader's worker that was not forked live through SIGTERM: ``DataLoader(worker_init_fn=outlive_sigterm)``.

    Libraries have started threads in it by now, so it ignores the signal for good, its parent's too. It ends when its
    loader says so, or its parent is gone, as torch looks to.

    Args:
        worker_id: The worker's number; not used.

    Thread: the main thread.
    """
    if signal.SIGTERM not in _outlived:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _start(numbers: frozenset[int]) -> None:
    threading.Thread(target=_take, args=(numbers, os.getppid()), name="outlast-outlive-signals", daemon=True).start()


def _take(numbers: frozenset[int], parent: int) -> None:
    waiting: int | None = None
    while os.getppid() == parent:
        info = signal.sigtimedwait(numbers, _LOOK_S)
        if info is None:
            continue
        if info.si_pid == parent:
            os._exit(0)
        waiting = info.si_signo
    # This thread is one that may die of them now; the main thread still has them blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    if waiting is not None:
        os.kill(os.getpid(), waiting)


def _go_on_in_child() -> None:
    if _outlived:
        _start(_outlived)


os.register_at_fork(after_in_child=_go_on_in_child)
