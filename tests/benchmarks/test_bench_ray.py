"""What ``python -m benchmarks ray`` reads from the marks of actors and workers."""

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

STRUCK, VICTIM = 6, 1


def write(folder: Path, name: str, rank: int, iteration: int, at_ns: int) -> None:
    mark = {"name": name, "rank": rank, "iteration": iteration, "at_ns": at_ns, "pid": 100 + rank}
    with (folder / f"marks-{100 + rank}.jsonl").open("a") as file:
        file.write(json.dumps(mark) + "\n")


def test_a_restart_is_over_with_the_last_ranks_first_step(tmp_path: Path) -> None:
    """Each rank's first step after the kill counts, and the last of them ends the time; earlier steps do not count."""
    for rank in range(2):
        write(tmp_path, "stepped", rank, STRUCK - 1, 50)
    write(tmp_path, "killed", VICTIM, STRUCK, 100)
    write(tmp_path, "stepped", 0, STRUCK, 300)
    assert when_all(read_marks(tmp_path), "stepped", since_ns=100, num_ranks=2) is None
    write(tmp_path, "stepped", 1, STRUCK, 400)
    write(tmp_path, "stepped", 0, STRUCK + 1, 500)
    marks = read_marks(tmp_path)
    assert when_all(marks, "stepped", since_ns=100, num_ranks=2) == 400
    assert when_rank(marks, "killed", VICTIM, STRUCK) == 100
    assert when_rank(marks, "entered", VICTIM, STRUCK) is None


def test_a_line_that_a_death_cut_short_is_left_out(tmp_path: Path) -> None:
    """A process that is killed as it writes spoils no other mark."""
    MarkWriter(tmp_path)("stepped", 3, 2)
    with next(tmp_path.glob("marks-*.jsonl")).open("a") as file:
        file.write('{"name": "step')
    assert [(mark.name, mark.rank, mark.iteration) for mark in read_marks(tmp_path)] == [("stepped", 3, 2)]


def test_a_rank_fails_once_and_only_where_it_is_to(tmp_path: Path) -> None:
    """Neither another rank, nor another step, nor the same step done again is struck."""
    fault = bench.BenchFault(str(tmp_path), "kill")
    fault.strike(VICTIM + 1, STRUCK)
    fault.strike(VICTIM, STRUCK - 1)
    (tmp_path / "struck").touch()
    fault.strike(VICTIM, STRUCK)
    assert read_marks(tmp_path) == []


def test_details_are_part_of_the_json_form_where_there_are_some() -> None:
    """Programs find what the figures are made of; a benchmark that tells nothing has no such key."""
    bars = (Bar(name="one_s", value=1.0, unit="s", bar=2.0),)
    assert json.loads(BenchResult(bench="ray", bars=bars, details={"phases_s": {"load": 0.5}}).to_json())[
        "details"
    ] == {"phases_s": {"load": 0.5}}
    assert "details" not in json.loads(BenchResult(bench="ray", bars=bars).to_json())


def test_bars_are_made_of_medians_and_the_worse_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is told in seconds and as a ratio to Ray Train's; a hang's figure is that of the kind found later."""
    monkeypatch.setattr(bench, "_cluster", nullcontext)
    ours = {
        "kill": RecoveryTiming(2.0, {"join": 1.0}),
        "sleep": RecoveryTiming(4.0, {}, 0.2),
        "stop": RecoveryTiming(4.5, {}, 0.7),
    }
    monkeypatch.setattr(bench, "_run_group", lambda fault: ours[fault])
    monkeypatch.setattr(bench, "_run_ray_train", lambda: RecoveryTiming(10.0, {"began": 8.0, "stepped": 10.0}))
    told: list[str] = []
    result = bench.measure(repeats=2, progress=told.append)
    assert {bar.name: bar.value for bar in result.bars} == {
        "ray_recover_s": 2.0,
        "ray_recover_vs_train": 0.2,
        "hang_found_beyond_timeout_s": 0.7,
    }
    assert result.ok
    assert json.loads(result.to_json())["details"]["phases_s"]["Ray Train, kill"] == {"began": 8.0, "stepped": 10.0}
    assert len(told) == 3 * 4


def test_without_ray_the_command_says_what_to_install() -> None:
    """Without Ray the module is imported as any other; the benchmark is one line on standard error and exit code 2."""
    call = "import sys; sys.modules['ray'] = None; from benchmarks.__main__ import main; main()"
    command = (sys.executable, "-c", call, "ray", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmarks: Ray Train is not installed")
    assert "pip install 'ray[train]'" in line


def test_a_ray_train_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of Ray Train's that hangs ends the benchmark at its time limit: nothing waits for the thread."""
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
def test_light_actors_are_recovered_by_size() -> None:
    """The benchmark with a number of actors has one figure for each size, and its recoveries cost one actor each."""
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "benchmarks", "ray", "--actors", "4", "--repeats", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr  # 1: a busy machine misses a bar
    result = json.loads(done.stdout)
    (bar,) = result["bars"]
    assert bar["name"] == "ray_recover_4_s"
    assert bar["value"] > 0
    assert set(result["details"]["phases_s"]["4"]) == {"detect", "abort", "fill", "store", "join"}
