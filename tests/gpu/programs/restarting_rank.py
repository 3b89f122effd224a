"""One rank with several groups for collectives on its device, in a wrapped function that fails in its first call.

Arguments: what happens (``exception``, ``stuck`` or ``running``), and whether the cache is emptied (``on`` or ``off``).
It prints a JSON object for each call, and one at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outlast import InProcessRestartConfig, inprocess
from outlast.runtime import device_collectives
from outlast.runtime.device import training_backend

FAULT, EMPTIES = sys.argv[1], sys.argv[2] == "on"
BALLAST_BYTES = 512 << 20
VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS", "NCCL_NVLS_ENABLE")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
SOFT_S, HARD_S = (12.0, 40.0) if FAULT == "stuck" else (60.0, 90.0)
CONFIG = InProcessRestartConfig(soft_timeout=SOFT_S, hard_timeout=HARD_S, empty_cuda_cache=EMPTIES)

aborted: list[int] = []
"""How many groups each abort found, in the order of the aborts."""
abort_collectives = device_collectives.abort_collectives


def abort_and_count() -> int:
    """Abort, and note what that returns."""
    aborted.append(abort_collectives())
    return aborted[-1]


def say(**facts: Any) -> None:
    """Print facts as one line."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def read_variables() -> dict[str, str | None]:
    """Return what NCCL needs to be aborted, as it is now."""
    return {name: os.environ.get(name) for name in VARIABLES}


def fill_cache() -> None:
    """Leave a large block to the allocator's cache."""
    torch.zeros(BALLAST_BYTES, dtype=torch.uint8, device=DEVICE)


@inprocess.Wrapper(CONFIG)
def train(call: inprocess.Handle) -> float:
    """Add up over three groups, and meet with the fault in the first call."""
    reserved = torch.cuda.memory_reserved() if ON_GPU else 0
    say(call=call.iteration, pid=os.getpid(), variables=read_variables(), reserved_bytes=reserved, aborted=aborted)
    dist.init_process_group(training_backend(), timeout=timedelta(seconds=600))
    groups = [None, dist.new_group([0]), dist.new_group([0])]
    total = torch.zeros(4, device=DEVICE)
    for number, group in enumerate(groups):
        part = torch.full((4,), float(10**number), device=DEVICE)
        dist.all_reduce(part, group=group)
        total += part
    if call.iteration == 0:
        fill_cache()
        if FAULT == "running" and ON_GPU:
            torch.cuda._sleep(1_000_000_000)  # half a second of work, and collectives that wait for it
            for group in groups:
                dist.all_reduce(total, group=group, async_op=True)
        if FAULT == "stuck":
            say(stuck=True)
            while True:
                time.sleep(3600)
        raise ValueError("planned")
    return float(total.sum())


def main() -> None:
    """Train, and compare the environment with that of before."""
    if ON_GPU:
        torch.cuda.set_device(0)
        torch.cuda.synchronize()  # the context is made here: it counts as no progress while it is made
    device_collectives.abort_collectives = abort_and_count
    before = read_variables()
    returned = train()
    say(returned=returned, restored=read_variables() == before, aborted=aborted, pid=os.getpid())


if __name__ == "__main__":
    main()
