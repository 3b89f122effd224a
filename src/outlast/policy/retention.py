"""Which generations of a place are kept when room is made.

Applied after every save, so it must also keep what a later save will need: of a generation that is deleted today none
can say tomorrow that it is older than the suspect window. Hence two may stay beyond the newest K: one that is older
than the window, and the one that will be next. A third does while the newest hold numbers that are infinite or NaN: the
newest that holds none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["KEEP_ALL", "choose_kept"]

KEEP_ALL = -1


def choose_kept(
    generations: Iterable[int],
    *,
    most_recent_k: int,
    retain_interval: int = 0,
    suspect_window: int = 0,
    not_finite: Collection[int] = (),
) -> frozenset[int]:
    """Choose the generations to keep.

    Args:
        generations: Iterations of the *valid* generations, in any order: what is torn or distrusted must not be
            counted, or it would push out the good ones.
        most_recent_k: How many of the newest to keep, at least 1; -1 = all.
        retain_interval: Generations whose iteration is a multiple of it are kept for ever; 0 = none.
        suspect_window: Iterations after a load in which an invalid result casts doubt on what was loaded.
        not_finite: Those that are known to hold numbers that are infinite or NaN.

    Returns:
        Some of ``generations``, and all of these: the newest K; the newest that is finite; the multiples; the newest
        that is more than ``suspect_window`` iterations older than the newest of all, if there is one; the oldest that
        is not, which will take its place. Applied save after save, that one beyond the window is never lost once there
        was one, and its distance from the newest stays within two windows and two intervals between saves.

    Raises:
        ValueError: ``most_recent_k`` is 0 or below -1, or another number is negative.
    """
    if most_recent_k < 1 and most_recent_k != KEEP_ALL:
        raise ValueError(f"most_recent_k={most_recent_k} must be at least 1, or -1 to keep all")
    if retain_interval < 0 or suspect_window < 0:
        raise ValueError(f"retain_interval={retain_interval} and suspect_window={suspect_window} must not be negative")
    present = sorted(set(generations), reverse=True)
    if not present or most_recent_k == KEEP_ALL:
        return frozenset(present)
    kept = set(present[:most_recent_k])
    kept.update([generation for generation in present if generation not in not_finite][:1])
    if retain_interval:
        kept.update(generation for generation in present if generation % retain_interval == 0)
    doubtful = [generation for generation in present if present[0] - generation <= suspect_window]
    kept.add(doubtful[-1])
    kept.update(present[len(doubtful) : len(doubtful) + 1])
    return frozenset(kept)
