"""What ``outlast bench restart`` launches: a script of its own, as all that it imports is measured.

With the folder for marks alone it is plain torch.distributed, the same under both launchers. In cycle 0 every rank
writes that it is ready and continues to reduce until it is killed or a peer disconnects. In a later cycle each writes
when it had begun, had its group, and had its first all-reduce, and ends.

With a number of cycles too it is two ranks in sections, rank 1 in one that does not end, which is stopped in so many
cycles; the one after them ends at once.
"""

import time

_BEGUN_NS = time.monotonic_ns()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

_WARMUP_S = 0.3
_LONGEST_S = 90.0
_LONGEST_HANG_S = 60.0


def reduce(folder: str) -> None:
    """Run one rank that is killed, or restarted after that."""
    dist.init_process_group("gloo")
    joined_ns = time.monotonic_ns()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    reduced_ns = time.monotonic_ns()

    from outlast.env import read_worker  # not before: only what any script does is measured

    worker = read_worker()
    mark = {"pid": os.getpid(), "begun_ns": _BEGUN_NS, "joined_ns": joined_ns, "reduced_ns": reduced_ns}
    if worker.cycle == 0:
        _reduce_for(_WARMUP_S, tensor)
    _write_mark(folder, worker.cycle, worker.global_rank, mark)
    if worker.cycle == 0:
        _reduce_for(_LONGEST_S, tensor)
    dist.barrier()
    dist.destroy_process_group()


def _reduce_for(seconds: float, tensor: torch.Tensor) -> None:
    """Reduce until rank 0's clock has come to the end."""
    end_ns = time.monotonic_ns() + int(seconds * 1e9)
    go_on = torch.ones(1)
    while go_on.item():
        dist.all_reduce(tensor)
        go_on.fill_(float(dist.get_rank() == 0 and time.monotonic_ns() < end_ns))
        dist.all_reduce(go_on)


def hang(folder: str, num_cycles: int) -> None:
    """Run one rank of those that are stopped in a section."""
    import threading

    from outlast.monitor import RankMonitor

    monitor = RankMonitor()
    worker = monitor.env
    if worker.cycle >= num_cycles:
        return
    never = threading.Event()
    if worker.global_rank == 1:
        entered_ns = time.monotonic_ns()
        with monitor.section("step"):
            _write_mark(folder, worker.cycle, worker.global_rank, {"pid": os.getpid(), "entered_ns": entered_ns})
            never.wait(_LONGEST_HANG_S)
    end_ns = time.monotonic_ns() + int(_LONGEST_HANG_S * 1e9)
    while time.monotonic_ns() < end_ns:
        with monitor.section("step"):
            never.wait(0.05)


def _write_mark(folder: str, cycle: int, rank: int, mark: dict[str, int]) -> None:
    path = os.path.join(folder, f"{cycle}-{rank}.json")
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(mark, file)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        hang(sys.argv[1], int(sys.argv[2]))
    else:
        reduce(sys.argv[1])
