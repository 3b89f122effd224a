"""Run one rank with several groups for collectives on its device, in a wrapped function whose first call fails.

Arguments: the fault (``exception``, ``stuck`` or ``running``), and whether the cache is emptied (``on`` or ``off``).
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
"""The number of groups that each abort found, in order."""
abort_collectives = device_collectives.abort_collectives


def abort_and_count() -> int:
    """Abort all groups, and record their number."""
    aborted.append(abort_collectives())
    return aborted[-1]


def print_facts(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def read_variables() -> dict[str, str | None]:
    """Return the current variables that an abort of NCCL needs."""
    return {name: os.environ.get(name) for name in VARIABLES}


def fill_cache() -> None:
    """Leave a large block in the allocator's cache."""
    torch.zeros(BALLAST_BYTES, dtype=torch.uint8, device=DEVICE)


@inprocess.Wrapper(CONFIG)
def train(call: inprocess.Handle) -> float:
    """Reduce over three groups, with the fault in the first call."""
    reserved = torch.cuda.memory_reserved() if ON_GPU else 0
    print_facts(
        call=call.iteration, pid=os.getpid(), variables=read_variables(), reserved_bytes=reserved, aborted=aborted
    )
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
            torch.cuda._sleep(1_000_000_000)  # half a second of work, and collectives that wait for the work
            for group in groups:
                dist.all_reduce(total, group=group, async_op=True)
        if FAULT == "stuck":
            print_facts(stuck=True)
            while True:
                time.sleep(3600)
        raise ValueError("planned")
    return float(total.sum())


def main() -> None:
    """Train, and compare the environment with the original one."""
    if ON_GPU:
        torch.cuda.set_device(0)
        torch.cuda.synchronize()  # create the context here: its creation does not count as progress
    device_collectives.abort_collectives = abort_and_count
    before = read_variables()
    returned = train()
    print_facts(returned=returned, restored=read_variables() == before, aborted=aborted, pid=os.getpid())


if __name__ == "__main__":
    main()
