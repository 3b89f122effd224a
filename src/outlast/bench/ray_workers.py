"""What trains in ``outlast bench ray``: an actor of ours and Ray Train's function, with one model and one fault."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

from outlast.bench.measuring import MarkWriter
from outlast.errors import OutlastError
from outlast.ray import TrainActor

__all__ = ["STRUCK", "TOTAL", "VICTIM", "BenchActor", "BenchFault", "batch_of", "run_ray_train"]

STRUCK, TOTAL, VICTIM = 6, 8, 1
"""The step in which a rank fails, the last one, and which rank it is; steps count from 1."""
_PEERS_WAIT_S = 0.3
"""Seconds in which the others have come to the all-reduce, and what the step before saved is committed."""
_LONGEST_S = 120.0
_LONGEST_RUN_S = 240.0
_WIDTH, _BATCH = 256, 8
_STATE = "state.pt"


class BenchFault:
    """The fault of one rank.

    Args:
        folder: Where marks go.
        kind: ``kill``, ``sleep``, ``stop``, or ``none``.
    """

    def __init__(self, folder: str, kind: str) -> None:
        self._folder, self._kind = Path(folder), kind
        self._mark = MarkWriter(self._folder)

    def strike(self, rank: int, iteration: int) -> None:
        """Fail, if it is this rank's turn, once."""
        if self._kind == "none" or (rank, iteration) != (VICTIM, STRUCK):
            return
        try:
            (self._folder / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        if self._kind == "sleep":
            time.sleep(_LONGEST_S)
        if self._kind == "stop":
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        time.sleep(_PEERS_WAIT_S)
        self._mark("killed", rank, iteration)
        os.kill(os.getpid(), signal.SIGKILL)


def batch_of(iteration: int) -> torch.Tensor:
    """Return the batch of a step."""
    return torch.full((_BATCH, _WIDTH), float(iteration))


def _make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Linear(_WIDTH, _WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class BenchActor(TrainActor):
    """Train a layer; gradients are reduced over both axes.

    Args:
        folder: Where marks go.
        fault: How rank 1 fails in one step.
    """

    def __init__(self, folder: str, fault: str) -> None:
        self._mark, self._fault = MarkWriter(Path(folder)), BenchFault(folder, fault)

    def setup(self) -> None:
        """Make the model."""
        self.model, self.optimizer = _make_model()

    def state(self) -> Mapping[str, Any]:
        """Return what is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    def train_step(self, batch: torch.Tensor, iteration: int) -> float:
        """Make a step; return its loss."""
        rank = self.place.rank
        with self.section("step"):
            self._mark("entered", rank, iteration)
            self._fault.strike(rank, iteration)
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(batch).square().mean()
            loss.backward()
            for parameter in self.model.parameters():
                for axis in ("tp", "dp"):
                    dist.all_reduce(parameter.grad, group=self.group(axis))
            with self.update(iteration):
                self.optimizer.step()
        self.save(iteration)
        self._mark("stepped", rank, iteration)
        return float(loss.detach())


def run_ray_train(folder: Path, *, num_workers: int) -> None:
    """Train with ``TorchTrainer`` until it has recovered from the kill and has ended.

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
            run.result(_LONGEST_RUN_S)
        except (ray.train.TrainingFailedError, TimeoutError) as error:
            raise OutlastError(f"Ray Train did not recovered from the kill: {error}") from error


def _train(config: dict[str, Any]) -> None:
    mark, fault = MarkWriter(Path(config["folder"])), BenchFault(config["folder"], "kill")
    rank, first = dist.get_rank(), 1
    mark("began", rank, 0)
    model, optimizer = _make_model()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as name:
            saved = torch.load(Path(name) / _STATE, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"] + 1
    mark("loaded", rank, first - 1)
    for iteration in range(first, TOTAL + 1):
        fault.strike(rank, iteration)
        optimizer.zero_grad()
        loss = model(batch_of(iteration)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        mark("stepped", rank, iteration)
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
