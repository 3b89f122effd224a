"""The fault tolerance shell example."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from outlast.incidents import EventKind
from outlast.journal import read

pytestmark = pytest.mark.extended

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "fault_tolerance"


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(FOLDER / "run_fault_tolerance.sh"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=250,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
@pytest.mark.process
def test_simulated_fault_restarts_from_the_checkpoint(tmp_path: Path) -> None:
    """The timeouts in use are printed, one fault is injected, and training continues from a checkpoint to its end."""
    completed = _run("--simulate-fault", "--iterations", "40", "--dir", str(tmp_path))
    assert completed.returncode == 0, completed.stdout
    # On a busy machine an earlier line reports that the script has not called outlast.init() yet.
    lines = [line for line in completed.stdout.splitlines() if "[agent " in line and "protected: " in line]
    line = next(line for line in lines if "hang unknown" not in line)
    for timeout in ("setup 60 s", "step 5 s", "checkpointing 30 s", "outside of sections 30 s"):
        assert timeout in line
    events = list(read(tmp_path / "run"))
    (fault,) = [event for event in events if event.kind == EventKind.FAULT_SIMULATED]
    restored = {event.iteration for event in events if event.kind == EventKind.RESTORED and event.cycle == 1}
    assert len(restored) == 1, "both ranks resume from the same checkpoint"
    (iteration,) = restored
    assert iteration is not None
    assert fault.iteration is not None
    assert 10 <= iteration <= fault.iteration
    assert json.loads((tmp_path / "result.json").read_text())["iterations"] == 40


@pytest.mark.process
def test_unknown_option_is_rejected() -> None:
    """Exit code 2, the option, and the usage."""
    completed = _run("--simulate-fualt")
    assert completed.returncode == 2
    assert "--simulate-fualt" in completed.stdout
    assert "usage:" in completed.stdout
