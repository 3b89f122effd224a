"""The tracking of an actor's state, without Ray: its iteration, and whether it is complete."""

from __future__ import annotations

import pytest
import torch

from outlast.errors import OutlastError
from outlast.ray.actor_state import StateTracker
from outlast.runtime.interruption import Abandoned, AsyncInterruption


@pytest.fixture
def interruption() -> AsyncInterruption:
    return AsyncInterruption()


@pytest.fixture
def tracker(interruption: AsyncInterruption) -> StateTracker:
    tracker = StateTracker(None, interruption)
    tracker.start_over(has_state=True)
    return tracker


def step(tracker: StateTracker, iteration: int) -> None:
    with tracker.update(iteration):
        pass


def iteration_of(tracker: StateTracker) -> int | None:
    return tracker.iteration


def tear(tracker: StateTracker, iteration: int) -> None:
    with pytest.raises(ValueError, match="within"), tracker.update(iteration):
        raise ValueError("within")


def restore(tracker: StateTracker, has: int | None) -> tuple[str, int | None]:
    begin = tracker.restore({"weights": torch.zeros(1)}, has, lambda values: None)
    return begin.origin, tracker.iteration


def test_an_interrupted_update_tears_the_state(tracker: StateTracker) -> None:
    """Until it is loaded, a torn state has no iteration, is neither updated nor saved, and is never kept."""
    step(tracker, 1)
    assert iteration_of(tracker) == 1
    tear(tracker, 2)
    assert iteration_of(tracker) is None
    with pytest.raises(OutlastError, match="middle of an update"):
        step(tracker, 2)
    with pytest.raises(OutlastError, match="middle of an update"):
        tracker.save({}, 1, now=True)
    for has in (None, 1, 2):
        begin = tracker.restore({"weights": torch.zeros(1)}, has, lambda values: None)
        assert (begin.origin, begin.is_as_set_up) == ("new", False), has


def test_complete_state_is_kept_where_the_driver_agrees(tracker: StateTracker) -> None:
    """The driver and the actor's own tracker must have the same iteration."""
    step(tracker, 1)
    step(tracker, 2)
    assert restore(tracker, 2) == ("kept", 2)
    step(tracker, 3)
    assert restore(tracker, 2)[0] == "new"
    assert restore(tracker, None)[0] == "new"
    assert restore(tracker, 3) == ("kept", 3)


def test_random_state_is_restored_with_the_state(tracker: StateTracker) -> None:
    """A failed step has used random numbers; kept state continues with the generator state after its last update."""
    step(tracker, 1)
    expected = torch.rand(3)
    torch.rand(5)
    assert restore(tracker, 1) == ("kept", 1)
    assert torch.equal(torch.rand(3), expected)


def test_only_the_next_iteration_can_be_an_update(tracker: StateTracker) -> None:
    """Any other iteration is rejected without changing the state, and so is a save of another iteration."""
    step(tracker, 1)
    for iteration in (0, 1, 3):
        with pytest.raises(OutlastError, match="the next update is 2"):
            step(tracker, iteration)
    with pytest.raises(OutlastError, match="has done 1 steps"):
        tracker.save({}, 2, now=True)
    assert iteration_of(tracker) == 1


def test_an_update_completes_before_the_call_is_abandoned(
    tracker: StateTracker, interruption: AsyncInterruption
) -> None:
    """The step counts, because no input of it came from a peer; the call is abandoned after the update."""

    def call() -> None:
        with tracker.update(1):
            interruption.order(0)
        raise AssertionError("not reached")

    assert isinstance(interruption.run(0, call).error, Abandoned)
    assert iteration_of(tracker) == 1


def test_a_failed_call_tears_unknown_state(tracker: StateTracker) -> None:
    """Without updates the calls are counted; state of a failed call is never kept."""
    with tracker.whole_call():
        pass
    assert iteration_of(tracker) == 1
    with pytest.raises(ValueError, match="within"), tracker.whole_call():
        raise ValueError("within")
    assert iteration_of(tracker) is None


def test_an_actor_without_state_has_no_iteration(tracker: StateTracker) -> None:
    """An actor without state has nothing to lose and nothing to save."""
    tracker.start_over(has_state=False)
    assert iteration_of(tracker) is None
    assert tracker.save({}, 0, now=True) is None
