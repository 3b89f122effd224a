"""A training of two ranks whose iterations and result can be checked. Run as a program, by the jobs.

Each rank records its iterations: start of the job, cycle, iteration, node. The first one saves a digest of the
trained weights, which :func:`undisturbed` computes as well.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch

WORLD_SIZE = 2


def gradient(weight: torch.Tensor, iteration: int, rank: int) -> torch.Tensor:
    """Return a rank's gradient, which depends on all state that a resume could restore wrongly."""
    data = torch.randn(16, generator=torch.Generator().manual_seed(1000 * iteration + rank))
    return (weight @ data - 1) * data / 16


def make_optimizer(weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight], lr=0.1, momentum=0.9)


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()


def undisturbed(total: int) -> str:
    """Return the digest of the weights of a run with ``total`` iterations."""
    weight = torch.nn.Parameter(torch.zeros(16))
    optimizer = make_optimizer(weight)
    for iteration in range(total):
        gradients = [gradient(weight.detach(), iteration, rank) for rank in range(WORLD_SIZE)]
        weight.grad = torch.stack(gradients).sum(0) / WORLD_SIZE
        optimizer.step()
    return digest(weight)


def main() -> None:
    import outlast
    from outlast.config import CheckpointConfig

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--total", type=int, required=True)
    parser.add_argument(
        "--pace", type=float, nargs="+", default=[0.05], help="seconds a step, in each start of the job"
    )
    parser.add_argument("--crash", action="store_true", help="rank 1 ends with an error at iteration 5, once")
    args = parser.parse_args()
    start, node = int(os.environ.get("SLURM_RESTART_COUNT", "0")), os.environ["OUTLAST_NODE"]
    pace_s = args.pace[min(start, len(args.pace) - 1)]

    weight = torch.nn.Parameter(torch.zeros(16))
    optimizer = make_optimizer(weight)
    checkpoint = CheckpointConfig(directory=str(args.folder / "checkpoints"), save_interval=10)
    run = outlast.init(outlast.Config(checkpoint=checkpoint))
    for iteration in run.steps({"weight": weight, "optimizer": optimizer}, total=args.total):
        weight.grad = gradient(weight.detach(), iteration, run.global_rank)
        torch.distributed.all_reduce(weight.grad)
        weight.grad /= WORLD_SIZE
        optimizer.step()
        with open(args.folder / f"rank-{run.global_rank}", "a") as file:
            print(start, os.environ["OUTLAST_CYCLE"], iteration, node, file=file)
        if args.crash and (run.global_rank, iteration) == (1, 5) and not (crashed := args.folder / "crashed").exists():
            crashed.write_text(node)
            raise RuntimeError(f"{node} is broken")
        time.sleep(pace_s)
    if run.global_rank == 0:
        (args.folder / "digest").write_text(digest(weight))


if __name__ == "__main__":
    main()
