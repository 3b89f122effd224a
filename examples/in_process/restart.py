"""Make a rank fail while the others continue in their processes.

    python examples/in_process/restart.py /tmp/in-process --fault raise
    python examples/in_process/restart.py /tmp/in-process --fault kill
    python examples/in_process/restart.py /tmp/in-process --fault hang

starts four ranks and a spare on this machine. The README describes what to look for. On real machines each of them runs
the same line, and what is below ``train`` is the whole script::

    outlast run --nnodes=2 --nproc-per-node=8 --rdzv-endpoint=$HEAD:29400 --rdzv-id=my-run \\
        examples/in_process/restart.py --train /shared/my-run
"""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import outlast
from outlast import inprocess
from outlast.env import read_worker
from outlast.testing.ranks import RankProcesses

ITERATIONS, STRUCK, WIDTH, RANKS = 60, 35, 64, 4
FAULTS = ("none", "raise", "kill", "hang")


def make_model() -> nn.Module:
    """Return a model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))


def strike(fault: str) -> None:
    """Make this rank fail."""
    if fault == "raise":
        raise RuntimeError("a fault in the forward pass")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)


@inprocess.Wrapper(
    outlast.InProcessRestartConfig(active_world_size=RANKS, granularity="rank", soft_timeout=10, hard_timeout=20)
)
def train(folder: Path, fault: str, call: inprocess.Handle) -> None:
    """Train on this rank; called again on all ranks when one of them fails."""
    config = outlast.Config(
        checkpoint=outlast.CheckpointConfig(directory=str(folder / "checkpoints"), save_interval=10),
        run_dir=str(folder / "run"),
        in_process=True,
        seed=0,
    )
    with outlast.init(config) as run:
        # State in memory is not loaded again after a restart if all ranks are at the same iteration.
        model = call.keep("model", make_model)
        optim = call.keep("optim", lambda: torch.optim.AdamW(model.parameters()))
        # The session has restored the weights: DDP must not overwrite them with those of rank 0.
        parallel = nn.parallel.DistributedDataParallel(model, init_sync=call.iteration == 0)
        begun = False
        for iteration in run.steps({"model": model, "optim": optim}, total=ITERATIONS):
            if not begun and call.iteration > 0:
                print(f"rank {run.global_rank} (pid {os.getpid()}) resumes from iteration {iteration}", flush=True)
            begun = True
            batch = torch.randn(16, WIDTH)
            optim.zero_grad()
            if call.iteration == 0 and iteration == STRUCK and run.global_rank == 2:
                strike(fault)
            loss = (parallel(batch) - batch).square().mean()
            loss.backward()
            optim.step()
    if run.global_rank == 0:
        print(f"finished {run.iteration} iterations, loss {loss.item():.4f}", flush=True)


def show(folder: Path, fault: str) -> int:
    """Run the example on this machine; return the exit code."""
    arguments = ["--train", os.fspath(folder), "--fault", fault]
    with RankProcesses(__file__, *arguments, world_size=RANKS + 1, directory=folder / "output") as ranks:
        codes = ranks.wait(timeout_s=120)
        for rank in range(RANKS + 1):
            for line in ranks.output(rank).splitlines():
                if "resumes from" in line or "finished" in line or "resuming from memory" in line:
                    print(line)
    killed = [rank for rank, code in enumerate(codes) if code == -signal.SIGKILL]
    print(f"exit codes {codes}")
    return 0 if all(code == 0 for rank, code in enumerate(codes) if rank not in killed) else 1


def main() -> int:
    """Run the example, or train as a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is written")
    parser.add_argument("--fault", choices=FAULTS, default="raise", help="how rank 2 fails at iteration 35")
    parser.add_argument("--train", action="store_true", help="be a rank; without it, ranks are started here")
    options = parser.parse_args()
    if not options.train:
        return show(options.folder, options.fault)
    if read_worker().global_rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    train(options.folder, options.fault)
    return 0


if __name__ == "__main__":
    sys.exit(main())
