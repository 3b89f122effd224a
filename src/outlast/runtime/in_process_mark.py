"""The mark of a process that can restart within: what its node's agent must know, on its page of the heartbeat board.

It is written by the wrapper of the function that is called again, which is there before any
:class:`outlast.monitor.RankMonitor` and outlives each of them. Whenever it changes, the agent gets a datagram
with the faults behind the change; the datagram may be lost, the words on the page cannot.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

import msgspec

from outlast.clock import now_ns
from outlast.incidents import IncidentKind
from outlast.policy.inprocess_protocol import InProcessState
from outlast.runtime import board as layout
from outlast.runtime.board import Board

__all__ = ["Change", "InProcessFault", "InProcessMark", "address"]

log = logging.getLogger(__name__)

_MAX_FAULTS = 8
_MAX_SUMMARY = 500
_encoder = msgspec.msgpack.Encoder()


class InProcessFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault that made the ranks leave the function."""

    rank: int
    """The initial rank that it was seen on."""
    kind: IncidentKind
    summary: str = ""
    is_consequence: bool = False
    """Another rank's fault caused it."""


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's mark changed."""

    local_rank: int
    call: int
    restart_count: int
    state: InProcessState
    faults: tuple[InProcessFault, ...] = ()


def address(token: int) -> bytes:
    """Return where the agent of the board with this token receives changes."""
    return b"\0outlast-%016x-agent" % token


class InProcessMark:
    """The writing side of one process's mark.

    Thread: any, one at a time; no call blocks.
    """

    def __init__(self, board: Board, local_rank: int) -> None:
        self._board, self._local_rank = board, local_rank
        self._words = board.words_of(local_rank)
        self._agent = address(board.token)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: str, local_rank: int) -> InProcessMark:
        """Open the mark on a board (``OUTLAST_BOARD``) that an agent made.

        Raises:
            OutlastError: There is no such board, or no such rank on it.
        """
        board = Board.open(path)
        try:
            return cls(board, local_rank)
        except BaseException:
            board.close()
            raise

    def arm(self, call: int, *, patience_s: float) -> None:
        """Record that a wrapped function is about to run.

        Args:
            call: Which of the process's calls of a wrapped function it is, from 0.
            patience_s: Seconds after which a restart inside the processes that did not come about is given up by the
                agent; the sum of the barrier's and the hard timeout.
        """
        self._words[layout.IN_PROCESS_PATIENCE] = round(patience_s * 1e9)
        self._words[layout.IN_PROCESS_CALL] = call
        self._write(InProcessState.SPARE, 0, ())

    def activate(self, restart_count: int, faults: Sequence[InProcessFault] = ()) -> None:
        """Record that the function begins, with the faults that ended the call before."""
        self._write(InProcessState.ACTIVE, restart_count, faults)

    def wait(self, restart_count: int, faults: Sequence[InProcessFault] = ()) -> None:
        """Record that this process waits as a spare in a call."""
        self._write(InProcessState.SPARE, restart_count, faults)

    def restart(self, restart_count: int, faults: Sequence[InProcessFault] = ()) -> None:
        """Record that a fault is known and all leave the function, to begin call ``restart_count``."""
        self._write(InProcessState.RESTARTING, restart_count, faults)

    def complete(self) -> None:
        """Record that the function returned here; others may still run it."""
        self._write(InProcessState.COMPLETED, self._words[layout.IN_PROCESS_RESTART_COUNT], ())

    def finish(self) -> None:
        """Record that all are done: an end of this process is from now on what any other worker's is."""
        self._write(InProcessState.RETURNED, self._words[layout.IN_PROCESS_RESTART_COUNT], ())

    def leave(self) -> None:
        """Record that this process leaves its peers permanently, and that they resume without it."""
        self._write(InProcessState.LEFT, self._words[layout.IN_PROCESS_RESTART_COUNT], ())

    def give_up(self, faults: Sequence[InProcessFault] = ()) -> None:
        """Record that what happened cannot be recovered inside the processes: the agent starts them again."""
        self._write(InProcessState.GAVE_UP, self._words[layout.IN_PROCESS_RESTART_COUNT], faults)

    def close(self) -> None:
        """Let go of the board; what was written last stays. Idempotent."""
        self._socket.close()
        self._words.release()
        self._board.close()

    def _write(self, state: InProcessState, restart_count: int, faults: Sequence[InProcessFault]) -> None:
        if os.getpid() != self._pid:  # a forked child is not the worker
            return
        words = self._words
        words[layout.IN_PROCESS_RESTART_COUNT] = restart_count
        words[layout.IN_PROCESS_SINCE] = now_ns()
        words[layout.IN_PROCESS] = state
        change = Change(
            local_rank=self._local_rank,
            call=words[layout.IN_PROCESS_CALL],
            restart_count=restart_count,
            state=state,
            faults=tuple(
                msgspec.structs.replace(fault, summary=fault.summary[:_MAX_SUMMARY]) for fault in faults[:_MAX_FAULTS]
            ),
        )
        try:
            self._socket.sendto(_encoder.encode(change), self._agent)
        except OSError as error:  # nobody listens, or its buffer is full: the words on the page have it, too
            log.debug("the agent got no datagram that local rank %d is %s: %s", self._local_rank, state.name, error)
