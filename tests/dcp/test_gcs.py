"""The global tier in GCS, with a server process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import fsspec
import pytest
import test_two_lives as processes
import torch
from gcs_server import GCSServer
from lanes import Lanes, flat_state

from outlast.checkpoint.dcp.reader import read_rank
from outlast.checkpoint.dcp.store import ObjectStore
from outlast.checkpoint.state import decode
from outlast.checkpoint.verification import VerifiedFiles

pytestmark = [
    pytest.mark.overlay,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body"),  # gcsfs passes bytes to aiohttp
]


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    running = GCSServer("bucket")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in running.environment.items():
                patch.setenv(name, value)
            # fsspec is already imported and has already read its variables in this process.
            patch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
            yield running
    finally:
        running.kill()


def test_a_checkpoint_in_gcs_is_restored(server: GCSServer) -> None:
    """Ranks save small and large objects to a bucket, and each rank restores its own state, verified."""
    state = {"weight": torch.arange(300_000.0), "epoch": 2.0}
    with Lanes("gs://bucket/one", 2) as lanes:
        assert lanes.save([flat_state(state)] * 2, 7) == [None, None]
        assert lanes.directory.checkpoints() == [7]
        found = read_rank(VerifiedFiles(lanes.directory, lanes.directory.manifest(7)), 1)
        saved = decode(found.tree, found.tensors.__getitem__)["state"]
        assert torch.equal(saved["weight"], state["weight"])
        assert saved["epoch"] == 2.0
    names = server.objects("one/")
    assert {name.rpartition("/")[2] for name in names} >= {".metadata", "manifest.json", "latest", "run.json"}


def test_one_of_concurrent_runs_claims_a_bucket(server: GCSServer, caplog: pytest.LogCaptureFixture) -> None:
    """GCS creates an object only if there is none, and replaces an object only if it is the one that was read: one
    of several concurrent runs succeeds, and no warning reports that the object store cannot fence."""
    stores = [ObjectStore("gs://bucket/race") for _ in range(4)]
    with ThreadPoolExecutor(len(stores)) as pool:
        created = list(pool.map(lambda store: store.create("run.json", b"{}"), stores))
        assert sorted(created) == [False] * 3 + [True]
        version = stores[0].version("run.json")
        contents = [b"0", b"1", b"2", b"3"]
        replaced = list(pool.map(lambda store, data: store.replace("run.json", data, version), stores, contents))
    assert sorted(replaced) == [False] * 3 + [True]
    assert stores[0].read("run.json") == contents[replaced.index(True)]
    with caplog.at_level(logging.WARNING):
        stores[0].check_fencing("probe.json")
    assert not [record.getMessage() for record in caplog.records if "fence" in record.getMessage()]


@pytest.mark.parametrize("point", ["checkpoint.fenced", "checkpoint.indexed"])
def test_a_process_loads_the_checkpoints_of_a_killed_one(server: GCSServer, point: str) -> None:
    """A process is killed within its third save, before or after the commit; the next process finds all committed
    checkpoints, verified, and continues from there."""
    with ExitStack() as stack:
        run_directory = processes.RunDirectory(f"gs://bucket/{point}", server.environment, stack)
        first = run_directory.start(point=point, at=2)
        first.wait_for("committed", 2)
        first.wait_until_stopped()
        first.close()
        second = run_directory.start()
        found = dict(second.wait_for("found")["found"])
        assert {1: 1001.0, 2: 1002.0}.items() <= found.items()
        assert set(found) <= {1, 2, 3}
        second.wait_for("committed", 2)
        assert second.finish() == 0
        assert run_directory.contents() == {**found, **second.committed()}
