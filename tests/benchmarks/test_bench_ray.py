"""The results that ``python -m benchmarks ray`` derives from the marks of actors and workers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import ray as bench
from benchmarks.measuring import ROOT, MarkWriter, read_marks
from benchmarks.ray import RecoveryTiming, when_all, when_rank
from outlast.errors import OutlastError
from outlast.simulate.benchmark_results import Bar, BenchResult

pytestmark = pytest.mark.extended

FAULT_ITERATION, VICTIM = 6, 1


def write_mark(folder: Path, name: str, rank: int, iteration: int, at_ns: int) -> None:
    mark = {"name": name, "rank": rank, "iteration": iteration, "at_ns": at_ns, "pid": 100 + rank}
    with (folder / f"marks-{100 + rank}.jsonl").open("a") as file:
        file.write(json.dumps(mark) + "\n")


def test_a_restart_ends_with_the_last_ranks_first_step(tmp_path: Path) -> None:
    """Only steps after the kill count, and the first step of the last rank ends the restart."""
    for rank in range(2):
        write_mark(tmp_path, "stepped", rank, FAULT_ITERATION - 1, 50)
    write_mark(tmp_path, "killed", VICTIM, FAULT_ITERATION, 100)
    write_mark(tmp_path, "stepped", 0, FAULT_ITERATION, 300)
    assert when_all(read_marks(tmp_path), "stepped", since_ns=100, num_ranks=2) is None
    write_mark(tmp_path, "stepped", 1, FAULT_ITERATION, 400)
    write_mark(tmp_path, "stepped", 0, FAULT_ITERATION + 1, 500)
    marks = read_marks(tmp_path)
    assert when_all(marks, "stepped", since_ns=100, num_ranks=2) == 400
    assert when_rank(marks, "killed", VICTIM, FAULT_ITERATION) == 100
    assert when_rank(marks, "entered", VICTIM, FAULT_ITERATION) is None


def test_a_torn_mark_is_skipped(tmp_path: Path) -> None:
    """A process that is killed while it writes invalidates no other mark."""
    MarkWriter(tmp_path)("stepped", 3, 2)
    with next(tmp_path.glob("marks-*.jsonl")).open("a") as file:
        file.write('{"name": "step')
    assert [(mark.name, mark.rank, mark.iteration) for mark in read_marks(tmp_path)] == [("stepped", 3, 2)]


def test_the_fault_is_injected_once_at_the_right_place(tmp_path: Path) -> None:
    """The fault spares other ranks, other steps, and a repetition of the same step."""
    fault = bench.BenchFault(str(tmp_path), "kill")
    fault.strike(VICTIM + 1, FAULT_ITERATION)
    fault.strike(VICTIM, FAULT_ITERATION - 1)
    (tmp_path / "struck").touch()
    fault.strike(VICTIM, FAULT_ITERATION)
    assert read_marks(tmp_path) == []


def test_json_has_details_only_where_they_exist() -> None:
    """The JSON form has the values behind the results; a benchmark without details lacks the key."""
    bars = (Bar(name="one_s", value=1.0, unit="s", bar=2.0),)
    assert json.loads(BenchResult(bench="ray", bars=bars, details={"phases_s": {"load": 0.5}}).to_json())[
        "details"
    ] == {"phases_s": {"load": 0.5}}
    assert "details" not in json.loads(BenchResult(bench="ray", bars=bars).to_json())


def test_bars_are_medians_and_the_slower_hang_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery by outlast is a time and a ratio to Ray Train's; the hang result is that of the kind detected later."""
    monkeypatch.setattr(bench, "_cluster", nullcontext)
    outlast_timings = {
        "kill": RecoveryTiming(2.0, {"join": 1.0}),
        "sleep": RecoveryTiming(4.0, {}, 0.2),
        "stop": RecoveryTiming(4.5, {}, 0.7),
    }
    monkeypatch.setattr(bench, "_run_group", lambda fault: outlast_timings[fault])
    monkeypatch.setattr(bench, "_run_ray_train", lambda: RecoveryTiming(10.0, {"began": 8.0, "stepped": 10.0}))
    messages: list[str] = []
    result = bench.measure(repeats=2, progress=messages.append)
    assert {bar.name: bar.value for bar in result.bars} == {
        "ray_recover_s": 2.0,
        "ray_recover_vs_train": 0.2,
        "hang_found_beyond_timeout_s": 0.7,
    }
    assert result.ok
    assert json.loads(result.to_json())["details"]["phases_s"]["Ray Train, kill"] == {"began": 8.0, "stepped": 10.0}
    assert len(messages) == 3 * 4


def test_missing_ray_is_one_error_line() -> None:
    """Without Ray the module can be imported; the benchmark ends with one line on standard error and exit code 2."""
    call = "import sys; sys.modules['ray'] = None; from benchmarks.__main__ import main; main()"
    command = (sys.executable, "-c", call, "ray", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmarks: Ray Train is not installed")
    assert "pip install 'ray[train]'" in line


def test_a_hanging_ray_train_ends_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging restart of Ray Train ends the benchmark at its time limit, without waiting for the thread."""
    released = threading.Event()

    class Trainer:
        def __init__(self, *_: object, **__: object) -> None: ...

        def fit(self) -> None:
            released.wait()

    monkeypatch.setattr(bench, "TorchTrainer", Trainer)
    monkeypatch.setattr(bench, "_LONGEST_RUN_S", 0.1)
    with pytest.raises(OutlastError, match="did not recover from the kill"):
        bench.run_ray_train(tmp_path, num_workers=1)
    released.set()


@pytest.mark.campaign
@pytest.mark.process
def test_light_actors_are_measured_by_group_size() -> None:
    """With a number of actors the benchmark has one result for each size, and each recovery replaces one actor."""
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "benchmarks", "ray", "--actors", "4", "--repeats", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr  # 1: a busy machine may miss a bar
    result = json.loads(done.stdout)
    (bar,) = result["bars"]
    assert bar["name"] == "ray_recover_4_s"
    assert bar["value"] > 0
    assert set(result["details"]["phases_s"]["4"]) == {"detect", "abort", "fill", "store", "join"}
