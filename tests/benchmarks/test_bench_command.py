"""``python -m benchmarks`` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from benchmarks import heartbeat
from benchmarks.__main__ import cli, main
from benchmarks.catalogue import BENCHMARKS
from benchmarks.measuring import ROOT
from outlast.errors import OutlastError
from outlast.simulate.benchmark_results import Bar, BenchResult

pytestmark = pytest.mark.extended


def run_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float | None, *arguments: str
) -> tuple[object, str, str]:
    def measure(*, repeats: int, progress: object) -> BenchResult:
        if value is None:
            raise OutlastError("the worker failed; try again")
        assert callable(progress)
        progress(f"{repeats} rounds")
        return BenchResult(bench="heartbeat", bars=(Bar(name="heartbeat_us", value=value, unit="us", bar=1.0),))

    monkeypatch.setattr(heartbeat, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "heartbeat", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize(("value", "code"), [(0.5, 0), (1.5, 1)])
def test_json_output_and_exit_code(
    value: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json standard output is one object with the machine; the exit code is 1 where a bar is missed."""
    found, out, err = run_with(monkeypatch, capsys, value, "--json", "--repeats", "7")
    assert found == code
    assert json.loads(out)["bench"] == "heartbeat"
    assert {"processor", "cores", "date", "torch", "outlast"} <= set(json.loads(out)["machine"])
    assert "7 rounds" in err


def test_the_default_output_is_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json the output is a table with the value, the limit and whether the bar is kept."""
    _, out, _ = run_with(monkeypatch, capsys, 0.5)
    (row,) = [line for line in out.splitlines() if "heartbeat_us" in line]
    assert row.split() == ["heartbeat_us", "0.5", "us", "<=", "1", "us", "kept", "-", "-"]


def test_a_failed_measurement_is_one_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark that fails prints no result and one line with the reason, and ends with exit code 1."""
    assert run_with(monkeypatch, capsys, None, "--json") == (1, "", "benchmarks: the worker failed; try again\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["heartbeats"], "did you mean 'heartbeat'"),
        (["heartbeat", "--repeats=0"], "--repeats"),
        (["heartbeat", "--tensors=2"], "--tensors"),
    ],
)
def test_invalid_input_is_one_error_line(
    arguments: list[str], part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown benchmark or option, or zero rounds, ends with exit code 2 before anything is measured."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert part in err


def test_each_benchmark_is_a_command_with_help() -> None:
    """Every benchmark module is a command; its help has the duration, the options and examples."""
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "\ndef measure(" in path.read_text()}
    assert BENCHMARKS.keys() == modules
    for name, one in BENCHMARKS.items():
        text = CliRunner().invoke(cli, [name, "--help"]).output
        assert {"Takes", "--json", "--repeats", *(f"--{option}" for option in one.options)} <= set(text.split())
        assert f"python -m benchmarks {name} --json" in text


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "bars", "peer"),
    [
        ("heartbeat", ["heartbeat_us", "section_us"], "TCPStore.set"),
        ("straggler", ["straggler_us_per_step", "report_ms"], "torch.profiler.record_function, off"),
    ],
)
def test_a_benchmark_measures_in_real_workers(name: str, bars: list[str], peer: str) -> None:
    """The command measures in real workers and prints its bars and the peer's value."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--json", "--repeats=1"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )
    found = {bar["name"]: bar for bar in json.loads(done.stdout)["bars"]}
    assert list(found) == bars
    assert found[bars[0]]["peer"] == peer
    assert all(bar["value"] > 0 for bar in found.values())
    assert done.returncode == int(not all(bar["ok"] for bar in found.values()))
