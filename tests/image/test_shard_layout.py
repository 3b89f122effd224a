"""The head of a shard: what it takes, and what it refuses."""

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
    """Return a head that says what it is given."""
    header = dict(entries)
    if identity:
        header["__metadata__"] = {"outlast": msgspec.json.encode(IDENTITY).decode()}
    text = json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text)


def entry(begin: int, end: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin], "data_offsets": [begin, end]}


def test_safetensors_reads_a_shard() -> None:
    """A shard is a file of safetensors: its own library reads every tensor of it."""
    tensors = {"w": torch.randn(3, 5), "n": torch.arange(4), "h": torch.randn(7).to(torch.bfloat16)}
    staged = stage(tensors)
    found = load(bytes_of(staged))
    assert TREE in found
    for name, tensor in tensors.items():
        assert torch.equal(next(value for key, value in found.items() if key.endswith(name)), tensor)
    staged.arena.close()


@pytest.mark.parametrize("length", [0, 1, 101, 2**40, 2**64 - 1])
def test_an_impossible_header_length_is_refused(length: int) -> None:
    """A length that cannot be is refused before anything of that size is read or allocated."""
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
def test_a_header_that_points_outside_or_lacks_something_is_refused(entries: dict[str, object]) -> None:
    """Places outside of the file, backwards, of the wrong kind or missing: each is an error of the file."""
    head = head_of(entries)
    with pytest.raises(Corrupt):
        read_header(head, len(head) + 100)


def test_a_file_of_another_program_is_refused() -> None:
    """A file of safetensors without an identity is none of ours, and neither is what is no JSON object."""
    head = head_of({"w": entry(0, 4)}, identity=False)
    with pytest.raises(Corrupt):
        read_header(head, len(head) + 4)
    for text in (b"[1, 2]", b"\xff\xfe", b"nothing"):
        with pytest.raises(Corrupt):
            read_header(memoryview(len(text).to_bytes(8, "little") + text), 8 + len(text))


def test_names_sort_as_ranks_and_the_last_chunk_may_be_short() -> None:
    """Files of ranks sort by rank, and a part of a chunk is a chunk."""
    assert [shard_name(2), shard_name(10)] == sorted([shard_name(10), shard_name(2)])
    assert [num_chunks(n) for n in (0, 1, CHUNK_BYTES, CHUNK_BYTES + 1)] == [0, 1, 1, 2]
