"""The checkpoints that retention keeps."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.checkpoint_plan import KEEP_ALL, RetentionRules, choose_kept, choose_removed

ITERATIONS = st.lists(st.integers(0, 500), max_size=40)
FEW = st.sets(st.integers(0, 60))
GAPS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


@given(ITERATIONS, st.integers(1, 8), st.integers(0, 50), st.integers(0, 100))
def test_newest_checkpoints_are_kept(checkpoints: list[int], k: int, interval: int, window: int) -> None:
    """The K newest are always kept, and every removed checkpoint exists."""
    kept = choose_kept(checkpoints, most_recent_k=k, retain_interval=interval, suspect_window=window)
    assert kept >= set(sorted(set(checkpoints))[-k:])
    assert kept <= set(checkpoints)


@given(ITERATIONS, st.integers(1, 8), st.integers(1, 50))
def test_multiples_of_the_interval_are_kept(checkpoints: list[int], k: int, interval: int) -> None:
    """Every multiple of the retain interval stays, however old."""
    kept = choose_kept(checkpoints, most_recent_k=k, retain_interval=interval)
    assert kept >= {checkpoint for checkpoint in checkpoints if checkpoint % interval == 0}


@given(ITERATIONS, st.integers(1, 8), st.integers(0, 100))
def test_at_most_two_extra_checkpoints_are_kept(checkpoints: list[int], k: int, window: int) -> None:
    """The suspect window keeps at most two checkpoints in addition to the newest ones."""
    assert len(choose_kept(checkpoints, most_recent_k=k, suspect_window=window)) <= k + 2


@given(ITERATIONS, st.sets(st.integers(0, 500)), st.integers(1, 8), st.integers(0, 100))
def test_newest_finite_checkpoint_is_kept(checkpoints: list[int], not_finite: set[int], k: int, window: int) -> None:
    """The newest finite checkpoint is kept, however many newer ones contain infinities or NaN; it costs the space of
    one checkpoint."""
    kept = choose_kept(checkpoints, most_recent_k=k, suspect_window=window, not_finite=not_finite)
    finite = set(checkpoints) - not_finite
    assert not finite or max(finite) in kept
    assert len(kept) <= k + 3


@given(ITERATIONS, st.integers(1, 8), st.integers(0, 100))
def test_newest_beyond_the_suspect_window_is_kept(checkpoints: list[int], k: int, window: int) -> None:
    """If any checkpoint is older than the suspect window, the newest of those is kept."""
    kept = choose_kept(checkpoints, most_recent_k=k, suspect_window=window)
    old = [checkpoint for checkpoint in checkpoints if max(checkpoints) - checkpoint > window]
    assert not old or max(old) in kept


@given(GAPS, st.integers(1, 5), st.integers(0, 60))
def test_checkpoint_beyond_the_window_survives_every_save(gaps: list[int], k: int, window: int) -> None:
    """After each save of a run that is old enough, a checkpoint older than the window exists, at most two windows and
    two intervals old."""
    present: set[int] = set()
    saves = list(accumulate(gaps))
    for newest in saves:
        present = set(choose_kept({*present, newest}, most_recent_k=k, suspect_window=window))
        old = [checkpoint for checkpoint in present if newest - checkpoint > window]
        assert bool(old) == (newest - saves[0] > window)
        assert not old or newest - max(old) <= 2 * (window + max(gaps))


@given(ITERATIONS, st.integers(1, 8), st.integers(0, 50), st.integers(0, 100))
def test_retention_is_idempotent(checkpoints: list[int], k: int, interval: int, window: int) -> None:
    """Without a new checkpoint a second cleaning removes nothing."""
    once = choose_kept(checkpoints, most_recent_k=k, retain_interval=interval, suspect_window=window)
    assert choose_kept(once, most_recent_k=k, retain_interval=interval, suspect_window=window) == once


@given(ITERATIONS)
def test_minus_one_keeps_all(checkpoints: list[int]) -> None:
    """-1 keeps every checkpoint."""
    assert choose_kept(checkpoints, most_recent_k=-1) == set(checkpoints)


@pytest.mark.parametrize(("k", "interval", "window"), [(0, 0, 0), (-2, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_invalid_retention_numbers_are_rejected(k: int, interval: int, window: int) -> None:
    """An invalid policy is an error and deletes nothing."""
    with pytest.raises(ValueError, match="must"):
        choose_kept([1], most_recent_k=k, retain_interval=interval, suspect_window=window)


@given(FEW, FEW, st.integers(0, 60), st.integers(1, 5), st.integers(0, 9))
def test_only_older_unkept_checkpoints_are_removed(
    present: set[int], valid: set[int], newest: int, k: int, window: int
) -> None:
    """Checkpoints as new as the newest that counts, and those that the rules keep, stay; older checkpoints that are not
    valid are removed."""
    rules = RetentionRules(most_recent_k=k, suspect_window=window)
    removed = set(choose_removed(sorted(present), valid, committed=newest, rules=rules, not_finite=()))
    newest_counted = max((present & valid) | {newest})
    assert all(checkpoint < newest_counted for checkpoint in removed)
    kept = choose_kept((present & valid) | {newest}, most_recent_k=k, suspect_window=window)
    if newest in valid:
        assert not removed & kept
    assert {checkpoint for checkpoint in present - valid if checkpoint < newest_counted} - {newest} <= removed


def test_unverified_newest_keeps_the_newest_finite() -> None:
    """A newer checkpoint may be torn, so the newest one that is known to be finite is kept too."""
    rules = RetentionRules(most_recent_k=1)
    assert choose_removed([5, 4, 3], {4, 3}, committed=5, rules=rules, not_finite=()) == [3]


@given(FEW, FEW, st.integers(0, 60), st.integers(1, 5), st.integers(0, 9))
def test_excluded_checkpoints_take_no_place(
    valid: set[int], excluded: set[int], newest: int, k: int, window: int
) -> None:
    """The set of removed valid checkpoints does not depend on other checkpoints."""
    rules = RetentionRules(most_recent_k=k, suspect_window=window)

    def removed(present: set[int]) -> set[int]:
        return set(choose_removed(present, valid | {newest}, committed=newest, rules=rules, not_finite=()))

    assert removed(valid | excluded | {newest}) & valid == removed(valid | {newest}) & valid


def test_after_a_rollback_newer_checkpoints_do_not_count() -> None:
    """After a rollback from 2000 to 1000 with two to keep, 1000 and 1100 are kept, and 2000 stays for inspection."""
    rules = RetentionRules(most_recent_k=2)
    assert choose_removed([2000, 1100, 1000, 900], {900, 1000, 1100}, committed=1100, rules=rules, not_finite=()) == [
        900
    ]


@given(FEW, FEW)
def test_keep_all_keeps_invalid_checkpoints(present: set[int], valid: set[int]) -> None:
    """With -1, checkpoints that are not known to be valid are kept too."""
    rules = RetentionRules(most_recent_k=KEEP_ALL)
    assert choose_removed(present, valid, committed=61, rules=rules, not_finite=()) == []
