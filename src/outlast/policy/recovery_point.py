"""Which generation all ranks go back to: the newest that every one of them has a copy of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["choose_recovery_point"]


def choose_recovery_point(copies: Sequence[Mapping[int, str]], refused: Collection[int] = ()) -> int | None:
    """Choose a generation; every rank that is given the same facts chooses the same.

    Args:
        copies: For each rank, generation to the digest of the manifest that its copy belongs to. Two attempts at
            the same generation have different digests and are never mixed.
        refused: Generations that some rank's verification rejected.

    Returns:
        The newest generation that all ranks have under one digest; ``None`` when there is none.
    """
    if not copies:
        return None
    first, *others = copies
    shared = (
        generation
        for generation, manifest in first.items()
        if generation not in refused and all(copy.get(generation) == manifest for copy in others)
    )
    return max(shared, default=None)
