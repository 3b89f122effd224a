"""Data loaders' workers that live on when the whole process group is told to leave.

A scheduler signals every process of a job. A worker that dies of it takes the training's next batch with it, and the
rank fails before it could save. So a worker keeps such signals waiting, and takes them itself, in a thread: one from
its parent ends it, as torch's own handler would; others wait until the parent is gone, then count after all.

Rejected: ``SIG_IGN``, and a Python handler: torch puts its own handler in their place when a worker starts, and
neither tells who sent the signal, so a loader could not end its workers any more.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Collection

__all__ = ["outlive_signals"]

log = logging.getLogger(__name__)
_LOOK_S = 0.5
_outlived: frozenset[int] = frozenset()


def outlive_signals(signals: Collection[int] | int = (signal.SIGTERM,)) -> None:
    """Let this process, a child of one that trains, live through signals until its parent leaves.

    ``exit_signal_handler_for_dataloader`` does this for forked workers. For those that are spawned give it to the
    loader: ``DataLoader(..., worker_init_fn=outlive_signals)``.

    A signal that the parent itself sends still ends this process, and so do those of others once the parent is gone.

    Args:
        signals: The signals; a plain number, as a loader passes to its ``worker_init_fn``, stands for SIGTERM alone.

    Thread: the main thread, before others are started, which would still die of the signals.
    """
    global _outlived
    numbers = {int(signal.SIGTERM)} if isinstance(signals, int) else {int(number) for number in signals}
    if not numbers - _outlived:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    _outlived |= numbers
    _start(frozenset(numbers))


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
