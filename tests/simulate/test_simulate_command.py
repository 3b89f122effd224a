"""``outlast simulate``: its output and its usage errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outlast.cli.main import main

SMALL = ("--ranks", "64", "--hours", "12", "--failure-every", "900", "--repeats", "4")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the command and returns its exit code, output and errors."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outlast", "simulate", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_json_has_results_and_settings(run: Any) -> None:
    """The JSON form has the results, the settings, and the duration of the simulation."""
    code, out, err = run(*SMALL, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert {"wall_s", "ettr", "ettr_range", "partition", "num_failures"} <= set(found)
    low, high = found["ettr_range"]
    assert 0 <= low < found["ettr"] < high <= 1
    assert "sweep" not in found
    assert sum(found["partition"].values()) == pytest.approx(12 * 3600)
    assert found["settings"]["num_ranks"] == 64
    assert found["settings"]["costs"]["start_up_s"] == 60.0
    assert found["settings"]["limits"]["max_restarts"] == 3


def test_text_output_has_results_and_sweep(run: Any) -> None:
    """Without --json the results, the parts of the time and a sweep are printed as lines."""
    code, out, _ = run(*SMALL, "--spares", "0", "--sweep", "spares=0:4:2")
    assert code == 0
    for text in (
        "64 ranks on 8 nodes and 0 spares, 12 h",
        "ETTR",
        "5 to 95 % of the runs",
        "productive",
        "spares (N)",
    ):
        assert text in out
    assert out.count("best") == 1


def test_every_option_reaches_the_scenario(run: Any) -> None:
    """Options, also those of costs and limits, set the scenario, in their documented units."""
    words = [
        "--ranks=8",
        "--ranks-per-node=1",
        "--minutes=10",
        "--step=0.1",
        "--failure-every=20",
        "--shares=process=1",
    ]
    words += ["--interval-iterations=50", "--global-interval=0", "--spares=0", "--repair=2", "--restart-stopped=never"]
    words += [
        "--restart=1.5",
        "--max-restarts=9",
        "--no-memory",
        "--fixed-repair",
        "--preempt-every=3",
        "--start-up=0.4",
    ]
    code, out, _ = run(*words, "--repeats=2", "--json")
    assert code == 0
    used = json.loads(out)["settings"]
    assert (used["duration_s"], used["step_s"], used["mtbf_s"], used["process_share"]) == (600.0, 0.1, 20.0, 1.0)
    assert (used["interval_iterations"], used["global_interval_iterations"], used["num_spares"]) == (50, 0, 0)
    assert (used["repair_s"], used["restart_stopped_s"], used["preempt_every_s"]) == (7200.0, None, 10800.0)
    assert (used["use_memory"], used["fixed_repair"]) == (False, True)
    assert (used["costs"]["restart_s"], used["costs"]["start_up_s"], used["limits"]["max_restarts"]) == (1.5, 0.4, 9)


def test_options_override_costs_from_a_file(run: Any, tmp_path: Path) -> None:
    """Values from a file replace the defaults, and an option replaces the value from the file."""
    bars = [
        {"name": "stall_vs_memcpy", "value": 2.0, "unit": "x", "bar": 1.0, "peer": "copy (s)", "peer_value": 2.0},
        {"name": "durable_vs_dcp_save", "value": 2.0, "unit": "x", "bar": 1, "peer": "dcp.save (s)", "peer_value": 4.5},
    ]
    path = tmp_path / "save.json"
    path.write_text(json.dumps({"bench": "save", "bars": bars}))
    _, out, _ = run(*SMALL, "--json", "--costs", str(path), "--save", "7")
    costs = json.loads(out)["settings"]["costs"]
    assert (costs["save_stall_s"], costs["save_s"]) == (4.0, 7.0)


def test_a_trace_replaces_drawn_failures(run: Any, tmp_path: Path) -> None:
    """With a trace the failures of the run are exactly those of the trace."""
    path = tmp_path / "trace.csv"
    path.write_text("time,kind\n3600,process\n7200,node\n")
    _, out, _ = run("--ranks=64", "--hours=3", "--trace", str(path), "--repeats=2", "--json")
    found = json.loads(out)
    assert found["settings"]["trace"] == 2
    assert found["num_by_kind"] == {"node": 1.0, "process": 1.0}


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("interval=10,60,auto", [10.0, 60.0, "auto"]),
        ("interval-iterations=1,9", [1.0, 9.0]),
        ("spares=0:4:2", [0.0, 2.0, 4.0]),
        ("replication=1:3", [1.0, 2.0, 3.0]),
        ("repair=0.5", [0.5]),
        ("restart-stopped=1,never", [1.0, "never"]),
        ("hang-timeout=60,300", [60.0, 300.0]),
        ("max-no-progress-cycles=3,9", [3.0, 9.0]),
    ],
)
def test_a_sweep_varies_an_option(run: Any, sweep: str, values: list[Any]) -> None:
    """A sweep lists the values of any numeric option, or gives start, end and step, in the unit of the option."""
    for more in ((), ("--interval-iterations", "5")):
        code, out, _ = run(*SMALL, "--repeats", "2", *more, "--sweep", sweep, "--json")
        assert code == 0
        found = json.loads(out)["sweep"]
        assert (found["name"], [row["value"] for row in found["rows"]]) == (sweep.partition("=")[0], values)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--days", "0"], "--days=0 must be above 0"),
        (["--hours", "-1"], "--hours=-1 must be above 0"),
        (["--days", "1", "--hours", "2"], "--days and --hours set the same duration"),
        (["--days", "many"], "--days=many is not a number"),
        (["--days", "nan"], "--days=nan is not a number"),
        (["--days", "inf"], "--days=inf must be above 0"),
        (["--ranks", "1.5"], "--ranks=1.5 is not a whole number"),
        (["--ranks", "0"], "--ranks=0 must be at least 1"),
        (["--ranks", "12"], "--ranks=12 must be a multiple"),
        (["--ranks", "999999999999"], "must be at most"),
        (["--failure-every", "0.1"], "too many to simulate"),
        (["--spares", "-1"], "--spares=-1 must be 0 or more"),
        (["--step", "0"], "--step=0 must be above 0"),
        (["--mttf", "0"], "--mttf=0 must be above 0"),
        (["--mttf", "8000", "--failure-every", "60"], "set the same rate"),
        (["--shares", "process=0.5"], "must sum to 1, and sum to 0.5"),
        (["--shares", "proces=1"], "did you mean 'process'?"),
        (["--shares", "process"], "must be a kind and a number"),
        (["--shares", "process=1.5,node=-0.5"], "must be between 0 and 1"),
        (["--interval", "10", "--interval-iterations", "2"], "set the same value"),
        (["--interval", "-10"], "--interval=-10 must be 0 or more"),
        (["--restart", "-1"], "--restart=-1 must be 0 or more seconds"),
        (["--replication", "0"], "--replication=0 must be at least 1"),
        (["--weibull", "0"], "--weibull=0 must be above 0"),
        (["--restart-stopped", "soon"], "is not a number, or never"),
        (["--max-restarts", "-1"], "--max-restarts=-1 must be 0 or more"),
        (["--max-restarts-total", "-1"], "--max-restarts-total=-1 must be 0 or more"),
        (["--repeats", "0"], "see outlast simulate --help"),
        (["--sweep", "sparse=1"], "did you mean 'spares'?"),
        (["--sweep", "spares"], "must be NAME=VALUE"),
        (["--sweep", "spares=-2,0"], "--spares=-2 must be 0 or more"),
        (["--sweep", "spares=a,b"], "--spares=a is not a whole number"),
        (["--sweep", "spares=1.5"], "--spares=1.5 is not a whole number"),
        (["--sweep", "spares=0:8:0"], "must be numbers"),
        (["--sweep", "spares=8:0:2"], "has 0 values"),
        (["--sweep", "spares=0:1e9:1"], "has 201 values"),
        (["--sweep", "interval=0:b"], "must be numbers"),
        (["--sweep", "interval=0:inf"], "must be numbers"),
        (["--sweep", "interval=inf"], "--interval=inf must be 0 or more"),
        (["--trace", "/nowhere.csv"], "cannot be read"),
        (["--trace", "/nowhere.csv", "--mttf", "5"], "leave one out"),
        (["--costs", "/nowhere.json"], "cannot be read"),
        (["--intervall", "5"], "no such option"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_usage_errors_are_one_line(run: Any, words: list[str], message: str) -> None:
    """A usage error ends with exit code 2 and one line that names the option as it was given."""
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("outlast: ")
    assert err.count("\n") == 1
    assert message in err


def test_the_help_has_valid_examples(run: Any) -> None:
    """The help has examples, and every option in them exists."""
    code, out, _ = run("--help")
    assert code == 0
    examples = [line.split() for line in out.partition("Examples:")[2].splitlines() if "outlast simulate" in line]
    assert len(examples) >= 5
    options = out.partition("Examples:")[0]
    for words in examples:
        for word in words:
            assert not word.startswith("--") or f" {word} " in options
