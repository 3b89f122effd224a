"""Two ranks that measure together, over gloo: the first one starts the second."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from outlast.bench.measuring import plain_environment

__all__ = ["TIMEOUT_S", "WORLD_SIZE", "measure_together"]

WORLD_SIZE = 2
TIMEOUT_S = 60.0


def measure_together(module: str, measure_rounds: Callable[[int], Iterator[Mapping[str, float]]]) -> None:
    """Run as one of the ranks; the first one prints a line of JSON a round.

    The arguments of the process are the number of rounds, and, for the second rank, the port of the first one's store.

    Args:
        module: Name of the module that calls this when it is run.
        measure_rounds: Yields what each round gave. Collective: both ranks.

    Blocks: until all rounds are done.
    """
    torch.set_num_threads(1)
    num_rounds, port = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    rank = 1 if port else 0
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", port, is_master=not port, wait_for_workers=False, timeout=timeout)
    other = None
    if rank == 0:
        command = [sys.executable, "-m", module, str(num_rounds), str(store.port)]
        other = subprocess.Popen(command, env=plain_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
        for found in measure_rounds(num_rounds):
            if rank == 0:
                print(json.dumps(found), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        if other is not None:
            other.wait(TIMEOUT_S)
    finally:
        if other is not None:
            other.kill()
            other.wait()
