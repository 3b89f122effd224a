"""A digest depends on every bit and on the order of the bytes, on the host and on an accelerator."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outlast.numerics import replica_digest
from outlast.numerics.replica_digest import (
    BLOCK_WORDS,
    GROUP_BLOCKS,
    PIECE_BLOCKS,
    digest_tensors,
    weigh,
    weigh_at_once,
)


class SimulatedKernel:
    """Simulates the compiled kernel from its arguments: reads memory by address."""

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def run(
            addresses: torch.Tensor,
            counts: torch.Tensor,
            groups: torch.Tensor,
            weights: torch.Tensor,
            factors: torch.Tensor,
            sums: torch.Tensor,
            **fixed: int,
        ) -> None:
            blocks, words = fixed["num_blocks"], fixed["block_words"]
            assert fixed["tile_words"] * fixed["num_tiles"] == words
            assert (grid, sums.shape) == ((len(addresses), fixed["num_tiles"]),) * 2
            for task, (address, count, group) in enumerate(zip(addresses, counts, groups, strict=True)):
                first = int(group) * blocks * words
                here = np.zeros(blocks * words, dtype=np.int64)
                num_words = min(int(count) - first, len(here))
                memory = (ctypes.c_int32 * num_words).from_address(int(address) + 4 * first)
                here[:num_words] = np.frombuffer(memory, dtype=np.int32)
                group_factors = factors[int(group) * blocks : (int(group) + 1) * blocks, None]
                weighted = torch.from_numpy(here).view(blocks, words) * weights * group_factors
                sums[task] = weighted.view(blocks, fixed["num_tiles"], -1).sum(dim=(0, 2))

        return run


class BrokenKernel:
    """Simulates Triton without a compiler."""

    def __getitem__(self, _: tuple[int, int]) -> Callable[..., None]:
        raise RuntimeError("Failed to find C compiler")


def kernel_sums(tensors: list[torch.Tensor]) -> list[int]:
    """Return the results of one kernel, without a device to run it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outlast.numerics.replica_digest.find_kernel", SimulatedKernel)
        sums = weigh_at_once(tensors, torch.device("cpu"))
    assert sums is not None
    return sums.tolist()


WAYS: dict[str, Callable[[torch.Tensor], int]] = {
    "host": lambda tensor: digest_tensors([tensor])[0],
    "accelerator": lambda tensor: int(weigh(tensor)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64]
DTYPES += [torch.float8_e4m3fn]


@pytest.fixture(params=sorted(WAYS))
def digest(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], int]:
    """The implementations for the host and for accelerators, which runs on the CPU too."""
    return WAYS[request.param]


def _random(num_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    highest = 2 if dtype == torch.bool else 256
    return torch.randint(0, highest, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype)


def _flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_flipped_bit_changes_the_digest(digest: Callable[[torch.Tensor], int], dtype: torch.dtype) -> None:
    """Any one bit of any element type changes the digest, and flipping it again restores it."""
    tensor = _random(48, dtype)
    before = digest(tensor)
    seen = {before}
    for bit in range(8 * 48):
        _flip(tensor, bit)
        seen.add(digest(tensor))
        _flip(tensor, bit)
    assert len(seen) == 1 + 8 * 48
    assert digest(tensor) == before


@pytest.mark.parametrize("bit", [0, 7, 23, 30, 31])
def test_equal_flips_in_two_places_do_not_cancel(digest: Callable[[torch.Tensor], int], bit: int) -> None:
    """The same bit flipped in two words changes the digest: sign bits, neighbours, and the same place of two blocks."""
    tensor = _random(4 * (2 * BLOCK_WORDS + 5))
    before = digest(tensor)
    for first, second in ((0, 1), (1, 3), (7, BLOCK_WORDS + 7), (BLOCK_WORDS - 1, BLOCK_WORDS), (0, 2 * BLOCK_WORDS)):
        for word in (first, second):
            _flip(tensor, 32 * word + bit)
        assert digest(tensor) != before, (first, second)
        for word in (first, second):
            _flip(tensor, 32 * word + bit)
    assert digest(tensor) == before


def test_swapped_words_change_the_digest(digest: Callable[[torch.Tensor], int]) -> None:
    """Two swapped words change the digest, even if they differ in their highest bits only."""
    for first, second in ((0, 1), (2, 4), (5, BLOCK_WORDS + 5), (0, BLOCK_WORDS)):
        words = torch.zeros(2 * BLOCK_WORDS, dtype=torch.int32)
        words[first] = -(2**31)
        before = digest(words)
        words[first], words[second] = 0, -(2**31)
        assert digest(words) != before, (first, second)


def test_memory_layout_does_not_change_the_digest(digest: Callable[[torch.Tensor], int]) -> None:
    """The same elements in the same order have the same digest, for any strides and offset."""
    tensor = _random(6 * 10 * 2, torch.bfloat16).view(6, 10)
    expected = digest(tensor)
    assert digest(tensor.t().contiguous().t()) == expected
    assert digest(torch.nn.Parameter(tensor)) == expected
    room = torch.zeros(61, dtype=torch.bfloat16)
    room[1:] = tensor.reshape(-1)
    assert digest(room[1:]) == expected
    wide = torch.zeros(6, 20, dtype=torch.bfloat16)
    wide[:, ::2] = tensor
    assert digest(wide[:, ::2]) == expected
    assert digest(tensor.t()) != expected


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, 4, 5, 4 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS, 4 * BLOCK_WORDS + 3])
def test_any_number_of_bytes_has_a_digest(digest: Callable[[torch.Tensor], int], num_bytes: int) -> None:
    """Empty tensors and odd numbers of bytes have a digest, in which the last byte counts."""
    tensor = _random(num_bytes)
    before = digest(tensor)
    if num_bytes:
        _flip(tensor, 8 * num_bytes - 1)
        assert digest(tensor) != before


