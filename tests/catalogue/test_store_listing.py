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
class Somewhere:
    """A global directory, and how to change what lies in it."""

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
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Somewhere:
    """A directory on a path, and one in fsspec's memory."""
    url = str(tmp_path / "run") if request.param == "path" else f"memory://{uuid.uuid4().hex}/run"
    file_system, root = fsspec.core.url_to_fs(url)
    return Somewhere(url, file_system, str(root))


def test_whole_checkpoints_are_listed(place: Somewhere) -> None:
    """Checkpoints come newest first, with lineage, sizes, run and tracker; all ranks are in the global tier."""
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 20, world_size=3, restored_from=10)
    looked = look_into(place.url).entry
    assert (looked.tier, looked.run, looked.latest) == ("global", RUN, 20)
    newest, older = looked.checkpoints
    assert (newest.iteration, newest.world_size, newest.restored_from, newest.valid) == (20, 3, 10, True)
    assert (older.iteration, older.world_size, older.restored_from, older.valid) == (10, 2, None, True)
    assert newest.num_files == 5
    assert newest.num_bytes > 30_000
    assert not looked.leftovers


def test_saves_for_diagnosis_are_apart(place: Somewhere) -> None:
    """What lies in suspect/ comes last and is marked."""
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 12, folder="suspect/step-12")
    entries = look_into(place.url).entry.checkpoints
    assert [(entry.iteration, entry.suspect, entry.valid) for entry in entries] == [(10, False, True), (12, True, True)]


def test_torn_files_are_seen_unread(place: Somewhere) -> None:
    """A file that is missing or cut is named, and the checkpoint is bad."""
    lay_in_store(place.write, 10)
    place.remove("step-10/__0_0.distcp")
    place.write("step-10/__1_0.distcp", b"short")
    (entry,) = look_into(place.url).entry.checkpoints
    assert not entry.valid
    assert [(problem.file, problem.kind, problem.reason) for problem in entry.problems] == [
        ("step-10/__0_0.distcp", "Incomplete", "is missing"),
        ("step-10/__1_0.distcp", "Incomplete", "is 5 bytes long instead of 10000"),
    ]


def test_a_missing_index_for_other_readers_is_told(place: Somewhere) -> None:
    """.metadata is for other readers: without it a checkpoint is valid, and the lack is told."""
    lay_in_store(place.write, 10)
    place.remove("step-10/.metadata")
    (found,) = look_into(place.url).found
    assert found.entry.valid
    assert [problem.file for problem in found.entry.problems] == ["step-10/.metadata"]
    assert verify(found, num_threads=2).entry.valid


def test_a_changed_index_for_other_readers_is_told(place: Somewhere) -> None:
    """One flipped bit of .metadata is found by its digest: the checkpoint is valid for us, and not right."""
    lay_in_store(place.write, 10)
    data = bytearray(place.read("step-10/.metadata"))
    data[5] ^= 1
    place.write("step-10/.metadata", bytes(data))
    (found,) = look_into(place.url).found
    assert not found.entry.problems  # its length is right
    entry = verify(found, num_threads=2).entry
    assert entry.valid
    assert [(problem.file, problem.kind) for problem in entry.problems] == [("step-10/.metadata", "Corrupt")]


