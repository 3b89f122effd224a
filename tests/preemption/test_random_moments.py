"""A run with repeated shutdown requests at random moments ends like an undisturbed one."""

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
def test_run_survives_shutdowns_at_random_moments(tmp_path: Path, count: int) -> None:
    """Successive starts are shut down at random moments; each resumes exactly where the last one stopped."""
    script = Path(__file__).with_name("random_moments.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OUTLAST_"))}
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(count), "7", "3"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        timeout=60 + 120 * count,
        check=False,
        text=True,
        capture_output=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    moments = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(moments) == count
    iterations = [moment["iteration"] for moment in moments]
    assert iterations == sorted(set(iterations))
