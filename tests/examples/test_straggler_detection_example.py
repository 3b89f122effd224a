"""The example of straggler detection does what its README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "straggler_detection" / "straggler_detection_example.py"


@pytest.mark.process
@pytest.mark.timeout(120)
def test_reports_have_the_known_layout_and_the_slow_rank_ends_the_training(tmp_path: Path) -> None:
    """Reports come from the start, in the layout of the reference; once rank 2 is slow it is named, with its section
    and what its machine is like, and with --stop all ranks leave."""
    arguments = ("--iterations=2000", "--slow-from=150", "--report-interval=0.5", "--factor=2", "--stop")
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=100,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = ended.stdout
    assert ended.returncode == 0, output
    for title in ("CPU relative performance:", "CPU individual performance:"):
        assert re.search(rf"^{title}\n(  Rank=\d Node=\S+ Score=[01]\.\d\d\n){{4}}", output, re.MULTILINE), output
    assert re.search(r"^Straggler report processing time: \d+\.\d{3} sec\.$", output, re.MULTILINE), output
    assert re.search(r"^STRAGGLER DETECTION WARNING: .* Affected ranks: .*\b2\b", output, re.MULTILINE), output
    named = r"^Straggler: Rank=2 Node=\S+ takes (1\.[7-9]\d|2\.\d\d) times as long in 'forward'"
    assert re.search(named, output, re.MULTILINE), output
    assert re.search(r"^Straggler: Rank=2 Node=\S+: .*matrix product", output, re.MULTILINE), output
    done = re.search(r"^done after (\d+) iterations$", output, re.MULTILINE)
    assert done, output
    assert 150 < int(done[1]) < 2000
