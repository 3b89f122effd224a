"""Where an actor's working thread is: what its own process can see of it, at any time."""

from __future__ import annotations

import sys
from pathlib import Path

from outlast.monitor.responder import count_collectives
from outlast.monitor.stacks import Frame, Stack
from outlast.policy.culprit import Position
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

    Blocks: never.
    """
    stack = stack_of(thread)
    return Position(
        node=node,
        global_rank=state.global_rank,
        pid=state.pid,
        iteration=state.iteration,
        sections=tuple(section.name for section in state.sections),
        num_entries=state.num_entries_in_iteration,
        collectives=count_collectives(),
        process_state=Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[0],
        stack_line=stack.line,
        waits_in_collective=stack.waits_in_collective,
        expired=bool(expired(state, timeouts, now_ns)),
        attached=state.attached,
        finished=state.finished,
    )
