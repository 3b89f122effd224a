"""The result of the GPT example does not depend on restarts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"

# Runs the unchanged example, prints its first iteration, and closes the session before a given iteration.
RUNNER = """
import runpy, sys
from outlast import Session

script, before = sys.argv[1], int(sys.argv[2])
steps = Session.steps

def some_steps(self, state, *, total):
    first = None
    for iteration in steps(self, state, total=total):
        if first is None:
            first = iteration
            print(f"rank {self.global_rank} begins with {first}", flush=True)
        if iteration == before:
            self.close()
            sys.exit(0)
        yield iteration

Session.steps = some_steps
sys.argv = [script, *sys.argv[3:]]
runpy.run_path(script, run_name="__main__")
"""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
OUTLAST_RUN = ("-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "run")


def _train(folder: Path, name: str, launcher: tuple[str, ...], *, before: int = -1) -> str:
    runner = folder / "runner.py"
    runner.write_text(RUNNER)
    command = [sys.executable, *launcher, "--nproc-per-node=4"]
    if launcher == OUTLAST_RUN:
        command += [f"--run-dir={folder / name}-run-{before}", "--resume-from-other-run"]
    command += [str(runner), str(EXAMPLE), str(before), "--iterations=12", "--save-interval=6"]
    command += [f"--checkpoint-dir={folder / name}", f"--out={folder / name}.json"]
    completed = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=250,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


@pytest.mark.slow
@pytest.mark.process
def test_restarted_training_ends_bit_identical(tmp_path: Path) -> None:
    """Twelve uninterrupted iterations under torchrun, and six plus six in new processes under outlast run, give the
    same weights, optimizer state and losses."""
    output = _train(tmp_path, "straight", TORCHRUN)
    assert all(f"rank {rank} begins with 0" in output for rank in range(4)), output
    _train(tmp_path, "halfway", OUTLAST_RUN, before=6)
    assert not (tmp_path / "halfway.json").exists()
    output = _train(tmp_path, "halfway", OUTLAST_RUN)
    assert all(f"rank {rank} begins with 6" in output for rank in range(4)), output
    uninterrupted = json.loads((tmp_path / "straight.json").read_text())
    restarted = json.loads((tmp_path / "halfway.json").read_text())
    assert uninterrupted["iterations"] == 12
    assert restarted == uninterrupted


def test_example_is_short_enough_to_copy() -> None:
    """The example stays under 150 lines."""
    assert len(EXAMPLE.read_text().splitlines()) < 150
