"""The manually advanced clock."""

from __future__ import annotations

import pytest

from outlast.clock import Clock
from outlast.testing import FakeClock


def test_fake_clock_advances_only_on_request() -> None:
    """The time is constant until the clock is advanced, and changes by exactly the requested amount."""
    clock: Clock = (fake := FakeClock(start_s=5.0))
    assert (clock.now_ns(), clock.now_ns()) == (5_000_000_000, 5_000_000_000)
    fake.advance(0.25)
    assert fake.now_s() == 5.25


def test_fake_clock_rejects_negative_steps() -> None:
    """A monotonic clock rejects a step backwards."""
    with pytest.raises(ValueError, match="cannot go back"):
        FakeClock().advance(-1)
