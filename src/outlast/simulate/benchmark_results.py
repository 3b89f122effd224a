"""Results of benchmarks: the format of ``python -m benchmarks NAME --json``, and reading a file of them.

The format is the same for all benchmarks::

    {"bench": ..., "machine": {...}, "bars": [{"name", "value", "unit", "bar", "peer", "peer_value", "ok"}]}

A bar that is the lowest good value also has ``"is_floor": true``. ``"notes": [...]`` has text lines, and ``"details":
{...}`` the components of the values, where there are any.

Defined here because the simulator, which reads costs from it, is in the wheel, and the benchmarks are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.decoding import from_json, read_file
from outlast.errors import ConfigError


class Bar(msgspec.Struct):
    """One measured value and its limit; values have four significant digits."""

    name: str
    value: float | None
    """Median of the measurements; ``None`` = not measurable."""
    unit: str
    """Unit of ``value`` and ``bar``; ``x`` = a ratio (outlast's to the peer's, or as in the name)."""
    bar: float
    """Highest good value; with ``is_floor`` the lowest."""
    peer: str | None = None
    """The peer measured in the same run; with its unit in parentheses where ``unit`` is ``x``."""
    peer_value: float | None = None
    """Median of the peer; in the unit of ``value``, or in the one that ``peer`` names."""
    is_floor: bool = False
    """Whether more is better, as for rates."""
    ok: bool = False
    """Whether the limit is kept; false without a value."""
    bench: str = ""
    """The benchmark, in a list of bars of several; empty in the result of one."""

    def __post_init__(self) -> None:
        self.value, self.peer_value = _round(self.value), _round(self.peer_value)
        self.ok = self.value is not None and (self.value >= self.bar if self.is_floor else self.value <= self.bar)

    @property
    def seconds(self) -> float | None:
        """The value in seconds, a ratio multiplied by the peer's; ``None`` = not a time, or not measured."""
        if self.value is None or self.value < 0:
            return None
        if self.unit in _SECONDS:
            return self.value * _SECONDS[self.unit]
        if self.unit != "x" or self.peer_value is None or not str(self.peer).endswith("(s)"):
            return None
        return self.value * self.peer_value


_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


class BenchResult(msgspec.Struct):
    """Measurements of one benchmark."""

    bench: str
    bars: Sequence[Bar]
    notes: Sequence[str] = ()
    """Text lines: breakdowns, runs that failed and were repeated."""
    machine: Mapping[str, Any] = {}
    """What the values depend on: day, processor, versions."""
    details: Mapping[str, Any] = {}
    """Components of the values, for programs; empty = none."""

    @property
    def ok(self) -> bool:
        """Whether every limit is kept."""
        return all(bar.ok for bar in self.bars)

    @property
    def num_measured(self) -> int:
        return sum(bar.value is not None for bar in self.bars)

    def to_json(self) -> str:
        """Return the JSON form, on one line."""
        fields = msgspec.to_builtins(self)
        for bar in fields["bars"]:
            del bar["bench"]
            if not bar["is_floor"]:
                del bar["is_floor"]
        for name in ("notes", "details"):
            if not fields[name]:
                del fields[name]
        return msgspec.json.encode(fields).decode()


def read_results(path: Path) -> list[BenchResult]:
    """Return the results in a file: one, a list of them, or one on each line.

    Raises:
        ConfigError: The file cannot be read, or has other contents.
    """
    wanted = "name a file that python -m benchmarks NAME --json wrote"
    try:
        data = read_file(path, follows_links=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}; {wanted}") from None
    found: BenchResult | list[BenchResult]
    try:
        found = from_json(data, BenchResult | list[BenchResult])
    except msgspec.DecodeError as error:
        try:
            found = [from_json(line, BenchResult) for line in data.splitlines() if line.strip()]
        except msgspec.DecodeError:
            raise ConfigError(f"{path} is not a result of a benchmark ({error}); {wanted}") from None
    return found if isinstance(found, list) else [found]
