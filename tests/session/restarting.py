"""A training script in a wrapped function, for tests: arguments have the injected fault, files have the reports."""

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

import outlast
from outlast import inprocess
from outlast.preemption.signals import SignalWatch

folder, options = sys.argv[1], json.loads(sys.argv[2])
FAULT, AT, ON = options.get("fault", ""), options.get("at", 7), options.get("on", 1)
TOTAL, NUM_FAULTS = options.get("total", 16), options.get("num_faults", 1)


def report(**facts):
    with open(f"{folder}/said-{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))


def average(model):
    """Average the gradients in a fixed order, because DDP's first step after a restart has another order of sums."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class Sampler:
    """Draws from a generator and saves its state."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(100 + rank)

    def next(self):
        return torch.randn(4, 8, generator=self.generator)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


settled = {}
"""The counts of this process after the fifth restart."""


def open_files():
    """Return the targets of this process's descriptors; a socket with its family, its own address and its peer's."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as copy:
                    name = f"socket {copy.family.name} {copy.type.name} {copy.getsockname()!r}"
                    with contextlib.suppress(OSError):
                        name += f" to {copy.getpeername()!r}"
            found.append(name)
    return sorted(found)


def count_held():
    """Count descriptors and threads once they are no more than before, or once they do not change: a connection
    exists until its peer has closed it too."""
    gives_up = time.monotonic() + 20
    last, since = {}, time.monotonic()
    while True:
        now = {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "tasks": len(os.listdir("/proc/self/task")),
        }
        if now != last:
            last, since = now, time.monotonic()
        is_settled = all(now[kind] <= settled[kind] for kind in now) if settled else time.monotonic() > since + 1
        if is_settled or time.monotonic() > gives_up:
            settled.update(now)
            return now
        time.sleep(0.01)


def delay(optimizer, *_):
    optimizer._optimizer_step_pre_hooks.popitem()
    time.sleep(0.3)


def fail_once(optimizer, *_):
    optimizer._optimizer_step_post_hooks.clear()
    raise ValueError("planned")


def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


if options.get("closes_slowly"):  # a rank that leaves because a peer failed is interrupted there
    restore_handlers = SignalWatch.restore

    def restore_slowly(watch):
        restore_handlers(watch)
        time.sleep(0.2)

    SignalWatch.restore = restore_slowly

config = outlast.InProcessRestartConfig(
    active_world_size=options.get("active"), granularity="rank", soft_timeout=60, hard_timeout=90
)


@inprocess.Wrapper(config)
def train(call: inprocess.Handle):
    checkpoint = None
    if options.get("saves", True):
        asynchronous = FAULT == "raise" and options.get("keeps", True)  # a checkpoint to load is committed
        checkpoint = outlast.CheckpointConfig(directory=f"{folder}/global", save_interval=5, async_save=asynchronous)
    settings = outlast.Config(checkpoint=checkpoint, in_process=True, run_dir=f"{folder}/run", seed=3)
    with outlast.init(settings) as run:
        keeps = options.get("keeps", True)
        model = call.keep("model", make_model) if keeps else make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if keeps:
            optimizer = call.keep("optimizer", lambda: optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        sampler = Sampler(run.global_rank)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler, "seen": []}
        begins = None
        for iteration in run.steps(state, total=TOTAL):
            if begins is None:
                begins = iteration
                report(call=call.iteration, begins=iteration, rank=run.global_rank, pid=os.getpid())
                if call.iteration >= 5 and call.iteration in (5, NUM_FAULTS):
                    dist.barrier()  # all ranks have connected
                    report(call=call.iteration, rank=run.global_rank, held=count_held(), files=open_files())
            is_fatal = call.iteration < NUM_FAULTS and iteration == AT + call.iteration
            is_injected = is_fatal and run.global_rank == ON
            noise = random.random() + np.random.random()
            optimizer.zero_grad()
            loss = (model(sampler.next()) * (1 + noise)).square().mean()
            if is_fatal and not options.get("others_dawdle"):
                dist.barrier()  # no rank is still in the iteration before
            if is_injected and FAULT == "raise":
                raise ValueError("planned")
            if is_injected and FAULT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            average(model)
            if FAULT == "raise" and options.get("others_dawdle") and iteration == AT - 1 and run.global_rank != ON:
                optimizer.register_step_pre_hook(delay)
            if is_injected and FAULT == "torn":
                optimizer.register_step_post_hook(fail_once)
            optimizer.step()
            schedule.step()
            state["seen"].append(iteration)
            if is_injected and FAULT == "late":
                raise ValueError("planned")
    assert state["seen"] == list(range(TOTAL)), state["seen"]
    report(call=call.iteration, digest=digest(model), rate=optimizer.param_groups[0]["lr"])


train()
