"""Composed plug-ins, and plug-ins that end restarts."""

from __future__ import annotations

import pytest

from outlast.errors import ConfigError, RestartAbort, UnhealthyRank
from outlast.inprocess.plugins import (
    ActiveWorldSizeDivisibleBy,
    Compose,
    FaultCounter,
    FillGaps,
    Level,
    MaxActiveWorldSize,
    RetryController,
    State,
    Tree,
)


def state(**changes: object) -> State:
    values: dict[str, object] = {
        "initial_rank": 1,
        "initial_world_size": 5,
        "rank": 1,
        "world_size": 4,
        "active_world_size": 3,
        "iteration": 2,
        "node": "n0",
        "fault_counts": {1: 2, 4: 1},
    }
    return State(**{**values, **changes})  # type: ignore[arg-type]


def test_plugins_run_from_left_to_right() -> None:
    """Each plug-in gets the result of the one before it, or the same argument if that returned None."""
    seen: list[tuple[str, int]] = []

    def make_plugin(name: str, returned: int | None) -> object:
        def plugin(value: int) -> int | None:
            seen.append((name, value))
            return returned

        return plugin

    assert Compose(make_plugin("a", None), make_plugin("b", 7), make_plugin("c", None))(1) == 7  # type: ignore[arg-type]
    assert seen == [("a", 1), ("b", 1), ("c", 7)]


def test_first_error_ends_the_call() -> None:
    """Plug-ins to the right of one that raised are not called."""

    def fail(value: object) -> None:
        raise RuntimeError("left")

    with pytest.raises(RuntimeError, match="left"):
        Compose(fail, lambda value: pytest.fail("called"))(0)


def test_retry_controller_aborts_with_the_counts() -> None:
    """RetryController accepts values within its limits, and its error has the exceeded limit."""
    RetryController(max_iterations=2, min_world_size=4, min_active_world_size=3)(state())
    with pytest.raises(RestartAbort, match="restart 2 of max_iterations=1") as caught:
        RetryController(max_iterations=1)(state())
    assert caught.value.counts == {"restarts": 2, "living": 4, "active": 3, "faults": 3}
    assert caught.value.iteration == 2
    with pytest.raises(RestartAbort, match="4 processes are left of min_world_size=5"):
        RetryController(min_world_size=5)(state())
    with pytest.raises(RestartAbort, match="3 ranks would run of min_active_world_size=4"):
        RetryController(min_active_world_size=4)(state())


def test_fault_counter_removes_a_rank_that_fails_too_often() -> None:
    """FaultCounter raises on the rank itself once its faults exceed the limit; faults of other ranks do not count."""
    FaultCounter(max_rank_faults=2)(state())
    FaultCounter()(state(fault_counts={1: 99}))
    FaultCounter(max_rank_faults=0)(state(initial_rank=2))
    with pytest.raises(UnhealthyRank, match="rank 1 failed 2 times, more than max_rank_faults=1 allows"):
        FaultCounter(max_rank_faults=1)(state())


def test_a_spare_has_no_rank() -> None:
    """A spare has no rank; an active rank has one."""
    assert state(rank=None).is_spare
    assert not state().is_spare
    assert state().active_rank == 1


@pytest.mark.parametrize(
    "make",
    [
        Compose,
        lambda: Compose(3),  # type: ignore[arg-type]
        lambda: FillGaps(granularity="rack"),
        lambda: MaxActiveWorldSize(0),
        lambda: ActiveWorldSizeDivisibleBy(0),
        lambda: RetryController(max_iterations=-1),
        lambda: RetryController(min_world_size=0),
        lambda: FaultCounter(max_rank_faults=-1),
        lambda: Level("RACK", spare=-1),
        lambda: Level(""),
        Tree,
        lambda: Tree(Level("RACK", whole=True), Level("node", whole=True)),
    ],
)
def test_invalid_settings_are_rejected(make: object) -> None:
    """An invalid setting of a plug-in is a ConfigError at its construction."""
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
