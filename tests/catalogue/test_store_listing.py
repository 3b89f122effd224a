"""``outlast ckpt`` on global directories: a path, and object stores."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from laid_store import RUN, lay_in_store

from outlast.checkpoint.catalogue.entries import Rule, plan_pruning
from outlast.checkpoint.catalogue.listing import look_into, verify
from outlast.checkpoint.shard import CHUNK_BYTES
from outlast.cli.main import main
from outlast.errors import CheckpointError, ConfigError
from outlast.testing.ranks import free_port


@dataclass(frozen=True)
class GlobalPlace:
    """A global directory, with functions that change its contents."""

    url: str
    file_system: Any
    root: str

    def write(self, name: str, data: bytes) -> None:
        path = f"{self.root}/{name}"
        if "://" not in self.url:
            self.file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.file_system.pipe_file(path, data)

    def read(self, name: str) -> bytes:
        return bytes(self.file_system.cat_file(f"{self.root}/{name}"))

    def remove(self, name: str) -> None:
        self.file_system.rm_file(f"{self.root}/{name}")

    def names(self) -> list[str]:
        return sorted(path[len(self.root.lstrip("/")) :] for path in self.file_system.find(self.root))


@pytest.fixture(params=["path", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> GlobalPlace:
    """A directory on a path, and one in fsspec's memory."""
    url = str(tmp_path / "run") if request.param == "path" else f"memory://{uuid.uuid4().hex}/run"
    file_system, root = fsspec.core.url_to_fs(url)
    return GlobalPlace(url, file_system, str(root))


def test_checkpoints_are_listed_newest_first(place: GlobalPlace) -> None:
    """Checkpoints are listed newest first, with lineage, sizes, run and tracker."""
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 20, world_size=3, restored_from=10)
    listing = look_into(place.url).entry
    assert (listing.tier, listing.run, listing.latest) == ("global", RUN, 20)
    newest, older = listing.checkpoints
    assert (newest.iteration, newest.world_size, newest.restored_from, newest.valid) == (20, 3, 10, True)
    assert (older.iteration, older.world_size, older.restored_from, older.valid) == (10, 2, None, True)
    assert newest.num_files == 5
    assert newest.num_bytes > 30_000
    assert not listing.leftovers


def test_suspect_checkpoints_are_listed_last(place: GlobalPlace) -> None:
    """Checkpoints in ``suspect/`` come last and are marked."""
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 12, folder="suspect/step-12")
    entries = look_into(place.url).entry.checkpoints
    assert [(entry.iteration, entry.suspect, entry.valid) for entry in entries] == [(10, False, True), (12, True, True)]


def test_listing_detects_torn_files(place: GlobalPlace) -> None:
    """Listing reports a missing or truncated file, and the checkpoint is invalid."""
    lay_in_store(place.write, 10)
    place.remove("step-10/__0_0.distcp")
    place.write("step-10/__1_0.distcp", b"short")
    (entry,) = look_into(place.url).entry.checkpoints
    assert not entry.valid
    assert [(problem.file, problem.kind, problem.reason) for problem in entry.problems] == [
        ("step-10/__0_0.distcp", "Incomplete", "is missing"),
        ("step-10/__1_0.distcp", "Incomplete", "is 5 bytes long instead of 10000"),
    ]


def test_a_missing_metadata_file_is_reported(place: GlobalPlace) -> None:
    """A missing ``.metadata`` (which only other programs read) is reported; the checkpoint is valid."""
    lay_in_store(place.write, 10)
    place.remove("step-10/.metadata")
    (found,) = look_into(place.url).found
    assert found.entry.valid
    assert [problem.file for problem in found.entry.problems] == ["step-10/.metadata"]
    assert verify(found, num_threads=2).entry.valid


def test_a_corrupt_metadata_file_is_reported(place: GlobalPlace) -> None:
    """A flipped bit in ``.metadata`` is reported by its digest; the checkpoint stays valid for outlast."""
    lay_in_store(place.write, 10)
    data = bytearray(place.read("step-10/.metadata"))
    data[5] ^= 1
    place.write("step-10/.metadata", bytes(data))
    (found,) = look_into(place.url).found
    assert not found.entry.problems  # its length is correct
    entry = verify(found, num_threads=2).entry
    assert entry.valid
    assert [(problem.file, problem.kind) for problem in entry.problems] == [("step-10/.metadata", "Corrupt")]


