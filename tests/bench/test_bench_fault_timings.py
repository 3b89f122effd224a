"""What followed a fault in process is read from the marks of the ranks."""

from __future__ import annotations

import pytest

from outlast.bench.inprocess import fault_timings
from outlast.bench.measuring import Mark


def marks(*, last_step_ns: int = 2_400_000_000) -> list[Mark]:
    """Return those of four ranks of which rank 1 sleeps; a fifth process takes its place."""

    def mark(name: str, iteration: int, initial_rank: int, at_ns: int) -> Mark:
        return Mark(name=name, rank=initial_rank, iteration=iteration, at_ns=at_ns, pid=100 + initial_rank)

    first = [mark("entered", 0, rank, 0) for rank in range(4)]
    second = [mark("entered", 1, rank, 2_200_000_000 + rank) for rank in (0, 2, 3, 4)]
    steps = [mark("stepped", 1, rank, last_step_ns - 4 + rank) for rank in (0, 2, 3, 4)]
    return [*first, mark("fault", 0, 1, 100_000_000), *second, *steps]


def test_a_fault_is_over_with_the_last_rank() -> None:
    """Times run from the fault to the last active rank; a process that is replaced counts as lost."""
    (found,) = fault_timings(marks(), [("sleep", 1)]) or []
    assert (found.entered_s, found.stepped_s) == pytest.approx((2.1, 2.3))
    assert found.beyond_s == pytest.approx(0.3)
    assert found.num_lost == 1
    assert found.name == "sleep"


def test_what_has_not_followed_yet_is_no_result() -> None:
    """As long as one rank has not finished an iteration, or a later fault has not happened, there is no figure."""
    assert fault_timings(marks()[:-1], [("sleep", 1)]) is None
    assert fault_timings(marks(), [("sleep", 1), ("kill", 0)]) is None
