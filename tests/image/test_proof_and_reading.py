"""A shard is verified before anything is touched, and read into live tensors as it was verified."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from laid_shards import IDENTITY, flip, lay, manifest_of, stage

from outlast.checkpoint.manifest import Manifest, decode_manifest, seal
from outlast.checkpoint.restore import read_tensors
from outlast.checkpoint.shard import CHUNK_BYTES, read_head, read_header
from outlast.checkpoint.verification import PIECE_BYTES, check_shard, prove_shard, read_path, shard_file, verify
from outlast.errors import CheckpointError, Corrupt, Incomplete, Untrusted


class Laid:
    """A shard of two chunks and more, in a file."""

    def __init__(self, folder: Path) -> None:
        self.tensors = {"big": torch.randn(3 << 20), "small": torch.arange(5), "empty": torch.zeros(0, 4)}
        self.path = folder / "shard"
        self.manifest = lay(self.tensors, self.path)
        self.fd = os.open(self.path, os.O_RDONLY)
        size = self.path.stat().st_size
        _, self.table = read_header(memoryview(read_head(self.fd, size)), size)
        self.names = {name: self._name(name) for name in self.tensors}

    def span(self, name: str) -> tuple[int, int]:
        entry = self.table[self.names[name]]
        return entry.offset, entry.num_bytes

    def prove(self) -> None:
        prove_shard(self.fd, self.manifest, 0)

    def _name(self, name: str) -> str:
        return next(one for one in self.table if name in one)


@pytest.fixture
def laid(tmp_path: Path) -> Iterator[Laid]:
    made = Laid(tmp_path)
    yield made
    os.close(made.fd)


def test_read_puts_the_bytes_into_live_tensors(laid: Laid) -> None:
    """Tensors that are given take their bytes where they lie; the others are new; all have the saved values."""
    live = torch.full((3 << 20,), -1.0)
    address = live.data_ptr()
    found = read_tensors(laid.fd, laid.manifest, 0, prove_shard(laid.fd, laid.manifest, 0), {laid.names["big"]: live})
    assert found[laid.names["big"]] is live
    assert live.data_ptr() == address
    for name, tensor in laid.tensors.items():
        assert torch.equal(found[laid.names[name]], tensor)
        assert found[laid.names[name]].dtype == tensor.dtype
    assert len(found) == 3


def test_a_flipped_byte_names_its_chunk_and_tensor(laid: Laid) -> None:
    """One changed bit is refused, and the message names the chunk and the tensor that it lies in."""
    offset, num_bytes = laid.span("big")
    flip(laid.path, offset + num_bytes - 1)
    with pytest.raises(Corrupt, match=rf"chunk {(offset + num_bytes - 1) // CHUNK_BYTES}, .*big"):
        laid.prove()


def test_any_flipped_byte_is_found(laid: Laid) -> None:
    """A bit in the length, the header, its padding, the first and last tensor, and the last byte: each is refused."""
    size, data = laid.path.stat().st_size, laid.span("big")[0]
    for offset in (0, 7, 8, 200, data - 1, data, CHUNK_BYTES - 1, CHUNK_BYTES, size - 1):
        flip(laid.path, offset)
        with pytest.raises(CheckpointError):
            laid.prove()
        flip(laid.path, offset)
    laid.prove()


@pytest.mark.parametrize("kept", [0, 3, 100, 4096, CHUNK_BYTES, -1])
def test_a_torn_file_is_incomplete(laid: Laid, kept: int) -> None:
    """A file that is too short is refused, wherever it ends, by the cheap look as by the proof."""
    os.truncate(laid.path, kept if kept >= 0 else laid.path.stat().st_size - 1)
    with pytest.raises(Incomplete):
        laid.prove()
    with pytest.raises(Incomplete):
        check_shard(laid.path, laid.manifest, 0)


def test_a_file_that_is_too_long_is_incomplete(laid: Laid) -> None:
    """Bytes behind the end are refused as missing ones are."""
    with open(laid.path, "ab") as file:
        file.write(b"x")
    with pytest.raises(Incomplete):
        laid.prove()


@pytest.mark.parametrize(
    "other", [{"iteration": 8}, {"attempt": "7-b"}, {"run": "another"}, {"topology": "u"}, {"world_size": 2}]
)
def test_a_whole_shard_in_the_wrong_place_is_untrusted(laid: Laid, other: dict[str, object]) -> None:
    """A shard of another iteration, attempt, run or arrangement is refused, and the message says what it is."""
    wrong: Manifest = msgspec.structs.replace(laid.manifest, **other)
    with pytest.raises(Untrusted, match=next(iter(other))):
        prove_shard(laid.fd, wrong, 0)


def test_what_changes_after_the_proof_is_not_used(laid: Laid) -> None:
    """Bytes that are not those that were verified are noticed as they are read."""
    proof = prove_shard(laid.fd, laid.manifest, 0)
    flip(laid.path, laid.span("big")[0] + 12)
    with pytest.raises(Corrupt):
        read_tensors(laid.fd, laid.manifest, 0, proof, {})


def test_a_shard_in_longer_memory_is_verified_where_it_lies() -> None:
    """In shared memory a shard may be followed by anything; a change of its own bytes is found there too."""
    staged = stage({"w": torch.randn(3 << 20)})
    manifest = manifest_of(staged)
    staged.arena.array[staged.num_bytes :] = 9
    proof = prove_shard(staged.arena.fd, manifest, 0, in_memory=True)
    assert proof.spans
    staged.arena.array[CHUNK_BYTES + 5] ^= 1
    with pytest.raises(Corrupt, match="chunk 1"):
        prove_shard(staged.arena.fd, manifest, 0, in_memory=True)
    staged.arena.close()


def test_the_cheap_look_tells_what_is_missing(laid: Laid, tmp_path: Path) -> None:
    """A file that is not there is missing; one of the right length passes until it is verified."""
    with pytest.raises(Incomplete, match="missing"):
        check_shard(tmp_path / "nowhere", laid.manifest, 0)
    check_shard(laid.path, laid.manifest, 0)


def test_a_tiny_shard_is_verified_and_read(tmp_path: Path) -> None:
    """A state of less than a chunk takes the same way."""
    tensors = {"w": torch.tensor([1.5, -2.5], dtype=torch.float16)}
    manifest = lay(tensors, tmp_path / "s")
    fd = os.open(tmp_path / "s", os.O_RDONLY)
    found = read_tensors(fd, manifest, 0, prove_shard(fd, manifest, 0), {})
    os.close(fd)
    assert torch.equal(next(iter(found.values())), tensors["w"])
    assert manifest.iteration == IDENTITY.iteration


def _write_head(laid: Laid, head: bytes) -> None:
    with open(laid.path, "r+b") as file:
        file.write(head)


def test_a_changed_table_is_refused(laid: Laid) -> None:
    """A header that still describes a right file, but other tensors than were saved, differs from its digest."""
    head = read_head(laid.fd, laid.path.stat().st_size)
    name = laid.names["small"].encode()
    _write_head(laid, head.replace(name, name[:-1] + b"X"))
    with pytest.raises(Corrupt, match="table of its tensors, differs from its digest"):
        laid.prove()
    with pytest.raises(Corrupt, match="table of its tensors, differs from its digest"):
        check_shard(laid.path, laid.manifest, 0, read_head=True)


def test_another_ranks_table_is_refused(laid: Laid) -> None:
    """A header that is another rank's names that rank."""
    head = read_head(laid.fd, laid.path.stat().st_size)
    _write_head(laid, head.replace(b'\\"rank\\":0', b'\\"rank\\":1'))
    with pytest.raises(Untrusted, match="is the shard of rank 1 instead of 0"):
        laid.prove()


