"""Benchmark ``all``: a failure does not end the rest, results are stored, and one table has all of them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.__main__ import cli
from benchmarks.catalogue import Benchmark
from benchmarks.measuring import ROOT
from benchmarks.results import HISTORY, SuiteRecord, read_folder, read_history, render_bars
from benchmarks.suite import INTERRUPTED, NOT_BEGUN, Suite, SuiteBench, select
from outlast.decoding import from_json
from outlast.errors import ConfigError
from outlast.simulate.benchmark_results import read_results

pytestmark = pytest.mark.extended

MACHINE = {
    "date": "2026-01-02",
    "processor": "one",
    "cores": 2,
    "memory_gib": 8,
    "kernel": "6",
    "python": "3",
    "torch": "2",
}
HANG = "import sys, time; print('[hung] begun', file=sys.stderr, flush=True); time.sleep(600)"


def make_benchmark(name: str, code: str, *, limit_s: float = 240.0) -> SuiteBench:
    return SuiteBench(name, 90.0, [sys.executable, "-c", code], limit_s)


def succeeding(name: str, value: float | None, *, exit_code: int = 0) -> SuiteBench:
    """Return a benchmark that prints a result with one bar of 1.0."""
    bar = {"name": f"{name}_s", "value": value, "unit": "s", "bar": 1.0, "ok": value is not None and value <= 1}
    bar |= {"peer": None, "peer_value": None}
    text = json.dumps({"bench": name, "machine": MACHINE, "bars": [bar]})
    code = f"import sys; print('[{name}] round 1', file=sys.stderr); print({text!r}); sys.exit({exit_code})"
    return make_benchmark(name, code)


def failing(name: str, line: str, code: int) -> SuiteBench:
    return make_benchmark(name, f"import sys; print({line!r}, file=sys.stderr); sys.exit({code})")


def measure(*benches: SuiteBench, folder: Path | None = None) -> tuple[SuiteRecord, list[str]]:
    lines: list[str] = []
    suite = Suite(benches, folder=folder, report=lines.append)
    suite.run()
    return suite.record(), lines


@pytest.mark.process
def test_a_failing_benchmark_does_not_end_the_others(tmp_path: Path) -> None:
    """A failing benchmark has its reason instead of a result; the others are measured and stored."""
    benches = succeeding("a", 0.5), failing("b", "benchmarks: the worker failed; try again", 1), succeeding("c", 0.25)
    record, lines = measure(*benches, folder=tmp_path)
    assert [(bar.bench, bar.value) for bar in record.bars] == [("a", 0.5), ("c", 0.25)]
    assert record.not_measured == {"b": "the worker failed; try again"}
    assert not record.ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "c.json"]
    assert read_results(tmp_path / "c.json")[0].bars[0].value == 0.25
    assert "[all] 2/3 b: about 2 minutes, about 3 minutes until all are done" in lines
    assert "[c] round 1" in lines


@pytest.mark.process
def test_a_missing_package_is_not_a_failure() -> None:
    """A benchmark whose package is missing is not measured, and the others decide the exit code."""
    lack = "benchmarks: Ray Train is not installed; pip install 'ray[train]'"
    record, _ = measure(succeeding("a", 0.5), failing("b", lack, 2), succeeding("c", None, exit_code=1))
    assert record.ok
    assert record.not_measured["b"] == "Ray Train is not installed; pip install 'ray[train]'"
    assert "exit code 1" in record.not_measured["c"]
    assert not measure(failing("b", lack, 2))[0].ok  # no benchmark was measured


@pytest.mark.process
def test_a_missed_bar_is_stored_and_fails_the_suite(tmp_path: Path) -> None:
    """A benchmark that misses its bar has a result, which is stored; the suite fails."""
    record, _ = measure(succeeding("a", 1.5, exit_code=1), folder=tmp_path)
    assert (record.ok, record.not_measured) == (False, {})
    assert read_results(tmp_path / "a.json")[0].bars[0].ok is False


@pytest.mark.process
def test_an_earlier_result_stays_without_a_new_one(tmp_path: Path) -> None:
    """A stored result is only replaced by another result, never by a partial or empty one."""
    (tmp_path / "a.json").write_text("the earlier one")
    broken = make_benchmark("a", 'print(\'{"bench": "a", "mach\')')
    record, _ = measure(broken, folder=tmp_path)
    assert record.not_measured == {"a": "exit code 0"}
    assert (tmp_path / "a.json").read_text() == "the earlier one"


@pytest.mark.process
def test_a_hanging_benchmark_is_ended_at_its_limit() -> None:
    """A benchmark that exceeds its time limit is ended with its child processes, and the next one is measured."""
    record, _ = measure(make_benchmark("hung", HANG, limit_s=0.5), succeeding("b", 0.5))
    assert record.not_measured == {"hung": "it did not end within 0.5 s, and was ended"}
    assert [bar.bench for bar in record.bars] == ["b"]


@pytest.mark.process
def test_ctrl_c_keeps_finished_results(tmp_path: Path) -> None:
    """Ctrl-C ends the current benchmark; results measured before are stored and recorded."""
    pids: list[int] = []

    def report(line: str) -> None:
        if line == "[hung] begun":  # the benchmark runs: send SIGINT as the terminal does
            pids.extend(int(word) for word in children_of(os.getpid()))
            os.kill(os.getpid(), signal.SIGINT)

    suite = Suite(
        [succeeding("a", 0.5), make_benchmark("hung", HANG), succeeding("c", 0.5)], folder=tmp_path, report=report
    )
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            suite.run()
    finally:
        signal.signal(signal.SIGINT, earlier)
    record = suite.record()
    assert [bar.bench for bar in record.bars] == ["a"]
    assert record.not_measured == {"hung": INTERRUPTED, "c": NOT_BEGUN}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert pids
    assert not [pid for pid in pids if is_hung(pid)]


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_hung(pid: int) -> bool:
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and b"time.sleep(600)" in path.read_bytes()


@pytest.mark.process
def test_the_table_has_every_result_and_reason() -> None:
    """One table shows each result with its bar and decision; benchmarks without a result have their reason below."""
    record, _ = measure(
        succeeding("kept", 0.5), succeeding("missed", 1.5), failing("gone", "benchmarks: no such thing", 1)
    )
    console = Console(width=140, file=io.StringIO())
    reasons = [f"{name}: not measured: {reason}" for name, reason in record.not_measured.items()]
    console.print(render_bars("all", record.bars, reasons, record.machine))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert {"kept_s", "500", "ms", "kept"} <= set(rows["kept"].split())
    assert {"missed_s", "1.5", "missed"} <= set(rows["missed"].split())
    assert "gone: not measured: no such thing" in text
    assert f"{record.machine['cores']} cores of" in text


def test_benchmarks_are_selected_in_the_suites_order() -> None:
    """--only and --skip select benchmarks; an unknown name and an empty selection are rejected."""
    names = ["save", "load", "ray"]
    assert select(names) == names
    assert select(names, only=["load", "save"]) == ["save", "load"]
    assert select(names, skip=["ray"]) == ["save", "load"]
    with pytest.raises(ConfigError, match="--only: there is no benchmark 'lod'; did you mean 'load'"):
        select(names, only=["lod"])
    with pytest.raises(ConfigError, match="--skip"):
        select(names, only=["ray"], skip=["ray"])


def test_the_expected_duration_scales_with_rounds() -> None:
    """The expected duration is proportional to the number of rounds."""
    known = Benchmark("", "", takes_s=80, repeats=7)
    fewer_rounds = SuiteBench.of_command_line("save", known, 1)
    assert fewer_rounds.takes_s == 20
    assert fewer_rounds.command[-2:] == ["--repeats", "1"]
    assert "--repeats" not in SuiteBench.of_command_line("save", known, None).command


# -- the command -----------------------------------------------------------------------------------------------------


def call(monkeypatch: pytest.MonkeyPatch, benches: dict[str, SuiteBench], *words: str) -> tuple[int, str]:
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", dict.fromkeys(benches))
    monkeypatch.setattr(SuiteBench, "of_command_line", staticmethod(lambda name, *_: benches[name]))
    done = CliRunner().invoke(cli, ["all", *words], standalone_mode=False, catch_exceptions=False)
    return done.return_value, done.stdout


@pytest.mark.process
def test_the_command_stores_results_and_adds_to_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --results each result and a line of history are stored; --json prints that line; the exit code follows the
    decision."""
    folder = tmp_path / "made" / "results"
    code, out = call(monkeypatch, {"a": succeeding("a", 0.5)}, "--results", str(folder), "--json")
    assert code == 0
    assert call(monkeypatch, {"a": succeeding("a", 1.5)}, "--results", str(folder))[0] == 1
    records, num_torn = read_history(folder)
    assert (len(records), num_torn) == (2, 0)
    assert records[0] == from_json(out, SuiteRecord)
    assert [one.bars[0].value for one in records] == [0.5, 1.5]
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", HISTORY]


@pytest.mark.process
def test_a_run_without_results_adds_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without any measurement adds no line and fails."""
    assert call(monkeypatch, {"a": failing("a", "benchmarks: no", 2)}, "--results", str(tmp_path))[0] == 1
    assert not list(tmp_path.iterdir())


def test_an_unwritable_results_folder_is_rejected_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid --results is one error line before anything is measured."""
    (tmp_path / "file").touch()
    with pytest.raises((ConfigError, click.ClickException), match="file"):
        call(monkeypatch, {"a": succeeding("a", 0.5)}, "--results", str(tmp_path / "file" / "in"))


@pytest.mark.slow
@pytest.mark.process
def test_the_suite_runs_a_real_benchmark(tmp_path: Path) -> None:
    """The suite runs the benchmark's own command with the given number of rounds."""
    command = [sys.executable, "-m", "benchmarks", "all", "--only=heartbeat", "--repeats=1", f"--results={tmp_path}"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    record = from_json(done.stdout, SuiteRecord)
    assert [bar.name for bar in record.bars] == ["heartbeat_us", "section_us"], done.stderr
    assert read_folder(tmp_path)["heartbeat"].num_measured == 2
    assert done.returncode == int(not record.ok)
