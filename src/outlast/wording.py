"""Numbers, durations and ranks in sentences."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def printable(text: str) -> str:
    """Escape control characters other than newlines and tabs, so that a text cannot control a terminal."""
    if text.isprintable():
        return text
    kept = {char for char in set(text) if char.isprintable() or char in "\n\t" or unicodedata.category(char) == "Zs"}
    return "".join(char if char in kept else char.encode("unicode_escape").decode() for char in text)


def one_line(text: str) -> str:
    """Escape newlines and tabs too, so that a name within a text cannot pass for a line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def count(number: int, noun: str) -> str:
    """Return ``1 iteration``, ``2 iterations``: a regular plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def name_ranks(first: int, num: int, world_size: int) -> str:
    """Return consecutive ranks as text: ``rank 0 of 1``, ``ranks 0 to 3 of 8``."""
    which = f"rank {first}" if num == 1 else f"ranks {first} to {first + num - 1}"
    return f"{which} of {world_size}"


def duration(seconds: float) -> str:
    """Return seconds as text in a readable unit: ``5 s``, ``2 min``, ``3 h``, ``4 days``."""
    for limit, unit, name in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


def number_ranges(numbers: Iterable[int]) -> list[str]:
    """Return numbers as ranges: ``0-3`` and ``7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]
