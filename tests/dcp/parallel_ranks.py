"""A rank of four that trains with FSDP2 over tensor parallelism, saves, and loads in this layout and in another.

Argument: a folder. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.manager import open_manager
from outlast.checkpoint.state import capture
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv


class Block(torch.nn.Module):
    """6 rows over 2 x 2 ranks: the ranks have 2, 1, 2 and 1 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.up = torch.nn.Linear(4, 6)
        self.down = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def plain() -> dict[str, Any]:
    """Return a model that is not sharded, and its optimizer."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(Block(), Block())
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False), "epoch": 0}


def sharded(data: int, tensor: int) -> dict[str, Any]:
    """Return the same model and optimizer, sharded over a mesh."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model = plain()["model"]
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False), "epoch": 0}


def train(state: dict[str, Any]) -> None:
    torch.manual_seed(7)
    for _ in range(2):
        state["optim"].zero_grad()
        state["model"](torch.randn(8, 4)).square().mean().backward()
        state["optim"].step()
        state["epoch"] += 1


def content(state: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each full tensor."""
    captured = capture(state)
    tensors = dict(captured["model"])
    for number, moments in captured["optim"]["state"].items():
        tensors |= {f"{number}.{name}": value for name, value in moments.items()}
    found = {"epoch": str(captured["epoch"])}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = hashlib.sha256(full.detach().contiguous().numpy().tobytes()).hexdigest()
    return found


def manage(folder: Path, env: WorkerEnv) -> CheckpointManager:
    config = CheckpointConfig(local_directory=str(folder / "local"), directory=str(folder / "global"), save_timeout=60)
    return open_manager(config, env=env)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    env = WorkerEnv(
        node="node",
        global_rank=dist.get_rank(),
        local_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=dist.get_world_size(),
    )
    results: dict[str, Any] = {}
    state = sharded(2, 2)
    results["placements"] = sorted({str(parameter.placements) for parameter in state["model"].parameters()})
    train(state)
    results["trained"] = content(state)
    manager = manage(folder, env)
    manager.load_latest(state)
    manager.save(state, 1).wait(60)
    manager.close()
    for name, layout in (("again", (2, 2)), ("other", (4, 1))):
        state = sharded(*layout)
        manager = manage(folder, env)
        restored = manager.load_latest(state)
        results[name] = content(state)
        results[f"{name}_tier"] = restored.tier
        results[f"{name}_rejected"] = [str(one) for one in restored.rejected if one.rank == env.global_rank]
        train(state)  # the optimizer's state has the layout of the parameters
        if name == "other":
            results["later"] = content(state)
            manager.save(state, 2).wait(60)
        manager.close()
    print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
