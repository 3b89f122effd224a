"""Staging: which tensors are copied, when, and where to."""

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
"""Size from which two threads copy."""


@pytest.fixture
def stager() -> Iterator[Stager]:
    new_stager = Stager()
    yield new_stager
    new_stager.close()


def test_arena_memory_cannot_shrink() -> None:
    """A process with an arena's descriptor cannot truncate the memory that another process has mapped."""
    arena = Arena(memfd(8192))
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    assert os.fstat(arena.fd).st_size == 8192
    arena.close()
    arena.close()


def test_touch_keeps_the_contents_and_can_be_stopped() -> None:
    """``touch`` maps the pages without a change of their contents."""
    arena = Arena(memfd(1 << 20))
    arena.array[:] = 7
    arena.touch(threading.Event())
    stopped = threading.Event()
    stopped.set()
    arena.touch(stopped)
    assert bool((arena.array == 7).all())
    arena.close()


def test_data_and_tensors_are_aligned() -> None:
    """Data begins at a multiple of 4 KiB, and each tensor is aligned to its element size."""
    staged = stage({"narrow": torch.ones(3, dtype=torch.int8), "wide": torch.ones(5, dtype=torch.float64)})
    offsets = {tensor.name.rpartition(".")[2]: tensor.offset for tensor in staged.tensors}
    assert min(offsets.values()) % ALIGNMENT == 0
    assert next(offset for name, offset in offsets.items() if name.endswith("wide")) % 8 == 0
    staged.arena.close()


@pytest.mark.parametrize("count", [1, MANY // 4 + 3])
def test_the_image_has_the_values_of_the_save(stager: Stager, count: int) -> None:
    """Changes by training after staging are not in the image, whether one thread copies or two."""
    tensor = torch.arange(count, dtype=torch.float32)
    staged = stager.stage(flat_of({"w": tensor}), IDENTITY, provide)
    value_at_save = tensor.clone()
    tensor.fill_(-1)
    manifest = manifest_of(staged)
    found = read_tensors(staged.arena.fd, manifest, 0, prove_shard(staged.arena.fd, manifest, 0, in_memory=True), {})
    assert torch.equal(next(iter(found.values())), value_at_save)
    staged.arena.close()


def test_deferred_tensors_have_the_values_of_the_save(stager: Stager) -> None:
    """A deferred tensor that changes only after ``wait`` has its value of the save; the others are copied at once."""
    deferred_tensor, small_tensor = torch.arange(1 << 20, dtype=torch.float32), torch.arange(9, dtype=torch.float32)
    flat = flat_of({"late": deferred_tensor, "now": small_tensor})
    staged = stager.stage(flat, IDENTITY, provide, deferred={flat.tensors[0].name})
    small_tensor.fill_(-1)
    staged.wait()
    deferred_tensor.fill_(-1)
    manifest = manifest_of(staged)
    found = read_tensors(staged.arena.fd, manifest, 0, prove_shard(staged.arena.fd, manifest, 0, in_memory=True), {})
    assert torch.equal(found[flat.tensors[0].name], torch.arange(1 << 20, dtype=torch.float32))
    assert torch.equal(found[flat.tensors[1].name], torch.arange(9, dtype=torch.float32))
    staged.arena.close()


def test_a_reused_layout_equals_a_fresh_one(stager: Stager) -> None:
    """A later save with a cached layout produces the same bytes as a fresh layout."""
    for number, note in enumerate(("short", "a longer note " * 500, "short again")):
        tensors = {"a": torch.full((7, 3), float(number)), "b": torch.full((5,), number, dtype=torch.int64)}
        identity = msgspec.structs.replace(IDENTITY, iteration=10**number, attempt=f"{10**number}-x")
        reused = stager.stage(flat_of(tensors, note), identity, provide)
        fresh_stager = Stager()
        fresh = fresh_stager.stage(flat_of(tensors, note), identity, provide)
        assert bytes_of(reused) == bytes_of(fresh)
        assert reused.tensors == fresh.tensors
        assert stager.size_of(flat_of(tensors, note), identity) == reused.num_bytes
        for staged in (reused, fresh):
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
def test_a_different_state_gets_its_own_layout(stager: Stager, tensors: dict[str, torch.Tensor]) -> None:
    """A state with another shape, type, name or number of tensors does not reuse the cached layout."""
    stager.stage(flat_of({"a": torch.ones(7, 3)}), IDENTITY, provide).arena.close()
    staged = stager.stage(flat_of(tensors), IDENTITY, provide)
    fresh = stage(tensors)
    assert bytes_of(staged) == bytes_of(fresh)
    for one in (staged, fresh):
        one.arena.close()


def test_the_header_has_identity_and_tensor_spans() -> None:
    """The identity and the span of each tensor can be read from the image alone."""
    staged = stage({"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)})
    data = bytes_of(staged)
    length = 8 + int.from_bytes(data[:8], "little")
    identity, spans = read_header(memoryview(data)[:length], len(data))
    assert identity == IDENTITY
    expected = {entry.name: (entry.offset, entry.num_bytes, entry.shape) for entry in staged.tensors}
    assert {name: (span.offset, span.num_bytes, span.shape) for name, span in spans.items()} == expected
    staged.arena.close()


def test_views_are_saved_by_value(stager: Stager) -> None:
    """Transposed, sliced and conjugated tensors are saved by value, not by memory layout."""
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {"t": base.T, "s": base[:, 1:3], "c": torch.complex(base, base + 1).conj()}
    flat = flat_of(tensors)
    staged = stager.stage(flat, IDENTITY, provide)
    manifest = manifest_of(staged)
    found = read_tensors(staged.arena.fd, manifest, 0, prove_shard(staged.arena.fd, manifest, 0, in_memory=True), {})
    assert [torch.equal(found[named.name], named.tensor) for named in flat.tensors] == [True] * 3
    staged.arena.close()
