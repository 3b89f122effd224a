"""The header of a shard: accepted and rejected contents."""

from __future__ import annotations

import json
import os

import msgspec
import pytest
import torch
from laid_shards import IDENTITY, bytes_of, memfd, stage
from safetensors.torch import load

from outlast.checkpoint.shard import CHUNK_BYTES, TREE, num_chunks, read_head, read_header, shard_name
from outlast.errors import Corrupt


def head_of(entries: dict[str, object], *, identity: bool = True) -> memoryview:
    """Return a shard header with the given entries."""
    header = dict(entries)
    if identity:
        header["__metadata__"] = {"outlast": msgspec.json.encode(IDENTITY).decode()}
    text = json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text)


def entry(begin: int, end: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin], "data_offsets": [begin, end]}


def test_safetensors_can_read_a_shard() -> None:
    """A shard is a safetensors file: the safetensors library reads every tensor of it."""
    tensors = {"w": torch.randn(3, 5), "n": torch.arange(4), "h": torch.randn(7).to(torch.bfloat16)}
    staged = stage(tensors)
    found = load(bytes_of(staged))
    assert TREE in found
    for name, tensor in tensors.items():
        assert torch.equal(next(value for key, value in found.items() if key.endswith(name)), tensor)
    staged.arena.close()


@pytest.mark.parametrize("length", [0, 1, 101, 2**40, 2**64 - 1])
def test_an_impossible_header_length_is_rejected(length: int) -> None:
    """An impossible header length is rejected before that many bytes are read or allocated."""
    fd = memfd(108)
    os.pwrite(fd, length.to_bytes(8, "little"), 0)
    with pytest.raises(Corrupt, match="cannot be read"):
        read_head(fd, 108)
    os.close(fd)


@pytest.mark.parametrize(
    "entries",
    [
        {"w": entry(0, 101)},
        {"w": {**entry(0, 4), "data_offsets": [4, 0]}},
        {"w": {**entry(0, 4), "data_offsets": [-4, 0]}},
        {"w": {**entry(0, 4), "data_offsets": ["a", 4]}},
        {"w": {"dtype": "U8"}},
        {"w": 3},
    ],
)
def test_a_header_with_invalid_entries_is_rejected(entries: dict[str, object]) -> None:
    """Offsets outside the file, reversed, of a wrong type or missing are rejected."""
    head = head_of(entries)
    with pytest.raises(Corrupt):
        read_header(head, len(head) + 100)


def test_another_programs_file_is_rejected() -> None:
    """A safetensors file without an outlast identity is rejected, and so is a header that is not a JSON object."""
    head = head_of({"w": entry(0, 4)}, identity=False)
    with pytest.raises(Corrupt):
        read_header(head, len(head) + 4)
    for text in (b"[1, 2]", b"\xff\xfe", b"nothing"):
        with pytest.raises(Corrupt):
            read_header(memoryview(len(text).to_bytes(8, "little") + text), 8 + len(text))


def test_shard_names_sort_by_rank_and_partial_chunks_count() -> None:
    """Shard file names sort by rank, and a partial chunk counts as a chunk."""
    assert [shard_name(2), shard_name(10)] == sorted([shard_name(10), shard_name(2)])
    assert [num_chunks(n) for n in (0, 1, CHUNK_BYTES, CHUNK_BYTES + 1)] == [0, 1, 1, 2]
