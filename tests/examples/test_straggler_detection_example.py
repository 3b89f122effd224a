"""The straggler detection example behaves as its README describes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "straggler_detection" / "straggler_detection_example.py"
FAST = ("--report-interval=0.5", "--factor=2", "--stop")


def run(*arguments: str, folder: Path) -> str:
    """Run Python in a folder until it exits with 0; return its output."""
    completed = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=280,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


@pytest.mark.slow
@pytest.mark.process
def test_reports_have_nvrx_layout_and_slow_rank_stops_training(tmp_path: Path) -> None:
    """Reports are printed from the start, in the layout of the reference. The slow rank 2 is identified with its
    section and health check, and with --stop all ranks exit."""
    arguments = ("--iterations=2000", "--forward-ms=40", "--slow-from=60", *FAST)
    output = run(str(SCRIPT), *arguments, folder=tmp_path)
    for title in ("CPU relative performance:", "CPU individual performance:"):
        assert re.search(rf"^{title}\n(  Rank=\d Node=\S+ Score=[01]\.\d\d\n){{4}}", output, re.MULTILINE), output
    assert re.search(r"^Straggler report processing time: \d+\.\d{3} sec\.$", output, re.MULTILINE), output
    assert re.search(r"^STRAGGLER DETECTION WARNING: .* Affected ranks: .*\b2\b", output, re.MULTILINE), output
    identified = r"^Straggler: Rank=2 Node=\S+ takes (1\.[4-9]\d|2\.\d\d) times as long in 'forward'"
    assert re.search(identified, output, re.MULTILINE), output
    assert re.search(r"^Straggler: Rank=2 Node=\S+: .*matrix product", output, re.MULTILINE), output
    done = re.search(r"^done after (\d+) iterations$", output, re.MULTILINE)
    assert done, output
    assert 60 < int(done[1]) < 2000


@pytest.mark.slow
@pytest.mark.process
def test_last_of_two_ranks_is_identified_under_torchrun(tmp_path: Path) -> None:
    """The default slow rank exists with any number of ranks: with two it is rank 1. A rank that does not exist is
    rejected."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT))
    arguments = ("--iterations=2000", "--forward-ms=40", "--slow-from=40", *FAST)
    output = run(*launch, *arguments, folder=tmp_path)
    assert re.search(r"^STRAGGLER DETECTION WARNING: .* Affected ranks: .*\b1\b", output, re.MULTILINE), output
    identified = r"^Straggler: Rank=1 Node=\S+ takes (1\.[4-9]\d|2\.\d\d) times as long in 'forward'"
    assert re.search(identified, output, re.MULTILINE), output
    assert re.search(r"^done after (\d+) iterations$", output, re.MULTILINE), output
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    rejected = subprocess.run(
        [sys.executable, str(SCRIPT), "--slow-rank=2"],
        env=environment,
        timeout=300,
        check=False,
        capture_output=True,
        text=True,
    )
    assert rejected.returncode == 2
    assert "--slow-rank 2: the ranks are 0 to 1" in rejected.stderr
