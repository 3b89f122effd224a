"""``outlast ckpt verify`` reads every byte and reports each corrupt one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laid_checkpoints import flip, lay_checkpoint, two_nodes

from outlast.checkpoint.catalogue.entries import Checkpoint, ListedCheckpoint
from outlast.checkpoint.catalogue.listing import look_into, verify
from outlast.checkpoint.shard import CHUNK_BYTES, shard_name
from outlast.checkpoint.verification import StoredFile


def newest(place: Path) -> ListedCheckpoint:
    return look_into(str(place)).found[0]


def test_every_byte_is_read_once(tmp_path: Path) -> None:
    """A complete checkpoint is valid, and each byte of its shards and replicas is read once."""
    two_nodes(tmp_path, 5)
    read_sizes: list[int] = []
    verified = verify(newest(tmp_path), num_threads=4, on_read=read_sizes.append)
    assert verified.entry.valid
    assert not verified.entry.problems
    size = sum(path.stat().st_size for path in tmp_path.rglob("rank-*"))
    assert verified.num_bytes_read == sum(read_sizes) == size


def test_verify_reports_chunk_and_tensor(tmp_path: Path) -> None:
    """Verification reports each corrupt chunk of a file with its tensors, and reads the other chunks."""
    lay_checkpoint({"node0": tmp_path}, 5, num_elements=(20 << 20) // 4)
    path = tmp_path / "step-5" / shard_name(0)
    flip(path, CHUNK_BYTES + 7)
    flip(path, path.stat().st_size - 20)
    verified = verify(newest(tmp_path), num_threads=2)
    assert not verified.entry.valid
    assert verified.entry.missing == (0,)
    first, last = verified.entry.problems
    assert (first.kind, first.file, first.rank, first.chunk) == ("Corrupt", f"step-5/{path.name}", 0, 1)
    assert first.tensors == ("model.weight",)
    assert (last.chunk, last.tensors) == (2, ("model.weight", "model.bias", "outlast.tree"))
    assert verified.num_bytes_read == path.stat().st_size


def test_a_corrupt_replica_is_reported(tmp_path: Path) -> None:
    """A flipped byte in one copy is reported with its node; the rank's other copy keeps the checkpoint valid."""
    two_nodes(tmp_path, 5)
    flip(tmp_path / "node1/step-5" / shard_name(0), 5000)
    entry = verify(newest(tmp_path), num_threads=2).entry
    assert entry.valid
    (problem,) = entry.problems
    assert (problem.node, problem.rank, problem.chunk) == ("node1", 0, 0)
    assert [held.replicas for held in entry.held] == [(2, 3), (1,)]


def test_two_corrupt_copies_invalidate_the_checkpoint(tmp_path: Path) -> None:
    """A rank without a correct copy is missing, and the checkpoint is invalid."""
    two_nodes(tmp_path, 5)
    for node in ("node0", "node1"):
        flip(tmp_path / node / "step-5" / shard_name(0), 5000)
    entry = verify(newest(tmp_path), num_threads=2).entry
    assert not entry.valid
    assert entry.missing == (0,)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Lay down one shard; return its path and its bytes."""
    place = tmp_path_factory.mktemp("shard")
    lay_checkpoint({"node0": place}, 5)
    path = place / "step-5" / shard_name(0)
    return path, path.read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_detected(shard: tuple[Path, bytes], place: float, bit: int) -> None:
    """A flip of any bit of a shard is detected, without a crash."""
    path, data = shard
    changed = bytearray(data)
    changed[int(place * len(data))] ^= 1 << bit
    path.write_bytes(changed)
    entry = verify(newest(path.parents[1]), num_threads=1).entry
    assert not entry.valid
    assert entry.problems[0].file == "step-5/rank-00000.safetensors"


def test_a_file_deleted_after_listing_is_reported(tmp_path: Path) -> None:
    """A file that is deleted between listing and reading is reported as a problem; no exception is raised."""
    lay_checkpoint({"node0": tmp_path}, 5)
    found = newest(tmp_path)
    (tmp_path / "step-5" / shard_name(0)).unlink()
    entry = verify(found, num_threads=2).entry
    assert not entry.valid
    assert entry.problems[0].kind == "CheckpointError"


class EndlessFile:
    """A file without an end that interrupts the main thread when it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, start: int, end: int, room: memoryview) -> Iterator[memoryview]:
        for _ in range(start, end, len(room)):
            self.reads += 1
            if self.reads == 2:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            yield room


@pytest.mark.parametrize("num_threads", [1, 4])
def test_an_interrupt_stops_the_readers(num_threads: int) -> None:
    """Ctrl-C during verification raises `KeyboardInterrupt`, and all reader threads exit."""

    chunks = ("",) * (1 << 12)
    file = StoredFile(name="f", num_bytes=CHUNK_BYTES << 12, chunks=chunks, read=EndlessFile().read, room_bytes=4096)
    entry = Checkpoint(iteration=1, tier="local", valid=True)
    found = ListedCheckpoint(entry=entry, files=(file,), judge=lambda problems: entry, remove=lambda: None)
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            verify(found, num_threads=num_threads)
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outlast-verify")]
