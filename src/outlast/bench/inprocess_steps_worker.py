"""The ranks in which ``outlast bench inprocess`` measures what the wrapper costs when nothing is wrong.

Two ranks train the small model of ``outlast bench numerics``. Blocks of steps take turns, in an order drawn anew for
each turn: in a function that the wrapper calls, and in the same function without it, when nothing of the wrapper's
runs. Each block has a process group of its own. Rank 0 prints a line of JSON a round: the median step of each in
milliseconds, what one costs more than the other in percent, and the processor time of what watches a rank.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from outlast import InProcessRestartConfig, clock, env
from outlast.bench.inprocess_worker import HARD_TIMEOUT_S, SOFT_TIMEOUT_S
from outlast.bench.quiet_step_worker import Training
from outlast.inprocess import Wrapper

_NUM_TURNS, _BLOCK, _WARM = 12, 50, 5
"""Blocks of each kind in a round, steps in a block, and steps before them that do not count."""
_WORLD_SIZE = 2
_TIMEOUT = timedelta(seconds=60)


class Blocks:
    """Blocks of steps, in the wrapper or out of it.

    Args:
        rank: This one's.
        port: Of the store that the plain blocks' groups are made with.

    Collective: both ranks, here and in each block.
    """

    def __init__(self, rank: int, port: int) -> None:
        self._rank = rank
        self._store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=_TIMEOUT)
        self._num_groups = 0
        self._batch_size: int | None = None
        self.watching_shares: list[float] = []
        """What the monitor thread and process took of a core, for each block in the wrapper."""
        config = InProcessRestartConfig(soft_timeout=SOFT_TIMEOUT_S, hard_timeout=HARD_TIMEOUT_S)
        self._wrapped = Wrapper(config)(self._in_wrapper)

    def plain(self) -> float:
        """Return the seconds of a step without the wrapper."""
        self._num_groups += 1
        store = PrefixStore(str(self._num_groups), self._store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=_WORLD_SIZE, timeout=_TIMEOUT)
        seconds, _ = self._block()
        return seconds

    def wrapped(self) -> float:
        """Return the seconds of a step in the wrapper."""
        found = self._wrapped()
        assert found is not None, "no rank is a spare here"
        seconds, share = found
        self.watching_shares.append(share)
        return float(seconds)

    def _in_wrapper(self) -> tuple[float, float]:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        return self._block()

    def _block(self) -> tuple[float, float]:
        training = Training(self._batch_size)
        self._batch_size = training.batch.shape[0]
        for _ in range(_WARM):
            training.step()
        watching_ns, begin_ns = _watching_ns(), clock.now_ns()
        for _ in range(_BLOCK):
            training.step()
        taken_ns, watched_ns = clock.now_ns() - begin_ns, _watching_ns() - watching_ns
        del training
        dist.destroy_process_group()
        return taken_ns / 1e9 / _BLOCK, watched_ns / taken_ns


def _watching_ns() -> int:
    """Return the processor time of this process's other Python threads and of its children."""
    others = [thread.native_id for thread in threading.enumerate() if thread is not threading.main_thread()]
    tasks = [Path(f"/proc/self/task/{number}") for number in others]
    for child in psutil.Process().children():
        tasks += Path(f"/proc/{child.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def measure_rounds(num_rounds: int, rank: int, port: int) -> Iterator[dict[str, float]]:
    """Yield what each round gave.

    Collective: both ranks.
    """
    blocks = Blocks(rank, port)
    kinds = {"plain": blocks.plain, "wrapped": blocks.wrapped}
    names, order = list(kinds), random.Random(0)  # the same on both ranks
    for _ in range(num_rounds):
        found_s: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(_NUM_TURNS):
            order.shuffle(names)
            for name in names:
                found_s[name].append(kinds[name]())
        plain_s, wrapped_s = (statistics.median(found_s[name]) for name in ("plain", "wrapped"))
        more_s = statistics.median(a - b for a, b in zip(found_s["wrapped"], found_s["plain"], strict=True))
        yield {
            "plain_ms": plain_s * 1e3,
            "wrapped_ms": wrapped_s * 1e3,
            "wrapped_pct": 100 * more_s / plain_s,
            "watching_cpu_pct": 100 * statistics.median(blocks.watching_shares),
        }
        blocks.watching_shares.clear()


def main() -> None:
    """Measure; arguments: the number of rounds, and a port for the store of the plain blocks."""
    torch.set_num_threads(1)
    rank = env.read_worker().global_rank
    for found in measure_rounds(int(sys.argv[1]), rank, int(sys.argv[2])):
        if rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
