"""Which checkpoints stay when room is made."""

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
def test_the_newest_are_kept(checkpoints: list[int], k: int, interval: int, window: int) -> None:
    """The K newest are always kept, and nothing is named that is not there."""
    kept = choose_kept(checkpoints, most_recent_k=k, retain_interval=interval, suspect_window=window)
    assert kept >= set(sorted(set(checkpoints))[-k:])
    assert kept <= set(checkpoints)


@given(ITERATIONS, st.integers(1, 8), st.integers(1, 50))
def test_multiples_are_kept_for_ever(checkpoints: list[int], k: int, interval: int) -> None:
    """Every multiple of the retain interval stays, however old."""
    kept = choose_kept(checkpoints, most_recent_k=k, retain_interval=interval)
    assert kept >= {checkpoint for checkpoint in checkpoints if checkpoint % interval == 0}


@given(ITERATIONS, st.integers(1, 8), st.integers(0, 100))
def test_no_more_than_two_beyond_the_newest(checkpoints: list[int], k: int, window: int) -> None:
    """The suspect window costs the room of at most two checkpoints."""
    assert len(choose_kept(checkpoints, most_recent_k=k, suspect_window=window)) <= k + 2


@given(ITERATIONS, st.sets(st.integers(0, 500)), st.integers(1, 8), st.integers(0, 100))
def test_the_newest_finite_one_is_kept(checkpoints: list[int], not_finite: set[int], k: int, window: int) -> None:
    """However many newer ones hold infinities or NaN; it costs the room of one checkpoint."""
    kept = choose_kept(checkpoints, most_recent_k=k, suspect_window=window, not_finite=not_finite)
    finite = set(checkpoints) - not_finite
    assert not finite or max(finite) in kept
    assert len(kept) <= k + 3


@given(ITERATIONS, st.integers(1, 8), st.integers(0, 100))
def test_one_older_than_the_window_is_kept(checkpoints: list[int], k: int, window: int) -> None:
    """If any checkpoint is older than the suspect window, the newest such is kept."""
    kept = choose_kept(checkpoints, most_recent_k=k, suspect_window=window)
    old = [checkpoint for checkpoint in checkpoints if max(checkpoints) - checkpoint > window]
    assert not old or max(old) in kept


@given(GAPS, st.integers(1, 5), st.integers(0, 60))
def test_one_older_than_the_window_survives_every_save(gaps: list[int], k: int, window: int) -> None:
    """Applied after each save of a run, a checkpoint older than the window is always there once the run is that old,
    and never older than two windows and two intervals."""
    present: set[int] = set()
    saves = list(accumulate(gaps))
    for newest in saves:
        present = set(choose_kept({*present, newest}, most_recent_k=k, suspect_window=window))
        old = [checkpoint for checkpoint in present if newest - checkpoint > window]
        assert bool(old) == (newest - saves[0] > window)
        assert not old or newest - max(old) <= 2 * (window + max(gaps))


@given(ITERATIONS, st.integers(1, 8), st.integers(0, 50), st.integers(0, 100))
def test_keeping_twice_keeps_the_same(checkpoints: list[int], k: int, interval: int, window: int) -> None:
    """Without a new checkpoint a second cleaning removes nothing."""
    once = choose_kept(checkpoints, most_recent_k=k, retain_interval=interval, suspect_window=window)
    assert choose_kept(once, most_recent_k=k, retain_interval=interval, suspect_window=window) == once


@given(ITERATIONS)
def test_minus_one_keeps_all(checkpoints: list[int]) -> None:
    """-1 keeps every checkpoint."""
    assert choose_kept(checkpoints, most_recent_k=-1) == set(checkpoints)


@pytest.mark.parametrize(("k", "interval", "window"), [(0, 0, 0), (-2, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_senseless_numbers_are_refused(k: int, interval: int, window: int) -> None:
    """Nothing is deleted by a policy that makes no sense."""
    with pytest.raises(ValueError, match="must"):
        choose_kept([1], most_recent_k=k, retain_interval=interval, suspect_window=window)


@given(FEW, FEW, st.integers(0, 60), st.integers(1, 5), st.integers(0, 9))
def test_what_is_removed_is_older_and_not_kept(
    present: set[int], valid: set[int], newest: int, k: int, window: int
) -> None:
    """Nothing that is as new as the newest that counts is removed, nor what the rules keep of the valid checkpoints;
    what is older and not valid goes, whole or not."""
    rules = RetentionRules(most_recent_k=k, suspect_window=window)
    removed = set(choose_removed(sorted(present), valid, committed=newest, rules=rules, not_finite=()))
    newest_counted = max((present & valid) | {newest})
    assert all(checkpoint < newest_counted for checkpoint in removed)
    kept = choose_kept((present & valid) | {newest}, most_recent_k=k, suspect_window=window)
    if newest in valid:
        assert not removed & kept
    assert {checkpoint for checkpoint in present - valid if checkpoint < newest_counted} - {newest} <= removed


def test_a_newest_one_that_is_not_known_to_be_valid_displaces_no_finite_one() -> None:
    """A newer checkpoint may be torn: the newest that is known to be finite stays beside it."""
    rules = RetentionRules(most_recent_k=1)
    assert choose_removed([5, 4, 3], {4, 3}, committed=5, rules=rules, not_finite=()) == [3]


@given(FEW, FEW, st.integers(0, 60), st.integers(1, 5), st.integers(0, 9))
def test_what_is_excluded_takes_no_place(valid: set[int], excluded: set[int], newest: int, k: int, window: int) -> None:
    """What is removed of the valid checkpoints is the same, whatever else lies there."""
    rules = RetentionRules(most_recent_k=k, suspect_window=window)

    def removed(present: set[int]) -> set[int]:
        return set(choose_removed(present, valid | {newest}, committed=newest, rules=rules, not_finite=()))

    assert removed(valid | excluded | {newest}) & valid == removed(valid | {newest}) & valid


def test_after_a_rollback_newer_checkpoints_do_not_count() -> None:
    """A rollback from 2000 to 1000 with two to keep: 1000 stays beside 1100, and 2000 stays for whoever looks."""
    rules = RetentionRules(most_recent_k=2)
    assert choose_removed([2000, 1100, 1000, 900], {900, 1000, 1100}, committed=1100, rules=rules, not_finite=()) == [
        900
    ]


@given(FEW, FEW)
def test_who_keeps_all_loses_nothing(present: set[int], valid: set[int]) -> None:
    """Not even what is not known to be valid."""
    rules = RetentionRules(most_recent_k=KEEP_ALL)
    assert choose_removed(present, valid, committed=61, rules=rules, not_finite=()) == []