def test_a_metadata_file_without_digest_is_unverified(
    place: GlobalPlace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of an earlier version, without a digest of ``.metadata``, is valid.

    The file is reported as not verified.
    """
    lay_in_store(place.write, 10, metadata=None)
    (found,) = look_into(place.url).found
    entry = verify(found, num_threads=2).entry
    assert (entry.valid, entry.problems, entry.unverified) == (True, (), ("step-10/.metadata",))
    monkeypatch.setattr(sys, "argv", ["outlast", "ckpt", "verify", place.url])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert not exit_info.value.code
    assert "an earlier version kept no digest: step-10/.metadata" in capsys.readouterr().out


def test_a_corrupt_manifest_invalidates_the_checkpoint(place: GlobalPlace) -> None:
    """A manifest that differs from its own digest makes the checkpoint invalid."""
    lay_in_store(place.write, 10)
    data = bytearray(place.read("step-10/manifest.json"))
    data[60] ^= 1
    place.write("step-10/manifest.json", bytes(data))
    (entry,) = look_into(place.url).entry.checkpoints
    assert (entry.valid, entry.problems[0].kind) == (False, "Corrupt")


def test_verify_locates_a_flipped_byte(place: GlobalPlace) -> None:
    """Verification reads every byte and reports file, chunk and tensor of a flipped one."""
    lay_in_store(place.write, 10, num_bytes=CHUNK_BYTES + 5000)
    (found,) = look_into(place.url).found
    before = verify(found, num_threads=2)
    assert before.entry.valid
    assert before.num_bytes_read == 2 * (CHUNK_BYTES + 5000) + len(place.read("step-10/.metadata"))
    data = bytearray(place.read("step-10/__1_0.distcp"))
    data[1500] ^= 1
    place.write("step-10/__1_0.distcp", bytes(data))
    entry = verify(found, num_threads=2).entry
    assert not entry.valid
    (problem,) = entry.problems
    assert (problem.file, problem.kind, problem.chunk) == ("step-10/__1_0.distcp", "Corrupt", 0)
    assert problem.tensors == ("model.weight", "outlast/rank-1/tree")


def test_old_checkpoints_are_pruned(place: GlobalPlace) -> None:
    """Pruning deletes every file of a checkpoint."""
    for iteration in (10, 20, 30):
        lay_in_store(place.write, iteration)
    plan = plan_pruning(look_into(place.url), Rule(most_recent_k=1), now_ns=0)
    (found,) = plan.checkpoints
    found.remove()
    assert [entry.iteration for entry in look_into(place.url).entry.checkpoints] == [30, 20]
    assert not any("step-10" in name for name in place.names())
    found.remove()  # another process was faster


def test_a_checkpoint_replaced_after_listing_is_kept(place: GlobalPlace) -> None:
    """A checkpoint that was written again after the listing is not deleted."""
    for iteration in (10, 20, 30):
        lay_in_store(place.write, iteration)
    (found,) = plan_pruning(look_into(place.url), Rule(most_recent_k=1), now_ns=0).checkpoints
    lay_in_store(place.write, 10, attempt="job-0-cafe.99")
    with pytest.raises(CheckpointError, match="changed meanwhile"):
        found.remove()
    assert look_into(place.url).entry.checkpoints[-1].valid


def test_files_without_manifest_in_an_object_store_are_an_attempt() -> None:
    """In an object store, files without a manifest are an attempt, which is deleted only by its age."""
    url = f"memory://{uuid.uuid4().hex}/run"
    file_system, root = fsspec.core.url_to_fs(url)
    place = GlobalPlace(url, file_system, root)
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 5, committed=False)
    listing = look_into(url)
    assert [entry.iteration for entry in listing.entry.checkpoints] == [10]
    (leftover,) = listing.entry.leftovers
    assert (leftover.name, leftover.kind, leftover.iteration) == ("step-5", "attempt", 5)
    assert leftover.modified_ns is not None
    rule = Rule(leftovers=True, older_than_s=60)
    assert not plan_pruning(listing, rule, now_ns=leftover.modified_ns).remains
    (remains,) = plan_pruning(listing, rule, now_ns=leftover.modified_ns + 61 * 10**9).remains
    remains.remove()
    assert not any("step-5" in name for name in place.names())


def test_other_programs_objects_are_never_pruned() -> None:
    """In a folder without a manifest only an attempt's own objects are deleted; other objects are kept."""
    url = f"memory://{uuid.uuid4().hex}/run"
    file_system, root = fsspec.core.url_to_fs(url)
    place = GlobalPlace(url, file_system, root)
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 5, committed=False)
    others = {"step-5/notes.txt", "step-4/model.bin", "step-4/.metadata"}
    for name in others:
        place.write(name, b"precious")
    plan = plan_pruning(look_into(url), Rule(most_recent_k=1, leftovers=True, older_than_s=0), now_ns=1 << 62)
    for remains in plan.remains:
        remains.remove()
    names = {name.removeprefix(f"{root}/").lstrip("/") for name in file_system.find(root)}
    assert {name for name in names if name.startswith(("step-4/", "step-5/"))} == others


