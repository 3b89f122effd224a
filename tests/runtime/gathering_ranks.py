"""Ranks that gather bytes from each other, also after the death of one rank. Argument: the scenario."""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

from outlast.runtime.process_groups import Group, find_first, gather_bytes, gather_on_first

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
group = Group.open(timeout_s=60).open_group
gathered = [bytes([one]) * one * 3000 for one in range(world_size)]
if sys.argv[1] == "all":
    assert gather_bytes(group, gathered[rank]) == gathered
    assert gather_bytes(group, b"") == [b""] * world_size
    assert gather_on_first(group, gathered[rank]) == (gathered if rank == 0 else None)
    assert find_first(group, b"%d" % rank if rank >= 2 else b"") == b"2"
    assert find_first(group, b"") == b""
    print("gathered", flush=True)
    dist.destroy_process_group()
else:
    dist.barrier()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        gather_bytes(group, gathered[rank])
    except RuntimeError:
        print("missed", flush=True)
        os._exit(3)
