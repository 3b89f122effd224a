"""A matrix product of which every bit is known beforehand, whatever computes it.

The factors are small whole numbers, so that each product and each partial sum is a number that the format holds
exactly: the order of summation, blocking, fused or split reductions and TF32 change nothing, and one digest holds for
every correct CPU and GPU. A device that gets a single bit wrong gives another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    import numpy as np

__all__ = ["EXPECTED", "Factors", "digest_of", "factors"]

Factors = tuple["np.ndarray[Any, np.dtype[np.int64]]", "np.ndarray[Any, np.dtype[np.int64]]"]

EXPECTED = {(512, 8): "d95868279b2af29f", (2048, 8): "e98b6ae67a7869c2", (2048, 1): "010ac15c69d5f908"}
"""Size and largest factor to the product's digest. Sums of 2048 products of -1, 0 and 1 fit bfloat16's 8 bits here."""


def factors(size: int, largest: int) -> Factors:
    """Return two square matrices of whole numbers from ``-largest`` to ``largest``, always the same ones."""
    import numpy as np

    numbers = np.arange(2 * size * size, dtype=np.uint64)
    # A multiplicative hash: no library's random numbers, whose streams may change.
    mixed = (numbers ^ np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    values = ((mixed >> np.uint64(33)) % np.uint64(2 * largest + 1)).astype(np.int64) - largest
    left, right = values.reshape(2, size, size)
    return left, right


def digest_of(product: np.ndarray[Any, Any], *, flip: bool = False) -> str:
    """Return the digest of a product.

    Args:
        product: In any number format that holds it exactly.
        flip: Change one bit first.
    """
    import numpy as np

    whole = np.ascontiguousarray(product).astype(np.int32)
    if flip:
        whole[0, 0] ^= 1
    return xxhash.xxh3_64_hexdigest(whole.tobytes())
