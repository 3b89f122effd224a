"""Ranks that ``srun`` starts, with a function that is restarted in process. Run as a program, by the jobs.

Arguments: a folder, and the reaction to the loss of rank 1: a ``spare`` replaces it, or the others ``shrink`` the
world. Each rank records its iterations; the first one saves the trained weights.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from slurm_train import gradient, make_optimizer

import outlast
from outlast import inprocess
from outlast.config import CheckpointConfig
from outlast.env import read_worker

TOTAL, FAULT_ITERATION, VICTIM = 40, 15, 1


def mean_gradient(weight: torch.Tensor, iteration: int, world_size: int) -> torch.Tensor:
    """Return the average gradient of the ranks, which the test can compute as well."""
    return torch.stack([gradient(weight, iteration, rank) for rank in range(world_size)]).sum(0) / world_size


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16))


def train(folder: Path, call: inprocess.Handle) -> None:
    model = call.keep("model", Model)
    weight = model.weight
    optimizer = call.keep("optimizer", lambda: make_optimizer(weight))
    checkpoint = CheckpointConfig(directory=str(folder / "checkpoints"), save_interval=10, async_save=False)
    place = read_worker()
    with outlast.init(outlast.Config(checkpoint=checkpoint, in_process=True)) as run:
        for iteration in run.steps({"model": model, "optimizer": optimizer}, total=TOTAL):
            if (call.iteration, iteration, run.global_rank) == (0, FAULT_ITERATION, VICTIM):
                os.kill(os.getpid(), signal.SIGKILL)
            weight.grad = gradient(weight.detach(), iteration, run.global_rank)
            torch.distributed.all_reduce(weight.grad)
            weight.grad /= run.world_size
            optimizer.step()
            with open(folder / f"task-{os.environ['SLURM_PROCID']}", "a") as file:
                here = (place.node, place.local_rank, place.local_world_size)
                print(call.iteration, iteration, run.global_rank, run.world_size, os.getpid(), *here, file=file)
    if run.global_rank == 0:
        torch.save(weight.detach(), folder / "trained")


def main() -> None:
    folder, reaction = Path(sys.argv[1]), sys.argv[2]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    before = [os.environ.get(name) for name in names]
    config = outlast.InProcessRestartConfig(granularity="rank", active_world_size=2 if reaction == "spare" else None)
    assignment = inprocess.ShiftRanks() if reaction == "shrink" else None
    finished = folder / "finished"
    wrapper = inprocess.Wrapper(config, rank_assignment=assignment, completion=lambda _: finished.touch())
    wrapper(train)(folder)
    assert [os.environ.get(name) for name in names] == before, "the environment is not as it was"


if __name__ == "__main__":
    main()
