"""Verification of a shard before it is read, and reading into live tensors."""

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


class StoredShard:
    """A shard of more than two chunks, in a file."""

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
def stored_shard(tmp_path: Path) -> Iterator[StoredShard]:
    new_shard = StoredShard(tmp_path)
    yield new_shard
    os.close(new_shard.fd)


def test_reading_fills_live_tensors_in_place(stored_shard: StoredShard) -> None:
    """Given tensors are filled in place, the others are allocated, and all have the saved values."""
    live = torch.full((3 << 20,), -1.0)
    address = live.data_ptr()
    found = read_tensors(
        stored_shard.fd,
        stored_shard.manifest,
        0,
        prove_shard(stored_shard.fd, stored_shard.manifest, 0),
        {stored_shard.names["big"]: live},
    )
    assert found[stored_shard.names["big"]] is live
    assert live.data_ptr() == address
    for name, tensor in stored_shard.tensors.items():
        assert torch.equal(found[stored_shard.names[name]], tensor)
        assert found[stored_shard.names[name]].dtype == tensor.dtype
    assert len(found) == 3


def test_a_flipped_byte_is_reported_with_chunk_and_tensor(stored_shard: StoredShard) -> None:
    """A flipped bit is rejected with an error that contains its chunk and tensor."""
    offset, num_bytes = stored_shard.span("big")
    flip(stored_shard.path, offset + num_bytes - 1)
    with pytest.raises(Corrupt, match=rf"chunk {(offset + num_bytes - 1) // CHUNK_BYTES}, .*big"):
        stored_shard.prove()


def test_flips_in_every_section_are_detected(stored_shard: StoredShard) -> None:
    """A flipped bit in the length, header, padding, any tensor or last byte is rejected."""
    size, data = stored_shard.path.stat().st_size, stored_shard.span("big")[0]
    for offset in (0, 7, 8, 200, data - 1, data, CHUNK_BYTES - 1, CHUNK_BYTES, size - 1):
        flip(stored_shard.path, offset)
        with pytest.raises(CheckpointError):
            stored_shard.prove()
        flip(stored_shard.path, offset)
    stored_shard.prove()


@pytest.mark.parametrize("num_kept_bytes", [0, 3, 100, 4096, CHUNK_BYTES, -1])
def test_a_torn_file_is_incomplete(stored_shard: StoredShard, num_kept_bytes: int) -> None:
    """A truncated file is rejected at any length, both by `check_shard` and by full verification."""
    os.truncate(stored_shard.path, num_kept_bytes if num_kept_bytes >= 0 else stored_shard.path.stat().st_size - 1)
    with pytest.raises(Incomplete):
        stored_shard.prove()
    with pytest.raises(Incomplete):
        check_shard(stored_shard.path, stored_shard.manifest, 0)


def test_a_file_with_extra_bytes_is_incomplete(stored_shard: StoredShard) -> None:
    """A file with extra bytes at its end is rejected."""
    with open(stored_shard.path, "ab") as file:
        file.write(b"x")
    with pytest.raises(Incomplete):
        stored_shard.prove()


@pytest.mark.parametrize(
    "changed_fields", [{"iteration": 8}, {"attempt": "7-b"}, {"run": "another"}, {"topology": "u"}, {"world_size": 2}]
)
def test_a_shard_of_another_checkpoint_is_untrusted(
    stored_shard: StoredShard, changed_fields: dict[str, object]
) -> None:
    """A shard of another iteration, attempt, run or topology is rejected, and the error contains the difference."""
    other_manifest: Manifest = msgspec.structs.replace(stored_shard.manifest, **changed_fields)
    with pytest.raises(Untrusted, match=next(iter(changed_fields))):
        prove_shard(stored_shard.fd, other_manifest, 0)


def test_bytes_changed_after_verification_are_rejected(stored_shard: StoredShard) -> None:
    """Bytes that changed after verification are detected when they are read."""
    proof = prove_shard(stored_shard.fd, stored_shard.manifest, 0)
    flip(stored_shard.path, stored_shard.span("big")[0] + 12)
    with pytest.raises(Corrupt):
        read_tensors(stored_shard.fd, stored_shard.manifest, 0, proof, {})


def test_a_shard_in_longer_memory_is_verified() -> None:
    """A shard in shared memory may be followed by other bytes; a flip of its own bytes is detected."""
    staged = stage({"w": torch.randn(3 << 20)})
    manifest = manifest_of(staged)
    staged.arena.array[staged.num_bytes :] = 9
    proof = prove_shard(staged.arena.fd, manifest, 0, in_memory=True)
    assert proof.spans
    staged.arena.array[CHUNK_BYTES + 5] ^= 1
    with pytest.raises(Corrupt, match="chunk 1"):
        prove_shard(staged.arena.fd, manifest, 0, in_memory=True)
    staged.arena.close()


