"""The ranks in which ``outlast bench numerics`` measures what judging a step costs when nothing is wrong.

Two ranks train a small model under ``DistributedDataParallel`` over gloo. Blocks of steps take turns, in an order drawn
anew for each turn: steps as they are, steps in which the re-run state machine keeps what a second run would need,
judges the loss, and has the ranks agree, and steps with a bare all-reduce of one integer over gloo. Rank 0 prints a
a line of JSON a round: the median step of each, in milliseconds, and what the others cost more than the first, in
percent.

Single steps cannot take turns: ranks that have just agreed begin the next step together, which makes that one up to 4 %
faster than one after a step where they did not, so what one kind costs would be credited to another.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast import clock
from outlast.bench.measuring import timed
from outlast.bench.two_ranks import TIMEOUT_S, WORLD_SIZE, measure_together
from outlast.config import RerunStateMachineConfig
from outlast.env import WorkerEnv
from outlast.numerics import RerunStateMachine
from outlast.runtime.process_groups import Group

STEP_MS = 10.0
NUM_TURNS, BLOCK = 40, 10
"""Blocks of each kind in a round, and steps in a block."""
WIDTH = 256
_MAX_BATCH = 1 << 16


class Training:
    """A model whose step takes about :data:`STEP_MS` on all ranks.

    Args:
        batch_size: What makes it so; ``None`` = find out.

    Collective: both ranks, here and in each step.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(batch_size or 64, WIDTH)
        for _ in range(10 if batch_size is None else 0):
            rate = self.batch.shape[0] / (1e3 * min(timed(self.step)[0] for _ in range(5)))
            size = torch.tensor([min(_MAX_BATCH, max(8, int(rate * STEP_MS)))])
            dist.broadcast(size, src=0)
            self.batch = torch.randn(int(size), WIDTH)

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss; gradients are averaged meanwhile."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(batch).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        """Do a step as it is."""
        self.forward_backward(self.batch)
        self.optimizer.step()


def measure_rounds(num_rounds: int) -> Iterator[dict[str, float]]:
    """Yield what each round gave.

    Collective: both ranks.
    """
    training = Training()
    place = WorkerEnv(global_rank=dist.get_rank(), world_size=WORLD_SIZE)
    config = RerunStateMachineConfig(rerun_mode="validate_results", check_for_spiky_loss=True)
    machine = RerunStateMachine(config, modules=[training.model], place=place, timeout_s=TIMEOUT_S)
    batches = machine.replayable(itertools.repeat(training.batch))
    iteration = 0

    def judged_step() -> None:
        nonlocal iteration
        machine.begin_step(iteration, batches)
        while machine.should_run():
            machine.validate(training.forward_backward(next(batches)))
        training.optimizer.step()
        iteration += 1

    group = Group.open(timeout_s=TIMEOUT_S)
    number = torch.zeros(1, dtype=torch.int64)

    def reduced_step() -> None:
        training.forward_backward(training.batch)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group.process_group)
        training.optimizer.step()

    steps = {"plain": training.step, "judged": judged_step, "reduced": reduced_step}
    order = random.Random(0)  # the same on both ranks
    for _ in range(num_rounds):
        found_s = _in_turns(steps, order)
        medians = {name: statistics.median(seconds) for name, seconds in found_s.items()}
        found = {f"{name}_ms": median * 1e3 for name, median in medians.items()}
        for name in ("judged", "reduced"):
            more_s = statistics.median(a - b for a, b in zip(found_s[name], found_s["plain"], strict=True))
            found[f"{name}_pct"] = 100 * more_s / medians["plain"]
        yield found
    group.close()
    machine.close()


def _in_turns(steps: Mapping[str, Callable[[], None]], order: random.Random) -> dict[str, list[float]]:
    """Return the seconds that a step of each kind took in each of its blocks."""
    found_s: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for _ in range(NUM_TURNS):
        order.shuffle(names)
        for name in names:
            begin_ns = clock.now_ns()
            for _ in range(BLOCK):
                steps[name]()
            found_s[name].append((clock.now_ns() - begin_ns) / 1e9 / BLOCK)
    return found_s


if __name__ == "__main__":
    measure_together("outlast.bench.quiet_step_worker", measure_rounds)