def test_a_checkpoint_without_manifest_on_a_path_is_invalid(tmp_path: Path) -> None:
    """On a path, a checkpoint folder without its manifest is an invalid checkpoint."""
    place = GlobalPlace(str(tmp_path), *fsspec.core.url_to_fs(str(tmp_path)))
    lay_in_store(place.write, 10)
    (tmp_path / "step-10/manifest.json").unlink()
    (entry,) = look_into(str(tmp_path)).entry.checkpoints
    assert (entry.valid, entry.problems[0].kind) == (False, "Incomplete")


def test_leftovers_on_a_path_are_listed(tmp_path: Path) -> None:
    """Attempts in a directory of checkpoints are listed as leftovers, by their names."""
    place = GlobalPlace(str(tmp_path), *fsspec.core.url_to_fs(str(tmp_path)))
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 20, folder="step-20.tmp-job-0-cafe.20", committed=False)
    listing = look_into(str(tmp_path))
    assert [(leftover.name, leftover.attempt) for leftover in listing.entry.leftovers] == [
        ("step-20.tmp-job-0-cafe.20", "job-0-cafe.20")
    ]
    assert [entry.iteration for entry in listing.entry.checkpoints] == [10]


def test_an_empty_url_is_rejected() -> None:
    """A URL without any object is rejected, because it is likely a mistake."""
    with pytest.raises(ConfigError, match="is empty or does not exist"):
        look_into(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A real S3 server process; gives its address."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.02)
        yield address
    finally:
        server.kill()
        server.wait(10)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.process
def test_an_s3_directory_is_listed_verified_and_pruned(s3: str, run_outlast: Callable[..., Any]) -> None:
    """On a real S3 server the commands detect a flipped byte and prune an old checkpoint without importing torch."""
    urllib.request.urlopen(urllib.request.Request(f"{s3}/bucket", method="PUT"), timeout=60).close()
    file_system = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=s3, key="k", secret="s")
    place = GlobalPlace("s3://bucket/run", file_system, "bucket/run")
    for iteration in (10, 20, 30):
        lay_in_store(place.write, iteration)
    lay_in_store(place.write, 40, committed=False)
    done = run_outlast(s3, "ckpt", "ls", place.url, "--json")
    (listed,) = json.loads(done.stdout)["places"]
    assert [(entry["iteration"], entry["valid"]) for entry in listed["checkpoints"]] == [
        (30, True),
        (20, True),
        (10, True),
    ]
    assert [leftover["name"] for leftover in listed["leftovers"]] == ["step-40"]
    assert run_outlast(s3, "ckpt", "verify", place.url).returncode == 0
    data = bytearray(place.read("step-20/__0_0.distcp"))
    data[1500] ^= 1
    place.write("step-20/__0_0.distcp", bytes(data))
    done = run_outlast(s3, "ckpt", "verify", place.url)
    assert done.returncode == 1
    assert "step-20/__0_0.distcp: chunk 0" in done.stdout
    done = run_outlast(s3, "ckpt", "prune", place.url, "--keep", "2", "--suspect-window", "5", "--leftovers")
    assert done.returncode == 0, done.stderr
    assert {name.split("/")[1] for name in place.names()} == {"latest", "run.json", "step-20", "step-30", "step-40"}


@pytest.fixture
def run_outlast(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a separate process that uses the S3 server and fails if torch is imported."""

    def command(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.modules['torch'] = None; from outlast.cli.main import main; main()"
        environment = {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_DEFAULT_REGION": "us-east-1",
            "HOME": str(tmp_path),
            "PATH": "",
        }
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return command
