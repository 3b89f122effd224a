"""Functions of the ranks in the tests of NaN: train with a loss that is invalid on rank 1 only, and report the
results."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import NotFinite
from outlast.numerics import FiniteCheck, NonFiniteDetector

BAD_ITERATION = 2


def _train(rank: int, detector: NonFiniteDetector) -> dict[str, Any]:
    """Train with one NaN in the loss of rank 1; report checks, weights before and after that step, and errors."""
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    results: dict[str, Any] = {"steps": [], "errors": []}
    for iteration in range(4):
        optim.zero_grad()
        loss = model(torch.ones(1, 3)).square().mean()
        if iteration == BAD_ITERATION and rank == 1:
            loss = loss * math.nan
        loss.backward()
        before = _bits(model, optim)
        try:
            found = detector.check(loss, optim, iteration=iteration)
        except NotFinite as error:
            results["errors"].append([str(error), error.rank, error.iteration])
            continue
        grads = [parameter.grad is not None for parameter in model.parameters()]
        optim.step()  # whatever the check returns
        changed = _bits(model, optim) != before
        results["steps"].append({**_summarise(found), "moved": changed, "gradients": any(grads)})
    results["weights"] = _bits(model, optim)
    return results


def _summarise(found: FiniteCheck) -> dict[str, Any]:
    return {
        "iteration": found.iteration,
        "action": found.action,
        "should_step": found.should_step,
        "loss_ranks": found.loss_ranks,
        "gradient_ranks": found.gradient_ranks,
    }


def _bits(model: torch.nn.Module, optim: torch.optim.Optimizer) -> list[list[int]]:
    tensors = [*model.parameters(), *(t for state in optim.state.values() for t in state.values())]
    return [tensor.detach().reshape(-1).view(torch.int32).tolist() for tensor in tensors]


def actions(rank: int) -> dict[str, Any]:
    """Train once with each action."""
    results: dict[str, Any] = {}
    called: list[int] = []
    for action in ("warn", "skip", "raise", "rollback"):
        detector = NonFiniteDetector(action, check_gradients=True)
        detector.bind(lambda found: called.append(found.iteration))
        results[action] = _train(rank, detector)
        detector.close()
    results["rolled_back_at"] = called
    return results


def limit(rank: int) -> dict[str, Any]:
    """Train with a loss that is invalid on rank 1 twice, then finite, then permanently invalid, without a rank in the
    environment."""
    os.environ.pop("RANK")
    detector = NonFiniteDetector("warn", max_consecutive=3)
    results: dict[str, Any] = {"bad": [], "logged": []}
    handler = logging.Handler()
    handler.emit = lambda record: results["logged"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("outlast.runtime.diagnoses").addHandler(handler)
    losses = [math.nan, math.inf, 1.0, math.nan, -math.inf, math.nan]
    try:
        for iteration, loss in enumerate(losses):
            found = detector.check(loss if rank == 1 else 1.0, iteration=100 + iteration)
            results["bad"].append(not found.finite)
    except NotFinite as error:
        results["error"] = [str(error), error.rank, error.iteration]
    detector.close()
    return results


def watched(rank: int) -> dict[str, Any]:
    """Train with an optimizer that checks its own steps, and an invalid gradient of rank 1 at one of them."""
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    detector = NonFiniteDetector("skip")
    handle = detector.watch(optim)
    changed = []
    for iteration in range(4):
        optim.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        if rank == 1 and iteration == 2:
            model.bias.grad[1] = math.inf
        before = _bits(model, optim)
        optim.step()
        changed.append(_bits(model, optim) != before)
    handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    optim.step()  # on this rank only, after the reduction
    detector.close()
    return {"moved": changed}


def sharded(rank: int) -> dict[str, Any]:
    """Report a NaN in the shard of a gradient that rank 1 holds."""
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    detector = NonFiniteDetector("skip", check_gradients=True)
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    if rank == 1:
        model.weight.grad.to_local()[0, 0] = math.nan
    found = detector.check(loss, optim, iteration=0)
    detector.close()
    return _summarise(found)
