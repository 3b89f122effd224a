"""Detection of infinities and NaN in saved bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.checkpoint.shard import DTYPE_NAMES, MAY_BE_INFINITE, PIECE_BYTES, Numbers, is_finite

TYPES = {short: getattr(torch, name.removeprefix("torch.")) for name, short in DTYPE_NAMES.items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", sorted(MAY_BE_INFINITE))
def test_one_nonfinite_number_is_found_in_any_piece(dtype: str) -> None:
    """A single NaN or infinity is found at the beginning, after the first piece and at the end."""
    count = PIECE_BYTES // TYPES[dtype].itemsize + 3
    bad = [float("nan")] + ([float("inf"), float("-inf")] if dtype != "F8_E4M3" else [])  # F8_E4M3 has no infinity
    good = torch.ones(count, dtype=torch.complex64 if dtype == "C64" else torch.float64).to(TYPES[dtype])
    assert is_finite(bytes_of(good), dtype)
    for value in bad:
        for position in (0, count - 4, count - 1):
            tensor = good.clone()
            tensor[position] = value
            assert not is_finite(bytes_of(tensor), dtype), (value, position)


@pytest.mark.parametrize("dtype", sorted(MAY_BE_INFINITE))
def test_the_largest_numbers_are_finite(dtype: str) -> None:
    """The largest finite numbers of either sign are finite, although their sum would overflow."""
    largest = torch.finfo(TYPES[dtype]).max
    assert is_finite(bytes_of(torch.full((1000,), largest, dtype=torch.float64).to(TYPES[dtype])), dtype)
    assert is_finite(bytes_of(torch.full((1000,), -largest, dtype=torch.float64).to(TYPES[dtype])), dtype)


def test_an_empty_tensor_is_finite() -> None:
    """An empty tensor is finite."""
    assert is_finite(memoryview(b""), "F32")


@given(
    st.lists(st.tuples(st.sampled_from(["F64", "F32", "BF16", "I64"]), st.integers(0, 12)), max_size=8),
    st.integers(0, 96),
    st.sampled_from([16, 24, 64, 1000]),
)
@example([("F64", 0), ("F64", 4)], 0, 16)  # an empty tensor at the offset of another one
def test_nonfinite_numbers_are_found_across_piece_borders(
    tensors: list[tuple[str, int]], bad: int, piece_bytes: int
) -> None:
    """An image of several tensors, checked in pieces, is finite exactly if no tensor holds a non-finite number.

    Bit patterns of NaN in integer tensors do not count.
    """
    tensors.sort(key=lambda tensor: -TYPES[tensor[0]].itemsize)  # as in a shard
    image, spans, is_bad = bytearray(), [], False
    for dtype, count in tensors:
        start, numbers = len(image), torch.ones(count, dtype=TYPES[dtype])
        if 0 <= (at := bad - start // 8) < count and dtype != "I64":
            numbers[at], is_bad = float("nan"), True
        elif dtype == "I64":
            numbers[:] = -1  # the bit pattern of a NaN
        image += bytes_of(numbers) if count else b""
        if dtype != "I64":
            spans.append((dtype, start, len(image) - start))
    locations = Numbers(reversed(spans))
    pieces = [(memoryview(image)[start : start + piece_bytes], start) for start in range(0, len(image), piece_bytes)]
    assert all(locations.are_finite(piece, start) for piece, start in pieces) == (not is_bad)
