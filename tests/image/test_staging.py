"""Staging: what is copied, when, and where it goes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
from laid_shards import IDENTITY, bytes_of, flat_of, manifest_of, memfd, provide, stage

from outlast.checkpoint.arena import Arena, Stager
from outlast.checkpoint.restore import read_tensors
from outlast.checkpoint.shard import ALIGNMENT, read_header
from outlast.checkpoint.verification import prove_shard

MANY = 4 * (8 << 20)
"""Bytes from which two threads copy."""


@pytest.fixture
def stager() -> Iterator[Stager]:
    made = Stager()
    yield made
    made.close()


def test_sealed_memory_cannot_shrink() -> None:
    """Nobody who has an arena's descriptor can take pages from under a process that has it mapped."""
    arena = Arena(memfd(8192))
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    assert os.fstat(arena.fd).st_size == 8192
    arena.close()
    arena.close()


def test_touching_changes_nothing_and_can_be_stopped() -> None:
    """Pages are made ready without a change of what lies in them."""
    arena = Arena(memfd(1 << 20))
    arena.array[:] = 7
    arena.touch(threading.Event())
    stopped = threading.Event()
    stopped.set()
    arena.touch(stopped)
    assert bool((arena.array == 7).all())
    arena.close()


def test_data_begins_at_a_page_and_every_tensor_at_its_element() -> None:
    """Data begins at a multiple of 4 KiB, and no tensor of wide elements lies askew behind one of narrow ones."""
    staged = stage({"narrow": torch.ones(3, dtype=torch.int8), "wide": torch.ones(5, dtype=torch.float64)})
    offsets = {tensor.name.rpartition(".")[2]: tensor.offset for tensor in staged.tensors}
    assert min(offsets.values()) % ALIGNMENT == 0
    assert next(offset for name, offset in offsets.items() if name.endswith("wide")) % 8 == 0
    staged.arena.close()


@pytest.mark.parametrize("count", [1, MANY // 4 + 3])
def test_what_is_staged_is_the_value_at_the_save(stager: Stager, count: int) -> None:
    """What training does after staging is not in the image, whether one thread copied or two."""
    tensor = torch.arange(count, dtype=torch.float32)
    staged = stager.stage(flat_of({"w": tensor}), IDENTITY, provide)
    kept = tensor.clone()
    tensor.fill_(-1)
    manifest = manifest_of(staged)
    found = read_tensors(staged.arena.fd, manifest, 0, prove_shard(staged.arena.fd, manifest, 0, in_memory=True), {})
    assert torch.equal(next(iter(found.values())), kept)
    staged.arena.close()


def test_deferred_tensors_are_as_they_were_until_the_wait(stager: Stager) -> None:
    """What is copied late has its values of the save, if it changes only after the wait; the rest has them at once."""
    late, now = torch.arange(1 << 20, dtype=torch.float32), torch.arange(9, dtype=torch.float32)
    flat = flat_of({"late": late, "now": now})
    staged = stager.stage(flat, IDENTITY, provide, deferred={flat.tensors[0].name})
    now.fill_(-1)
    staged.wait()
    late.fill_(-1)
    manifest = manifest_of(staged)
    found = read_tensors(staged.arena.fd, manifest, 0, prove_shard(staged.arena.fd, manifest, 0, in_memory=True), {})
    assert torch.equal(found[flat.tensors[0].name], torch.arange(1 << 20, dtype=torch.float32))
    assert torch.equal(found[flat.tensors[1].name], torch.arange(9, dtype=torch.float32))
    staged.arena.close()


def test_a_layout_used_again_is_the_one_made_anew(stager: Stager) -> None:
    """The image of a second save has the same bytes as if its layout had been worked out afresh."""
    for number, note in enumerate(("short", "a longer note " * 500, "short again")):
        tensors = {"a": torch.full((7, 3), float(number)), "b": torch.full((5,), number, dtype=torch.int64)}
        identity = msgspec.structs.replace(IDENTITY, iteration=10**number, attempt=f"{10**number}-x")
        again = stager.stage(flat_of(tensors, note), identity, provide)
        fresh_stager = Stager()
        fresh = fresh_stager.stage(flat_of(tensors, note), identity, provide)
        assert bytes_of(again) == bytes_of(fresh)
        assert again.tensors == fresh.tensors
        assert stager.size_of(flat_of(tensors, note), identity) == again.num_bytes
        for staged in (again, fresh):
            staged.arena.close()
        fresh_stager.close()


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.zeros(7)},
        {"a": torch.zeros(7, 3, dtype=torch.int32)},
        {"b": torch.zeros(7, 3)},
        {"a": torch.zeros(7, 3), "c": torch.zeros(1)},
    ],
)
def test_another_state_gets_a_layout_of_its_own(stager: Stager, tensors: dict[str, torch.Tensor]) -> None:
    """Another shape, type, name or number of tensors is never laid out as the state before."""
    stager.stage(flat_of({"a": torch.ones(7, 3)}), IDENTITY, provide).arena.close()
    staged = stager.stage(flat_of(tensors), IDENTITY, provide)
    fresh = stage(tensors)
    assert bytes_of(staged) == bytes_of(fresh)
    for one in (staged, fresh):
        one.arena.close()


def test_the_head_says_whose_shard_it_is() -> None:
    """The identity and every tensor's place can be read from the image alone."""
    staged = stage({"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)})
    data = bytes_of(staged)
    length = 8 + int.from_bytes(data[:8], "little")
    identity, spans = read_header(memoryview(data)[:length], len(data))
    assert identity == IDENTITY
    told = {entry.name: (entry.offset, entry.num_bytes, entry.shape) for entry in staged.tensors}
    assert {name: (span.offset, span.num_bytes, span.shape) for name, span in spans.items()} == told
    staged.arena.close()


def test_views_are_staged_as_what_they_show(stager: Stager) -> None:
    """Transposed, sliced and conjugated tensors are saved by value, not by memory."""
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {"t": base.T, "s": base[:, 1:3], "c": torch.complex(base, base + 1).conj()}
    flat = flat_of(tensors)
    staged = stager.stage(flat, IDENTITY, provide)
    manifest = manifest_of(staged)
    found = read_tensors(staged.arena.fd, manifest, 0, prove_shard(staged.arena.fd, manifest, 0, in_memory=True), {})
    assert [torch.equal(found[named.name], named.tensor) for named in flat.tensors] == [True] * 3
    staged.arena.close()
