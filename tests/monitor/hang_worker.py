"""A rank of a DDP-like loop that hangs on purpose; run as a script by ``test_hang_root_cause.py``.

Arguments: board, rendezvous file, rank that hangs, kind of hang, iteration of it.
"""

import ctypes
import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from outlast.env import WorkerEnv
from outlast.monitor.rank_monitor import PlacedRankMonitor


def load_batch(kind: str) -> torch.Tensor:
    if kind == "sleep":
        time.sleep(3600)  # the data loader sleeps
    elif kind == "gil":
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)  # a deadlock in C that holds the GIL
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)  # stopped from outside
    return torch.ones(8)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    board, rendezvous, bad_rank, kind, at = sys.argv[1:]
    torch.set_num_threads(1)
    monitor = PlacedRankMonitor(WorkerEnv(global_rank=rank, local_rank=rank, board=board))
    with monitor.section("setup"):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=200),
        )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    for iteration in range(1000):
        monitor.set_iteration(iteration)
        hangs = rank == int(bad_rank) and iteration == int(at)
        with monitor.section("step"):
            if kind == "mismatch" and iteration == int(at) - 1:
                while not os.path.exists(f"{rendezvous}-go"):
                    time.sleep(0.02)  # all ranks are equally slow
            batch = load_batch(kind if hangs else "none")
            if kind == "mismatch" and hangs:
                dist.broadcast(batch, src=0)
            model(batch).sum().backward()
            dist.all_reduce(batch)
        monitor.heartbeat()


main()
