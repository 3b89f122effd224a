"""The helper processes of a node: one agent process that monitors the ranks, and one writer of their checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
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
    commands = {child.pid: child.cmdline() for child in psutil.Process().parent().children(recursive=True)}
    return sorted((command[command.index("-m") + 1], pid) for pid, command in commands.items() if "-m" in command)


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
def test_ranks_of_a_node_share_two_helper_processes(tmp_path: Path) -> None:
    """With 4 ranks under torchrun, a wrapped function, timeouts, checkpoints and an in-process restart: one agent
    process has all duties and one writer serves all ranks. Both end soon after the last rank."""
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
    pids = set()
    for rank in range(4):
        found = json.loads((tmp_path / f"helpers-{rank}").read_text())
        assert [name for name, _ in found] == ["outlast.checkpoint.writer", "outlast.runtime.agent_process"], (
            done.stderr
        )
        pids.update(pid for _, pid in found)
    assert len(pids) == 2
    remaining = [process for process in psutil.process_iter() if process.pid in pids]
    assert not psutil.wait_procs(remaining, timeout=10.0)[1]
    assert "agent process" in done.stderr
    assert "not detected" not in done.stderr
