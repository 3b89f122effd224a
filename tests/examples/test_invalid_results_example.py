"""The invalid results example behaves as its README describes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "invalid_results" / "nan.py"


def _run_with_fault(folder: Path, fault: str) -> tuple[int, str]:
    """Run the example to its end; return its exit code and output."""
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / fault), "--plant", fault],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return completed.returncode, completed.stdout


def _checksum(output: str) -> str:
    found = re.search(r"^trained 30 iterations, checksum (\S+)$", output, re.MULTILINE)
    assert found, output
    return found[1]


@pytest.mark.campaign
@pytest.mark.process
def test_invalid_results_are_diagnosed_and_weights_unchanged(tmp_path: Path) -> None:
    """A transient NaN costs one rerun of a step, a broken device its node; both end with the weights of an
    undisturbed run. A bad batch ends the run with 17 and its fingerprint."""
    code, undisturbed = _run_with_fault(tmp_path, "none")
    assert code == 0, undisturbed
    assert "found" not in undisturbed
    code, transient = _run_with_fault(tmp_path, "transient")
    assert (code, _checksum(transient)) == (0, _checksum(undisturbed)), transient
    assert ": a transient fault; batch" in transient
    assert "exit code 0, 1 cycles" in transient
    code, broken = _run_with_fault(tmp_path, "broken-device")
    assert (code, _checksum(broken)) == (0, _checksum(undisturbed)), broken
    assert "a persistent fault of that device" in broken
    assert re.search(r"verdict: .*node node-\d is quarantined", broken), broken
    assert "exit code 0, 3 cycles" in broken
    code, bad = _run_with_fault(tmp_path, "bad-batch")
    assert code == 17, bad
    assert re.search(r"the data or the model is at fault; batch [0-9a-f]{16}", bad), bad
    assert "exit code 17, 2 cycles" in bad
    assert "trained" not in bad
