"""Spike detection: the threshold, and the values that never count."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from outlast.numerics.validation import SpikeRule

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60)


def rule(values: list[float], *, factor: float = 10, warmup: int = 3, window: int = 5) -> SpikeRule:
    made = SpikeRule(factor=factor, warmup=warmup, window=window)
    for value in values:
        made.note(value)
    return made


@given(VALUES, st.integers(1, 5), st.integers(5, 9))
def test_maximum_is_of_the_newest_finite_values(values: list[float], warmup: int, window: int) -> None:
    """The maximum is that of the newest finite magnitudes, and None before the warm-up is over."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    expected = max(finite[-window:]) if len(finite) >= warmup else None
    assert rule(values, warmup=warmup, window=window).maximum == expected


def test_spike_is_at_least_the_factor_times_the_largest() -> None:
    """A value at the factor is a spike, with either sign; below it is not."""
    made = rule([1.0, 2.0, 1.0])
    assert made.is_spike(20.0)
    assert made.is_spike(-20.0)
    assert not made.is_spike(19.9)


def test_warm_up_values_are_never_spikes() -> None:
    """The first values set the maximum, however much they grow."""
    assert not rule([1.0, 100.0]).is_spike(1e9)


def test_nonfinite_values_do_not_count() -> None:
    """NaN and infinity are not spikes, never change the maximum, and do not end the warm-up."""
    made = rule([1.0, math.nan, math.inf, 1.0, -math.inf])
    assert made.maximum is None
    made.note(1.0)
    assert made.maximum == 1.0
    assert not made.is_spike(math.inf)
    assert not made.is_spike(math.nan)


def test_zeros_give_no_threshold() -> None:
    """If all values were 0, no value is a spike."""
    assert not rule([0.0, 0.0, 0.0]).is_spike(1.0)


@given(VALUES, VALUES)
def test_loaded_state_gives_the_same_decisions(before: list[float], after: list[float]) -> None:
    """A rule that was saved and loaded gives the same decisions as the original."""
    loaded = SpikeRule(factor=10, warmup=3, window=5)
    original = rule(before)
    loaded.load_state_dict(original.state_dict())
    for value in after:
        original.note(value)
        loaded.note(value)
        assert loaded.maximum == original.maximum
