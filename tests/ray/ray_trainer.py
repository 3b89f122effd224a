"""A small model that groups of actors train, its injected faults, and the expected weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast.ray import TrainActor

WIDTH, SAMPLES = 16, 8
RATE = 0.05


def batch_of(iteration: int) -> torch.Tensor:
    """Return the samples of an iteration, which depend on the iteration alone."""
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(iteration), dtype=torch.float64)


def first_weights() -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(12345), dtype=torch.float64)


def weights_after(iterations: int, *, dp: int = 2, tp: int = 2) -> list[torch.Tensor]:
    """Return each tensor-parallel slice after a number of undisturbed steps, computed in one process."""
    slices = list(first_weights().chunk(tp))
    for iteration in range(1, iterations + 1):
        shards = batch_of(iteration).chunk(dp)
        grads = []
        for shard in shards:
            outputs = sum_of([_partial(shard.chunk(tp, dim=1)[index], slices[index]) for index in range(tp)])
            grads.append([_gradient(shard.chunk(tp, dim=1)[index], outputs) for index in range(tp)])
        slices = [
            weight - RATE * sum_of([grads[shard][index] for shard in range(dp)]) for index, weight in enumerate(slices)
        ]
    return slices


def sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _partial(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (inputs * weight).sum(dim=1)


def _gradient(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return (inputs * torch.tanh(outputs).unsqueeze(1)).sum(dim=0) / SAMPLES


class Trainer(TrainActor):
    """Train a row of weights: its columns are cut over tp, the samples over dp.

    Args:
        folder: Has a file for each fault, which is injected once.
    """

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.folder = Path(folder)
        self.num_calls = 0
        self.shards: list[float] = []

    def setup(self) -> None:
        self.inject_fault("setup", -1)
        self.weight = first_weights().chunk(self.place.tp_size)[self.place.tp].clone()

    def regroup(self) -> None:
        self.inject_fault("regroup", -1)

    def state(self) -> Mapping[str, Any]:
        return {"weight": self.weight}

    def train_step(self, batch: torch.Tensor, iteration: int) -> float:
        """Make a step; return the sum of its shard."""
        self.num_calls += 1
        with self.section("step"):
            self.inject_fault("begin", iteration)
            inputs = batch.chunk(self.place.tp_size, dim=1)[self.place.tp]
            outputs = _partial(inputs, self.weight)
            dist.all_reduce(outputs, group=self.group("tp"))
            self.inject_fault("middle", iteration)
            grad = _gradient(inputs, outputs)
            dist.all_reduce(grad, group=self.group("dp"))
            self.inject_fault("before_update", iteration)
            with self.update(iteration):
                self.inject_fault("update", iteration)
                self.weight -= RATE * grad
            self.inject_fault("after_update", iteration)
        self.save(iteration)
        self.inject_fault("end", iteration)
        return float(batch.sum())

    def weights(self) -> torch.Tensor:
        return self.weight

    def calls(self) -> int:
        return self.num_calls

    def fail(self) -> float:
        return 1 / (self.num_calls * 0)

    def linger(self, seconds: float) -> str:
        time.sleep(seconds)
        return "lingered"

    def dawdle(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.05)):
            time.sleep(0.05)

    def inject_fault(self, where: str, iteration: int) -> None:
        """Inject the fault that a file in the folder plans, once: ``<where>-<iteration>-<rank>-<kind>``, -1 = any
        iteration."""
        for number in {iteration, -1}:
            for path in self.folder.glob(f"{where}-{number}-{self.place.rank}-*.fault"):
                try:
                    path.with_suffix(".pid").write_text(str(os.getpid()))
                    path.rename(path.with_suffix(".done"))
                except FileNotFoundError:
                    continue  # another process was faster
                kind = path.stem.rpartition("-")[2]
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif kind == "killtogether":
                    while list(self.folder.glob(f"{where}-{number}-*-{kind}.fault")):
                        time.sleep(0.001)  # wait for the other ranks; the last one ends all
                    pids = {int(one.read_text()) for one in self.folder.glob(f"{where}-{number}-*-{kind}.pid")}
                    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                        os.kill(pid, signal.SIGKILL)
                elif kind == "stop":
                    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # at once, in this thread
                elif kind == "sleep":
                    time.sleep(600)
                elif kind == "exception":
                    raise ValueError(f"a fault on purpose in rank {self.place.rank}")
                else:
                    raise AssertionError(kind)


def plan_fault(folder: Path, where: str, iteration: int, rank: int, kind: str) -> None:
    """Make a rank fail once: see :meth:`Trainer.inject_fault`."""
    (folder / f"{where}-{iteration}-{rank}-{kind}.fault").touch()


class Counter:
    """Counts calls, without state that is kept; a class without any outlast code."""

    def __init__(self) -> None:
        self.count = 0

    def count_all(self) -> int:
        """Return the calls of all ranks together."""
        self.count += 1
        total = torch.tensor(self.count)
        dist.all_reduce(total)
        return int(total)

    def die(self) -> None:
        """Kill the first rank while the others wait for it."""
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))


class Unable:
    """Fails in the constructor."""

    def __init__(self) -> None:
        raise FileNotFoundError("no data here")

    def work(self) -> None: ...
