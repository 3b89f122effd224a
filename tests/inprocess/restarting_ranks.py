"""Ranks that train a small model in a wrapped function, with an injected fault.

Arguments: the folder for the reports of each rank, the fault, the initial rank that has it, and the number of active
ranks.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from outlast import InProcessRestartConfig, inprocess

FOLDER, FAULT, VICTIM, ACTIVE = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
NUM_STEPS, FAULT_STEP = 12, 5
INITIAL_RANK = int(os.environ["RANK"])
HANGS = FAULT in ("sleep", "swallow", "stop", "gil")
SOFT_S, HARD_S = (6.0, 12.0) if HANGS else (60.0, 90.0)
CONFIG = InProcessRestartConfig(soft_timeout=SOFT_S, hard_timeout=HARD_S, granularity="rank", active_world_size=ACTIVE)


def report(*words: object) -> None:
    with (FOLDER / f"rank-{INITIAL_RANK}").open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def inject() -> None:
    if FAULT == "exception":
        raise ValueError("planned")
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "sleep":
        time.sleep(3600)
    if FAULT == "gil":
        mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex)
        lock(mutex)  # never returns, with the interpreter's lock held; no signal ends it
    if FAULT == "swallow":
        while True:
            try:
                time.sleep(3600)
            except:  # noqa: E722
                pass


@inprocess.Wrapper(CONFIG)
def train(seed: int, call: inprocess.Handle) -> float:
    report("call", call.iteration, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "pid", os.getpid())
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    torch.manual_seed(seed)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        if FAULT != "nothing" and step == FAULT_STEP and call.iteration == 0 and INITIAL_RANK == VICTIM:
            report("strikes")
            inject()
        inputs = torch.full((4, 64), float(step + dist.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # DDP imports it too: its peers would time out while a spare imports it
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    before = [os.environ.get(name) for name in names]
    report("returned", train(7))
    assert [os.environ.get(name) for name in names] == before, "the environment is not as it was"
