"""Several files at once. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_threads"]

NUM_LOCAL, NUM_REMOTE = 2, 8
"""A disk is busy with two; a network waits most of the time."""
T = TypeVar("T")


def in_threads(work: Callable[[T], None], things: Iterable[T], *, is_remote: bool) -> None:
    """Do something with each thing, several at once; raise the first error in their order.

    Blocks: until all are done, or those that run when one fails.
    """
    ordered = list(things)
    if len(ordered) < 2:
        for thing in ordered:
            work(thing)
        return
    with ThreadPoolExecutor(NUM_REMOTE if is_remote else NUM_LOCAL, thread_name_prefix="outlast-global") as pool:
        running = [pool.submit(work, thing) for thing in ordered]
        try:
            for one in running:
                one.result()
        except BaseException:  # whatever it was: what has not begun need not begin
            for one in running:
                one.cancel()
            raise
