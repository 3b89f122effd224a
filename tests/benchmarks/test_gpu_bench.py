"""Benchmark ``gpu``: rejected without a GPU; its parts that need none are tested here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.measuring import ROOT, MeasuredRounds, measure_rounds
from benchmarks.restart import RestartTiming, kill_under_outlast
from outlast.runtime.device import why_absent
from outlast.testing.ranks import free_port

pytestmark = pytest.mark.extended


@pytest.mark.process
@pytest.mark.skipif(why_absent("gpu") is None, reason="there may be a GPU here")
def test_a_missing_gpu_is_one_error_line() -> None:
    """The line says why there is nothing to measure, and the exit code is that of bad input."""
    command = [sys.executable, "-m", "benchmarks", "gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"benchmarks: there is nothing to measure: {why_absent('gpu')}\n"


def test_bars_are_ratios_to_hardware_limits() -> None:
    """Every bar of the table exists and is computed per round from values of the same round."""
    saves = MeasuredRounds([{"to_host": 1.0, "to_device": 2.0, "ours": 1.05, "dcp": 1.5, "load": 2.4, "dcp_lost": 1.6}])
    steps = {"step": 0.01, "step_meanwhile": 0.0102, "overlapped_lost": 0.02}
    late = MeasuredRounds([{"overlapped": 0.004, "timers_us": 9.0, "within": 0.3, "digest": 0.5, **steps}])
    killed = {name: [RestartTiming(seconds, 1, {})] for name, seconds in (("outlast", 0.5), ("torchrun", 4.0))}
    bars = {bar.name: bar for bar in gpu.bars_of(saves, late, MeasuredRounds([{"restarted": 0.1}]), killed)}
    assert {name: pytest.approx(bar.value) for name, bar in bars.items()} == {
        "gpu_save_stall_vs_copy": 1.05,
        "gpu_save_stall_vs_dcp": 0.7,
        "gpu_overlapped_stall_ms": 4.0,
        "gpu_overlapped_slowdown_pct": 2.0,
        "gpu_lost_per_save_ms": 20.0,
        "gpu_load_vs_copy": 1.2,
        "gpu_restart_vs_torchrun": 0.125,
        "gpu_inprocess_exception_s": 0.1,
        "gpu_straggler_us_per_step": 9.0,
        "gpu_digest_vs_memory_bandwidth": 0.6,
    }
    assert all(bar.ok for bar in bars.values())
    assert bars["gpu_lost_per_save_ms"].peer_value == pytest.approx(1600.0)


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_rank_resumes_stepping() -> None:
    """The task that both launchers run works on the CPU where there is no GPU, and steps again after a kill."""
    found = kill_under_outlast(1, gpu.step_until_killed)
    assert found.cycle == 1
    assert 0 < found.stages_s["detected"] < found.after_s


@pytest.mark.slow
@pytest.mark.process
def test_a_function_is_restarted_once_per_round() -> None:
    """Each round is the time from an exception to the first reduction of the next call, in one process."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = measure_rounds(
        gpu.measure_restarts, repeats=2, progress=lambda _: None, timeout_s=250, variables=place, one_thread=False
    )
    assert found["restarted"] > 0
