"""Benchmarks ``save``, ``load``, ``replica`` and ``commit`` measure all bars on a small state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import load
from benchmarks.checkpoint_state import CheckpointState, holds
from benchmarks.measuring import ROOT, MeasuredRounds, measure_rounds
from benchmarks.save import measure_saves
from outlast.errors import OutlastError

pytestmark = pytest.mark.extended

COMMAND = (sys.executable, "-m", "benchmarks")
SAVE_BARS = {
    "stall_vs_dcp_async": 0.7,
    "stall_vs_memcpy": 1.25,
    "stall_overlapped_ms": 8.0,
    "stall_overlapped_vs_dcp_staging": 0.6,
    "many_tensors_stall_ms": 150.0,
    "slowdown_vs_dcp_thread": 0.5,
    "durable_vs_dcp_save": 0.7,
    "durable_vs_bare_write": 1.3,
    "extra_memory_mib": 2 * 16.0 + 64.0,
}
LOAD_BARS = {"load_verified_vs_torch_load": 0.5, "load_verified_vs_dcp_load": 0.6, "load_memory_vs_torch_load": 0.5}
REPLICA_BARS = {"replica_vs_gloo": 1.11}


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "bars"),
    [pytest.param("save", SAVE_BARS, marks=pytest.mark.campaign), ("load", LOAD_BARS), ("replica", REPLICA_BARS)],
    ids=["save", "load", "replica"],
)
def test_every_bar_is_measured_and_no_file_remains(tmp_path: Path, name: str, bars: dict[str, float]) -> None:
    """Each benchmark measures all its bars in real processes, prints them as JSON, and leaves no file behind."""
    done = subprocess.run(
        [*COMMAND, name, "--json", "--repeats=1", "--tensors=1"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        cwd=ROOT,
    )
    assert done.stdout, done.stderr
    found = {bar["name"]: bar for bar in json.loads(done.stdout)["bars"]}
    assert {bar["name"]: bar["bar"] for bar in found.values()} == bars
    # Saves of so small a state may not slow the peer's training measurably: then there is no ratio.
    measured = [bar for bar in found.values() if bar["name"] != "slowdown_vs_dcp_thread"]
    assert all(bar["value"] is not None and bar["value"] > 0 for bar in measured), done.stderr
    assert all(bar["peer_value"] is not None for bar in found.values())
    assert done.returncode == int(not all(bar["ok"] for bar in found.values()))
    assert list(tmp_path.glob("outlast*")) == []


@pytest.mark.process
@pytest.mark.slow
def test_commit_measures_all_bars_and_leaves_no_file(tmp_path: Path) -> None:
    """``commit`` runs a real lane for a hundred simulated ranks, and removes its files."""
    done = subprocess.run(
        [*COMMAND, "commit", "--json", "--repeats=1", "--ranks=100"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        cwd=ROOT,
    )
    assert done.stdout, done.stderr
    found = {bar["name"]: bar for bar in json.loads(done.stdout)["bars"]}
    assert {name: bar["bar"] for name, bar in found.items()} == {
        "commit_leader_s": 2.0,
        "manifest_mib": 8.0,
        "global_leader_s": 30.0,
        "global_manifest_mib": 256.0,
    }
    assert all(bar["value"] > 0 for bar in found.values())
    assert done.returncode == int(not all(bar["ok"] for bar in found.values()))
    assert list(tmp_path.glob("outlast*")) == []


def test_wrong_loaded_values_are_detected() -> None:
    """The comparison after a load detects overwritten values and swapped tensors."""
    state = CheckpointState(2)
    assert state.is_right()
    first, second = state.tensors().values()
    assert not holds({"0": second, "1": first})
    state.forget()
    assert not state.is_right()
    state.fill()
    first[7, 7] += 1
    assert not state.is_right()


@pytest.mark.process
def test_a_load_without_a_checkpoint_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint to load the benchmark fails and has no result."""
    monkeypatch.setattr(load, "_save_and_kill", lambda *_: None)
    with pytest.raises(OutlastError, match="measure_loads"):
        load.measure(repeats=1, progress=lambda _: None, num_tensors=1)


@pytest.mark.process
def test_a_measuring_process_is_ended_at_its_time_limit(tmp_path: Path) -> None:
    """A process that does not end is killed at its time limit, and the failure is reported."""
    with pytest.raises(OutlastError, match="stopped after 0 rounds"):
        measure_rounds(measure_saves, tmp_path, 1, repeats=10**6, progress=lambda _: None, timeout_s=0.2)


def test_ratios_are_computed_per_round() -> None:
    """A ratio is the median over the rounds of the own value to the peer's of the same round; a missing value has no
    ratio."""
    rounds = MeasuredRounds([{"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 10.0}, {"a": 4.0, "b": 4.0, "c": 1.0}])
    assert rounds.ratio("a", "b") == 0.9
    assert rounds.median("a") == 4.0
    assert rounds.median("c") is None
    assert rounds.ratio("a", "c") is None
