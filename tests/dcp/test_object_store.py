"""The global tier in S3, with a real server process."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import fsspec
import msgspec
import pytest
import torch
from lanes import Lanes, flat_state
from s3_server import S3Server

from outlast.checkpoint.dcp.assemble import Assemble, Assembled, Range, assemble
from outlast.checkpoint.dcp.directory import GlobalDirectory, StoreRecords
from outlast.checkpoint.dcp.reader import VerifiedReader, read_rank
from outlast.checkpoint.dcp.reshard import load_resharded
from outlast.checkpoint.dcp.store import ObjectStore
from outlast.checkpoint.manager import open_manager
from outlast.checkpoint.state import decode
from outlast.checkpoint.vault import MAX_IMAGES
from outlast.checkpoint.verification import VerifiedFiles
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, Corrupt, Incomplete, Unavailable, Untrusted
from outlast.policy.lease import LeaseOwner
from outlast.runtime.lease import InUse, Lease, decode_owner
from outlast.runtime.processes import this_process
from outlast.testing.ranks import free_port

pytestmark = [pytest.mark.process]
BUCKET = "bucket"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server.reachable(BUCKET, tmp_path_factory.mktemp("s3") / "record") as running:
        yield running


@pytest.fixture
def mortal_server(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server.reachable(BUCKET, tmp_path / "record") as running:
        yield running


@pytest.fixture
def url(server: S3Server, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


def _state(value: float = 1.0) -> dict[str, object]:
    return {"model": {"weight": torch.full((64, 64), value), "bias": torch.arange(64.0)}, "epoch": value}


def _saved_value(lanes: Lanes, iteration: int) -> float:
    found = read_rank(VerifiedFiles(lanes.directory, lanes.directory.manifest(iteration)), 1)
    saved = decode(found.tree, found.tensors.__getitem__)["state"]
    assert torch.equal(saved["model"]["weight"], torch.full((64, 64), saved["epoch"]))
    assert torch.equal(saved["model"]["bias"], torch.arange(64.0))
    return float(saved["epoch"])


def test_a_checkpoint_in_s3_is_restored(server: S3Server, url: str) -> None:
    """Ranks save to a bucket in the same layout as to a path, and each rank restores its own state."""
    with Lanes(url, 2) as lanes:
        assert lanes.save([flat_state(_state(2.0))] * 2, 7) == [None, None]
        assert lanes.directory.is_remote
        assert lanes.directory.checkpoints() == [7]
        assert (lanes.directory.run(), lanes.directory.latest()) == ("r", 7)
        assert _saved_value(lanes, 7) == 2.0
        live = {"model": {"weight": torch.zeros(64, 64), "bias": torch.zeros(64)}, "epoch": 0.0}
        load_resharded(VerifiedFiles(lanes.directory, lanes.directory.manifest(7)), live).apply()
        assert live["epoch"] == 2.0
        assert torch.equal(live["model"]["weight"], torch.full((64, 64), 2.0))
    names = set(server.objects(url.removeprefix(f"s3://{BUCKET}/")))
    assert {name.rpartition("/")[2] for name in names} >= {".metadata", "manifest.json", "latest", "run.json"}


@pytest.mark.extended
def test_one_of_concurrent_runs_claims_a_bucket(server: S3Server, url: str) -> None:
    """Of concurrent requests to create an object, one succeeds; the saves of a second run are refused, also after
    the object that names the owner was deleted."""
    stores = [ObjectStore(f"{url}/race") for _ in range(6)]
    gate = threading.Barrier(len(stores), timeout=100)

    def claim(store: ObjectStore) -> bool:
        gate.wait()
        return store.create("run.json", store.describe("").encode())

    with ThreadPoolExecutor(len(stores)) as pool:
        assert sorted(pool.map(claim, stores)) == [False] * 5 + [True]
    with Lanes(url, 2, token="aa", run="first") as first, Lanes(url, 2, token="bb", run="second") as second:
        assert first.save([flat_state(_state(2.0))] * 2, 7) == [None, None]
        assert all(isinstance(error, Untrusted) for error in second.save([flat_state(_state(4.0))] * 2, 7))
        server.client().delete_object(Bucket=BUCKET, Key=f"{url.removeprefix(f's3://{BUCKET}/')}/run.json")
        assert first.directory.run() == "first"  # the manifest has the run's name
        assert first.save([flat_state(_state(3.0))] * 2, 8) == [None, None]
        assert first.directory.hint() == "first"
        assert [_saved_value(first, iteration) for iteration in (7, 8)] == [2.0, 3.0]


def test_a_bucket_has_one_live_owner(server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several concurrent runs gets the lease. A run on another machine is refused while the owner renews the
    lease and takes over once the renewals end; the previous owner detects that before it writes again."""
    monkeypatch.setattr(StoreRecords, "renew_s", 0.3)
    records = GlobalDirectory.open(f"{url}/owned").owners
    here = this_process()

    def lease(run: str, machine: str) -> Lease:
        process = msgspec.structs.replace(here, machine=machine)
        return Lease(records, LeaseOwner(token="", process=process, run=run))

    leases = [lease(f"run-{number}", "here") for number in range(4)]
    gate = threading.Barrier(len(leases), timeout=100)

    def take(candidate: Lease) -> bool:
        gate.wait()
        with contextlib.suppress(InUse):
            candidate.acquire()
        return candidate.is_held

    with ThreadPoolExecutor(len(leases)) as pool:
        assert sorted(pool.map(take, leases)) == [False] * 3 + [True]
    (first,) = [candidate for candidate in leases if candidate.is_held]
    with pytest.raises(InUse, match="is in use by run run-"):
        lease("other", "there").acquire()
    monkeypatch.setattr(StoreRecords, "renew", lambda *_: None)
    follower = lease("other", "there")
    follower.acquire()
    with pytest.raises(InUse, match="was taken over by run other"):
        first.check()
    monkeypatch.undo()
    first.release()
    follower.release()
    owner = decode_owner(records.read(max(records.numbers())))
    assert owner is not None
    assert (owner.run, owner.released) == ("other", True)


