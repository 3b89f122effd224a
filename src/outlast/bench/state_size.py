"""How large the state of the checkpoint benchmarks is. Apart from the state, so that who only asks imports no torch."""

from __future__ import annotations

__all__ = ["NUM_SMALL", "NUM_TENSORS", "TENSOR_BYTES"]

NUM_TENSORS = 64
"""Unless another number is asked for: 1 GiB."""
TENSOR_BYTES = 16 << 20
NUM_SMALL = 20_000
"""Tensors of 4 KiB of the state of many small ones."""
