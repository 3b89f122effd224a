"""All nodes see the same checkpoints in an object store; otherwise the start ends with an error."""

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
    """Two object stores with a bucket of the same name."""
    folder = tmp_path_factory.mktemp("s3")
    with ExitStack() as stack:
        found = []
        for name in ("one", "two"):
            found.append(S3Server(BUCKET, folder / name))
            stack.callback(found[-1].kill)
        yield found[0], found[1]


def start(servers: list[S3Server], **options: Any) -> list[dict[str, Any]]:
    """Run a rank on each node, each with a different object store; return the results."""
    store_environments = [{"OUTLAST_NODES": "1", **server.environment} for server in servers]
    nodes = [f"node-{number}" for number in range(len(servers))]
    with RankProcesses(
        SCRIPT, json.dumps(options), world_size=len(servers), code=True, nodes=nodes, environments=store_environments
    ) as ranks:
        codes = ranks.wait_until_gone(300)
        outputs = [ranks.output(rank) for rank in range(len(servers))]
    assert codes == [0] * len(servers), outputs
    return [json.loads(next(line for line in output.splitlines() if line.startswith("{"))) for output in outputs]


def test_a_node_with_another_endpoint_is_a_config_error(servers: tuple[S3Server, S3Server], tmp_path: Path) -> None:
    """If rank 0's endpoint has no checkpoint and another node's endpoint has some, all ranks report a ConfigError
    that identifies both nodes, for ``directory`` and for ``load``, and the object stores do not change."""
    empty, filled = servers
    url = f"s3://{BUCKET}/run"
    assert start([filled, filled], directory=url) == [{"loaded": None, "saved": 10}] * 2
    before = filled.objects()
    for options in ({"directory": url}, {"load": url, "local_directory": str(tmp_path)}):
        for result in start([empty, filled], **options):
            assert result.get("error", "").startswith("ConfigError"), result
            assert "is not the same on all nodes" in result["error"]
            assert f"node node-0 sees no checkpoint in {url}" in result["error"]
            assert f"node node-1 sees 1 checkpoint (iteration 10) in {url}" in result["error"]
            assert "endpoint" in result["error"]
    assert filled.objects() == before
    assert not empty.objects()
    assert start([filled, filled], directory=url) == [{"loaded": 10, "saved": 20}] * 2


def test_a_node_without_access_to_the_store_is_an_error(servers: tuple[S3Server, S3Server], tmp_path: Path) -> None:
    """If a node other than rank 0's cannot connect to its endpoint, all ranks report Unavailable with that node
    before training starts."""
    stopped = S3Server(BUCKET, tmp_path / "gone")
    stopped.kill()
    for result in start([servers[0], stopped], directory=f"s3://{BUCKET}/unreachable"):
        assert result.get("error", "").startswith("Unavailable"), result
        assert "node node-1" in result["error"]
