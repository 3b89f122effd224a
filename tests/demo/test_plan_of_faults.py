"""The plan of faults: drawn from the seed alone, well apart, within the run."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.demo.plan import NUM_FAULTS, Deed, DemoFault, Shape, draw_faults, least_iterations
from outlast.errors import ConfigError

DRAWN = {Deed.KILL, Deed.STOP, Deed.LOSE, Deed.FLIP}


def restarts(seed: int, shape: Shape) -> list[DemoFault]:
    """Return the faults that cost a restart."""
    return [fault for fault in draw_faults(seed, shape) if fault.deed not in (Deed.SLOW, Deed.NAN, Deed.LEAVE)]


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
    """One of each kind, on a rank or a node of the world, the notice to leave last; the same seed draws the same."""
    faults = draw_faults(seed, shape)
    assert len(faults) == NUM_FAULTS
    assert {fault.deed for fault in faults} == set(Deed)
    assert (faults[0].deed, faults[-1].deed) == (Deed.SLOW, Deed.LEAVE)
    assert restarts(seed, shape)[-1].deed == Deed.SPOIL
    assert [fault.iteration for fault in faults] == sorted(fault.iteration for fault in faults)
    for fault in faults:
        if fault.deed.loses_node:
            assert fault.rank is None
            assert fault.slot in range(shape.num_nodes)
        else:
            assert fault.slot is None
            assert fault.rank in range(shape.world_size)
    assert draw_faults(seed, shape) == faults


@given(st.integers(0, 2**32), shapes())
def test_there_is_something_to_lose_and_something_won_each_time(seed: int, shape: Shape) -> None:
    """Some generations lie before the first restart, one beyond any restart's before the next, and one after the last.

    Before the last one that is so for generations of the global tier, and the newest of all is not there.
    """
    interval, faults = shape.save_interval, restarts(seed, shape)
    assert faults[0].iteration >= 4 * interval
    for fault, following in pairwise(faults):
        newest_restored = fault.iteration // interval * interval
        assert following.iteration >= newest_restored + 3 * interval
    assert faults[-1].iteration <= shape.iterations - interval
    assert faults[-1].iteration // interval * interval % shape.global_save_interval
    newest_restored = faults[-2].iteration // interval * interval
    newest_global = (faults[-1].iteration - interval) // shape.global_save_interval * shape.global_save_interval
    assert newest_global > newest_restored


@given(st.integers(0, 2**32), shapes())
def test_no_fault_strikes_at_the_iteration_of_a_save(seed: int, shape: Shape) -> None:
    """So that each restart costs something, and a flipped bit is there before a save that it blocks."""
    if shape.save_interval > 1:
        assert all(fault.iteration % shape.save_interval for fault in draw_faults(seed, shape))


@given(st.integers(0, 2**32), shapes())
def test_the_nan_comes_clearly_after_a_restart_and_before_the_next(seed: int, shape: Shape) -> None:
    """More than a generation's iterations after the fault before it, and in an earlier generation than the next one."""
    interval = shape.save_interval
    (nan,) = (fault for fault in draw_faults(seed, shape) if fault.deed == Deed.NAN)
    assert nan.iteration >= interval
    for fault in restarts(seed, shape):
        if fault.iteration < nan.iteration:
            assert nan.iteration // interval >= fault.iteration // interval + 2
        else:
            assert nan.iteration // interval < fault.iteration // interval


@given(st.integers(0, 2**32), shapes())
def test_the_notice_to_leave_comes_a_while_before_the_end(seed: int, shape: Shape) -> None:
    """A generation after the last restart's fault at least, and one before the end: all go on, and leave, and go on."""
    *_, last, leave = draw_faults(seed, shape)
    assert leave.iteration >= last.iteration + shape.save_interval
    assert leave.iteration <= shape.iterations - shape.save_interval


@given(st.integers(0, 2**32), shapes())
def test_a_rank_is_slow_from_the_start_and_long_enough(seed: int, shape: Shape) -> None:
    """From within the steps that are not timed, and for three generations before a restart; no flip cuts it short."""
    slow, first = draw_faults(seed, shape)[0], restarts(seed, shape)[0]
    assert 1 <= slow.iteration <= 3
    assert first.iteration >= 4 * shape.save_interval
    assert first.deed != Deed.FLIP


def test_seeds_draw_other_orders_victims_and_moments() -> None:
    """Forty seeds show each kind at the first place that may be there, the NaN at five places, and many moments."""
    plans = [draw_faults(seed, Shape()) for seed in range(40)]
    assert {restarts(seed, Shape())[0].deed for seed in range(40)} == DRAWN - {Deed.FLIP}
    assert {[fault.deed for fault in plan].index(Deed.NAN) for plan in plans} == {1, 2, 3, 4, 5}
    assert len({fault.iteration for plan in plans for fault in plan}) > 20
    assert {fault.rank for plan in plans for fault in plan if fault.deed.is_planned} == {0, 1, 2, 3}


@given(st.integers(0, 2**32), shapes())
def test_another_spare_has_time_to_come_between_two_lost_nodes(seed: int, shape: Shape) -> None:
    """Some other fault strikes in between."""
    assert restarts(seed, shape)[-2].deed != Deed.LOSE


def test_too_few_iterations_are_refused() -> None:
    """The message says how many are needed."""
    least = least_iterations(5)
    draw_faults(0, Shape(iterations=least))
    with pytest.raises(ConfigError, match=rf"--iterations={least - 1} is too few .* at least {least}"):
        draw_faults(0, Shape(iterations=least - 1))
