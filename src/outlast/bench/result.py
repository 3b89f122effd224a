"""The result of a benchmark: bars, and how they are shown to people and to programs.

The JSON form is the same for all benchmarks::

    {"bench": ..., "machine": {...}, "bars": [{"name", "value", "unit", "peer", "peer_value", "bar", "ok"}]}

Where there are any, ``"notes": [...]`` has lines for people, and ``"details": {...}`` of what the figures are made.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from outlast import clock
from outlast.version import __version__

__all__ = ["Bar", "BenchResult", "describe_machine"]

_UNITS_OF_RATIOS = "x"
_PEERS = ("nvidia-resiliency-ext", "torch-checkpointing", "ray")
"""Packages that some benchmarks measure beside ours, where they are installed."""


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on: day, processor, memory, load, versions of ours and of the peers installed."""
    return {
        "date": datetime.datetime.fromtimestamp(clock.wall_ns() / 1e9, datetime.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "outlast": __version__,
        **{peer: version for peer in _PEERS if (version := _installed(peer))},
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # no such file on this machine: the architecture is all that is known
    return platform.machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure and the limit that it must keep."""

    name: str
    value: float | None
    """Median of what was measured; ``None``: it could not be."""
    unit: str
    """Unit of ``value`` and ``bar``; ``x``: a ratio (ours / the peer's, or as in the name)."""
    bar: float
    """Highest value that is good; with ``is_floor`` the lowest."""
    is_floor: bool = False
    """Whether more is better, as for rates."""
    peer: str | None = None
    """What was measured beside it, in the same run; its unit in parentheses where ``unit`` is ``x``."""
    peer_value: float | None = None
    """Median of the peer's; in the unit of ``value``, or in the one that ``peer`` names."""

    @property
    def ok(self) -> bool:
        """Whether the bar is kept; never without a value."""
        if self.value is None:
            return False
        return self.value >= self.bar if self.is_floor else self.value <= self.bar

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the JSON form."""
        return {
            "name": self.name,
            "value": _round(self.value),
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": _round(self.peer_value),
            "bar": self.bar,
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What a benchmark found."""

    bench: str
    bars: tuple[Bar, ...]
    notes: tuple[str, ...] = ()
    """Lines for people: breakdowns, runs that failed and were repeated."""
    machine: Mapping[str, Any] = field(default_factory=describe_machine)
    details: Mapping[str, Any] = field(default_factory=dict)
    """For programs, what the figures are made of; empty = nothing."""

    @property
    def ok(self) -> bool:
        """Whether every bar is kept."""
        return all(bar.ok for bar in self.bars)

    def to_json(self) -> str:
        """Return the JSON form, on one line."""
        bars = [bar.to_fields() for bar in self.bars]
        fields = {"bench": self.bench, "machine": dict(self.machine), "bars": bars}
        if self.notes:
            fields["notes"] = list(self.notes)
        if self.details:
            fields["details"] = dict(self.details)
        return json.dumps(fields, allow_nan=False)

    def render(self) -> RenderableType:
        """Return the table and the notes, for a terminal or a file."""
        table = Table(title=f"outlast bench {self.bench}", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("figure", no_wrap=True)
        table.add_column("outlast", justify="right", no_wrap=True)
        table.add_column("bar", justify="right", no_wrap=True)
        table.add_column("")
        table.add_column("peer")
        table.add_column("its figure", justify="right", no_wrap=True)
        for bar in self.bars:
            table.add_row(
                bar.name,
                _show(bar.value, bar.unit),
                f"{'>=' if bar.is_floor else '<='} {_show(bar.bar, bar.unit)}",
                "[green]kept[/]" if bar.ok else "[bold red]missed[/]",
                escape(bar.peer or "-"),
                _show(bar.peer_value, "" if bar.unit == _UNITS_OF_RATIOS else bar.unit),
            )
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        return Group(table, *(Text(f" {note}") for note in self.notes), Text(f" {machine}", style="dim"))


def _round(value: float | None) -> float | None:
    """Return the value with four significant digits; ``None`` for what is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _show(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g} {unit}".rstrip()