@pytest.mark.extended
@pytest.mark.cold  # fsspec reads its variables when it is imported, which torch 2.8 does
def test_stock_dcp_loads_a_checkpoint_from_s3(server: S3Server, url: str) -> None:
    """In another process, `dcp.load` reads the URL of a checkpoint, with its own reader and with VerifiedReader."""
    with Lanes(url, 2) as lanes:
        assert lanes.save([flat_state(_state(3.0))] * 2, 7) == [None, None]
    script = """
import sys, torch, torch.distributed.checkpoint as dcp
from outlast.checkpoint.dcp.reader import VerifiedReader
url = sys.argv[1]
for options in ({"checkpoint_id": url}, {"storage_reader": VerifiedReader(url)}):
    state = {"model": {"weight": torch.zeros(64, 64), "bias": torch.zeros(64)}, "epoch": 0.0}
    dcp.load(state, **options)
    assert torch.equal(state["model"]["weight"], torch.full((64, 64), 3.0))
    assert torch.equal(state["model"]["bias"], torch.arange(64.0))
    assert state["epoch"] == 3.0
"""
    environment = {**os.environ, **server.environment}
    subprocess.run([sys.executable, "-c", script, f"{url}/step-7"], env=environment, check=True, timeout=300)


@pytest.mark.extended
def test_large_files_are_uploaded_in_parts(server: S3Server, url: str) -> None:
    """A file of more than two parts is uploaded in parts, and the object has the same bytes."""
    image = memoryview(os.urandom(20 << 20))
    pieces = (b"head", Range(100, (20 << 20) - 100), b"tail")
    request = Assemble(url=url, folder="step-1", name="f.distcp", pieces=pieces, timeout_s=100.0)

    done = assemble(request, image)

    assert done.error is None
    key = f"{url.removeprefix(f's3://{BUCKET}/')}/step-1/f.distcp"
    found = server.client().get_object(Bucket=BUCKET, Key=key)
    assert found["ETag"].strip('"').endswith("-3")
    assert found["Body"].read() == b"head" + bytes(image[100:]) + b"tail"
    assert len(done.chunks) == 3


@pytest.mark.extended
def test_a_server_killed_during_a_save_fails_only_that_save(mortal_server: S3Server) -> None:
    """The save fails on all ranks. After a restart of the server, the older checkpoint is intact, the failed save is
    not a checkpoint, and a later save succeeds and removes the remains of the failed one."""
    server, url = mortal_server, f"s3://{BUCKET}/mortal"
    is_written, is_killed = threading.Event(), threading.Event()

    def writer(rank: int, request: Assemble, image: memoryview) -> Assembled:
        if rank == 0 and "step-20" in request.folder and not is_killed.is_set():
            done = assemble(request, image)
            is_written.set()
            return done
        if rank == 1 and "step-20" in request.folder and not is_killed.is_set():
            assert is_written.wait(20.0)
            server.kill()
            is_killed.set()
        return assemble(request, image)

    with Lanes(url, 2, writer=writer, suspect_window=0) as lanes:
        assert lanes.save([flat_state(_state(1.0))] * 2, 10) == [None, None]
        errors = lanes.save([flat_state(_state(2.0))] * 2, 20)
        server.start()
        assert all(isinstance(error, CheckpointError) for error in errors)
        assert "rank 1" in str(errors[0])
        assert "step-20" in str(errors[0])
        assert lanes.directory.latest() == 10
        assert _saved_value(lanes, 10) == 1.0
        with pytest.raises(Incomplete, match="no manifest"):
            lanes.directory.manifest(20)
        prefix = url.removeprefix(f"s3://{BUCKET}/")
        remains = server.objects(f"{prefix}/step-20/")
        assert len(remains) == 1  # the objects that were written before the kill

        assert lanes.save([flat_state(_state(3.0))] * 2, 20) == [None, None]
        assert _saved_value(lanes, 20) == 3.0
        assert lanes.directory.latest() == 20
        assert not set(remains) & set(server.objects(f"{prefix}/step-20/"))


