"""A training script for tests that has all connections at once: a session that replicates, in a wrapped function.

Arguments: a folder, and the number of cycles that end with a failure. Once a checkpoint is committed in a cycle, each
rank creates ``ready-<cycle>-<rank>`` in the folder with the port of the launcher's store, and continues once
``go-<cycle>`` exists; rank 0 first writes the content of the ranks' stores to ``store-<cycle>``.
"""

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore

import outlast
from outlast import inprocess

folder, num_failing = Path(sys.argv[1]), int(sys.argv[2])
cycle, node = int(os.environ["OUTLAST_CYCLE"]), os.environ["GROUP_RANK"]
PATIENCE_S = 200


def launchers_endpoint():
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


launchers_store = launchers_endpoint()


def write_stores():
    """Write all keys and values of the launcher's store and of this call's store."""
    entries = {}
    for host, port in {launchers_store, launchers_endpoint()}:
        store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=60))
        entries.update({f"{port} {key}": store.get(key).decode("latin-1") for key in store.list_keys()})
    path = folder / f"store-{cycle}"
    path.with_suffix(".new").write_text(json.dumps(entries))
    path.with_suffix(".new").rename(path)


config = outlast.InProcessRestartConfig(granularity="rank", soft_timeout=200, hard_timeout=220, barrier_timeout=240)


@inprocess.Wrapper(config)
def train(call: inprocess.Handle):
    checkpoint = outlast.CheckpointConfig(
        directory=str(folder / "global"),
        local_directory=str(folder / f"local-{node}"),
        save_interval=1,
        replication=True,
    )
    with outlast.init(outlast.Config(checkpoint=checkpoint, in_process=True)) as run:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = {"model": model, "optimizer": optimizer}
        for iteration in run.steps(state, total=3 * (cycle + 1)):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if iteration == 3 * cycle + 1:
                if run.global_rank == 0:
                    write_stores()
                ready = folder / f"ready-{cycle}-{run.global_rank}"
                ready.with_suffix(".new").write_text(f"{launchers_store[1]}")
                ready.with_suffix(".new").rename(ready)
                deadline = time.monotonic() + PATIENCE_S
                while not (folder / f"go-{cycle}").exists():
                    assert time.monotonic() < deadline, "nobody said go"
                    time.sleep(0.05)


train()
if cycle < num_failing:
    sys.exit(3)
