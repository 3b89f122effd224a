"""The checkpoint interval follows from the cost of a save and the failure rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.checkpoint_plan import failures_per_s, iterations_between, optimal_interval_s

COSTS = st.floats(1e-3, 1e3)
RATES = st.floats(1e-9, 1e-2)
STEPS = st.floats(1e-3, 1e3)


def _lost_share(interval_s: float, cost_s: float, rate: float) -> float:
    """Return the share of time that saves and redone work take, to first order."""
    return cost_s / interval_s + rate * interval_s / 2


@given(COSTS, RATES, st.floats(0.1, 10.0))
def test_chosen_interval_minimises_lost_time(cost_s: float, rate: float, factor: float) -> None:
    """No other interval above the cost of a save gives less time lost to saves and failures."""
    interval_s = optimal_interval_s(cost_s, rate)
    other_s = interval_s * factor
    if other_s >= cost_s:
        assert _lost_share(interval_s, cost_s, rate) <= _lost_share(other_s, cost_s, rate) * (1 + 1e-9)


@given(COSTS, RATES, STEPS)
def test_interval_in_iterations_is_near_the_optimum(cost_s: float, rate: float, step_s: float) -> None:
    """The interval is a whole number of at least 1 iteration, within half a step of the optimum."""
    number = iterations_between(cost_s, step_s, rate)
    assert number >= 1
    if number > 1:
        assert abs(number * step_s - optimal_interval_s(cost_s, rate)) <= step_s / 2 * (1 + 1e-9)


@given(COSTS, RATES, STEPS)
def test_costlier_saves_are_less_frequent(cost_s: float, rate: float, step_s: float) -> None:
    """A costlier save or a lower failure rate never makes saves more frequent."""
    number = iterations_between(cost_s, step_s, rate)
    assert iterations_between(cost_s * 2, step_s, rate) >= number
    assert iterations_between(cost_s, step_s, rate / 2) >= number


def test_unmeasured_costs_give_an_interval_of_one() -> None:
    """Without a cost or a step time, the interval is one iteration and no error is raised."""
    assert iterations_between(0.0, 1.0, 1e-6) == 1
    assert iterations_between(1.0, 0.0, 1e-6) == 1


def test_example_of_1024_ranks() -> None:
    """1,024 ranks of 8,000 h each fail every 7.8 h; a save of 1 s is due every 237 s, which is every 24 steps of 10
    s."""
    rate = failures_per_s(1024, 8000.0)
    assert 1 / rate / 3600 == pytest.approx(7.8125)
    assert optimal_interval_s(1.0, rate) == pytest.approx(math.sqrt(2 * 28125))
    assert iterations_between(1.0, 10.0, rate) == 24
    assert failures_per_s(1024, 8000.0, share=0.25) == pytest.approx(rate / 4)
