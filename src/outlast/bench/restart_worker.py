"""What ``outlast bench restart`` launches: plain torch.distributed, the same under both launchers.

In cycle 0 every rank says that it is ready and goes on reducing until it is killed or its peers break off. In a later
cycle each says when it had begun, had its group, and had its first all-reduce, and ends.
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


def main() -> None:
    """Run one rank; argument: the folder where marks go."""
    dist.init_process_group("gloo")
    joined_ns = time.monotonic_ns()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    reduced_ns = time.monotonic_ns()

    from outlast.env import read_worker  # not before: only what any script does is measured

    worker = read_worker()
    path = os.path.join(sys.argv[1], f"{worker.cycle}-{worker.global_rank}.json")
    mark = {"pid": os.getpid(), "begun_ns": _BEGUN_NS, "joined_ns": joined_ns, "reduced_ns": reduced_ns}
    if worker.cycle == 0:
        _reduce_for(_WARMUP_S, tensor)
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(mark, file)
    os.replace(f"{path}.part", path)
    if worker.cycle == 0:
        _reduce_for(_LONGEST_S, tensor)
    dist.barrier()
    dist.destroy_process_group()


def _reduce_for(seconds: float, tensor: torch.Tensor) -> None:
    """Reduce until rank 0's clock says that it is enough."""
    end_ns = time.monotonic_ns() + int(seconds * 1e9)
    go_on = torch.ones(1)
    while go_on.item():
        dist.all_reduce(tensor)
        go_on.fill_(float(dist.get_rank() == 0 and time.monotonic_ns() < end_ns))
        dist.all_reduce(go_on)


if __name__ == "__main__":
    main()
