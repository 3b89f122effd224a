"""Copies that are excluded after invalid results, and that the exclusion ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.recovery_point import (
    MAX_OPEN,
    Copy,
    Exclusion,
    Load,
    RecoveryPoint,
    Tier,
    TierName,
    choose_recovery_point,
    decode_excluded,
    is_doubtful,
    is_excluded,
    judge,
    settle,
    tier_of_load,
)

WINDOW = 20
NEAR = (Tier.MEMORY, Tier.LOCAL, Tier.REPLICA)


def load(checkpoint: int, tier: TierName = "local", *, cycle: int = 1, attempt: str | None = None) -> Load:
    name = attempt or f"job-0-aa.{checkpoint}"
    return Load(cycle=f"job-{cycle}", checkpoint=checkpoint, attempt=name, tier=tier, suspect_window=WINDOW)


def find_exclusion(one: Load, iteration: int, known: Sequence[Exclusion] = (), loads: Sequence[Load] = ()) -> Exclusion:
    judgement = judge(one, iteration, known=known, loads=loads)
    assert judgement.excluded is not None, judgement.reason
    return judgement.excluded


@dataclass
class Store:
    """Checkpoints of a run, and the saves and loads of its cycles."""

    copies: set[Copy] = field(default_factory=set)
    lineage: dict[str, str | None] = field(default_factory=dict)
    known: tuple[Exclusion, ...] = ()
    loads: tuple[Load, ...] = ()

    def save(self, iteration: int, attempt: str, parent: str | None, tiers: Sequence[Tier]) -> None:
        self.copies |= {Copy(iteration, attempt, tier) for tier in tiers}
        self.lineage[attempt] = parent

    def choose(self) -> RecoveryPoint | None:
        refused = {copy for copy in self.copies if is_excluded(copy, self.lineage, self.known)}
        return choose_recovery_point([self.copies], {0: refused})

    def load(self, cycle: int) -> Load | None:
        point = self.choose()
        if point is None:
            return None
        tier = tier_of_load([str(copy.tier) for copy in point.copies])
        one = Load(
            cycle=f"job-{cycle}",
            checkpoint=point.checkpoint,
            attempt=point.attempt,
            tier=tier,
            suspect_window=WINDOW,
        )
        self.loads += (one,)
        return one


def test_corrupt_local_copies_are_excluded_in_one_restart() -> None:
    """With corrupt node-local copies of 120 and a good global checkpoint at 100, the cycle after the first invalid
    result loads 100, although the fetched replica is now a memory copy; checkpoints saved in between are excluded
    too."""
    store = Store()
    store.save(100, "job-0-aa.0", None, [*NEAR, Tier.GLOBAL])
    store.save(120, "job-0-aa.1", None, [Tier.LOCAL, Tier.REPLICA])
    first = store.load(1)
    assert first is not None
    assert first.checkpoint == 120
    store.save(125, "job-1-bb.0", first.attempt, [*NEAR, Tier.GLOBAL])
    store.copies.add(Copy(120, "job-0-aa.1", Tier.MEMORY))
    store.known += (find_exclusion(first, 127),)
    point = store.choose()
    assert point is not None
    assert (point.checkpoint, point.attempt) == (100, "job-0-aa.0")


def test_other_local_copies_of_the_cycle_are_doubtful() -> None:
    """One excluded node-local copy makes all node-local copies of its cycle doubtful, but not its global checkpoints or
    other cycles. An excluded global copy makes no other copy doubtful."""
    one = find_exclusion(load(120, "local", cycle=2, attempt="job-1-bb.3"), 121)
    assert all(is_doubtful(Copy(110, "job-1-bb.1", tier), [one]) for tier in NEAR)
    assert not is_excluded(Copy(110, "job-1-bb.1", Tier.LOCAL), {}, [one])
    assert not is_doubtful(Copy(110, "job-1-bb.1", Tier.GLOBAL), [one])
    assert not any(is_doubtful(Copy(110, f"job-{cycle}-cc.1", Tier.LOCAL), [one]) for cycle in (0, 2, 11))
    assert not is_doubtful(Copy(110, "job-1-bb.1", Tier.LOCAL), [find_exclusion(load(120, "global"), 121)])


def test_global_copy_of_an_excluded_checkpoint_is_loaded() -> None:
    """After an invalid result from a node-local tier the same checkpoint is loaded from the global tier, which has
    separate digests; checkpoints saved on top of it are trusted."""
    store = Store()
    store.save(120, "job-0-aa.1", None, [*NEAR, Tier.GLOBAL])
    first = store.load(1)
    assert first is not None
    assert first.tier == "memory"
    store.known += (find_exclusion(first, 121),)
    second = store.load(2)
    assert second is not None
    assert (second.checkpoint, second.tier) == (120, "global")
    store.save(130, "job-2-cc.0", second.attempt, NEAR)
    point = store.choose()
    assert point is not None
    assert point.checkpoint == 130


def test_descendants_of_a_global_checkpoint_are_excluded() -> None:
    """An invalid result from the global tier excludes the checkpoint in every tier with its descendants over any number
    of checkpoints; an older one is loaded."""
    store = Store()
    store.save(100, "job-0-aa.0", None, [Tier.GLOBAL])
    store.save(120, "job-0-aa.1", None, [*NEAR, Tier.GLOBAL])
    store.save(130, "job-7-bb.0", "job-0-aa.1", [Tier.GLOBAL])
    store.save(140, "job-8-cc.0", "job-7-bb.0", NEAR)
    store.known += (find_exclusion(load(120, "global", attempt="job-0-aa.1"), 125),)
    point = store.choose()
    assert point is not None
    assert point.checkpoint == 100
    assert all(is_excluded(copy, store.lineage, store.known) for copy in store.copies if copy.checkpoint > 100)


def test_descendants_are_excluded_across_deleted_parents() -> None:
    """Checkpoints saved after the copy was loaded are excluded although the checkpoint between was deleted and the
    parent in the newest manifest is unknown."""
    near = load(100, "local", cycle=1, attempt="job-0-aa.0")
    child = load(110, "local", cycle=2, attempt="job-1-bb.0")
    again = load(100, "memory", cycle=3, attempt="job-0-aa.0")
    one = find_exclusion(again, 103, loads=[near, child, again])
    assert set(one.tainted) == {"job-1", "job-2", "job-3"}
    grandchild = Copy(120, "job-2-cc.0", Tier.GLOBAL)
    assert is_excluded(grandchild, {"job-2-cc.0": "job-1-bb.0"}, [one])
    assert not is_excluded(Copy(120, "job-20-cc.0", Tier.LOCAL), {}, [one])


@pytest.mark.parametrize("iteration", [99, 121])
def test_result_outside_the_window_excludes_nothing(iteration: int) -> None:
    """An invalid result after the suspect window excludes nothing, and the reason reports that."""
    judgement = judge(load(100), iteration, known=[], loads=[])
    assert judgement.excluded is None
    assert "beyond the suspect window" in judgement.reason


def test_cycle_without_a_load_excludes_nothing() -> None:
    """A cycle that began from scratch, or whose load is unknown, has no copy to exclude."""
    assert judge(None, 5, known=[], loads=[]).excluded is None
    assert judge(load(3), None, known=[], loads=[]).excluded is None


def test_a_copy_is_excluded_once() -> None:
    """Loading a copy that is already excluded stops the run, since excluding it again has no effect."""
    first = find_exclusion(load(120), 121)
    assert judge(load(120, "memory"), 122, known=[first], loads=[]).excluded is None


def test_progress_closes_the_invalid_result() -> None:
    """A commit beyond the failed checkpoint starts a new case for the next invalid result; exclusions stay."""
    first = find_exclusion(load(120, "global"), 125)
    (still,) = settle([first], 125)
    assert not still.settled
    known = settle([first], 126)
    assert is_excluded(Copy(120, first.attempt, Tier.GLOBAL), {}, known)
    assert judge(load(500, "global"), 505, known=known, loads=[]).excluded is not None


def test_farthest_local_tier_is_judged() -> None:
    """If ranks loaded from several tiers, the farthest node-local one is judged; the global one only if all ranks
    loaded from there."""
    assert tier_of_load(["memory", "replica", "local"]) == "replica"
    assert tier_of_load(["global", "memory"]) == "memory"
    assert tier_of_load(["global", "global"]) == "global"


def test_exclusions_survive_the_environment() -> None:
    """Workers read the coordinator's exclusions from the variable; an empty variable excludes nothing."""
    known = (find_exclusion(load(120), 121), find_exclusion(load(100, "global"), 101))
    assert decode_excluded(msgspec.json.encode(known).decode()) == known
    assert decode_excluded(None) == ()
    with pytest.raises(msgspec.DecodeError):
        decode_excluded('[{"generation": 1}]')


