"""Which generations of a place are kept when room is made.

Applied after every save, so it must also keep what a later save will need: of a generation that is deleted today none
can say tomorrow that it is older than the suspect window. Hence two may stay beyond the newest K: one that is older
than the window, and the one that will be next. A third does while the newest hold numbers that are infinite or NaN: the
newest that holds none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["KEEP_ALL", "RetentionRules", "choose_kept", "choose_removed"]

KEEP_ALL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """How many generations of a place are kept; see :func:`choose_kept`."""

    most_recent_k: int
    retain_interval: int = 0
    suspect_window: int = 0


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
        retain_interval: Generations whose iteration is a multiple of it are kept forever; 0 = none.
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


def choose_removed(
    present: Iterable[int], valid: Collection[int], *, newest: int, rules: RetentionRules, not_finite: Collection[int]
) -> list[int]:
    """Choose the generations to remove from a place after a commit.

    Args:
        present: Iterations of all generations that are there, whole or not.
        valid: Those that are known to be committed; others may be torn or distrusted, and do not count.
        newest: The generation that was committed last, or a newer one: what is not older than it stays for whoever
            looks. It counts even if it is not known to be valid, but then not as one that is finite.
        rules: How many to keep; if all, nothing is removed.
        not_finite: Those that are known to hold numbers that are infinite or NaN.

    Returns:
        Some of ``present``, in its order.

    Raises:
        ValueError: The rules contradict themselves.
    """
    there = list(present)
    kept = choose_kept(
        {*(generation for generation in there if generation in valid), newest},
        most_recent_k=rules.most_recent_k,
        retain_interval=rules.retain_interval,
        suspect_window=rules.suspect_window,
        not_finite={*not_finite, *({newest} - set(valid))},
    )
    if rules.most_recent_k == KEEP_ALL:
        return []
    return [generation for generation in there if generation not in kept and generation < newest]
