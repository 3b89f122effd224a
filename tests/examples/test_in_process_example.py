"""The in-process restart example behaves as its README describes."""

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
def test_all_ranks_resume_in_process_after_a_fault(fault: str, killed: int, tmp_path: Path) -> None:
    """After any fault of rank 2, all four ranks resume from the iteration of the fault and train to the end; only a
    killed rank has an exit code other than 0."""
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "--fault", fault],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = completed.stdout
    assert completed.returncode == 0, output
    resumed = re.findall(r"^rank (\d) \(pid \d+\) resumes from iteration (\d+)$", output, re.MULTILINE)
    assert sorted(resumed) == [(str(rank), "35") for rank in range(4)], output
    assert re.search(r"^finished 60 iterations, loss ", output, re.MULTILINE), output
    codes = re.search(r"^exit codes \[(.*)\]$", output, re.MULTILINE)
    assert codes, output
    assert sorted(codes[1].split(", ")) == ["-9"] * killed + ["0"] * (5 - killed)
