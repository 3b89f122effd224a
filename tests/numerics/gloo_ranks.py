"""Ranks of a gloo group as real processes, each of which runs functions of a module and reports their results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from outlast.testing import RankProcesses

TIMEOUT_S = 200.0
RESULTS_PREFIX = "told: "


def run_ranks(module: str, functions: Sequence[str], world_size: int) -> list[dict[str, Any]]:
    """Return what each ``module.function(rank)`` returned, by its name, for every rank in order.

    Args:
        module: A module in the folder of this one.
        functions: Its functions, called one after the other once ``torch.distributed`` is up.
        world_size: Number of ranks; each is a separate node, ``node-<rank>``.
    """
    nodes = [f"node-{rank}" for rank in range(world_size)]
    with RankProcesses(__file__, module, *functions, world_size=world_size, nodes=nodes) as ranks:
        codes = ranks.wait(TIMEOUT_S)
        texts = [ranks.output(rank) for rank in range(world_size)]
    assert codes == [0] * world_size, "\n".join(text[-3000:] for text in texts)
    results = [next(line for line in text.splitlines() if line.startswith(RESULTS_PREFIX)) for text in texts]
    return [json.loads(line.removeprefix(RESULTS_PREFIX)) for line in results]


def _main() -> None:
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = importlib.import_module(sys.argv[1])
    results = {name: getattr(module, name)(dist.get_rank()) for name in sys.argv[2:]}
    sys.stdout.write(f"\n{RESULTS_PREFIX}{json.dumps(results)}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
