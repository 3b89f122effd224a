"""The result of a benchmark: its JSON form, its decision, and its rounds."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.measuring import median, run_rounds
from benchmarks.results import render_bars
from outlast.simulate.benchmark_results import Bar, BenchResult

pytestmark = pytest.mark.extended

KEPT = Bar(name="heartbeat_us", value=0.18649, unit="us", bar=1.0, peer="TCPStore.set", peer_value=4.6)
MISSED = Bar(name="section_us", value=2.5, unit="us", bar=2.0)
UNKNOWN = Bar(name="restart_vs_torchrun_2", value=None, unit="x", bar=0.06, peer="torchrun (s)", peer_value=None)


def test_json_has_exactly_the_documented_fields() -> None:
    """The JSON form has exactly the documented fields, null where a value is missing."""
    text = BenchResult(bench="heartbeat", bars=(KEPT, UNKNOWN), notes=("a note",)).to_json()
    found = json.loads(text)
    assert "\n" not in text
    assert set(found) == {"bench", "machine", "bars", "notes"}
    assert found["notes"] == ["a note"]
    assert set(json.loads(BenchResult(bench="heartbeat", bars=(KEPT,)).to_json())) == {"bench", "machine", "bars"}
    assert found["bars"][0] == {
        "name": "heartbeat_us",
        "value": 0.1865,
        "unit": "us",
        "peer": "TCPStore.set",
        "peer_value": 4.6,
        "bar": 1.0,
        "ok": True,
    }
    assert found["bars"][1]["value"] is None
    assert found["bars"][1]["peer_value"] is None


def test_a_bar_is_kept_up_to_its_limit() -> None:
    """A value at the limit keeps the bar; one above it, or a missing value, misses it."""
    assert KEPT.ok
    assert Bar(name="x", value=1.0, unit="s", bar=1.0).ok
    assert not MISSED.ok
    assert not UNKNOWN.ok
    assert not Bar(name="x", value=float("nan"), unit="s", bar=1.0).ok


def test_a_floor_is_kept_at_or_above_its_limit() -> None:
    """Where more is better, a value at or above the limit keeps the bar, and the table shows the direction."""
    rate = Bar(name="digest_gb_s", value=8.0, unit="GB/s", bar=8.0, is_floor=True)
    assert rate.ok
    assert Bar(name="x", value=9.0, unit="GB/s", bar=8.0, is_floor=True).ok
    assert not Bar(name="x", value=7.9, unit="GB/s", bar=8.0, is_floor=True).ok
    assert not Bar(name="x", value=None, unit="GB/s", bar=8.0, is_floor=True).ok
    assert not Bar(name="x", value=float("nan"), unit="GB/s", bar=8.0, is_floor=True).ok
    console = Console(width=120, file=io.StringIO())
    console.print(render_bars("b", [rate], (), {}))
    assert isinstance(console.file, io.StringIO)
    assert ">= 8\N{NO-BREAK SPACE}GB/s" in console.file.getvalue()


def test_one_missed_bar_fails_the_benchmark() -> None:
    """The benchmark passes only if every bar is kept."""
    assert BenchResult(bench="b", bars=(KEPT,), machine={}).ok
    assert not BenchResult(bench="b", bars=(KEPT, MISSED), machine={}).ok


def test_the_table_has_every_value() -> None:
    """The table has every result, its limit, the peer's value, the decision and the notes."""
    console = Console(width=120, file=io.StringIO())
    console.print(render_bars("b", [KEPT, MISSED, UNKNOWN], ["[3 of 5] runs"], {}))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue().replace("\N{NO-BREAK SPACE}", " ")
    for part in ("0.186 us", "<= 1 us", "kept", "TCPStore.set", "4.6 us", "missed", "[3 of 5] runs"):
        assert part in text


def test_rounds_alternate_and_drop_the_first() -> None:
    """The own measurement and the peer's alternate, and the first round does not count."""
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    lines: list[str] = []
    found = run_rounds({"a": lambda: measure("a"), "b": lambda: measure("b")}, repeats=2, progress=lines.append)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert len(lines) == 6
    assert median(found["a"]) == 4.0
