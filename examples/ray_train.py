"""Train with Ray Train while a worker hangs and is replaced; the result does not change.

    python examples/ray_train.py /tmp/ray-train --fault none
    python examples/ray_train.py /tmp/ray-train --fault sleep
    python examples/ray_train.py /tmp/ray-train --fault stop

The last line is the same each time: a digest of the weights. Ray Train alone would wait for the hung worker forever.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import outlast.ray.train
from outlast import CheckpointConfig, FaultToleranceConfig

ITERATIONS, STRUCK, WORKERS, WIDTH = 30, 15, 2, 32


def strike(config: dict[str, Any], rank: int, iteration: int) -> None:
    """Hang, on rank 1, in one iteration, once."""
    marker = Path(config["folder"]) / "struck"
    if config["fault"] == "none" or (rank, iteration) != (1, STRUCK) or marker.exists():
        return
    marker.touch()
    print(f"rank {rank} (pid {os.getpid()}) hangs in iteration {iteration}", flush=True)
    if config["fault"] == "sleep":
        time.sleep(3600)
    while True:  # reading its stacks interrupts the sleep
        os.kill(os.getpid(), signal.SIGSTOP)


def train(config: dict[str, Any]) -> str:
    """Train on one worker; return a digest of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with outlast.ray.train.session() as run:
        for iteration in run.steps({"model": model, "optimizer": optimizer}, total=ITERATIONS):
            strike(config, run.global_rank, iteration)
            # A step's inputs depend on its number alone, so that a repeated step is the same.
            torch.manual_seed(WORKERS * iteration + run.global_rank)
            inputs = torch.randn(64, WIDTH)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True).sin())
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()[:16]


def main() -> None:
    """Run the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", choices=("none", "sleep", "stop"), default="sleep")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ray.init(num_cpus=WORKERS, object_store_memory=150 << 20, include_dashboard=False)
    callback = outlast.ray.train.TrainCallback(
        fault_tolerance=FaultToleranceConfig(rank_section_timeouts={"step": 5.0}),
        checkpoint=CheckpointConfig(directory=str(folder / "checkpoints"), save_interval=5),
        run_dir=str(folder / "run"),
    )
    result = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "fault": arguments.fault},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="example",
            storage_path=str(folder / "results"),
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[callback],
        ),
    ).fit()
    ray.shutdown()
    print(f"weights {result.return_value}")


if __name__ == "__main__":
    main()
