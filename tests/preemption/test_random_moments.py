"""A run that is told to leave again and again, at random moments, goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended


@pytest.mark.process
@pytest.mark.parametrize("count", [4, pytest.param(150, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])])
def test_random_moments_leave_nothing_torn(tmp_path: Path, count: int) -> None:
    """Starts in a row are told to leave at random moments; each goes on exactly where the last one stopped."""
    script = Path(__file__).with_name("random_moments.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OUTLAST_"))}
    played = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(count), "7", "3"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        timeout=60 + 12 * count,
        check=False,
        text=True,
        capture_output=True,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    moments = [json.loads(line) for line in played.stdout.splitlines()]
    assert len(moments) == count
    iterations = [moment["iteration"] for moment in moments]
    assert iterations == sorted(set(iterations))
