"""Train on one device that the ranks of several nodes share, over gloo; checkpoints are in memory and in replicas.

NCCL refuses two ranks on one GPU, so the group is made before the session. Arguments: a folder for the result, and
whether ranks wait in the first cycle for the loss of a node (``lose`` or ``none``).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import outlast

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2]
TOTAL, WAIT_AT, WIDTH, WAITS_S = 14, 10, 640, 100.0
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def wait_for_the_loss() -> None:
    """Wait until the loss of a node ends this process."""
    sys.stdout.write("waits for the loss of a node\n")
    sys.stdout.flush()
    end_s = time.monotonic() + WAITS_S
    while time.monotonic() < end_s:
        time.sleep(0.05)
    raise TimeoutError("no node was lost")


def main() -> None:
    """Train to the end; rank 0 writes the digest of the weights and the losses."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    saves = outlast.CheckpointConfig(
        directory=str(FOLDER / "saved"),
        save_interval=1000,
        non_persistent_save_interval=4,
        non_persistent_ckpt_type="in_memory",
        overlap_staging=True,
    )
    with outlast.init(outlast.Config(checkpoint=saves)) as run:
        torch.manual_seed(1)
        layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
        model = torch.nn.Sequential(*layers).to(DEVICE)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {"model": model, "optim": optim, "losses": []}
        for iteration in run.steps(state, total=TOTAL):
            if iteration == WAIT_AT and FAULT == "lose" and os.environ.get("OUTLAST_CYCLE") == "0":
                wait_for_the_loss()
            numbers = torch.Generator().manual_seed(1000 * run.global_rank + iteration)
            optim.zero_grad()
            loss = model(torch.randn(16, WIDTH, generator=numbers).to(DEVICE)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= run.world_size
            optim.step()
            state["losses"].append(loss.item())
        if run.global_rank == 0:
            weights = b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())
            result = {"weights": hashlib.sha256(weights).hexdigest(), "losses": state["losses"]}
            (FOLDER / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