def test_a_shard_without_its_table_is_refused(laid: Laid) -> None:
    """Zeros in place of the header are no table, whatever the rest is."""
    _write_head(laid, bytes(len(read_head(laid.fd, laid.path.stat().st_size))))
    with pytest.raises(Corrupt, match="the header cannot be read"):
        laid.prove()


@pytest.mark.parametrize(("field", "value"), [("table", "0" * 16), ("digests", bytes(16))])
def test_a_manifest_that_lies_about_a_shard_is_found_out(laid: Laid, field: str, value: object) -> None:
    """A right shard is refused under a manifest with another digest of its table, or of a chunk."""
    (entry,) = laid.manifest.shards
    lying = msgspec.structs.replace(entry, **{field: value})
    assert len(lying.digests) == len(entry.digests)
    with pytest.raises(Corrupt, match="differs from its digest"):
        prove_shard(laid.fd, msgspec.structs.replace(laid.manifest, shards=(lying,)), 0)


def test_a_flaw_names_tensors_only_by_a_table_that_is_right(laid: Laid) -> None:
    """Where the table is damaged too, the chunk is named without what lies in it."""
    flip(laid.path, CHUNK_BYTES + 5)
    read = partial(read_path, laid.path)
    (entry,) = laid.manifest.shards
    (flaw,) = verify([shard_file(entry, read, room_bytes=PIECE_BYTES)], num_threads=1)
    assert flaw.chunk == 1
    assert laid.names["big"] in flaw.contents
    head = read_head(laid.fd, laid.path.stat().st_size)
    name = laid.names["small"].encode()
    _write_head(laid, head.replace(name, name[:-1] + b"X"))
    flaws = verify([shard_file(entry, read, room_bytes=PIECE_BYTES)], num_threads=1)
    assert [(flaw.chunk, flaw.contents) for flaw in flaws] == [(0, ()), (1, ())]


def test_a_manifest_of_an_earlier_schema_is_refused_by_name(laid: Laid) -> None:
    """It is not read as something else: the error says which schema it has."""
    with pytest.raises(Untrusted, match="has schema 1, this version reads 2 and newer"):
        decode_manifest(seal(msgspec.structs.replace(laid.manifest, schema=1)))
