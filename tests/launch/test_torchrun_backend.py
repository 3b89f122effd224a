"""Stock torchrun with `--rdzv-backend=outlast`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.testing import RankProcesses
from outlast.testing.ranks import free_port

pytestmark = pytest.mark.process

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
dist.destroy_process_group()  # without it, an interpreter that ends while gloo's threads run may abort
"""


def test_restart_and_spare_under_stock_torchrun(tmp_path: Path) -> None:
    """The entry point registers; a killed rank leads to one restart that succeeds at the first try; a surplus agent
    waits and exits with 0 when the run is finished."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    options = ["--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-id=t"]
    rendezvous = ["--rdzv-backend=outlast", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    arguments = [*options, *rendezvous, str(script), str(tmp_path / "killed")]
    with RankProcesses("torch.distributed.run", *arguments, world_size=3, module=True) as agents:
        codes = agents.wait(250)
        text = "".join(agents.output(number) for number in range(3))
    assert codes == [0, 0, 0], text
    assert (tmp_path / "killed").exists()
    assert sorted(line for line in text.splitlines() if "is through" in line) == [
        "rank 0 of 2 is through",
        "rank 1 of 2 is through",
    ], text


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.cold
def test_entry_point_adds_few_imports_to_torch() -> None:
    """torch loads the entry point with its checkpoint package: the name is registered, and only small modules of
    outlast are imported."""
    script = """
import sys
import torch.distributed.checkpoint
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
assert "outlast" in rendezvous_handler_registry._registry, "the entry point is not installed"
print(*sorted(name for name in sys.modules if name.startswith("outlast")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == [
        "outlast",
        "outlast.launch",
        "outlast.launch.rendezvous",
        "outlast.lazy",
        "outlast.version",
    ]
