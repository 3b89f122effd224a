"""Results of benchmarks: tables for people, the machine, and the history of all runs of the suite.

A folder of results contains ``BENCH.json``, the output of ``python -m benchmarks BENCH --json``, and ``history.jsonl``,
one line for each run of ``python -m benchmarks all``. Lines are only appended; a reader skips a line that a crash cut
short, and the next line does not continue it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.catalogue import BENCHMARKS
from outlast import clock
from outlast.config.base import nearest
from outlast.decoding import from_json
from outlast.errors import ConfigError
from outlast.simulate.benchmark_results import Bar, BenchResult, read_results
from outlast.version import __version__

HISTORY = "history.jsonl"
NOT_MEASURED = "not measured"
NOISE_PCT = 20.0
"""Default limit below which changes are noise: two runs on one quiet machine differ by as much."""
_NUM_SHOWN = 4
"""Number of runs whose values are shown side by side."""
_PEERS = ("nvidia-resiliency-ext", "ray", "torch-checkpointing")
"""Packages with which some benchmarks compare outlast, if installed."""


def read_folder(folder: Path) -> dict[str, BenchResult]:
    """Return the newest result of each benchmark by name.

    Raises:
        ConfigError: A file is damaged.
    """
    paths = {name: folder / f"{name}.json" for name in sorted(BENCHMARKS)}
    return {name: read_results(path)[0] for name, path in paths.items() if path.exists()}


# -- for people ------------------------------------------------------------------------------------------------------


def show_figure(value: float | None, unit: str) -> str:
    """Return a measured value for people: three digits, seconds below one as milliseconds."""
    if value is None:
        return NOT_MEASURED
    if unit == "s" and abs(value) < 1:
        value, unit = value * 1e3, "ms"
    return f"{value:.3g}\N{NO-BREAK SPACE}{unit}".rstrip()


def describe_measurement(machine: Mapping[str, Any]) -> str:
    """Return when, on what machine and with which versions a result was measured."""
    peers = [f"{name} {machine[name]}" for name in _PEERS if name in machine]
    text = (
        f"{machine.get('date', 'day not recorded')}, {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_gib']:g} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"torch {machine['torch']}, outlast {machine.get('outlast', '')}".rstrip()
    )
    if "gpu" in machine:
        text += f"; {machine['gpu']}"
    return "; compared with ".join([text, ", ".join(peers)] if peers else [text])


def describe_machine() -> dict[str, Any]:
    """Return the properties of the machine on which values depend, and the versions."""
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
        **{peer: version for peer in _PEERS if (version := installed_version(peer))},
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""  # no such file on this machine: only the architecture is known
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def installed_version(package: str) -> str | None:
    """Return the version of a package; ``None``: not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def split_peer(bar: Bar) -> tuple[str, str]:
    """Return the peer's name, ``-`` if there is none, and the unit of its value."""
    if bar.peer is not None and bar.unit == "x":
        name, _, unit = bar.peer.rpartition(" (")
        return name, unit.rstrip(")")
    return bar.peer or "-", bar.unit


