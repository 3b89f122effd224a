"""Tensor files that are composed without torch have the format that torch reads."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch

from outlast.checkpoint.dcp.layout import ALIGNMENT, tensor_blob
from outlast.checkpoint.shard import DTYPE_NAMES, ELEMENT_BYTES


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize(("torch_name", "name"), DTYPE_NAMES.items())
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4), (2, 0, 3), (70000,)])
def test_torch_reads_the_blob_with_weights_only(torch_name, name, shape) -> None:
    """For every element type and shape, `torch.load(weights_only=True)` returns the same bytes, type and shape."""
    dtype = getattr(torch, torch_name.removeprefix("torch."))
    numbers = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    tensor = numbers.view(dtype).reshape(shape) if numbers.numel() else torch.empty(shape, dtype=dtype)
    raw = _raw(tensor)

    prefix, suffix = tensor_blob(name, shape, len(raw))
    found = torch.load(io.BytesIO(prefix + raw + suffix), weights_only=True)

    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert _raw(found) == raw
    assert len(prefix) % ALIGNMENT == 0


def test_a_tensor_larger_than_4_gib_is_read(tmp_path: Path) -> None:
    """Sizes and offsets beyond 32 bits are in the format's 64 bit fields."""
    count = (5 << 30) // 4
    prefix, suffix = tensor_blob("F32", (count,), 4 * count)
    path = tmp_path / "large"
    with open(path, "wb") as file:  # a sparse file
        file.write(prefix)
        file.seek(len(prefix) + 4 * count - 4)
        file.write(b"\0\0\x80\x3f" + suffix)

    found = torch.load(path, mmap=True, weights_only=True)

    assert found.shape == (count,)
    assert (found[0].item(), found[-1].item()) == (0.0, 1.0)


def test_a_size_that_contradicts_the_shape_is_rejected() -> None:
    """A number of bytes that does not match the shape, or an unknown element type, is an error."""
    with pytest.raises(ValueError, match="does not take 13 bytes"):
        tensor_blob("F32", (3,), 13)
    with pytest.raises(ValueError, match="F7"):
        tensor_blob("F7", (3,), 12)


def test_every_shard_element_type_can_be_in_a_blob() -> None:
    """The element types of shards and of blobs are the same."""
    assert set(ELEMENT_BYTES) == set(DTYPE_NAMES.values())
