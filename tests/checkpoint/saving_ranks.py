"""Ranks that run a given script with a CheckpointManager and report the result as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outlast.checkpoint.writer_client import WriterProcess
from outlast.testing import RankProcesses

BODY = """
import json, logging, os, random, signal, sys
import numpy as np
import torch
import torch.distributed as dist
from outlast.checkpoint.manager import open_manager
from outlast.config import CheckpointConfig
from outlast.env import read_worker
from outlast.errors import CheckpointError
from outlast.runtime.journal import Journal
from outlast.testing.ranks import having_argument

folder, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo", rank=rank, world_size=world)
torch.manual_seed(rank)
model = torch.nn.Linear(64, 64)
optim = torch.optim.AdamW(model.parameters())
state = {"model": model, "optim": optim, "losses": []}

def train():
    optim.zero_grad()
    loss = model(torch.randn(4, 64)).square().mean()
    loss.backward()
    optim.step()
    state["losses"].append(loss.item())

def content():
    parts = [model.weight, *(part for moments in optim.state.values() for part in moments.values())]
    return [float(part.detach().double().sum()) for part in parts] + state["losses"]

def tell(**what):
    sys.stdout.write(json.dumps(what) + "\\n")  # at once: a log line may come meanwhile

def manage(**arguments):
    # Unless the test names nodes, the node's name is the folder's: this node's local tier is then `folder` itself.
    os.environ.setdefault("OUTLAST_NODE", os.path.basename(folder))
    local = folder if "OUTLAST_NODES" in os.environ else os.path.dirname(folder)
    options = {"local_directory": local, "save_timeout": 120.0, **arguments.pop("config", {})}
    journal = Journal(folder + "-journal", run_id="r", job="job", node="n", proc=f"rank-{rank}")
    return open_manager(CheckpointConfig(**options), env=read_worker(), journal=journal, **arguments)

def writer_pid():
    import psutil
    helpers = psutil.Process().children(recursive=True)
    return having_argument(helpers, "outlast.checkpoint.writer")[0].pid

def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)

def kill_all():
    # Rank 0 hosts the store: it goes last, once all others have heard what they waited for.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"leaves/{rank}", "")
    if rank == 0:
        store.wait([f"leaves/{other}" for other in range(world)])
    kill_self()
"""


def start(
    folder: Path,
    script: str,
    *,
    world: int = 1,
    cycle: int = 0,
    timeout_s: float = 300,
    nodes: dict[str, WriterProcess] | None = None,
) -> list[tuple[int, Any]]:
    """Run ``script`` on each rank; return each rank's exit code and its last JSON line (or its whole output).

    Args:
        nodes: Names of as many nodes as divide the ranks evenly, with their writers, which outlive the ranks; ``None``
            = one node, each rank with a writer of its own.
    """
    names: list[str] | None = None
    places: list[dict[str, str]] = [{}] * world
    if nodes is not None:
        names = [name for name in nodes for _ in range(world // len(nodes))]
        places = [{"OUTLAST_WRITER": nodes[name].address, "OUTLAST_NODES": "1"} for name in names]
    cycles = {"OUTLAST_CYCLE": str(cycle)}
    with RankProcesses(
        BODY + script, str(folder), world_size=world, code=True, nodes=names, environment=cycles, environments=places
    ) as ranks:
        codes = ranks.wait_until_gone(timeout_s)
        outputs = [ranks.output(rank) for rank in range(world)]
    results = []
    for code, output in zip(codes, outputs, strict=True):
        lines = [line for line in output.splitlines() if line.startswith("{")]
        results.append((code, json.loads(lines[-1]) if lines else output))
    return results
