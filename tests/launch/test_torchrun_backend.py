"""Stock torchrun with `--rdzv-backend=outlast`."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

TRAINS = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
marker, total = sys.argv[1], torch.ones(1)
for iteration in range(6):
    dist.all_reduce(total)
    total /= dist.get_world_size()
    if iteration == 3 and dist.get_rank() == 1 and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
assert total.item() == 1.0
print(f"rank {dist.get_rank()} of {dist.get_world_size()} is through", flush=True)
dist.barrier()
"""


def test_restart_and_spare_under_stock_torchrun(tmp_path: Path) -> None:
    """The entry point registers; a killed rank leads to one restart that comes back at the first try; a surplus
    agent waits without disturbing and ends with 0 when the run is finished."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=1",
        "--rdzv-backend=outlast", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=t", str(script),
        str(tmp_path / "killed"),
    ]  # fmt: skip
    agents, outputs = [], []
    try:
        for number in range(3):
            output = tmp_path / f"agent-{number}.log"
            with output.open("wb") as log:
                agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT))
            outputs.append(output)
        codes = [agent.wait(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(timeout=10)
    text = "".join(output.read_text() for output in outputs)
    assert codes == [0, 0, 0], text
    assert (tmp_path / "killed").exists()
    assert sorted(line for line in text.splitlines() if "is through" in line) == [
        "rank 0 of 2 is through",
        "rank 1 of 2 is through",
    ]
