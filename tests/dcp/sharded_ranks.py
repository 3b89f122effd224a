"""A rank with a sharded and a replicated model that loads a checkpoint, prints its state, and saves the next one.

Arguments: folder, iteration to load (-1: none, train instead), iteration to save (-1: none). Prints one line of
JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading

import torch
import torch.distributed as dist
from lanes import LONG_S, flat_state, open_lane, stage, staged_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from outlast.checkpoint.dcp.assemble import assemble
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.reader import read_rank
from outlast.checkpoint.dcp.reshard import load_resharded
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.layouts import meshes_of
from outlast.checkpoint.state import capture, decode
from outlast.checkpoint.verification import VerifiedFiles
from outlast.policy.checkpoint_plan import RetentionRules


def _model() -> torch.nn.Module:
    # 7 rows over 4 ranks: shards of 2, 2, 2, 1; 3 rows: the last rank has none.
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))


def build(world: int) -> dict[str, object]:
    torch.manual_seed(5)
    sharded, replicated = _model(), DistributedDataParallel(_model())
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return {
        "fsdp": sharded,
        "fsdp_optim": torch.optim.Adam(sharded.parameters(), lr=0.1),
        "ddp": replicated,
        "ddp_optim": torch.optim.Adam(replicated.parameters(), lr=0.1),
        "epoch": 0,
    }


def train(state: dict[str, object]) -> None:
    torch.manual_seed(7)
    for _ in range(3):
        for name in ("fsdp", "ddp"):
            state[f"{name}_optim"].zero_grad()
            state[name](torch.randn(4, 5)).square().mean().backward()
            state[f"{name}_optim"].step()
    state["epoch"] = 3


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def content(state: dict[str, object]) -> dict[str, str]:
    """Return a digest of each full tensor."""
    found = {}
    for name, value in capture(state).items():
        tensors = value if "optim" not in name else {}
        if "optim" in name:
            tensors = {f"{i}.{k}": v for i, moments in value["state"].items() for k, v in moments.items()}
            found[f"{name}.lr"] = str(value["param_groups"][0]["lr"])
        elif name == "epoch":
            found[name] = str(value)
            continue
        for key, tensor in tensors.items():
            data = full(tensor).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[f"{name}.{key}"] = hashlib.sha256(data).hexdigest()
    return found


def save(folder: str, state: dict[str, object], iteration: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    attempt = SaveAttempt(job="job", cycle=0, token=f"ab{world}{iteration}", ordinal=0)
    flat = flat_state(capture(state), {"rank": rank})
    image = stage(flat, rank=rank, world=world, iteration=iteration, attempt=str(attempt))
    errors: list[object] = []
    done = threading.Event()

    def report(_: object, error: object) -> None:
        errors.append(error)
        done.set()

    lane = open_lane(
        GlobalDirectory.open(folder),
        dist.distributed_c10d._get_default_store().clone(),
        rank=rank,
        world=world,
        token=attempt.token,
        write=lambda request: assemble(request, image.view),
        report=report,
        rules=RetentionRules(most_recent_k=-1),
        file_bytes=2048,
    )
    lane.submit(staged_save(image, iteration, attempt))
    assert done.wait(LONG_S)
    assert lane.stop(LONG_S)
    assert errors == [None], errors


def main() -> None:
    folder, to_load, to_save = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    state = build(world)
    before = content(state)
    if to_load < 0:
        train(state)
    else:
        directory = GlobalDirectory.open(folder)
        loaded = load_resharded(VerifiedFiles(directory, directory.manifest(to_load)), state)
        assert content(state) == before, "something live was touched"
        loaded.apply()
    results = {"content": content(state)}
    if to_save >= 0:
        save(folder, state, to_save)
        dist.barrier()
        directory = GlobalDirectory.open(folder)
        own = read_rank(VerifiedFiles(directory, directory.manifest(to_save)), rank)
        meshes = meshes_of(capture(state))
        again = decode(own.tree, own.tensors.__getitem__, meshes)
        results["again"] = content(again["state"])
        results["rank"] = again["random"]["rank"]
    # Training continues: the optimizer states have the right layout.
    train(state)
    results["after"] = content(state)
    print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