TIERS: st.SearchStrategy[list[Tier]] = st.lists(st.sampled_from(list(Tier)), min_size=1, unique=True)
CYCLE = st.tuples(st.lists(st.tuples(st.integers(1, 15), TIERS), max_size=3), st.integers(0, 30))


@given(st.lists(TIERS, min_size=1, max_size=6), st.lists(CYCLE, min_size=12, max_size=12))
def test_any_sequence_of_invalid_results_ends(
    begun: list[list[Tier]], cycles: list[tuple[list[tuple[int, list[Tier]]], int]]
) -> None:
    """After at most MAX_OPEN restarts the run stops, and until then no cycle loads an excluded copy or its
    descendants."""
    store = Store()
    for ordinal, tiers in enumerate(begun):
        store.save(10 * (ordinal + 1), f"job-0-aa.{ordinal}", None, tiers)
    bad: set[str] = set()
    restarts = 0
    for number, (saves, after) in enumerate(cycles, start=1):
        loaded = store.load(number)
        if loaded is None:
            break
        assert loaded.attempt not in bad
        attempts = []
        for ordinal, (distance, tiers) in enumerate(saves):
            attempts.append(f"job-{number}-bb.{ordinal}")
            store.save(loaded.checkpoint + distance, attempts[-1], loaded.attempt, tiers)
        judgement = judge(loaded, loaded.checkpoint + after, known=store.known, loads=store.loads)
        if judgement.excluded is None:
            break
        store.known += (judgement.excluded,)
        bad |= set(attempts) | ({loaded.attempt} if loaded.tier == "global" else set())
        restarts += 1
    assert restarts <= MAX_OPEN
