"""Ray Train's side of ``outlast bench ray``: the same model with four workers, one of which is killed in a step."""

from __future__ import annotations

import concurrent.futures
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

from outlast.bench.ray_actor import WIDTH
from outlast.bench.ray_marks import TOTAL, Marker
from outlast.errors import OutlastError

__all__ = ["run_ray_train"]

_LONGEST_S = 240.0
_STATE = "state.pt"


def run_ray_train(folder: Path, *, num_workers: int) -> None:
    """Train with ``TorchTrainer`` until it has come back from the kill and is through.

    Raises:
        OutlastError: It did not.

    Blocks: about half a minute.
    """
    trainer = TorchTrainer(
        _train,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(
            name="bench",
            storage_path=str(folder / "results"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    # In a thread, which it takes no signals from: Ctrl-C is this program's.
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        run = threads.submit(trainer.fit)
        try:
            run.result(_LONGEST_S)
        except (ray.train.TrainingFailedError, TimeoutError) as error:
            raise OutlastError(f"Ray Train did not come back from the kill: {error}") from error


def _train(config: dict[str, Any]) -> None:
    marker = Marker(config["folder"], "kill")
    rank, first = dist.get_rank(), 1
    marker.mark("began", rank, 0)
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as name:
            saved = torch.load(Path(name) / _STATE, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"] + 1
    marker.mark("loaded", rank, first - 1)
    for iteration in range(first, TOTAL + 1):
        marker.strike(rank, iteration)
        optimizer.zero_grad()
        loss = model(torch.full((8, WIDTH), float(iteration))).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        marker.mark("stepped", rank, iteration)
        _report(rank, iteration, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _report(rank: int, iteration: int, state: dict[str, Any]) -> None:
    """Save as Ray Train's own guide does: rank 0 writes, all report."""
    metrics = {"iteration": iteration}
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        torch.save({**state, "iteration": iteration}, Path(name) / _STATE)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(name))
