"""Ranks of a gloo group as real processes, each running functions of a module and telling what it found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

TIMEOUT_S = 80.0
TOLD = "told: "


def run_ranks(module: str, functions: Sequence[str], world_size: int) -> list[dict[str, Any]]:
    """Return what each ``module.function(rank)`` returned, by its name, for every rank in order.

    Args:
        module: A module beside this one.
        functions: Its functions, called one after the other once ``torch.distributed`` is up.
        world_size: Number of ranks; every one is a node of its own, ``node-<rank>``.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        # Not pipes: a full one would stop a rank, and so all of them.
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(world_size)]
        ranks = [
            subprocess.Popen(
                [sys.executable, os.fspath(Path(__file__)), module, *functions],
                env={**os.environ, **common, "RANK": str(rank), "OUTLAST_NODE": f"node-{rank}", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            codes = [rank.wait(TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        texts = [(output.seek(0), output.read().decode())[1] for output in outputs]
    assert codes == [0] * world_size, "\n".join(text[-3000:] for text in texts)
    told = [next(line for line in text.splitlines() if line.startswith(TOLD)) for text in texts]
    return [json.loads(line.removeprefix(TOLD)) for line in told]


def _main() -> None:
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = importlib.import_module(sys.argv[1])
    told = {name: getattr(module, name)(dist.get_rank()) for name in sys.argv[2:]}
    print(f"\n{TOLD}{json.dumps(told)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