def test_scalars_and_lazy_views_are_digested(digest: Callable[[torch.Tensor], int]) -> None:
    """Tensors without dimensions, and views that are computed on access, are digested by their elements."""
    assert digest(torch.tensor(1.5)) == digest(torch.tensor([1.5])) != digest(torch.tensor(2.5))
    number = torch.tensor([1 + 2j])
    assert digest(number.conj()) == digest(torch.tensor([1 - 2j]))


def test_pieces_add_up_to_the_whole_tensor() -> None:
    """The sum over a tensor of several pieces is that of its weighted words, wrapped at 64 bits."""
    num_words = BLOCK_WORDS * PIECE_BLOCKS + BLOCK_WORDS + 3
    words = torch.zeros(num_words, dtype=torch.int32)
    single = []
    for place in (0, BLOCK_WORDS, BLOCK_WORDS * PIECE_BLOCKS, num_words - 1):
        words.zero_()
        words[place] = 1
        single.append(int(weigh(words)))
    assert len(set(single)) == 4
    assert all(weight % 2 == 1 for weight in single)
    for place in (0, BLOCK_WORDS, BLOCK_WORDS * PIECE_BLOCKS, num_words - 1):
        words[place] = 3
    assert (int(weigh(words)) - 3 * sum(single)) % 2**64 == 0


def test_digests_are_in_the_order_of_the_tensors() -> None:
    """Many tensors at once have the same digests as each alone."""
    tensors = [_random(size) for size in (5, 0, 64, 7)]
    assert digest_tensors(tensors) == [digest_tensors([tensor])[0] for tensor in tensors]


def test_batched_digests_equal_single_digests() -> None:
    """For any sizes, types and strides, in full groups of blocks or not, ranks with and without Triton agree."""
    group = 4 * BLOCK_WORDS * GROUP_BLOCKS
    sizes = (0, 1, 2, 3, 4, 5, 4096, 4 * BLOCK_WORDS + 3, group - 4, group, group + 4, 2 * group + 8189)
    tensors = [_random(size) for size in sizes]
    tensors += [_random(8 * 99, dtype) for dtype in DTYPES]
    tensors += [torch.randn(33, 7).t(), torch.randn(99, 20)[::2, ::3], _random(4002)[2:], torch.randn(5)[1:]]
    tensors.append(torch.tensor([1 + 2j, 3 - 1j]).conj())
    assert kernel_sums(tensors) == [int(weigh(tensor)) for tensor in tensors]
    assert kernel_sums([]) == []


def test_broken_triton_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a compiler the sums are computed otherwise, which is logged, and Triton is not tried again."""
    monkeypatch.setattr(replica_digest, "kernel_errors", [])
    for name in ("tl", "constexpr"):
        monkeypatch.setattr(replica_digest, name, None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(jit=lambda _: BrokenKernel()))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "triton.language", SimpleNamespace(constexpr=None))  # type: ignore[arg-type]
    replica_digest.find_kernel.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                assert weigh_at_once([_random(64)], torch.device("cpu")) is None
    finally:
        replica_digest.find_kernel.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "digests are computed by torch's own operations, several times slower: Failed to find C compiler"
    ]
