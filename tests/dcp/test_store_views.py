"""All nodes see the same checkpoints in an object store, or nothing is loaded and nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server

from outlast.testing import RankProcesses

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.extended]
BUCKET = "bucket"

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from outlast.checkpoint.manager import open_manager
from outlast.config import CheckpointConfig
from outlast.env import read_worker
from outlast.errors import OutlastError

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo", rank=rank, world_size=world)
state, options = {"weight": torch.full((64, 64), float(rank))}, json.loads(sys.argv[1])
outcome = {}
try:
    manager = open_manager(CheckpointConfig(save_timeout=100.0, **options), env=read_worker())
    restored = manager.load_latest(state)
    outcome["loaded"] = None if restored is None else restored.iteration
    if "load" not in options:
        iteration = 10 + (outcome["loaded"] or 0)
        manager.save(state, iteration).wait(100)
        outcome["saved"] = iteration
    manager.close()
except OutlastError as error:
    outcome["error"] = f"{type(error).__name__}: {error}"
sys.stdout.write(json.dumps(outcome) + "\\n")
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, S3Server]]:
    """Two stores with a bucket of the same name."""
    folder = tmp_path_factory.mktemp("s3")
    with ExitStack() as stack:
        found = []
        for name in ("one", "two"):
            found.append(S3Server(BUCKET, folder / name))
            stack.callback(found[-1].kill)
        yield found[0], found[1]


def start(servers: list[S3Server], **options: Any) -> list[dict[str, Any]]:
    """Run a rank on each node, each with its own store; return what came of it."""
    places = [{"OUTLAST_NODES": "1", **server.environment} for server in servers]
    nodes = [f"node-{number}" for number in range(len(servers))]
    with RankProcesses(
        SCRIPT, json.dumps(options), world_size=len(servers), code=True, nodes=nodes, environments=places
    ) as ranks:
        codes = ranks.wait_until_gone(300)
        outputs = [ranks.output(rank) for rank in range(len(servers))]
    assert codes == [0] * len(servers), outputs
    return [json.loads(next(line for line in output.splitlines() if line.startswith("{"))) for output in outputs]


def test_a_node_with_another_endpoint_ends_the_start(servers: tuple[S3Server, S3Server], tmp_path: Path) -> None:
    """Where rank 0's endpoint has no checkpoint and another node's has some, all ranks refuse; so they do for a
    directory to load from. The line names both nodes, and the stores are as they were."""
    empty, full = servers
    url = f"s3://{BUCKET}/run"
    assert start([full, full], directory=url) == [{"loaded": None, "saved": 10}] * 2
    before = full.objects()
    for options in ({"directory": url}, {"load": url, "local_directory": str(tmp_path)}):
        for told in start([empty, full], **options):
            assert told.get("error", "").startswith("ConfigError"), told
            assert "is not the same on all nodes" in told["error"]
            assert f"node node-0 sees no checkpoint in {url}" in told["error"]
            assert f"node node-1 sees 1 checkpoint (iteration 10) in {url}" in told["error"]
            assert "endpoint" in told["error"]
    assert full.objects() == before
    assert not empty.objects()
    assert start([full, full], directory=url) == [{"loaded": 10, "saved": 20}] * 2


def test_a_node_that_cannot_read_the_store_ends_the_start(servers: tuple[S3Server, S3Server], tmp_path: Path) -> None:
    """Where another node than that of rank 0 cannot reach its endpoint, nothing is trained that could not be saved."""
    gone = S3Server(BUCKET, tmp_path / "gone")
    gone.kill()
    for told in start([servers[0], gone], directory=f"s3://{BUCKET}/unreachable"):
        assert told.get("error", "").startswith("Unavailable"), told
        assert "node node-1" in told["error"]
