"""Where an actor's working thread is: what its own process can see of it, at any time."""

from __future__ import annotations

import sys
from pathlib import Path

from outlast.monitor.collectives import read_books, waits_in
from outlast.monitor.stacks import Frame, Stack
from outlast.policy.causes import Position
from outlast.policy.deadlines import Timeouts, expired
from outlast.runtime.board import RankState

__all__ = ["position_of", "stack_of"]


def stack_of(thread: int) -> Stack:
    """Return the Python stack of a thread of this process; empty when it runs no Python. Blocks: never."""
    frame = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return Stack(tuple(frames))


def position_of(state: RankState, timeouts: Timeouts, thread: int, *, node: str, now_ns: int) -> Position:
    """Return where a rank of this process is.

    Args:
        state: What its page of the board says.
        timeouts: What is enforced.
        thread: Identity of its working thread.
        node: Name of its node.
        now_ns: Monotonic nanoseconds.

    Blocks: up to a tenth of a second.
    """
    stack, books = stack_of(thread), read_books(thread)
    waits, collective = waits_in(stack, books)
    return Position(
        node=node,
        global_rank=state.global_rank,
        pid=state.pid,
        iteration=state.iteration,
        sections=tuple(section.name for section in state.sections),
        num_entries=state.num_entries_in_iteration,
        collectives=sum(books.groups.values()) if books.groups else -1,
        groups=books.groups,
        waiting_in=collective,
        process_state=Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[0],
        stack_line=stack.line,
        waits_in_collective=waits,
        expired=bool(expired(state, timeouts, now_ns)),
        attached=state.attached,
        finished=state.finished,
    )
