"""Whether the numbers of a tensor's bytes are all finite. Nothing here imports torch: the writer uses it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

__all__ = ["MAY_BE_INFINITE", "Numbers", "is_finite"]

PIECE_BYTES = 1 << 20
"""Small enough to stay in the cache."""

_SUMMED = {"F64": np.float64, "F32": np.float32, "C64": np.float32}
"""Types whose sum tells: it is finite only if all elements are."""

_MASKED = {
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
}
"""Types that numpy adds slowly or not at all: a mask, and what of an infinity or NaN is left under it."""

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
        kind, mask, bad = _MASKED[dtype]
        bits = np.frombuffer(data, dtype=kind)
        return not bool(((bits & mask) == bad).any())
    numbers = np.frombuffer(data, dtype=_SUMMED[dtype])
    with np.errstate(all="ignore"):
        # A sum of finite numbers may overflow: then each one is looked at.
        return bool(np.isfinite(numbers.sum())) or bool(np.isfinite(numbers).all())


class Numbers:
    """Where in an image the numbers lie that may be infinite or NaN.

    Args:
        spans: Element type (one of :data:`MAY_BE_INFINITE`), offset and bytes of each tensor; none overlap.
    """

    def __init__(self, spans: Iterable[tuple[str, int, int]]) -> None:
        self._spans: list[tuple[str, int, int]] = []
        for dtype, start, num_bytes in sorted(spans, key=lambda span: span[1]):
            first, end = start, start + num_bytes
            if self._spans and (self._spans[-1][0], self._spans[-1][2]) == (dtype, start):
                first = self._spans.pop()[1]  # many small tensors side by side are looked at as one
            self._spans.append((dtype, first, end))
        self._ends = [end for _, _, end in self._spans]

    def are_finite(self, piece: memoryview, start: int) -> bool:
        """Return whether no number in a piece of the image is infinite or NaN.

        Args:
            piece: Bytes of the image.
            start: Where they begin; neither this nor their end is inside of a number.
        """
        end = start + len(piece)
        for dtype, first, last in self._spans[bisect_right(self._ends, start) :]:
            if first >= end:
                return True
            with piece[max(first, start) - start : min(last, end) - start] as numbers:
                if not is_finite(numbers, dtype):
                    return False
        return True
