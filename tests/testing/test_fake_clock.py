"""The hand-moved clock."""

from __future__ import annotations

import pytest

from outlast.clock import Clock
from outlast.testing import FakeClock


def test_time_moves_by_hand_only() -> None:
    """The clock stands until it is advanced, and then by exactly that much."""
    clock: Clock = (fake := FakeClock(start_s=5.0))
    assert (clock.now_ns(), clock.now_ns()) == (5_000_000_000, 5_000_000_000)
    fake.advance(0.25)
    assert fake.now_s() == 5.25


def test_time_never_goes_back() -> None:
    """A monotonic clock refuses to go back."""
    with pytest.raises(ValueError, match="cannot go back"):
        FakeClock().advance(-1)
