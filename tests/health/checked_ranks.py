"""A rank that checks its process group, writes the results to a file, and uses the training's group afterwards."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from outlast.health import ProcessGroupCheck, check_process_group, process_group

folder, kind, timeout_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
training = dist.new_group([0, 1])
found = [check_process_group(timeout_s)] if kind == "alive" else []
with ProcessGroupCheck(timeout_s=timeout_s) as check:
    found.append(check.run())
    print("ready", flush=True)
    if kind in ("killed", "stopped") and rank == 2:
        while True:
            time.sleep(1)
    if kind in ("killed", "stopped"):
        while not (folder / "go").exists():
            time.sleep(0.01)
    if kind == "wrong" and rank == 1:
        right = process_group.expected_answer
        process_group.expected_answer = lambda who, number: right(who, number) + (who == rank)
    found.append(check.run())
    if kind != "wrong":
        found.append(check.run())
if rank < 2:
    number = torch.ones(1)
    dist.all_reduce(number, group=training)
    assert int(number) == 2, "the training's group was poisoned"
(folder / f"found-{rank}.json").write_text(
    json.dumps([[one.status, one.reason, one.facts, one.took_s] for one in found])
)
print("done", flush=True)
if kind in ("killed", "stopped"):
    import os

    os._exit(0)  # gloo would wait for the absent rank
dist.destroy_process_group()
