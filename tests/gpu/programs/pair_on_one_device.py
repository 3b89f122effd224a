"""Train two ranks on the same device, over gloo, in a wrapped function; one of them fails once.

NCCL rejects two ranks on one GPU, so the group is made before the session. Arguments: a folder, the fault (``none``,
``raise`` or ``kill``), and how many ranks are active. Each rank prints a JSON object for each call, and one at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import outlast
from outlast import inprocess

FOLDER, FAULT, ACTIVE = sys.argv[1], sys.argv[2], int(sys.argv[3])
TOTAL, FAULT_AT, VICTIM = 12, 6, 1
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CONFIG = outlast.InProcessRestartConfig(
    active_world_size=ACTIVE, granularity="rank", soft_timeout=60, hard_timeout=90, barrier_timeout=100
)


def print_facts(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def make_model() -> torch.nn.Module:
    """Return the model; its dropout draws from the device's random numbers."""
    torch.manual_seed(1)
    layers = (torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))
    return torch.nn.Sequential(*layers).to(DEVICE)


def average(model: torch.nn.Module) -> None:
    """Average the gradients, in an order that a restart does not change."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of the weights."""
    return hashlib.sha256(b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())).hexdigest()


@inprocess.Wrapper(CONFIG)
def train(call: inprocess.Handle) -> dict[str, Any]:
    """Train to the end, unless the fault comes."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    saves = outlast.CheckpointConfig(directory=f"{FOLDER}/saved", save_interval=4)
    config = outlast.Config(checkpoint=saves, in_process=True, run_dir=f"{FOLDER}/run", seed=3)
    with outlast.init(config) as run:
        model = call.keep("model", make_model)
        optim = call.keep("optim", lambda: torch.optim.AdamW(model.parameters(), lr=0.01))
        torch.manual_seed(100 + run.global_rank)  # each rank drops different units
        losses: list[float] = []
        state = {"model": model, "optim": optim, "losses": losses}
        first = None
        for iteration in run.steps(state, total=TOTAL):
            if first is None:
                first = iteration
                print_facts(call=call.iteration, begins=iteration, rank=run.global_rank, pid=os.getpid())
            numbers = torch.Generator().manual_seed(1000 * run.global_rank + iteration)
            inputs = torch.randn(16, 64, generator=numbers).to(DEVICE)
            optim.zero_grad()
            loss = model(inputs).square().mean()
            if iteration == FAULT_AT and call.iteration == 0 and FAULT != "none":
                dist.barrier()  # no rank is still in the previous iteration
                if run.global_rank == VICTIM and FAULT == "raise":
                    raise ValueError("planned")
                if run.global_rank == VICTIM:
                    os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            average(model)
            optim.step()
            state["losses"].append(loss.item())
        return {"rank": run.global_rank, "weights": digest(model), "losses": state["losses"]}


def main() -> None:
    """Train and print the result; an unused spare has none."""
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        torch.cuda.synchronize()  # create the context here, so that peers do not wait for it in a collective
    returned = train()
    print_facts(returned=returned, pid=os.getpid())


if __name__ == "__main__":
    main()
