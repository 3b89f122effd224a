"""Worker losses that a cycle with in-process restarts survives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outlast.policy.inprocess_protocol import InProcessState, has_resumed, is_survivable, needs_restart, newest_begun

OFF, ACTIVE, RESTARTING, RETURNED, LEFT, GAVE_UP, SPARE, COMPLETED = InProcessState


@dataclass(frozen=True)
class Worker:
    in_process: InProcessState
    in_process_restart_count: int = 0
    in_process_call: int = 0


def survives(
    state: InProcessState,
    living: tuple[InProcessState, ...] = (),
    done: tuple[InProcessState, ...] = (),
    *,
    unseen: bool = False,
) -> bool:
    return is_survivable(Worker(state), living=map(Worker, living), done=map(Worker, done), has_unseen_peers=unseen)


@pytest.mark.parametrize("state", [OFF, RETURNED, GAVE_UP])
def test_loss_outside_the_function_is_a_failure(state: InProcessState) -> None:
    """Before the function, after it and once restarting was given up, the end of a worker is a failure."""
    assert not survives(state, (ACTIVE, SPARE), (RETURNED,), unseen=True)


@pytest.mark.parametrize("state", [ACTIVE, RESTARTING, SPARE, COMPLETED, LEFT])
def test_cycle_survives_a_lost_worker_if_others_continue(state: InProcessState) -> None:
    """A worker that is active or waits in the function is not required as long as another worker continues."""
    assert survives(state, (ACTIVE,))
    assert survives(state, (SPARE,))
    assert survives(state, unseen=True)
    assert not survives(state, (OFF, GAVE_UP, LEFT))


def test_loss_of_the_last_active_worker_is_a_failure() -> None:
    """The loss of the last active worker is a failure; that of a worker that only waited is not if the others are
    done."""
    assert not survives(ACTIVE, (), (RETURNED,))
    assert survives(SPARE, (), (RETURNED,))
    assert survives(COMPLETED, (), (RETURNED,))
    assert not survives(SPARE, (), (LEFT,))


def test_only_active_workers_need_a_restart() -> None:
    """Spares, and workers that completed or left the function, are lost without a restart."""
    assert [state for state in InProcessState if needs_restart(Worker(state))] == [ACTIVE, RESTARTING]


def test_resumption_needs_a_later_iteration() -> None:
    """The iteration in which a worker was lost does not count as resumed; the restart's target iteration does."""
    lost = Worker(ACTIVE, 3)
    assert not has_resumed(lost, newest_begun([Worker(ACTIVE, 3), Worker(RESTARTING, 4)]))
    assert has_resumed(lost, newest_begun([Worker(RESTARTING, 4), Worker(ACTIVE, 4)]))
    assert has_resumed(lost, newest_begun([Worker(RETURNED, 5)]))
    assert has_resumed(Worker(RESTARTING, 4), newest_begun([Worker(SPARE, 4)]))
    assert has_resumed(lost, newest_begun([Worker(ACTIVE, 0, in_process_call=1)]))
    assert newest_begun([Worker(GAVE_UP, 4), Worker(RESTARTING, 9)]) == (0, 0)
