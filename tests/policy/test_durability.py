"""Failures that a checkpoint survives, and the lag of a commit that survives the end of the job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.durability import (
    Durability,
    OwedSaves,
    SurvivalLevel,
    describe_end,
    describe_overdue,
    job_tier,
    levels_of,
    with_commit,
)
from outlast.policy.recovery_point import Tier

TIERS = st.frozensets(st.sampled_from(list(Tier)))
COMMITS = st.lists(st.tuples(st.integers(0, 50), TIERS))


@pytest.mark.parametrize(
    ("configured", "tiers", "levels"),
    [
        ({Tier.MEMORY}, {Tier.MEMORY}, {SurvivalLevel.WORKER}),
        ({Tier.MEMORY, Tier.GLOBAL}, {Tier.MEMORY}, {SurvivalLevel.WORKER}),
        ({Tier.MEMORY, Tier.GLOBAL}, {Tier.GLOBAL}, set(SurvivalLevel)),
        (
            {Tier.MEMORY, Tier.REPLICA, Tier.GLOBAL},
            {Tier.MEMORY, Tier.REPLICA},
            {SurvivalLevel.WORKER, SurvivalLevel.NODE},
        ),
        ({Tier.LOCAL, Tier.GLOBAL}, {Tier.LOCAL}, {SurvivalLevel.WORKER}),
        ({Tier.LOCAL}, {Tier.LOCAL}, {SurvivalLevel.WORKER, SurvivalLevel.JOB}),
        ({Tier.LOCAL, Tier.REPLICA}, {Tier.LOCAL, Tier.REPLICA}, set(SurvivalLevel)),
        ({Tier.LOCAL}, set(), set()),
    ],
)
def test_durability_of_each_tier(configured: set[Tier], tiers: set[Tier], levels: set[SurvivalLevel]) -> None:
    """Each combination of tiers survives the failures that the documentation of checkpoints lists."""
    assert levels_of(tiers, configured) == levels


@given(commits=COMMITS, configured=TIERS)
def test_each_level_has_the_newest_commit_that_survives_it(
    commits: list[tuple[int, frozenset[Tier]]], configured: frozenset[Tier]
) -> None:
    """The newest commit of each level does not depend on the order of commits, never decreases, and is never newer than
    that of the worker level."""
    known = Durability()
    for iteration, tiers in commits:
        after = with_commit(known, iteration, tiers, configured)
        for level in ("worker", "node", "job"):
            before, now = getattr(known, level), getattr(after, level)
            assert before is None or now >= before
        known = after
    for level, value in (
        (SurvivalLevel.WORKER, known.worker),
        (SurvivalLevel.NODE, known.node),
        (SurvivalLevel.JOB, known.job),
    ):
        expected = [iteration for iteration, tiers in commits if level in levels_of(tiers, configured)]
        assert value == max(expected, default=None)
        assert value is None or (known.worker is not None and known.worker >= value)
    if job_tier(configured) == Tier.GLOBAL and known.job is not None:
        assert known.node is not None
        assert known.node >= known.job
    backwards = Durability()
    for iteration, tiers in reversed(commits):
        backwards = with_commit(backwards, iteration, tiers, configured)
    assert backwards == known


@given(
    moves=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.floats(0, 100)), max_size=60),
    after_s=st.floats(0, 100),
)
def test_lag_counts_from_the_oldest_uncommitted_save(moves: list[tuple[int, bool, float]], after_s: float) -> None:
    """A commit covers its save and all older ones; without an uncommitted save the lag is 0."""
    owed, begun, now_s = OwedSaves(), dict[int, float](), 0.0
    for iteration, commits, passed_s in moves:
        now_s += passed_s
        if commits:
            owed = owed.cover(iteration)
            begun = {one: since_s for one, since_s in begun.items() if one > iteration}
        else:
            owed = owed.add(iteration, now_s)
            begun.setdefault(iteration, now_s)
    now_s += after_s
    assert owed.lag_s(now_s) == (now_s - min(begun.values()) if begun else 0.0)
    assert owed.cover(None) == owed


def test_many_uncommitted_saves_keep_the_oldest() -> None:
    """A tier that is unavailable for long uses bounded memory, and the lag stays that of the first save."""
    owed = OwedSaves()
    for iteration in range(10_000):
        owed = owed.add(iteration, float(iteration))
    assert owed.lag_s(10_000.0) == 10_000.0
    assert len(owed.saves) < 1000
    assert owed.cover(9_999).lag_s(20_000.0) == 0.0


@pytest.mark.parametrize(
    ("known", "done", "parts"),
    [
        (Durability(40, 40, 40), 40, ("iteration 40 is saved, nothing is lost",)),
        (
            Durability(166, None, 40),
            166,
            ("iteration 166 is in node-local tiers only", "iterations 41 to 166 are lost"),
        ),
        (Durability(40, 40, 40), 41, ("that survives the end of the job is iteration 40: iteration 41 is lost",)),
        (Durability(5, None, None), 5, ("no checkpoint survives the end of the job: iterations 1 to 5 are lost",)),
        (Durability(), 0, ("nothing is lost",)),
    ],
)
def test_end_of_job_reports_lost_iterations(known: Durability, done: int, parts: tuple[str, ...]) -> None:
    """Only commits that survive the end of the job count as saved."""
    text = describe_end(known, done)
    for part in parts:
        assert part in text


def test_overdue_commit_reports_place_loss_and_error() -> None:
    """The facts come before the error, which may be long."""
    text = describe_overdue(
        where="the global directory /x", lag_s=7300, limit_s=7200, error="full", known=Durability(9, 9, 4), done=9
    )
    for part in ("the global directory /x", "max_durable_lag=7200 s", "iterations 5 to 9 are lost", "full"):
        assert part in text