@pytest.mark.extended
def test_an_unresponsive_server_fails_operations_in_time(server: S3Server, url: str) -> None:
    """Every operation on a server that does not respond ends within its timeout, with an error that contains the
    object's name."""
    patient = ObjectStore(url, timeout_s=100.0)  # on a busy machine an operation may take longer than a second
    patient.write("there", b"x")
    store = ObjectStore(url, timeout_s=1.0)
    server.stop()
    try:
        with pytest.raises(CheckpointError, match=f"{url}/there: the object store did not respond within 1 s"):
            store.read("there")
        with pytest.raises(CheckpointError, match="did not respond within 1 s"):
            store.write("more", b"y")
        request = Assemble(url=url, folder="step-1", name="f", pieces=(bytes(40 << 20),), timeout_s=1.0)
        done = assemble(request, memoryview(b""))
        assert done.error is not None
        assert "did not respond within 1 s" in done.error
    finally:
        server.resume()
    assert patient.read("there") == b"x"


def test_damaged_objects_are_rejected(server: S3Server, url: str) -> None:
    """A changed byte, a truncated, an empty and a missing object are rejected with the object's name."""
    with Lanes(url, 2) as lanes:
        assert lanes.save([flat_state(_state(1.0))] * 2, 10) == [None, None]
        manifest = lanes.directory.manifest(10)
        name = manifest.files[0].name
        key = f"{url.removeprefix(f's3://{BUCKET}/')}/step-10/{name}"
        client = server.client()
        data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        data[len(data) // 2] ^= 1
        client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
        with pytest.raises(Corrupt, match=f"{name}: chunk 0"):
            read_rank(VerifiedFiles(lanes.directory, manifest), 0)
        client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data[:100]))
        with pytest.raises(Incomplete, match=name):
            read_rank(VerifiedFiles(lanes.directory, manifest), 0)
        client.put_object(Bucket=BUCKET, Key=key, Body=b"")
        with pytest.raises(Incomplete, match=name):
            read_rank(VerifiedFiles(lanes.directory, manifest), 0)
        client.delete_object(Bucket=BUCKET, Key=key)
        with pytest.raises(Incomplete, match=f"{name} is missing"):
            read_rank(VerifiedFiles(lanes.directory, manifest), 0)
        with pytest.raises(Incomplete, match="no manifest"):
            VerifiedReader(f"{url}/step-11")


@pytest.mark.extended
def test_old_checkpoints_are_removed_from_s3(server: S3Server, url: str) -> None:
    """Only the newest ``most_recent_k`` checkpoints remain."""
    with Lanes(url, 1, most_recent_k=2) as lanes:
        for iteration in (10, 20, 30, 40):
            assert lanes.save([flat_state(_state(1.0))], iteration) == [None]
        assert lanes.directory.checkpoints() == [40, 30]


@pytest.mark.extended
def test_a_second_attempt_replaces_the_first_ones_checkpoint(server: S3Server, url: str) -> None:
    """Another save of the same iteration replaces the checkpoint as a whole and removes the old checkpoint's files."""
    with Lanes(url, 2) as first:
        assert first.save([flat_state(_state(1.0))] * 2, 10) == [None, None]
        old = {file.name for file in first.directory.manifest(10).files}
    with Lanes(url, 2, token="ef56ab78", cycle=1) as second:
        assert second.save([flat_state(_state(5.0))] * 2, 10) == [None, None]
        assert _saved_value(second, 10) == 5.0
        assert not old & set(second.directory.sizes("step-10"))


