"""What runs on a node beside its ranks: one agent process that watches them, and one writer of their checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, psutil, torch
import outlast

FOLDER = os.environ["OUT"]
CONFIG = outlast.Config(
    fault_tolerance=outlast.FaultToleranceConfig(rank_section_timeouts={"step": 600.0}, num_warmup_iterations=0),
    checkpoint=outlast.CheckpointConfig(local_directory=FOLDER + "/local"),
)


def helpers():
    commands = [child.cmdline() for child in psutil.Process().parent().children(recursive=True)]
    return sorted(command[command.index("-m") + 1] for command in commands if "-m" in command)


@outlast.inprocess.Wrapper(CONFIG)
def train(call: outlast.inprocess.Handle):
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    run = outlast.init(CONFIG)
    for iteration in run.steps({"model": model}, total=2):
        pass
    found = helpers()
    if call.iteration == 0:
        if os.environ["RANK"] == "0":
            raise ValueError("planned")
        torch.distributed.barrier()
    with open(f"{FOLDER}/helpers-{os.environ['RANK']}", "w") as file:
        json.dump(found, file)


train()
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_beside_the_ranks_of_a_node(tmp_path: Path) -> None:
    """Under stock torchrun, with a wrapped function, timeouts and checkpoints, after a restart in process: the agent
    process has all duties."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone", str(script)],
        env={**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        found = json.loads((tmp_path / f"helpers-{rank}").read_text())
        assert found == ["outlast.checkpoint.writer", "outlast.runtime.agent_process"], done.stderr
    assert "agent process" in done.stderr
    assert "not detected" not in done.stderr
