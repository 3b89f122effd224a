"""A rank of ``outlast bench inprocess``: a function that is restarted in process, and fails on purpose.

Arguments: the library (``outlast`` or ``nvrx``), the folder for what it marks, and the plan as JSON: ``faults``, a list
of kind and rank for the function's first call, its second, and so on; ``active_world_size``; ``group_timeout_s``;
``port`` of a store that the peer needs. Every mark is a line of JSON with a time of the monotonic clock.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from outlast import clock, env

__all__ = ["HARD_TIMEOUT_S", "SOFT_TIMEOUT_S"]

SOFT_TIMEOUT_S, HARD_TIMEOUT_S = 2.0, 4.0
_NUM_STEPS = 60
_FAULT_STEP = 20
_STEP_S = 0.002


class Marks:
    """What a rank writes down, with the time."""

    def __init__(self, folder: Path, initial_rank: int) -> None:
        self._file = os.open(folder / f"marks-{initial_rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._initial_rank = initial_rank

    def __call__(self, name: str, iteration: int, **facts: Any) -> None:
        """Write a mark."""
        line = {"mark": name, "iteration": iteration, "at_ns": clock.now_ns(), "initial_rank": self._initial_rank}
        os.write(self._file, f"{json.dumps({**line, 'pid': os.getpid(), **facts})}\n".encode())


def do_fault(kind: str) -> None:
    """Fail in one way; only an exception comes back from here."""
    if kind == "exception":
        raise RuntimeError("the benchmark's own fault")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "gil":
        _hold_interpreter()
    elif kind == "sleep":
        time.sleep(3600)
    else:
        raise ValueError(f"unknown fault {kind!r}")


def _hold_interpreter() -> None:
    """Wait for ever without letting go of the interpreter's lock; no signal ends the wait for a mutex."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


class Training:
    """The function: all-reduces after one another, and a fault where the plan says so."""

    def __init__(self, marks: Marks, plan: Mapping[str, Any]) -> None:
        self._marks, self._plan = marks, plan
        self._process = psutil.Process()

    def run(self, iteration: int, store: Store | None = None) -> None:
        """Run one call of the function."""
        place = env.read_worker()
        self._marks("entered", iteration, rank=place.global_rank)
        faults = self._plan["faults"]
        kind, victim = faults[iteration] if iteration < len(faults) else ("none", -1)
        timeout = timedelta(seconds=self._plan["group_timeout_s"])
        if store is None:
            dist.init_process_group("gloo", timeout=timeout)
        else:
            dist.init_process_group(
                "gloo", timeout=timeout, store=store, rank=place.global_rank, world_size=place.world_size
            )
        weights = torch.zeros(1 << 12)
        for step in range(_NUM_STEPS):
            gradient = torch.full_like(weights, 0.1 * (place.global_rank + 1) * (step + 1))
            if step == _FAULT_STEP and place.global_rank == victim:
                self._marks("fault", iteration, rank=place.global_rank, kind=kind)
                do_fault(kind)
            dist.all_reduce(gradient)
            weights += gradient / 7
            if step == 0:
                self._marks("stepped", iteration, rank=place.global_rank, **self._resources())
            time.sleep(_STEP_S)
        self._marks("done", iteration, rank=place.global_rank, weights=weights.double().sum().item())

    def _resources(self) -> dict[str, int]:
        return {
            "rss_bytes": self._process.memory_info().rss,
            "num_fds": self._process.num_fds(),
            "num_threads": self._process.num_threads(),
        }


def wrap_ours(training: Training, plan: Mapping[str, Any]) -> Callable[[], object]:
    """Return the function in outlast's wrapper."""
    from outlast import InProcessRestartConfig
    from outlast.inprocess import Handle, Wrapper

    config = InProcessRestartConfig(
        active_world_size=plan["active_world_size"],
        granularity="rank",
        soft_timeout=SOFT_TIMEOUT_S,
        hard_timeout=HARD_TIMEOUT_S,
    )

    def function(handle: Handle) -> None:
        training.run(handle.iteration)

    function.__annotations__["handle"] = Handle
    wrapped: Callable[[], object] = Wrapper(config)(function)
    return wrapped


def wrap_nvrx(training: Training, plan: Mapping[str, Any]) -> Callable[[], object]:
    """Return the function in the wrapper of nvidia-resiliency-ext, its intervals as short as ours need to be."""
    import importlib

    inprocess = importlib.import_module("nvidia_resiliency_ext.inprocess")
    ranks = importlib.import_module("nvidia_resiliency_ext.inprocess.rank_assignment")
    port = int(env.environ()["MASTER_PORT"])

    def function(call: Any = None) -> None:
        place = env.read_worker()
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=place.global_rank == 0,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )
        training.run(call.iteration, PrefixStore(str(call.iteration), store))

    function.__annotations__["call"] = inprocess.CallWrapper
    tenth, one = timedelta(seconds=0.1), timedelta(seconds=1)
    wrapped: Callable[[], object] = inprocess.Wrapper(
        store_kwargs={"host_name": "127.0.0.1", "port": plan["port"]},
        rank_assignment=inprocess.Compose(ranks.MaxActiveWorldSize(plan["active_world_size"]), ranks.FillGaps()),
        monitor_thread_interval=tenth,
        monitor_process_interval=tenth,
        heartbeat_interval=tenth,
        progress_watchdog_interval=tenth,
        last_call_wait=tenth,
        heartbeat_timeout=one * HARD_TIMEOUT_S,
        soft_timeout=one * SOFT_TIMEOUT_S,
        hard_timeout=one * HARD_TIMEOUT_S,
        termination_grace_time=tenth,
    )(function)
    return wrapped


def main() -> None:
    """Run the function until it is done."""
    library, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    training = Training(Marks(folder, env.read_worker().global_rank), plan)
    wrap = {"outlast": wrap_ours, "nvrx": wrap_nvrx}[library]
    wrap(training, plan)()


if __name__ == "__main__":
    main()