def test_objects_are_deleted_in_batches(server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five objects and a missing one are deleted with three requests of two names each."""
    store = ObjectStore(f"{url}/many")
    names = [f"a/{number}" for number in range(5)]
    for name in names:
        store.write(name, b"x")
    calls = list[str]()
    call = store._call
    monkeypatch.setattr(
        store, "_call", lambda method, *args, **kwargs: calls.append(method) or call(method, *args, **kwargs)
    )
    monkeypatch.setattr("outlast.checkpoint.dcp.store.BATCH", 2)
    store.remove([*names, "a/none"])
    assert calls == ["bulk_delete"] * 3
    assert store.sizes() == {}


def test_a_closed_session_fails_one_operation(server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation in a session that the library has closed fails; the next operation opens a new session."""
    store = ObjectStore(f"{url}/reset")
    store.write("a", b"1")
    assert store._opened is not None
    broken = store._opened[0]

    async def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Session is closed")

    monkeypatch.setattr(broken, "_pipe_file", fail)
    with pytest.raises(CheckpointError, match="Session is closed"):
        store.write("a", b"2")
    store.write("a", b"3")
    assert store.read("a") == b"3"


@pytest.mark.extended
def test_an_outage_does_not_create_a_client_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing calls reuse one S3 client, because each client takes about 10 MB."""
    opened = list[str]()
    open_file_system = fsspec.core.url_to_fs
    monkeypatch.setattr(
        fsspec.core, "url_to_fs", lambda url, **options: opened.append(url) or open_file_system(url, **options)
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://127.0.0.1:{free_port()}"})
    store = ObjectStore("s3://bucket/away", timeout_s=30)
    for _ in range(5):
        with pytest.raises(Unavailable, match="Could not connect"):
            store.names()
    assert opened == ["s3://bucket/away"]


@pytest.mark.extended
def test_failed_saves_unmap_their_memory(
    mortal_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """During an outage each save needs more memory than the one before: the earlier memory is unmapped at once,
    without a garbage collection, even though the errors of all saves are kept."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config = CheckpointConfig(directory=f"s3://{BUCKET}/mapped", save_timeout=60)
    errors = []
    gc.disable()
    try:
        with closing(open_manager(config, env=WorkerEnv(node="node"))) as manager:
            state = {"weight": torch.zeros(10)}
            manager.load_latest(state)
            manager.save(state, 1).wait(60)
            mortal_server.kill()
            for iteration in range(2, 10):
                state["weight"] = torch.zeros(iteration << 18)
                handle = manager.save(state, iteration)
                with pytest.raises(CheckpointError, match="Could not connect"):
                    handle.wait(60)
                errors.append(handle.error)
            mapped = sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
    finally:
        gc.enable()
    assert len(errors) == 8
    assert mapped <= MAX_IMAGES


@pytest.mark.extended
def test_only_the_version_that_was_read_is_replaced(server: S3Server, url: str) -> None:
    """An object that another process has created or changed since it was read is not replaced; a repeated request
    with the same content succeeds."""
    store = ObjectStore(f"{url}/versions")
    assert store.version("m") is None
    assert store.replace("m", b"1", None)
    seen = store.version("m")
    assert not store.replace("m", b"2", None)
    assert store.replace("m", b"1", None)
    assert store.replace("m", b"3", seen)
    assert not store.replace("m", b"4", seen)
    assert store.read("m") == b"3"


def test_an_object_store_without_conditions_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning reports that this object store cannot fence, which means that it cannot exclude a second owner."""
    store = ObjectStore(f"local://{tmp_path}")
    assert [store.create(name, b"x") for name in ("a", "b", "a")] == [True, True, False]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot fence" in line


def test_an_object_store_without_conditional_replace_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A claim in an object store that has conditional creation but no conditional replacement logs that it cannot
    fence."""
    ObjectStore("memory://half").check_fencing("owner/1.probe")
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot replace an object only if it is the one that was read, so it cannot fence" in line


@pytest.mark.extended
def test_s3_can_fence(server: S3Server, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """No warning is logged for an object store that has both conditions."""
    ObjectStore(f"{url}/whole").check_fencing("owner/1.probe")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_commit_with_a_lost_response_keeps_its_files(
    server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save whose commit was applied but whose response was lost fails, and the files that the manifest lists are
    kept."""
    with Lanes(url, 2) as lanes:
        replace = ObjectStore.replace

        def lose_response(store: ObjectStore, name: str, *arguments: object) -> bool:
            assert replace(store, name, *arguments)  # type: ignore[arg-type]
            raise CheckpointError(f"{name}: the store did not answer")

        monkeypatch.setattr(ObjectStore, "replace", lose_response)
        errors = lanes.save([flat_state(_state(2.0))] * 2, 7)
        assert ["did not answer" in str(error) for error in errors] == [True, True], errors
        assert _saved_value(lanes, 7) == 2.0


def test_a_missing_bucket_or_protocol_is_an_error(url: str) -> None:
    """A bucket that does not exist and an unknown protocol are errors that contain the URL."""
    request = Assemble(url="s3://nobody-made-it/run", folder="step-1", name="f", pieces=(b"x",), timeout_s=100.0)
    assert "s3://nobody-made-it/run/step-1/f" in str(assemble(request, memoryview(b"")).error)
    request = Assemble(url="nonsense://place", folder="step-1", name="f", pieces=(b"x",), timeout_s=5.0)
    assert "nonsense" in str(assemble(request, memoryview(b"")).error)
