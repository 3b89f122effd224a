"""The example's result does not depend on restarts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"


def _train(folder: Path, name: str, iterations: int, *, nproc: int = 4) -> dict[str, object]:
    out = folder / f"{name}.json"
    command = [sys.executable]
    if nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += [str(EXAMPLE), f"--iterations={iterations}", "--save-interval=6"]
    command += [f"--checkpoint-dir={folder / name}", f"--out={out}"]
    ended = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=50,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, ended.stdout
    assert "final loss" in ended.stdout
    result = json.loads(out.read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.process
def test_four_ranks_restarted_halfway_end_bit_identically(tmp_path: Path) -> None:
    """Twelve iterations at a stretch, and six, new processes, and six, give the same bits in all that is kept."""
    straight = _train(tmp_path, "straight", 12)
    generations = sorted((tmp_path / "straight").glob("*6*"))
    assert generations, "there is no generation of iteration 6 to go on from"
    for path in (tmp_path / "straight").iterdir():
        if path in generations:
            shutil.copytree(path, tmp_path / "halfway" / path.name)
    restarted = _train(tmp_path, "halfway", 12)
    assert straight["iterations"] == restarted["iterations"] == 12
    assert restarted == straight


def test_it_is_short_enough_to_copy() -> None:
    """The example stays under 150 lines."""
    assert len(EXAMPLE.read_text().splitlines()) < 150
