"""The example of Megatron-Core's local checkpoints ends with the same weights, whether a rank is killed or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "megatron" / "train_local.py"
RUN = "import sys; from outlast.cli.main import main; sys.exit(main())"


@pytest.mark.campaign
@pytest.mark.process
def test_a_killed_training_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """Rank 1 is killed in iteration 12: both ranks go on from iteration 10, verified, and end with equal weights."""
    digests = []
    for name, more, begins in (("whole", (), {"0"}), ("killed", ("--kill-at=12",), {"0", "10"})):
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            RUN,
            "run",
            "--nproc-per-node=2",
            f"--run-dir={tmp_path}/{name}-run",
        ]
        ended = subprocess.run(
            [*command, str(SCRIPT), str(tmp_path / name), *more],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            timeout=250,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert ended.returncode == 0, ended.stdout
        assert set(re.findall(r"starting from iteration (\d+)", ended.stdout)) == begins, ended.stdout
        found = re.findall(r"trained 20 iterations: ([0-9a-f]{64})", ended.stdout)
        assert len(found) == 2, ended.stdout
        digests += found
    assert len(set(digests)) == 1
