"""Whether the numbers of a tensor's bytes are all finite. Nothing here imports torch: the writer uses it."""

from __future__ import annotations

import numpy as np

__all__ = ["MAY_BE_INFINITE", "is_finite"]

PIECE_BYTES = 1 << 20
"""Small enough to stay in the cache."""

_SUMMED = {"F64": np.float64, "F32": np.float32, "C64": np.float32}
"""Types whose sum tells: it is finite only if all elements are."""

_MASKED = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F),
}
"""Types that numpy adds slowly or not at all: an element with all these bits set is infinite or NaN."""

MAY_BE_INFINITE = frozenset({*_SUMMED, *_MASKED})
"""safetensors' names of the element types that have infinities or NaN."""


def is_finite(data: memoryview, dtype: str) -> bool:
    """Return whether no element is infinite or NaN.

    Args:
        data: The tensor's bytes.
        dtype: One of :data:`MAY_BE_INFINITE`.
    """
    return all(_is_piece_finite(data[start : start + PIECE_BYTES], dtype) for start in range(0, len(data), PIECE_BYTES))


def _is_piece_finite(data: memoryview, dtype: str) -> bool:
    if dtype in _MASKED:
        kind, mask = _MASKED[dtype]
        bits = np.frombuffer(data, dtype=kind)
        return not bool(((bits & mask) == mask).any())
    numbers = np.frombuffer(data, dtype=_SUMMED[dtype])
    with np.errstate(all="ignore"):
        # A sum of finite numbers may overflow: then each one is looked at.
        return bool(np.isfinite(numbers.sum())) or bool(np.isfinite(numbers).all())
