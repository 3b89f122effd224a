"""Benchmark ``numerics``: the speed of replica digests, and the cost of judging a step without faults.

Single steps cannot take turns: ranks that have just agreed begin the next step together, which makes it up to 4 %
faster, so that the cost of one kind would be credited to another. Blocks of steps take turns, in a drawn order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import (
    GROUP_TIMEOUT_S,
    Progress,
    cost_in_percent,
    measure_rounds,
    median,
    process_group,
    seconds_per_call,
    take_turns,
    timed,
)
from outlast.config import RerunStateMachineConfig
from outlast.env import WorkerEnv
from outlast.numerics.replica_digest import digest_tensors
from outlast.numerics.rerun_machine import RerunMachine
from outlast.runtime.process_groups import Group
from outlast.simulate.benchmark_results import BenchResult

_TIMEOUT_S = 300.0
_NUM_TENSORS, _TENSOR_BYTES, _NUM_PASSES = 32, 16 << 20, 3
_STEP_MS = 10.0
_NUM_TURNS, _BLOCK = 40, 10
"""Blocks of each kind in a round, and steps in a block."""
_WIDTH = 256
_MAX_BATCH = 1 << 16


def measure(*, repeats: int, progress: Progress) -> BenchResult:
    """Measure digests in one process, then steps of two ranks.

    Raises:
        OutlastError: A worker failed, or was too slow.

    Blocks: about ten seconds a round, ten minutes at most.
    """
    progress(f"digests of 512 MiB on one core, {repeats} rounds and one that is dropped")
    digests = measure_rounds(measure_digests, repeats=repeats, progress=progress, timeout_s=_TIMEOUT_S)
    progress(f"steps of 2 ranks in turns, {repeats} rounds and one that is dropped")
    steps = measure_rounds(measure_steps, repeats=repeats, progress=progress, timeout_s=_TIMEOUT_S, num_ranks=2)
    called = "a bare all-reduce over gloo"
    return BenchResult(
        "numerics",
        (
            digests.bar(
                "digest_gb_s", "digest", "GB/s", 8.0, called="torch.hash_tensor", peer="hash_tensor", is_floor=True
            ),
            steps.bar("quiet_step_overhead_pct", "judged_pct", "%", 2.0, called=called, peer="reduced_pct"),
        ),
        (
            "digests: bfloat16, 32 tensors of 16 MiB; torch.hash_tensor is an XOR, blind to order and to equal flips; "
            f"of the same bytes as int64 it does {digests.median('hash_tensor_of_int64'):.3g} GB/s",
            f"steps: {steps.median('plain_ms'):.3g} ms as they are, {steps.median('judged_ms'):.3g} ms judged, "
            "with DistributedDataParallel over gloo and the ranks' agreement",
        ),
    )


def measure_digests(num_rounds: str) -> Iterator[dict[str, float]]:
    """Yield GB/s by name, on one thread, over more bytes than caches hold."""
    torch.set_num_threads(1)
    tensors = [torch.randn(_TENSOR_BYTES // 2).to(torch.bfloat16) for _ in range(_NUM_TENSORS)]
    whole = [tensor.view(torch.int64) for tensor in tensors]

    def gb_s(work: Callable[[list[torch.Tensor]], object], some: list[torch.Tensor]) -> float:
        seconds = min(timed(lambda: work(some))[0] for _ in range(_NUM_PASSES))
        return sum(tensor.nbytes for tensor in some) / seconds / 1e9

    def hash_tensors(some: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.hash_tensor(tensor) for tensor in some]

    for _ in range(int(num_rounds)):
        yield {
            "digest": gb_s(digest_tensors, tensors),
            "hash_tensor": gb_s(hash_tensors, tensors),
            "hash_tensor_of_int64": gb_s(hash_tensors, whole),
        }


class SmallTraining:
    """A model under ``DistributedDataParallel`` whose step takes about 10 ms on all ranks.

    Args:
        batch_size: Batch size for that duration; ``None``: determine it.

    Collective: both ranks, here and in each step.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, _WIDTH)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(batch_size or 64, _WIDTH)
        for _ in range(10 if batch_size is None else 0):
            rate = self.batch.shape[0] / (1e3 * min(timed(self.step)[0] for _ in range(5)))
            size = torch.tensor([min(_MAX_BATCH, max(8, int(rate * _STEP_MS)))])
            dist.broadcast(size, src=0)
            self.batch = torch.randn(int(size), _WIDTH)

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss; averages the gradients."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(batch).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.forward_backward(self.batch)
        self.optimizer.step()


def measure_steps(num_rounds: str) -> Iterator[dict[str, float]]:
    """Yield the median step of each kind in milliseconds, and the cost of the others over the first in percent.

    Kinds: plain steps; steps whose loss the re-run state machine judges, with the ranks' agreement; and steps with a
    bare all-reduce of one integer.

    Collective: both ranks.
    """
    with process_group():
        training = SmallTraining()
        machine = RerunMachine(
            WorkerEnv(global_rank=dist.get_rank(), world_size=2),
            config=RerunStateMachineConfig(rerun_mode="validate_results", check_for_spiky_loss=True),
            modules=[training.model],
            timeout_s=GROUP_TIMEOUT_S,
        )
        batches, iterations = machine.replayable(itertools.repeat(training.batch)), itertools.count()

        def judged_step() -> None:
            machine.begin_step(next(iterations), batches)
            while machine.should_run():
                machine.validate(training.forward_backward(next(batches)))
            training.optimizer.step()

        group, number = Group.open(timeout_s=GROUP_TIMEOUT_S), torch.zeros(1, dtype=torch.int64)

        def reduced_step() -> None:
            training.forward_backward(training.batch)
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group.process_group)
            training.optimizer.step()

        steps = {"plain": training.step, "judged": judged_step, "reduced": reduced_step}
        blocks = {name: partial(seconds_per_call, step, _BLOCK) for name, step in steps.items()}
        order = random.Random(0)  # the same on both ranks
        with closing(machine), closing(group):
            for _ in range(int(num_rounds)):
                found_s = take_turns(blocks, _NUM_TURNS, order)
                found = {f"{name}_ms": median(seconds) * 1e3 for name, seconds in found_s.items()}
                for name in ("judged", "reduced"):
                    found[f"{name}_pct"] = cost_in_percent(found_s[name], found_s["plain"])
                yield found
