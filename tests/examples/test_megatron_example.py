"""The example of Megatron-Core's local checkpoints: identical weights with and without a killed rank."""

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
def test_killed_training_ends_with_the_undisturbed_weights(tmp_path: Path) -> None:
    """After rank 1 is killed in iteration 12, both ranks resume from iteration 10 with a verified checkpoint, and
    end with identical weights."""
    digests = []
    for name, options, starts in (("whole", (), {"0"}), ("killed", ("--kill-at=12",), {"0", "10"})):
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
        completed = subprocess.run(
            [*command, str(SCRIPT), str(tmp_path / name), *options],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            timeout=250,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert completed.returncode == 0, completed.stdout
        assert set(re.findall(r"starting from iteration (\d+)", completed.stdout)) == starts, completed.stdout
        found = re.findall(r"trained 20 iterations: ([0-9a-f]{64})", completed.stdout)
        assert len(found) == 2, completed.stdout
        digests += found
    assert len(set(digests)) == 1
