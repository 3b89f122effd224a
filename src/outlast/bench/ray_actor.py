"""The actor of ``outlast bench ray``: a small model on dp2 x tp2, one of whose ranks fails in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outlast.bench.ray_marks import Marker
from outlast.ray import TrainActor

__all__ = ["WIDTH", "BenchActor"]

WIDTH = 256


class BenchActor(TrainActor):
    """Train a layer; gradients are reduced over both axes.

    Args:
        folder: Where marks go.
        fault: How rank 1 fails in one step.
    """

    def __init__(self, folder: str, fault: str) -> None:
        self._marker = Marker(folder, fault)

    def setup(self) -> None:
        """Make the model, the same on all ranks."""
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def state(self) -> Mapping[str, Any]:
        """Return what is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    def train_step(self, batch: torch.Tensor, iteration: int) -> float:
        """Make a step; return its loss."""
        rank = self.place.rank
        with self.section("step"):
            self._marker.mark("entered", rank, iteration)
            self._marker.strike(rank, iteration)
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            for parameter in self.model.parameters():
                for axis in ("tp", "dp"):
                    dist.all_reduce(parameter.grad, group=self.group(axis))
            with self.update(iteration):
                self.optimizer.step()
        self.save(iteration)
        self._marker.mark("stepped", rank, iteration)
        return float(loss.detach())
