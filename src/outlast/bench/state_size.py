"""How large the state of the checkpoint benchmarks is. Apart from the state, so that who only asks imports no torch."""

from __future__ import annotations

__all__ = ["NUM_TENSORS", "TENSOR_BYTES"]

NUM_TENSORS = 64
"""Unless another number is asked for: 1 GiB."""
TENSOR_BYTES = 16 << 20
