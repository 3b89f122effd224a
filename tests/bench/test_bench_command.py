"""``outlast bench``, as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import outlast.bench
from outlast.bench import heartbeat
from outlast.bench.measuring import Bar, BenchResult
from outlast.cli.bench import bench
from outlast.cli.main import main
from outlast.errors import OutlastError

COMMAND = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "bench")


def run_with(monkeypatch: pytest.MonkeyPatch, value: float | None, *arguments: str) -> tuple[int, str, str]:
    def measure(*, repeats: int, progress: object) -> BenchResult:
        if value is None:
            raise OutlastError("the worker failed; try again")
        assert callable(progress)
        progress(f"{repeats} rounds")
        return BenchResult(bench="heartbeat", bars=(Bar(name="heartbeat_us", value=value, unit="us", bar=1.0),))

    monkeypatch.setattr(heartbeat, "measure", measure)
    done = CliRunner().invoke(bench, ["heartbeat", *arguments], standalone_mode=False)
    return done.return_value, done.stdout, done.stderr


def test_exit_code_says_whether_the_bars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """0: every bar is kept; 1: one is missed."""
    assert run_with(monkeypatch, 0.5)[0] == 0
    assert run_with(monkeypatch, 1.5)[0] == 1


def test_json_alone_is_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --json standard output holds one object; how far it is goes to standard error."""
    _, out, err = run_with(monkeypatch, 0.5, "--json", "--repeats", "7")
    assert json.loads(out)["bench"] == "heartbeat"
    assert "7 rounds" in err


def test_a_failed_measurement_is_one_line_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be measured gives no object, a line that says why, and exit code 1."""
    code, out, err = run_with(monkeypatch, None, "--json")
    assert (code, out) == (1, "")
    assert "the worker failed; try again" in err


@pytest.mark.parametrize("arguments", [["heartbeats"], ["heartbeat", "--repeats=0"], ["heartbeat", "--repeat=2"]])
def test_bad_input_is_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown benchmark or option, or no round at all, ends with exit code 2 before anything is measured."""
    monkeypatch.setattr(sys, "argv", ["outlast", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


def test_each_benchmark_is_a_command_with_help_of_its_own() -> None:
    """Every module that measures is a command; its help says what, how long, with which options, and gives examples."""
    folder = Path(outlast.bench.__path__[0])
    modules = {path.stem for path in folder.glob("*.py") if "\ndef measure(" in path.read_text()}
    assert isinstance(bench, click.Group)
    assert bench.commands.keys() == modules | {"all", "history"}
    for name in modules:
        text = CliRunner().invoke(bench, [name, "--help"]).output
        assert {"Takes", "--json", "--repeats"} <= set(text.split())
        assert f"outlast bench {name} --repeats 9 --json" in text
        assert ("--tensors" in text) == (name in ("save", "load", "replica", "gpu"))


@pytest.mark.process
def test_heartbeat_is_measured_on_a_real_board() -> None:
    """The command measures in a real worker and tells both figures and the peer's."""
    done = subprocess.run(
        [*COMMAND, "heartbeat", "--json", "--repeats=1"], capture_output=True, text=True, timeout=200, check=False
    )
    bars = {bar["name"]: bar for bar in json.loads(done.stdout)["bars"]}
    assert list(bars) == ["heartbeat_us", "section_us"]
    assert bars["heartbeat_us"]["peer"] == "TCPStore.set"
    assert all(bar["value"] > 0 for bar in bars.values())
    assert done.returncode == int(not all(bar["ok"] for bar in bars.values()))
