"""The device of these tests, how they start programs on it, and which processes use the GPU's driver.

With ``OUTLAST_TEST_DEVICE=cpu`` the same programs run on the CPU of any machine, which checks the tests, not the GPU.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.testing import RankProcesses

DEVICE = os.environ.get("OUTLAST_TEST_DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"
PROGRAMS = Path(__file__).with_name("programs")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
PATIENCE_S = 110.0
"""Below the time limit of a test, so that a failed wait shows the processes' output."""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that make a GPU's results reproducible, in addition to torch's own switch."""
LAUNCHED = ["--no-health-check", "--ft-gpu-memory-reclaim-timeout=0"]
"""Options of ``outlast run``: do not wait for device memory that other tests use meanwhile."""
_DRIVER = re.compile(r"/dev/(nvidia[^\s]*|dxg|kfd)")


def needs_gpu(why: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where the programs run on the CPU."""
    return pytest.mark.skipif(not ON_GPU, reason=f"OUTLAST_TEST_DEVICE=cpu: {why}")


def own_device() -> torch.device:
    return torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def run_alone(program: Path, *args: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run one rank of a program without a launcher, which must succeed; return its output."""
    variables = {**DETERMINISTIC, **(environment or {})}
    with RankProcesses(program, *args, world_size=1, directory=folder, environment=variables) as ranks:
        codes = ranks.wait_until_gone(PATIENCE_S)
        output = ranks.output(0)
    assert codes == [0], output
    return output


def read_facts(output: str) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines of an output, in order."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]


def driver_files(pid: int) -> set[str]:
    """Return the files of a GPU's driver that a process has open or mapped, which it has once it has used the
    driver."""
    found = set(_DRIVER.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.update(_DRIVER.findall(os.readlink(entry)))
        except OSError:  # closed since it was listed
            continue
    return found
