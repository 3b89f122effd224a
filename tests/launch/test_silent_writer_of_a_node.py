"""A node whose checkpoint writer stops responding: its agent replaces the writer, and no checkpoint is lost."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from outlast.incidents import EventKind
from outlast.testing import Cluster
from outlast.testing.ranks import having_argument

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.extended]

WITHIN_S = 300.0
SCRIPT = """
import hashlib, os, pathlib, sys, time
import torch
import torch.distributed as dist
import outlast
from outlast.checkpoint import CheckpointManager
from outlast.errors import CheckpointError

folder, cycle, rank = pathlib.Path(sys.argv[1]), int(os.environ["OUTLAST_CYCLE"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
manager = CheckpointManager(outlast.CheckpointConfig(directory=str(folder / "global"), save_timeout=60.0))
torch.manual_seed(1000 * cycle + rank)
state = {"weight": torch.randn(1 << 12)}

def digest():
    return hashlib.sha256(state["weight"].numpy().tobytes()).hexdigest()[:16]

restored = manager.load_latest(state)
begin = 0 if restored is None else restored.iteration
if restored is not None:
    print(f"LOADED {cycle} {rank} {begin} {digest()} {','.join(restored.tiers)}", flush=True)
for iteration in range(begin + 1, 100000):
    is_last = torch.tensor([(folder / "end").exists()], dtype=torch.int32)
    dist.all_reduce(is_last, dist.ReduceOp.MAX)
    if is_last.item():
        break
    state["weight"] += torch.randn(1 << 12)
    try:
        manager.save(state, iteration, tiers=("memory", "replica")).wait(100)
        print(f"SAVED {cycle} {rank} {iteration} {digest()}", flush=True)
    except CheckpointError as error:
        print(f"FAILED {cycle} {rank} {iteration} {error}", flush=True)
    while iteration == 3 or (folder / f"hold-{cycle}").exists():  # cycle 0 saves three checkpoints and waits
        time.sleep(0.02)
    time.sleep(0.1)
"""


def _writer(cluster: Cluster, node: int) -> psutil.Process:
    children = psutil.Process(cluster.agent(node).pid).children()
    (writer,) = having_argument(children, "outlast.checkpoint.writer")
    return writer


def _saved(cluster: Cluster, cycle: int) -> dict[int, dict[int, str]]:
    """Return the digests of the saved states of a cycle, by iteration and rank."""
    match: dict[int, dict[int, str]] = {}
    for node in range(2):
        for rank, iteration, digest in re.findall(rf"SAVED {cycle} (\d) (\d+) (\w+)", cluster.agent(node).output()):
            match.setdefault(int(iteration), {})[int(rank)] = digest
    return match


def _loaded(cluster: Cluster, cycle: int) -> dict[int, tuple[int, str, str]]:
    """Return iteration, digest and tiers that each rank has loaded in a cycle."""
    cluster.wait_for(lambda event: event.kind == EventKind.CYCLE_STARTED and event.cycle == cycle, timeout_s=WITHIN_S)
    match: dict[int, tuple[int, str, str]] = {}
    for rank in range(2):
        cluster.wait_for(f"LOADED {cycle} {rank} ", timeout_s=WITHIN_S)
    for node in range(2):
        for rank, iteration, digest, tiers in re.findall(
            rf"LOADED {cycle} (\d) (\d+) (\w+) (\S+)", cluster.agent(node).output()
        ):
            match[int(rank)] = int(iteration), digest, tiers
    return match


def test_checkpoints_of_a_stopped_writer_are_loaded_from_replicas(tmp_path: Path) -> None:
    """The writer of node 1 is stopped, replaced with a journal entry, and a worker of node 1 is killed before the
    next save: all ranks load the newest checkpoint, rank 1 from its replica, bit for bit. Later the new writer is
    stopped during saves: training continues, memory is filled again, and a restart loads from memory."""
    (script := tmp_path / "train.py").write_text(SCRIPT)
    with Cluster(script, str(tmp_path), run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=1) as cluster:
        for rank in range(2):
            cluster.wait_for(f"SAVED 0 {rank} 3 ", timeout_s=WITHIN_S)
        match = re.search(r"SAVED 0 (\d) ", cluster.agent(1).output())
        assert match is not None
        lost = int(match[1])  # the rank on node 1: the first agent has rank 0
        first = _writer(cluster, 1)
        first.suspend()
        event = cluster.wait_for(lambda event: event.kind == EventKind.WRITER_ENDED, timeout_s=WITHIN_S)
        assert event is not None
        assert event.node == "node-1"
        assert re.search(rf"writer of node node-1, pid {first.pid} \(state T.*did not respond", event.data["summary"])
        os.kill(cluster.worker_pid(lost), signal.SIGKILL)
        saved, loaded = _saved(cluster, 0)[3], _loaded(cluster, 1)
        tiers = ",".join("replica" if rank == lost else "memory" for rank in range(2))
        assert loaded == {rank: (3, saved[rank], tiers) for rank in range(2)}

        cluster.wait_for(f"SAVED 1 {lost} 5 ", timeout_s=WITHIN_S)
        _writer(cluster, 1).suspend()
        first_ns = event.mono_ns
        cluster.wait_for(
            lambda event: event.kind == EventKind.WRITER_ENDED and event.mono_ns > first_ns, timeout_s=WITHIN_S
        )
        newest = max(_saved(cluster, 1))
        cluster.wait_for(f"SAVED 1 {lost} {newest + 3} ", timeout_s=WITHIN_S)
        (tmp_path / "hold-1").touch()
        os.kill(cluster.worker_pid(lost), signal.SIGKILL)
        loaded = _loaded(cluster, 2)
        assert {tiers for _, _, tiers in loaded.values()} == {"memory,memory"}
        ((iteration, *_),) = {(one[0],) for one in loaded.values()}
        assert iteration >= newest + 3
        saved = _saved(cluster, 1)[iteration]
        assert {rank: one[1] for rank, one in loaded.items() if rank in saved} == saved
        (tmp_path / "end").touch()
        assert cluster.wait(WITHIN_S) == [0, 0], cluster.tails()
