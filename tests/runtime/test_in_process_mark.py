"""The state of in-process restarts on a process's page of the heartbeat memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from outlast.incidents import IncidentKind
from outlast.policy.inprocess_protocol import InProcessState
from outlast.runtime.board import Board, InProcessFault, InProcessMark, MarkChanged, agent_address


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(num_ranks=2)
    yield board
    board.close()


@pytest.fixture
def mark(board: Board) -> Iterator[InProcessMark]:
    mark = InProcessMark(board.path, 1)
    yield mark
    mark.close()


def test_agent_reads_state_restart_and_patience(board: Board, mark: InProcessMark) -> None:
    """The state is on the page of its process, with its time, and on no other page."""
    mark.arm(2, patience_s=124.0)
    mark.set(InProcessState.ACTIVE, 0)
    before = board.read(1).in_process_since_ns
    mark.set(InProcessState.RESTARTING, 1)
    state = board.read(1)
    assert state.in_process == InProcessState.RESTARTING
    assert (state.in_process_call, state.in_process_restart_count, state.in_process_patience_s) == (2, 1, 124.0)
    assert state.in_process_since_ns >= before > 0
    assert board.read(0).in_process == InProcessState.OFF


def test_final_states_keep_the_restart_count(board: Board, mark: InProcessMark) -> None:
    """Completing, returning, leaving and giving up keep the restart count."""
    mark.arm(0, patience_s=1.0)
    mark.set(InProcessState.SPARE, 3)
    for expected in (
        InProcessState.COMPLETED,
        InProcessState.RETURNED,
        InProcessState.LEFT,
        InProcessState.GAVE_UP,
    ):
        mark.set(expected)
        assert (board.read(1).in_process, board.read(1).in_process_restart_count) == (expected, 3)


def test_attachment_keeps_the_mark(board: Board, mark: InProcessMark) -> None:
    """A monitor created in the wrapped function clears its page except for the earlier mark."""
    mark.arm(0, patience_s=9.0)
    mark.set(InProcessState.ACTIVE, 4)
    page = board.rank(1)
    page.attach(pid=7, global_rank=5, cycle=0)
    state = board.read(1)
    assert state.attached
    assert state.in_process == InProcessState.ACTIVE
    assert (state.in_process_restart_count, state.in_process_patience_s) == (4, 9.0)


def test_agent_receives_changes_with_their_faults(board: Board, mark: InProcessMark) -> None:
    """A listening agent receives each change at once with its faults, limited in number and size."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(agent_address(board.token))
        agent.settimeout(5.0)
        mark.arm(0, patience_s=1.0)
        agent.recv(1 << 16)
        mark.set(
            InProcessState.ACTIVE, 1, [InProcessFault(rank=3, kind=IncidentKind.WORKER_DIED, summary="x" * 9999)] * 20
        )
        change = msgspec.msgpack.decode(agent.recv(1 << 16), type=MarkChanged)
    assert (change.local_rank, change.restart_count, change.state) == (1, 1, InProcessState.ACTIVE)
    assert len(change.faults) == 8
    assert change.faults[0].rank == 3
    assert len(change.faults[0].summary) == 500


def test_mark_works_without_a_listener(board: Board, mark: InProcessMark) -> None:
    """A dead or busy agent does not block the process."""
    mark.arm(0, patience_s=1.0)
    mark.set(InProcessState.ACTIVE, 0)
    assert board.read(1).in_process == InProcessState.ACTIVE
