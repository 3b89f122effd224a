"""Whose end a cycle survives whose workers restart inside their processes."""

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
def test_a_worker_outside_the_function_is_never_spared(state: InProcessState) -> None:
    """Before it, after it, and once restarting was given up, an end is a failure, whoever is left."""
    assert not survives(state, (ACTIVE, SPARE), (RETURNED,), unseen=True)


@pytest.mark.parametrize("state", [ACTIVE, RESTARTING, SPARE, COMPLETED, LEFT])
def test_others_that_go_on_spare_it(state: InProcessState) -> None:
    """A worker in the function, or waiting there, is done without as long as somebody is left to go on."""
    assert survives(state, (ACTIVE,))
    assert survives(state, (SPARE,))
    assert survives(state, unseen=True)
    assert not survives(state, (OFF, GAVE_UP, LEFT))


def test_the_last_one_in_the_function_is_missed() -> None:
    """When nobody is left, a worker that was active is missed; one that only waited is not, if others are done."""
    assert not survives(ACTIVE, (), (RETURNED,))
    assert survives(SPARE, (), (RETURNED,))
    assert survives(COMPLETED, (), (RETURNED,))
    assert not survives(SPARE, (), (LEFT,))


def test_only_active_workers_need_a_restart() -> None:
    """Spares, and those that are done or have left, are lost without a restart."""
    assert [state for state in InProcessState if needs_restart(Worker(state))] == [ACTIVE, RESTARTING]


def test_others_have_resumed_when_a_later_iteration_began() -> None:
    """The iteration in which a worker was lost does not count; the one that it was on its way to does."""
    lost = Worker(ACTIVE, 3)
    assert not has_resumed(lost, newest_begun([Worker(ACTIVE, 3), Worker(RESTARTING, 4)]))
    assert has_resumed(lost, newest_begun([Worker(RESTARTING, 4), Worker(ACTIVE, 4)]))
    assert has_resumed(lost, newest_begun([Worker(RETURNED, 5)]))
    assert has_resumed(Worker(RESTARTING, 4), newest_begun([Worker(SPARE, 4)]))
    assert has_resumed(lost, newest_begun([Worker(ACTIVE, 0, in_process_call=1)]))
    assert newest_begun([Worker(GAVE_UP, 4), Worker(RESTARTING, 9)]) == (0, 0)