def render_bars(title: str, bars: Sequence[Bar], notes: Iterable[str], machine: Mapping[str, Any]) -> RenderableType:
    """Return the table of bars, followed by the notes and the machine."""
    table = Table(title=f"benchmarks: {title}", title_justify="left", box=box.SIMPLE_HEAD)
    several = any(bar.bench for bar in bars)
    for head in ("bench", "bar") if several else ("bar",):
        table.add_column(head, no_wrap=True)
    for head in ("value", "limit"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("peer", overflow="fold")
    table.add_column("its value", justify="right", no_wrap=True)
    before = ""
    for bar in bars:
        peer, peer_unit = split_peer(bar)
        missed = Text("missed", style="bold red") if bar.value is not None or not several else "-"
        table.add_row(
            *(["" if bar.bench == before else bar.bench] if several else []),
            bar.name,
            "-" if bar.value is None else show_figure(bar.value, bar.unit),
            f"{'>=' if bar.is_floor else '<='} {show_figure(bar.bar, bar.unit)}",
            Text("kept", style="green") if bar.ok else missed,
            Text(peer),
            "-" if bar.peer_value is None else show_figure(bar.peer_value, peer_unit),
        )
        before = bar.bench
    place = [Text(f" {describe_measurement(machine)}", style="dim")] if machine else []
    return Group(table, *(Text(f" {note}") for note in notes), *place)


# -- the history -----------------------------------------------------------------------------------------------------


class SuiteRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the suite: a line of the history."""

    date: str
    """When it began, ISO 8601 in UTC."""
    commit: str | None = None
    """Checked-out commit, with ``+`` if its code was changed; ``None``: not in a checkout."""
    version: str
    """Version of outlast."""
    machine: dict[str, Any]
    ok: bool
    """Whether every measured bar is kept, and no benchmark failed."""
    bars: list[Bar]
    not_measured: dict[str, str] = {}
    """Reason by benchmark without bars."""

    @property
    def label(self) -> str:
        return " ".join(filter(None, [self.date[:10], self.commit and self.commit[:8].rstrip("+")]))


def append_record(folder: Path, record: SuiteRecord) -> None:
    """Append a run to the history, durably.

    Raises:
        OSError: The disk is full, or the folder is not writable.
    """
    with open(folder / HISTORY, "ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        is_torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * is_torn + msgspec.json.encode(record) + b"\n")  # one write, always at the file's end
        os.fsync(file.fileno())


def read_history(folder: Path) -> tuple[list[SuiteRecord], int]:
    """Return the runs of the suite, oldest first, and the number of lines skipped as incomplete.

    Raises:
        ConfigError: There is no history.
    """
    path = folder / HISTORY
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); python -m benchmarks all --results {folder} writes it"
        ) from None
    found, num_torn = [], 0
    for line in filter(None, lines):
        try:
            found.append(from_json(line, SuiteRecord))
        except msgspec.DecodeError:
            num_torn += 1
    return found, num_torn


@dataclass(frozen=True, slots=True, kw_only=True)
class BarHistory:
    """The values of one bar from run to run on one kind of machine."""

    bench: str
    name: str
    unit: str
    bar: float
    is_floor: bool
    values: Sequence[float | None]
    """One per run, oldest first; ``None``: not measured in that run."""
    change: float | None
    """From the previous measured run to the newest: per cent of the former, for values in per cent the difference;
    ``None``: there is no such run."""
    best: float | None
    """Best value of all runs."""
    change_from_best: float | None
    """The change from the best value."""
    moved: str
    """``better`` or ``worse``: the change exceeds the noise; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineHistory:
    """The runs on one kind of machine."""

    processor: str
    cores: int
    memory_gib: int
    records: Sequence[SuiteRecord]
    bars: Sequence[BarHistory]

    def to_fields(self) -> dict[str, Any]:
        runs = [{"date": one.date, "commit": one.commit, "version": one.version} for one in self.records]
        machine = {"processor": self.processor, "cores": self.cores, "memory_gib": self.memory_gib}
        return {"machine": machine, "runs": runs, "bars": self.bars}


def compare_records(
    records: Iterable[SuiteRecord], *, noise_pct: float = NOISE_PCT, only: str | None = None
) -> list[MachineHistory]:
    """Return how each bar moved, by kind of machine: processor, cores, memory.

    Args:
        records: The history, oldest first.
        noise_pct: Changes up to this are noise: per cent of the earlier value, for values in per cent of the bar.
        only: ``BAR`` or ``BENCH.BAR``; ``None``: all.

    Raises:
        ConfigError: No run has such a bar.
    """
    kinds: dict[tuple[str, int, int], list[SuiteRecord]] = {}
    for one in records:
        machine = one.machine
        kind = (str(machine.get("processor")), int(machine.get("cores", 0)), round(machine.get("memory_gib", 0)))
        kinds.setdefault(kind, []).append(one)
    known = sorted({f"{bar.bench}.{bar.name}" for some in kinds.values() for one in some for bar in one.bars})
    wanted = [name for name in known if only is None or only in (name, name.partition(".")[2])]
    if only is not None and not wanted:
        raise ConfigError(f"no run in the history has a bar {only!r}; {nearest(only, known)}")
    found = []
    for (processor, cores, memory_gib), some in kinds.items():
        bars = [bar for name in wanted if (bar := _follow(name, some, noise_pct)) is not None]
        if bars:
            found.append(
                MachineHistory(processor=processor, cores=cores, memory_gib=memory_gib, records=some, bars=bars)
            )
    return found


def _follow(name: str, records: Sequence[SuiteRecord], noise_pct: float) -> BarHistory | None:
    """Return how a bar moved over the runs of one kind of machine; ``None``: no run has it."""
    stored = [next((bar for bar in one.bars if f"{bar.bench}.{bar.name}" == name), None) for one in records]
    newest = next((bar for bar in reversed(stored) if bar is not None), None)
    if newest is None:
        return None
    values = [None if bar is None else bar.value for bar in stored]
    known = [value for value in values if value is not None]
    best = (max if newest.is_floor else min)(known, default=None)
    change = _change(known[-2], known[-1], newest.unit) if len(known) > 1 else None
    noise = noise_pct / 100 * newest.bar if newest.unit == "%" else noise_pct
    moved = ""
    if change is not None and abs(change) > noise:
        moved = "better" if (change > 0) == newest.is_floor else "worse"
    return BarHistory(
        bench=newest.bench,
        name=newest.name,
        unit=newest.unit,
        bar=newest.bar,
        is_floor=newest.is_floor,
        values=values,
        change=change,
        best=best,
        change_from_best=None if best is None else _change(best, known[-1], newest.unit),
        moved=moved,
    )


def _change(before: float, after: float, unit: str) -> float | None:
    if unit == "%":  # such values are close to zero, where a ratio is meaningless
        return after - before
    if before == 0:
        return 0.0 if after == 0 else None
    change = 100 * (after - before) / abs(before)
    return change if math.isfinite(change) else None


def render_history(machine: MachineHistory, noise_pct: float) -> RenderableType:
    """Return the table of one kind of machine, with the newest runs side by side."""
    title = f"{machine.cores} cores of {machine.processor}, {machine.memory_gib} GiB"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("bench", no_wrap=True)
    table.add_column("figure", overflow="fold")
    shown = machine.records[-_NUM_SHOWN:]
    for one in shown:
        table.add_column(one.label, justify="right", max_width=11)
    for head in ("change", "from best"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    before = ""
    for bar in machine.bars:
        cells = ["-" if value is None else show_figure(value, bar.unit) for value in bar.values[-len(shown) :]]
        of = "" if bar.unit == "%" else " %"
        changes = ["-" if one is None else f"{one:+.3g}{of}" for one in (bar.change, bar.change_from_best)]
        mark = Text(bar.moved, style="bold red" if bar.moved == "worse" else "green")
        table.add_row("" if bar.bench == before else bar.bench, bar.name, *cells, *changes, mark)
        before = bar.bench
    num = len(machine.records)
    note = f" the newest {len(shown)} of {num} runs; a change of up to {noise_pct:g} % is noise and not marked"
    return Group(table, Text(note, style="dim"))
