"""How much two runs of the same step differ."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

import msgspec

from outlast.policy.rerun import JsonNumber, to_json_number

__all__ = ["DeterminismStatistics", "Differences", "describe_differences"]

MAX_KEPT = 1 << 17
"""Differences kept for the percentiles of one value; when there are more, every second one of them is dropped."""


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """Relative differences of one validated value between two runs of a step.

    Percentiles are of all comparisons, those without a difference included: the smallest difference that at least that
    share of them does not exceed.
    """

    num_compared: int
    num_different: int
    mean: JsonNumber
    """Mean of all comparisons."""
    p50: JsonNumber
    p90: JsonNumber
    p99: JsonNumber
    p99_9: JsonNumber
    maximum: JsonNumber
    num_unreached: int = 0
    """Validations that only one of the two runs reached."""


class _DifferenceCounts:
    def __init__(self) -> None:
        self.num_compared = self.num_different = self.num_unreached = 0
        self.total = self.maximum = 0.0
        self._kept = array("d")
        self._every = 1

    def add(self, difference: float) -> None:
        self.num_compared += 1
        if difference == 0:
            return
        if self.num_different % self._every == 0:
            self._kept.append(difference)
            if len(self._kept) >= MAX_KEPT:
                self._kept, self._every = self._kept[::2], self._every * 2
        self.num_different += 1
        self.total += difference
        self.maximum = max(self.maximum, difference)

    def summary(self) -> Differences:
        kept = sorted(self._kept)
        num_same = self.num_compared - self.num_different

        def percentile(share: float) -> JsonNumber:
            place = math.ceil(share * self.num_compared) - num_same  # which of the different ones, from 1
            if place <= 0:
                return 0.0
            return to_json_number(kept[math.ceil(place / self.num_different * len(kept)) - 1])

        return Differences(
            num_compared=self.num_compared,
            num_different=self.num_different,
            mean=to_json_number(self.total / self.num_compared) if self.num_compared else 0.0,
            p50=percentile(0.5),
            p90=percentile(0.9),
            p99=percentile(0.99),
            p99_9=percentile(0.999),
            maximum=to_json_number(self.maximum),
            num_unreached=self.num_unreached,
        )


class DeterminismStatistics:
    """Count the differences of each validated value, by its name.

    Only of this process: the counts begin anew with every cycle.
    """

    def __init__(self) -> None:
        self._records: dict[str, _DifferenceCounts] = {}

    def add(self, what: str, difference: float) -> None:
        """Add one comparison."""
        self._records.setdefault(what, _DifferenceCounts()).add(difference)

    def add_unreached(self, what: str) -> None:
        """Add a validation that only one of the two runs reached."""
        self._records.setdefault(what, _DifferenceCounts()).num_unreached += 1

    def report(self) -> dict[str, Differences]:
        """Return what was counted, by name of the value."""
        return {what: record.summary() for what, record in self._records.items()}


def describe_differences(report: Mapping[str, Differences]) -> str:
    """Return a report as lines for people."""
    heads = " ".join(f"{head:>9}" for head in ("mean", "p50", "p90", "p99", "p99.9", "max"))
    lines = [f"{'value':<16} {'compared':>9} {'differ':>7} {heads}"]
    for what, one in report.items():
        numbers = (one.mean, one.p50, one.p90, one.p99, one.p99_9, one.maximum)
        texts = " ".join(f"{value if isinstance(value, str) else format(value, '.3g'):>9}" for value in numbers)
        line = f"{what:<16} {one.num_compared:>9} {one.num_different:>7} {texts}"
        if one.num_unreached:
            line += f"  ({one.num_unreached} were reached by one run only)"
        lines.append(line)
    return "\n".join(lines)