def test_check_shard_detects_a_missing_file(stored_shard: StoredShard, tmp_path: Path) -> None:
    """`check_shard` rejects a missing file and accepts a file of the correct length."""
    with pytest.raises(Incomplete, match="missing"):
        check_shard(tmp_path / "nowhere", stored_shard.manifest, 0)
    check_shard(stored_shard.path, stored_shard.manifest, 0)


def test_a_tiny_shard_is_verified_and_read(tmp_path: Path) -> None:
    """A state smaller than one chunk is verified and read."""
    tensors = {"w": torch.tensor([1.5, -2.5], dtype=torch.float16)}
    manifest = lay(tensors, tmp_path / "s")
    fd = os.open(tmp_path / "s", os.O_RDONLY)
    found = read_tensors(fd, manifest, 0, prove_shard(fd, manifest, 0), {})
    os.close(fd)
    assert torch.equal(next(iter(found.values())), tensors["w"])
    assert manifest.iteration == IDENTITY.iteration


def write_head(stored_shard: StoredShard, head: bytes) -> None:
    with open(stored_shard.path, "r+b") as file:
        file.write(head)


def test_a_changed_header_is_rejected(stored_shard: StoredShard) -> None:
    """A header that describes a valid file with other tensors differs from its digest and is rejected."""
    head = read_head(stored_shard.fd, stored_shard.path.stat().st_size)
    name = stored_shard.names["small"].encode()
    write_head(stored_shard, head.replace(name, name[:-1] + b"X"))
    with pytest.raises(Corrupt, match="table of its tensors, differs from its digest"):
        stored_shard.prove()
    with pytest.raises(Corrupt, match="table of its tensors, differs from its digest"):
        check_shard(stored_shard.path, stored_shard.manifest, 0, read_head=True)


def test_another_ranks_header_is_rejected(stored_shard: StoredShard) -> None:
    """A header of another rank is rejected with an error that contains that rank."""
    head = read_head(stored_shard.fd, stored_shard.path.stat().st_size)
    write_head(stored_shard, head.replace(b'\\"rank\\":0', b'\\"rank\\":1'))
    with pytest.raises(Untrusted, match="is the shard of rank 1 instead of 0"):
        stored_shard.prove()


def test_a_zeroed_header_is_rejected(stored_shard: StoredShard) -> None:
    """A shard whose header is zeros is rejected."""
    write_head(stored_shard, bytes(len(read_head(stored_shard.fd, stored_shard.path.stat().st_size))))
    with pytest.raises(Corrupt, match="the header cannot be read"):
        stored_shard.prove()


@pytest.mark.parametrize(("field", "value"), [("table", "0" * 16), ("digests", bytes(16))])
def test_a_manifest_with_a_wrong_digest_is_rejected(stored_shard: StoredShard, field: str, value: object) -> None:
    """A correct shard is rejected under a manifest with another digest of its header or of a chunk."""
    (entry,) = stored_shard.manifest.shards
    false_entry = msgspec.structs.replace(entry, **{field: value})
    assert len(false_entry.digests) == len(entry.digests)
    with pytest.raises(Corrupt, match="differs from its digest"):
        prove_shard(stored_shard.fd, msgspec.structs.replace(stored_shard.manifest, shards=(false_entry,)), 0)


def test_a_corrupt_header_hides_tensor_names(stored_shard: StoredShard) -> None:
    """If the header is corrupt too, the corrupt chunk is reported without tensor names."""
    flip(stored_shard.path, CHUNK_BYTES + 5)
    read = partial(read_path, stored_shard.path)
    (entry,) = stored_shard.manifest.shards
    (flaw,) = verify([shard_file(entry, read, room_bytes=PIECE_BYTES)], num_threads=1)
    assert flaw.chunk == 1
    assert stored_shard.names["big"] in flaw.contents
    head = read_head(stored_shard.fd, stored_shard.path.stat().st_size)
    name = stored_shard.names["small"].encode()
    write_head(stored_shard, head.replace(name, name[:-1] + b"X"))
    flaws = verify([shard_file(entry, read, room_bytes=PIECE_BYTES)], num_threads=1)
    assert [(flaw.chunk, flaw.contents) for flaw in flaws] == [(0, ()), (1, ())]


def test_a_manifest_of_an_earlier_schema_is_rejected(stored_shard: StoredShard) -> None:
    """A manifest of an earlier schema is rejected with an error that contains its schema."""
    with pytest.raises(Untrusted, match="has schema 1, this version reads 2 and newer"):
        decode_manifest(seal(msgspec.structs.replace(stored_shard.manifest, schema=1)))
