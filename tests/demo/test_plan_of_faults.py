"""The plan of faults: drawn from the seed alone, well apart, within the run."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.demo.plan import NUM_FAULTS, Shape, draw_faults, least_iterations
from outlast.errors import ConfigError
from outlast.incidents import IncidentKind

KINDS = {IncidentKind.WORKER_DIED, IncidentKind.WORKER_HUNG, IncidentKind.NODE_LOST}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    interval = draw(st.integers(1, 20))
    least = least_iterations(interval)
    return Shape(
        num_nodes=draw(st.integers(1, 4)),
        nproc_per_node=draw(st.integers(1, 4)),
        iterations=draw(st.integers(least, 4 * least)),
        save_interval=interval,
    )


@given(st.integers(0, 2**32), shapes())
def test_each_fault_once_with_a_victim_that_exists(seed: int, shape: Shape) -> None:
    """One of each kind, on a rank or a node of the world, then a spoiled node; the same seed draws the same."""
    faults = draw_faults(seed, shape)
    assert len(faults) == NUM_FAULTS
    *first, last = faults
    assert {fault.kind for fault in first} == KINDS
    assert len(first) == len(KINDS)
    assert last.kind == IncidentKind.NODE_LOST
    assert [fault.spoils_copies for fault in faults] == [False, False, False, True]
    for fault in faults:
        if fault.kind == IncidentKind.NODE_LOST:
            assert fault.rank is None
            assert fault.slot in range(shape.num_nodes)
        else:
            assert fault.slot is None
            assert fault.rank in range(shape.world_size)
        assert fault.action
    assert draw_faults(seed, shape) == faults


@given(st.integers(0, 2**32), shapes())
def test_there_is_something_to_lose_and_something_won_each_time(seed: int, shape: Shape) -> None:
    """Two generations lie before the first fault, one beyond any restart's before the next, and one after the last.

    Before the last one that is so for generations of the global tier, and the newest of all is not there.
    """
    interval, faults = shape.save_interval, draw_faults(seed, shape)
    assert faults[0].iteration >= 2 * interval
    for fault, following in pairwise(faults):
        newest_restored = fault.iteration // interval * interval
        assert following.iteration >= newest_restored + 3 * interval
    assert faults[-1].iteration <= shape.iterations - interval
    if interval > 1:
        assert all(fault.iteration % interval for fault in faults)
    assert faults[-1].iteration // interval * interval % shape.global_save_interval
    newest_restored = faults[-2].iteration // interval * interval
    newest_global = (faults[-1].iteration - interval) // shape.global_save_interval * shape.global_save_interval
    assert newest_global > newest_restored


def test_seeds_draw_other_orders_victims_and_moments() -> None:
    """Twenty seeds show every order of the three kinds' first place, and many moments."""
    plans = [draw_faults(seed, Shape()) for seed in range(20)]
    assert {plan[0].kind for plan in plans} == KINDS
    assert len({fault.iteration for plan in plans for fault in plan}) > 20
    assert {fault.rank for plan in plans for fault in plan} == {None, 0, 1, 2, 3}


@given(st.integers(0, 2**32), shapes())
def test_another_spare_has_time_to_come_between_two_lost_nodes(seed: int, shape: Shape) -> None:
    """Some other fault strikes in between."""
    assert draw_faults(seed, shape)[-2].kind != IncidentKind.NODE_LOST


def test_too_few_iterations_are_refused() -> None:
    """The message says how many are needed."""
    least = least_iterations(5)
    draw_faults(0, Shape(iterations=least))
    with pytest.raises(ConfigError, match=rf"--iterations={least - 1} is too few .* at least {least}"):
        draw_faults(0, Shape(iterations=least - 1))
