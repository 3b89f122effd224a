"""The example of restart in process does what its README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "in_process" / "restart.py"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("fault", "killed"),
    [
        ("kill", 1),
        pytest.param("raise", 0, marks=pytest.mark.campaign),
        pytest.param("hang", 0, marks=pytest.mark.campaign),
    ],
)
def test_the_others_go_on_in_their_processes(fault: str, killed: int, tmp_path: Path) -> None:
    """Whatever befalls rank 2, all four go on from the iteration of the fault, and train to the end; only a rank that
    is killed has an exit code other than 0."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "--fault", fault],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = ended.stdout
    assert ended.returncode == 0, output
    resumed = re.findall(r"^rank (\d) \(pid \d+\) resumes from iteration (\d+)$", output, re.MULTILINE)
    assert sorted(resumed) == [(str(rank), "35") for rank in range(4)], output
    assert re.search(r"^finished 60 iterations, loss ", output, re.MULTILINE), output
    codes = re.search(r"^exit codes \[(.*)\]$", output, re.MULTILINE)
    assert codes, output
    assert sorted(codes[1].split(", ")) == ["-9"] * killed + ["0"] * (5 - killed)
