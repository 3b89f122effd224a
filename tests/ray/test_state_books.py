"""The books of an actor's state, without Ray: how far it is, and whether it is whole."""

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
def keeping(interruption: AsyncInterruption) -> StateTracker:
    keeping = StateTracker(None, interruption)
    keeping.start_over(has_state=True)
    return keeping


def step(keeping: StateTracker, iteration: int) -> None:
    with keeping.update(iteration):
        pass


def at(keeping: StateTracker) -> int | None:
    return keeping.iteration


def tear(keeping: StateTracker, iteration: int) -> None:
    with pytest.raises(ValueError, match="within"), keeping.update(iteration):
        raise ValueError("within")


def restore(keeping: StateTracker, has: int | None) -> tuple[str, int | None]:
    begin = keeping.restore({"weights": torch.zeros(1)}, has, lambda values: None)
    return begin.origin, keeping.iteration


def test_an_update_that_is_left_tears_the_state(keeping: StateTracker) -> None:
    """Until it is loaded, a torn state has no iteration, is neither updated nor saved, and is never kept."""
    step(keeping, 1)
    assert at(keeping) == 1
    tear(keeping, 2)
    assert at(keeping) is None
    with pytest.raises(OutlastError, match="middle of an update"):
        step(keeping, 2)
    with pytest.raises(OutlastError, match="middle of an update"):
        keeping.save({}, 1, now=True)
    for has in (None, 1, 2):
        begin = keeping.restore({"weights": torch.zeros(1)}, has, lambda values: None)
        assert (begin.origin, begin.is_as_set_up) == ("new", False), has


def test_a_whole_state_is_kept_where_the_driver_agrees(keeping: StateTracker) -> None:
    """The driver's word and the actor's own books have to name the same iteration."""
    step(keeping, 1)
    step(keeping, 2)
    assert restore(keeping, 2) == ("kept", 2)
    step(keeping, 3)
    assert restore(keeping, 2)[0] == "new"
    assert restore(keeping, None)[0] == "new"
    assert restore(keeping, 3) == ("kept", 3)


def test_random_numbers_go_back_with_the_state(keeping: StateTracker) -> None:
    """A step that failed has used random numbers; the state that is kept goes on with those after its last update."""
    step(keeping, 1)
    expected = torch.rand(3)
    torch.rand(5)
    assert restore(keeping, 1) == ("kept", 1)
    assert torch.equal(torch.rand(3), expected)


def test_only_the_next_iteration_is_an_update(keeping: StateTracker) -> None:
    """Any other is refused, and the state is what it was; so is a save of another iteration."""
    step(keeping, 1)
    for iteration in (0, 1, 3):
        with pytest.raises(OutlastError, match="the next update is 2"):
            step(keeping, iteration)
    with pytest.raises(OutlastError, match="has done 1 steps"):
        keeping.save({}, 2, now=True)
    assert at(keeping) == 1


def test_an_update_that_ends_after_the_order_is_whole_but_the_call_is_not(
    keeping: StateTracker, interruption: AsyncInterruption
) -> None:
    """The step counts, as nothing in it came from a peer; the call is left behind it."""

    def call() -> None:
        with keeping.update(1):
            interruption.order(0)
        raise AssertionError("not reached")

    assert isinstance(interruption.run(0, call).error, Abandoned)
    assert at(keeping) == 1


def test_a_state_of_which_nothing_is_known_is_torn_by_any_call_that_fails(keeping: StateTracker) -> None:
    """Calls are counted; one that fails leaves nothing that could be kept."""
    with keeping.whole_call():
        pass
    assert at(keeping) == 1
    with pytest.raises(ValueError, match="within"), keeping.whole_call():
        raise ValueError("within")
    assert at(keeping) is None


def test_an_actor_without_state_has_no_iteration(keeping: StateTracker) -> None:
    """There is nothing to lose, and nothing to be saved."""
    keeping.start_over(has_state=False)
    assert at(keeping) is None
    assert keeping.save({}, 0, now=True) is None
