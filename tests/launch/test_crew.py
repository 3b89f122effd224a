"""The workers of a node: news of them that come late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from outlast.launch.crew import Crew
from outlast.launch.worker_process import WorkerProcess
from outlast.runtime.zygote import Started


def crew_with(*, over: bool, num_workers: int = 1) -> tuple[Crew, Any]:
    cycle: Any = SimpleNamespace(
        over=over,
        number=3,
        board=Mock(),
        workers={key: WorkerProcess(local_rank=key, global_rank=key) for key in range(num_workers)},
    )
    crew = Crew(
        Mock(),
        options=Mock(),
        command=("exec", ()),
        base_env={},
        logs_specs=Mock(),
        workers=Mock(),
        writer=None,
        node="a",
    )
    crew.cycle = cycle
    return crew, cycle


def test_a_worker_that_started_while_its_cycle_ended_is_passed_over() -> None:
    """The board of a cycle that is over is gone; the late news must not touch it, let alone end the agent."""
    crew, cycle = crew_with(over=True)
    assert crew.note_started(Started(key=0, pid=4711)) is None
    cycle.board.assign.assert_not_called()


@pytest.mark.parametrize("key", [1, 7])
def test_the_cycle_runs_once_all_of_its_workers_do(key: int) -> None:
    """The last worker's start makes the cycle run; news of workers of no cycle of this node do not."""
    crew, cycle = crew_with(over=False, num_workers=2)
    assert crew.note_started(Started(key=0, pid=1)) is None
    assert crew.note_started(Started(key=key, pid=2)) is (cycle if key == 1 else None)
