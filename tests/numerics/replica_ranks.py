"""Functions of the ranks in the tests of replicas: train, flip bits, and report the results of the comparisons."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from outlast.numerics import Agreement, ReplicaDigest

NUM_TRIALS = 100
NUM_CLEAN_STEPS = 1000
BATCH = 2


def _layers() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))


def _train(model: torch.nn.Module, optim: torch.optim.Optimizer, rank: int, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        optim.zero_grad()
        (model(torch.randn(BATCH, 6) + rank).square().mean()).backward()
        optim.step()


def _ddp() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(_layers())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _flip(tensor: torch.Tensor, draw: random.Random) -> None:
    data = tensor.detach().view(-1).view(torch.uint8)
    data[draw.randrange(data.numel())] ^= 1 << draw.randrange(8)


def _summarise(agreement: Agreement) -> dict[str, Any]:
    return {**dataclasses.asdict(agreement), "tensor": agreement.tensor, "text": agreement.describe()}


def flips(rank: int) -> list[dict[str, Any]]:
    """Flip one bit of one rank's weights or moments in each trial, and restore it."""
    torch.manual_seed(rank)
    model, optim = _ddp()
    _train(model, optim, rank, 2)
    digest = ReplicaDigest({"model": model, "optim": optim})
    names = {id(parameter): f"model.{name}" for name, parameter in model.named_parameters()}
    draw = random.Random(7)
    results = []
    for trial in range(NUM_TRIALS):
        victim = draw.randrange(dist.get_world_size())
        parameter = draw.choice(list(model.parameters()))
        kind = draw.choice(["weight", "exp_avg", "exp_avg_sq"])
        tensor = parameter if kind == "weight" else optim.state[parameter][kind]
        name = names[id(parameter)] if kind == "weight" else f"optim.{names[id(parameter)]}.{kind}"
        kept = tensor.detach().clone()
        trial_random = random.Random(trial)
        if rank == victim:
            _flip(tensor, trial_random)
        found = digest.check(trial)
        with torch.no_grad():
            tensor.copy_(kept)
        again = digest.check(trial)
        results.append({**_summarise(found), "victim": victim, "flipped": name, "agrees_again": again.agrees})
    digest.close()
    return results


def briefly_clean(rank: int) -> dict[str, Any]:
    return clean(rank, NUM_CLEAN_STEPS // 10)


def clean(rank: int, num_steps: int = NUM_CLEAN_STEPS) -> dict[str, Any]:
    """Train with each rank's own batches, and compare after every step."""
    torch.manual_seed(rank)
    model, optim = _ddp()
    digest = ReplicaDigest([model, optim], interval=1)
    num_checks = num_alarms = 0
    for iteration in range(1, num_steps + 1):
        _train(model, optim, rank)
        if digest.should_check(iteration):
            found = digest.check(iteration)
            num_checks += 1
            num_alarms += not found.agrees
    stats = model.module[1].running_mean.tolist()
    digest.close()
    return {"num_checks": num_checks, "num_alarms": num_alarms, "stats": stats, **_summarise(found)}


def poisoned_training(rank: int) -> list[dict[str, Any]]:
    """Flip one bit of rank 2's weights, continue training, and compare later."""
    torch.manual_seed(rank)
    model, optim = _ddp()
    digest = ReplicaDigest({"model": model, "optim": optim}, interval=4)
    results = []
    for iteration in range(1, 9):
        _train(model, optim, rank)
        if iteration == 5 and rank == 2:
            _flip(next(model.parameters()), random.Random(1))
        if digest.should_check(iteration):
            results.append(_summarise(digest.check(iteration)))
    digest.close()
    return results


def hsdp(rank: int) -> dict[str, Any]:
    """Two shards, each on two ranks; one bit of rank 1's shard is flipped, then one of both its replicas."""
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optim = _fully_sharded(mesh)
    _train(model, optim, rank, 2)
    digest = ReplicaDigest({"model": model, "optim": optim})
    results = {"before": _summarise(digest.check(2))}
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    if rank == 1:
        _flip(weight.to_local(), random.Random(3))
    results["after"] = _summarise(digest.check(2))
    if rank == 3:
        _flip(weight.to_local(), random.Random(3))
    results["both"] = _summarise(digest.check(2))
    digest.close()
    return results


def fsdp(rank: int) -> dict[str, Any]:
    """Four shards, each on one rank: a flipped bit in a shard cannot be detected, one in a replicated counter can."""
    torch.manual_seed(rank)
    model, optim = _fully_sharded(init_device_mesh("cpu", (4,)))
    digest = ReplicaDigest({"model": model, "optim": optim})
    results = {"fresh": _summarise(digest.check(0))}
    _train(model, optim, rank)
    if rank == 1:
        _flip(model[0].weight.to_local(), random.Random(3))
    results["shard"] = _summarise(digest.check(1))
    if rank == 1:
        optim.state[model[0].weight]["step"] += 1
    results["step"] = _summarise(digest.check(1))
    digest.close()
    return results


def tensor_parallel_groups(rank: int) -> dict[str, Any]:
    """Plain tensors that differ by design between two columns of ranks, and are equal within each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(mesh.get_local_rank("tp"))
        model.bias.fill_(0)
    by_mesh = ReplicaDigest(model, group=mesh["dp"])
    by_group = ReplicaDigest(model, group=mesh.get_group("dp"))
    by_all = ReplicaDigest(model)
    results = {
        "mesh": _summarise(by_mesh.check(0)),
        "group": _summarise(by_group.check(0)),
        "all": _summarise(by_all.check(0)),
    }
    for digest in (by_mesh, by_group, by_all):
        digest.close()
    return results


def lost_state(rank: int) -> dict[str, Any]:
    """Rank 3 has lost the state of its optimizer."""
    torch.manual_seed(rank)
    model, optim = _ddp()
    _train(model, optim, rank)
    if rank == 3:
        optim.state.clear()
    digest = ReplicaDigest({"model": model, "optim": optim})
    found = _summarise(digest.check(1))
    digest.close()
    return found


def _fully_sharded(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
