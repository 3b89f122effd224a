"""Numbers and ranks in sentences: singular and plural as they are spoken."""

from __future__ import annotations

__all__ = ["count", "name_ranks"]


def count(number: int, noun: str) -> str:
    """Return ``1 iteration``, ``2 iterations``; the noun's plural ends with an ``s``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def name_ranks(first: int, num: int, world_size: int) -> str:
    """Name consecutive ranks: ``rank 0 of 1``, ``ranks 0 to 3 of 8``."""
    which = f"rank {first}" if num == 1 else f"ranks {first} to {first + num - 1}"
    return f"{which} of {world_size}"
