"""A small training in which the rerun state machine restores every source of change."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from outlast.config import RerunStateMachineConfig
from outlast.env import WorkerEnv
from outlast.numerics.rerun_machine import RerunDecision, RerunMachine
from outlast.policy.rerun import Replay
from outlast.runtime.random_numbers import capture_random, restore_random

Disturb = Callable[[int, int, torch.Tensor], torch.Tensor]
"""Takes iteration, number of the run from 1, and the loss; returns the loss that the step continues with."""


def undisturbed(iteration: int, run: int, loss: torch.Tensor) -> torch.Tensor:
    return loss


class Source(Iterator[torch.Tensor]):
    """Batches that use the script's random numbers, and can be rewound."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.full((4, 8), float(self.position)) + torch.randn(4, 8)


class Training:
    """A model with dropout and BatchNorm, an optimizer with a state, and data from random numbers."""

    def __init__(
        self,
        config: RerunStateMachineConfig | None = None,
        *,
        disturb: Disturb = undisturbed,
        micro_batches: int = 2,
        device: str = "first",
        **arguments: Any,
    ) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.disturb = disturb
        self.micro_batches = micro_batches
        self.source = Source()
        place = WorkerEnv(node="n", device=device)
        self.machine = RerunMachine(place, config=config, modules=[self.model], **arguments)
        self.batches = self.machine.replayable(self.source)
        self.iteration = 0

    def step(self, *, validate: bool = True) -> RerunDecision:
        """Do one step; the optimizer moves only if training continues."""
        self.machine.begin_step(self.iteration, self.batches)
        run = 0
        while self.machine.should_run():
            run += 1
            for _ in range(self.micro_batches):
                batch = next(self.batches) + random.random() + np.random.rand()
                loss = self.disturb(self.iteration, run, (self.model(batch) ** 2).mean())
                loss.backward()
                if validate:
                    self.machine.validate(loss, "loss")
        if self.machine.decision.exit_code is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.iteration += 1
        self.random = capture_random()
        return self.machine.decision

    def steps(self, number: int) -> Training:
        for _ in range(number):
            assert self.step().exit_code is None
        return self

    def save(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "machine": self.machine.state_dict(),
            "iteration": self.iteration,
            "position": self.source.position,
            "random": capture_random(),
        }

    def load(self, state: dict[str, Any], replay: Replay | None = None) -> Training:
        """Continue from the result of :meth:`save`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.machine.load_state_dict(state["machine"])
        self.iteration = state["iteration"]
        self.source.position = state["position"]
        restore_random(state["random"])
        if replay is not None:
            self.machine.begin_replay(replay)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        """Return everything that training has changed."""
        moments = self.optimizer.state_dict()["state"]
        return {
            **self.model.state_dict(),
            **{f"{key}.{name}": value for key, one in moments.items() for name, value in one.items()},
            "torch": self.random["torch"],
            "numpy": torch.from_numpy(self.random["numpy"][1].astype("int64")),
            "python": torch.tensor(self.random["python"][1]),
        }


def assert_same(a: Training, b: Training) -> None:
    """Parameters, buffers, optimizer and random numbers are bit-identical."""
    first, second = a.weights(), b.weights()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"
