"""Whether saved bytes hold an infinity or NaN."""

from __future__ import annotations

import pytest
import torch

from outlast.checkpoint.finite import MAY_BE_INFINITE, PIECE_BYTES, is_finite
from outlast.checkpoint.shard import DTYPE_NAMES

TYPES = {short: getattr(torch, name.removeprefix("torch.")) for name, short in DTYPE_NAMES.items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", sorted(MAY_BE_INFINITE))
def test_one_bad_number_is_found_in_any_piece(dtype: str) -> None:
    """A single NaN or infinity is found at the beginning, behind the first piece and at the end."""
    count = PIECE_BYTES // TYPES[dtype].itemsize + 3
    bad = [float("nan")] + ([float("inf"), float("-inf")] if dtype != "F8_E4M3" else [])  # which has no infinity
    good = torch.ones(count, dtype=torch.complex64 if dtype == "C64" else torch.float64).to(TYPES[dtype])
    assert is_finite(bytes_of(good), dtype)
    for value in bad:
        for where in (0, count - 4, count - 1):
            tensor = good.clone()
            tensor[where] = value
            assert not is_finite(bytes_of(tensor), dtype), (value, where)


@pytest.mark.parametrize("dtype", sorted(MAY_BE_INFINITE - {"C64"}))
def test_the_largest_numbers_are_finite(dtype: str) -> None:
    """Numbers whose sum would overflow are finite all the same, of either sign."""
    largest = torch.finfo(TYPES[dtype]).max
    assert is_finite(bytes_of(torch.full((1000,), largest, dtype=torch.float64).to(TYPES[dtype])), dtype)
    assert is_finite(bytes_of(torch.full((1000,), -largest, dtype=torch.float64).to(TYPES[dtype])), dtype)


def test_nothing_is_finite() -> None:
    """An empty tensor holds no bad number."""
    assert is_finite(memoryview(b""), "F32")
