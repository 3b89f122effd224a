"""Run one rank that aborts all its NCCL groups and makes new ones, twice; the argument is ``eager`` or ``lazy``.

Prints a JSON object: the number of groups that each abort found, and the results of the collectives.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from outlast.runtime import device_collectives

DEVICE = torch.device("cuda", 0)


def main() -> None:
    """Make a default group and two more, use them, abort them; and again."""
    torch.cuda.set_device(DEVICE)
    device_collectives.settle_collectives()
    found, sums = [], []
    for _ in range(2):
        dist.init_process_group(
            "nccl",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=100),
            device_id=DEVICE if sys.argv[1] == "eager" else None,
        )
        for group in (None, dist.new_group([0]), dist.new_group([0])):
            number = torch.full((1,), 7.0, device=DEVICE)
            dist.all_reduce(number, group=group)
            sums.append(float(number))
        found.append(device_collectives.abort_collectives())
        device_collectives.await_aborts()
        dist.destroy_process_group()
        found.append(device_collectives.abort_collectives())
    sys.stdout.write(json.dumps({"aborted": found, "sums": sums}) + "\n")


if __name__ == "__main__":
    main()
