"""At its start a run waits for an object store that does not respond or refuses requests, then loads its
checkpoints."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server

from outlast.testing import RankProcesses

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.extended]
LIMIT_S = 240.0
URL = "s3://bucket/run"

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from outlast.checkpoint.manager import open_manager
from outlast.config import CheckpointConfig
from outlast.env import read_worker
from outlast.errors import OutlastError

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world)
state, outcome = {"weight": torch.full((64, 64), float(rank))}, {}
try:
    manager = open_manager(CheckpointConfig(**json.loads(sys.argv[1])), env=read_worker())
    manager.claim()
    restored = manager.load_latest(state)
    outcome["loaded"] = None if restored is None else restored.iteration
    iteration = 10 + (outcome["loaded"] or 0)
    manager.save(state, iteration).wait(100)
    outcome["saved"] = iteration
    manager.close()
except OutlastError as error:
    outcome["error"] = f"{type(error).__name__}: {error}"
sys.stdout.write(json.dumps(outcome) + "\\n")
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server("bucket", tmp_path / "record")
    yield server
    server.kill()


def train(
    environment: dict[str, str], *, until: str = "", then: Callable[[], None] = lambda: None, **options: Any
) -> tuple[list[dict[str, Any]], str]:
    """Load and save on two nodes; return the result of each rank, and the output.

    Args:
        environment: Variables of the object store.
        until: A text in the output of rank 0 after which ``then`` is called; empty = at once.
        then: Called once.
        options: Settings that replace the defaults of these tests.
    """
    options = {"directory": URL, "response_timeout": 5.0, "restore_timeout": 200.0, **options}
    with RankProcesses(
        SCRIPT, json.dumps(options), world_size=2, code=True, nodes=["a", "b"], environment=environment
    ) as ranks:
        if until:
            ranks.wait_until(lambda: until in ranks.output(0) or None, LIMIT_S)
        then()
        ranks.wait_until_gone(LIMIT_S)
        outputs = [ranks.output(rank) for rank in range(2)]
    lines = [next((line for line in output.splitlines() if line.startswith("{")), "") for output in outputs]
    assert all(lines), outputs
    return [json.loads(line) for line in lines], "".join(outputs)


@contextmanager
def refusing(code: int) -> Iterator[str]:
    """Serve an address that responds to every request with an HTTP status."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_PUT = do_POST = respond

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.extended
@pytest.mark.parametrize("outage", ["silent", "killed"])
def test_a_restore_waits_for_an_unavailable_object_store(server: S3Server, outage: str) -> None:
    """While the object store is unavailable, the start retries; once the store responds, the run loads its own
    checkpoint, and its next save belongs to the same run."""
    results, output = train(server.environment)
    assert results == [{"loaded": None, "saved": 10}] * 2, output
    interrupt, restore = (server.stop, server.resume) if outage == "silent" else (server.kill, server.start)
    interrupt()
    results, output = train(server.environment, until="continues to wait", then=restore)
    assert results == [{"loaded": 10, "saved": 20}] * 2, output
    assert "belongs to run" not in output
    assert "PeerLost" not in output


@pytest.mark.parametrize("code", [403, 500])
def test_an_object_store_that_refuses_requests_is_an_outage(server: S3Server, code: int) -> None:
    """After ``restore_timeout`` all ranks get the same Outage error with the object store, the reason and what to
    do; the object store is not treated as empty."""
    with refusing(code) as address:
        environment = {**server.environment, "FSSPEC_S3_ENDPOINT_URL": address}
        results, output = train(environment, restore_timeout=2.0)
    assert results[0] == results[1], output
    assert results[0]["error"].startswith("Outage: no checkpoint could be looked up for"), output
    assert URL in results[0]["error"]
    assert "start again once it responds: nothing was changed" in results[0]["error"]
    assert not server.objects()
