"""The benchmark ``adapters`` measures both adapters with real ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.measuring import ROOT

COMMAND = (sys.executable, "-m", "benchmarks", "adapters", "--json", "--repeats=1")


@pytest.mark.overlay
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_benchmark_measures_both_trainers() -> None:
    """The command trains with and without each adapter and prints both results; the exit code depends on them."""
    completed = subprocess.run(
        [*COMMAND, "adapters", "--json", "--repeats=1"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        cwd=ROOT,
    )
    bars = {bar["name"]: bar for bar in json.loads(completed.stdout)["bars"]}
    names = ["lightning_us_per_step", "transformers_us_per_step"]
    assert list(bars) == [name + ranks for name in names for ranks in ("", "_2")]
    assert all(bar["peer_value"] > 0 for bar in bars.values())
    assert completed.returncode == int(not all(bar["ok"] for bar in bars.values()))
