"""Functions of the ranks in the tests of reruns: train together, corrupt one rank's results, and report the outcome."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from outlast.numerics import RerunStateMachine
from outlast.policy.rerun import Replay
from outlast.runtime.random_numbers import capture_random

Corrupt = Callable[[int, int], bool]
"""Takes iteration and number of the run; returns whether this rank's loss becomes NaN."""
NUM_STEPS = 7


def never(iteration: int, run: int) -> bool:
    return False


class Loop:
    """DDP with dropout and BatchNorm on data from this rank's random numbers."""

    def __init__(self, rank: int, corrupt: Corrupt = never) -> None:
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(5)
        layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 2)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(50 + rank)
        self.corrupt = corrupt
        self.iteration = 0
        self.runs: list[int] = []
        self.machine = RerunStateMachine(modules=[self.model])
        self.data = self.machine.replayable(torch.randn(4, 6) + random.random() for _ in range(100))

    def step(self) -> bool:
        self.machine.begin_step(self.iteration, self.data)
        run = 0
        while self.machine.should_run():
            run += 1
            for _ in range(2):
                loss = self.model(next(self.data) * np.random.rand()).square().mean()
                if self.corrupt(self.iteration, run):
                    loss = loss * math.nan
                loss.backward()
                self.machine.validate(loss)
        self.runs.append(run)
        if self.machine.decision.exit_code is not None:
            return False
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.iteration += 1
        return True

    def train(self, number: int = NUM_STEPS) -> Loop:
        while self.iteration < number and self.step():
            pass
        return self

    def digest_state(self) -> str:
        """Return a digest of everything that training changed."""
        self.machine.close()
        digest = hashlib.sha256()
        for value in self.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        for state in self.optimizer.state_dict()["state"].values():
            for value in state.values():
                digest.update(value.numpy().tobytes())
        state = capture_random()
        digest.update(repr(state["python"]).encode() + state["numpy"][1].tobytes() + state["torch"].numpy().tobytes())
        return digest.hexdigest()


def transient(rank: int) -> dict[str, Any]:
    """Corrupt one run of one step on rank 1 only."""
    results: dict[str, Any] = {"calm": Loop(rank).train().digest_state()}
    for bad in (0, 5):
        loop = Loop(rank, lambda iteration, run, bad=bad: rank == 1 and (iteration, run) == (bad, 1)).train()
        found = {finding: number for finding, number in loop.machine.state_dict()["found"].items() if number}
        results[str(bad)] = {"runs": loop.runs, "end": loop.digest_state(), "found": found}
    return results


def reproduced(rank: int) -> dict[str, Any]:
    """Corrupt every run of a step on rank 1; then replay it with rank 1 on another device and on the same one."""
    loop = Loop(rank, lambda iteration, run: rank == 1 and iteration == 3).train()
    diagnosis = loop.machine.decision.diagnosis
    assert diagnosis is not None
    machine_state = loop.machine.state_dict()
    results = {
        "exit_code": loop.machine.decision.exit_code,
        "must_save": loop.machine.decision.must_save,
        "text": diagnosis.describe(),
        "rejected_ranks": diagnosis.rejected_ranks,
        "gradients": [parameter.grad is None for parameter in loop.model.parameters()],
        "end": loop.digest_state(),
        "calm": Loop(rank).train(3).digest_state(),
    }
    for name, device, corrupted in (("bad", "elsewhere", True), ("good", "elsewhere", False), ("gone", "here", False)):
        replayed = Loop(rank, lambda iteration, run, on=corrupted: on and rank == 1 and iteration == 3)
        replayed.train(3)
        replayed.machine.load_state_dict(machine_state)
        replayed.machine.begin_replay(
            Replay(
                iteration=3,
                device=diagnosis.device if device == "here" else device,
                node=diagnosis.node,
                rank=diagnosis.rank,
                call=diagnosis.call,
                what=diagnosis.what,
                first=diagnosis.first,
            )
        )
        replayed.train()
        decision = replayed.machine.decision
        results[name] = {
            "exit_code": decision.exit_code,
            "finding": None if decision.diagnosis is None else str(decision.diagnosis.finding),
            "rank": None if decision.diagnosis is None else decision.diagnosis.rank,
            "end": replayed.digest_state(),
        }
    results["through"] = Loop(rank).train().digest_state()
    return results


def earliest(rank: int) -> dict[str, Any]:
    """Let both ranks reject a validation, rank 1 an earlier one."""
    machine = RerunStateMachine()
    machine.begin_step(9)
    while machine.should_run():
        for call in range(2):
            machine.validate(math.nan if call == 1 - rank else 1.0, f"value {call}")
    machine.close()
    diagnosis = machine.decision.diagnosis
    assert diagnosis is not None
    return {"rank": diagnosis.rank, "call": diagnosis.call, "ranks": diagnosis.rejected_ranks}