def test_an_index_without_a_digest_is_told_as_not_compared(
    place: Somewhere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of an earlier version, whose manifest knows no digest of .metadata, is right as far as can be told,
    and that is said."""
    lay_in_store(place.write, 10, metadata=None)
    (found,) = look_into(place.url).found
    entry = verify(found, num_threads=2).entry
    assert (entry.valid, entry.problems, entry.unverified) == (True, (), ("step-10/.metadata",))
    monkeypatch.setattr(sys, "argv", ["outlast", "ckpt", "verify", place.url])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "an earlier version kept no digest: step-10/.metadata" in capsys.readouterr().out


def test_a_changed_manifest_is_told(place: Somewhere) -> None:
    """A manifest that differs from its own digest makes a checkpoint bad."""
    lay_in_store(place.write, 10)
    data = bytearray(place.read("step-10/manifest.json"))
    data[60] ^= 1
    place.write("step-10/manifest.json", bytes(data))
    (entry,) = look_into(place.url).entry.checkpoints
    assert (entry.valid, entry.problems[0].kind) == (False, "Corrupt")


def test_a_flipped_byte_is_found(place: Somewhere) -> None:
    """Verifying reads every byte and names file, chunk and tensor."""
    lay_in_store(place.write, 10, num_bytes=CHUNK_BYTES + 5000)
    (found,) = look_into(place.url).found
    right = verify(found, num_threads=2)
    assert right.entry.valid
    assert right.num_bytes_read == 2 * (CHUNK_BYTES + 5000) + len(place.read("step-10/.metadata"))
    data = bytearray(place.read("step-10/__1_0.distcp"))
    data[1500] ^= 1
    place.write("step-10/__1_0.distcp", bytes(data))
    entry = verify(found, num_threads=2).entry
    assert not entry.valid
    (problem,) = entry.problems
    assert (problem.file, problem.kind, problem.chunk) == ("step-10/__1_0.distcp", "Corrupt", 0)
    assert problem.tensors == ("model.weight", "outlast/rank-1/tree")


def test_old_checkpoints_are_pruned(place: Somewhere) -> None:
    """Pruning deletes whole checkpoints and leaves nothing of them."""
    for iteration in (10, 20, 30):
        lay_in_store(place.write, iteration)
    plan = plan_pruning(look_into(place.url), Rule(most_recent_k=1), now_ns=0)
    (found,) = plan.checkpoints
    found.remove()
    assert [entry.iteration for entry in look_into(place.url).entry.checkpoints] == [30, 20]
    assert not any("step-10" in name for name in place.names())
    found.remove()  # somebody else was quicker


def test_a_checkpoint_that_changed_meanwhile_stays(place: Somewhere) -> None:
    """What was written again since it was listed is left alone."""
    for iteration in (10, 20, 30):
        lay_in_store(place.write, iteration)
    (found,) = plan_pruning(look_into(place.url), Rule(most_recent_k=1), now_ns=0).checkpoints
    lay_in_store(place.write, 10, attempt="job-0-cafe.99")
    with pytest.raises(CheckpointError, match="changed meanwhile"):
        found.remove()
    assert look_into(place.url).entry.checkpoints[-1].valid


def test_no_manifest_is_no_checkpoint_in_a_store() -> None:
    """In a store, files without a manifest are an attempt; it goes by its age alone."""
    url = f"memory://{uuid.uuid4().hex}/run"
    file_system, root = fsspec.core.url_to_fs(url)
    place = Somewhere(url, file_system, root)
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 5, committed=False)
    looked = look_into(url)
    assert [entry.iteration for entry in looked.entry.checkpoints] == [10]
    (left,) = looked.entry.leftovers
    assert (left.name, left.kind, left.iteration) == ("step-5", "attempt", 5)
    assert left.modified_ns is not None
    rule = Rule(leftovers=True, older_than_s=60)
    assert not plan_pruning(looked, rule, now_ns=left.modified_ns).remains
    (remains,) = plan_pruning(looked, rule, now_ns=left.modified_ns + 61 * 10**9).remains
    remains.remove()
    assert not any("step-5" in name for name in place.names())


def test_objects_of_other_programs_are_never_pruned() -> None:
    """In a folder without a manifest only an attempt's own objects go; a folder that has none of those stays whole."""
    url = f"memory://{uuid.uuid4().hex}/run"
    file_system, root = fsspec.core.url_to_fs(url)
    place = Somewhere(url, file_system, root)
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


def test_no_manifest_is_a_bad_checkpoint_on_a_path(tmp_path: Path) -> None:
    """On a path, a folder of the final name once had a manifest: it is bad."""
    place = Somewhere(str(tmp_path), *fsspec.core.url_to_fs(str(tmp_path)))
    lay_in_store(place.write, 10)
    (tmp_path / "step-10/manifest.json").unlink()
    (entry,) = look_into(str(tmp_path)).entry.checkpoints
    assert (entry.valid, entry.problems[0].kind) == (False, "Incomplete")


def test_leftovers_on_a_path(tmp_path: Path) -> None:
    """Attempts beside checkpoints on a path are leftovers, by their names."""
    place = Somewhere(str(tmp_path), *fsspec.core.url_to_fs(str(tmp_path)))
    lay_in_store(place.write, 10)
    lay_in_store(place.write, 20, folder="step-20.tmp-job-0-cafe.20", committed=False)
    looked = look_into(str(tmp_path))
    assert [(left.name, left.attempt) for left in looked.entry.leftovers] == [
        ("step-20.tmp-job-0-cafe.20", "job-0-cafe.20")
    ]
    assert [entry.iteration for entry in looked.entry.checkpoints] == [10]


def test_nothing_at_a_url_is_bad_input() -> None:
    """A URL below which nothing lies is likely a mistake and is refused."""
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
    """On a real S3 server the commands see a flipped byte, prune an old checkpoint, and need no torch."""
    urllib.request.urlopen(urllib.request.Request(f"{s3}/bucket", method="PUT"), timeout=60).close()
    file_system = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=s3, key="k", secret="s")
    place = Somewhere("s3://bucket/run", file_system, "bucket/run")
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
    assert [left["name"] for left in listed["leftovers"]] == ["step-40"]
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
    """Run a command in a process of its own that knows the S3 server and fails when torch is imported."""

    def command(address: str, *words: str) -> subprocess.CompletedProcess[str]:
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
            [sys.executable, "-c", code, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return command
