"""Rounds: ours and the peer's measured in turns, so that what the machine does meanwhile meets both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

__all__ = ["Say", "median", "run_rounds"]

T = TypeVar("T")
Say = Callable[[str], None]
"""Tells people how far a benchmark is."""


def run_rounds(measures: Mapping[str, Callable[[], T]], *, repeats: int, say: Say) -> dict[str, list[T]]:
    """Run every measure once a round, in the given order, and return what each gave.

    Args:
        measures: What is measured, by name.
        repeats: Rounds that count; one more goes before them and is dropped, as caches and imports are cold in it.
        say: Hears of every measure.

    Returns:
        Lists of ``repeats`` entries.
    """
    found: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(repeats + 1):
        for name, measure in measures.items():
            value = measure()
            dropped = " (dropped: the first)" if number == 0 else ""
            say(f"round {number}/{repeats}: {name}: {_tell(value)}{dropped}")
            if number > 0:
                found[name].append(value)
    return found


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return float(statistics.median(values))


def _tell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
