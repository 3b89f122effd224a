"""Which copies are not loaded again after invalid results, and that this comes to an end."""

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


def distrust(one: Load, iteration: int, known: Sequence[Exclusion] = (), loads: Sequence[Load] = ()) -> Exclusion:
    judgement = judge(one, iteration, known=known, loads=loads)
    assert judgement.excluded is not None, judgement.reason
    return judgement.excluded


@dataclass
class Store:
    """Checkpoints as a run keeps them, and what its cycles do with them."""

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


def test_the_replica_nan_loop_ends_in_two_cycles() -> None:
    """Bad near copies of 120 and a good global checkpoint at 100: the cycle after the first invalid result loads 100,
    although the fetched replica is by then a memory copy, and even what was saved in between is passed over."""
    store = Store()
    store.save(100, "job-0-aa.0", None, [*NEAR, Tier.GLOBAL])
    store.save(120, "job-0-aa.1", None, [Tier.LOCAL, Tier.REPLICA])
    first = store.load(1)
    assert first is not None
    assert first.checkpoint == 120
    store.save(125, "job-1-bb.0", first.attempt, [*NEAR, Tier.GLOBAL])
    store.copies.add(Copy(120, "job-0-aa.1", Tier.MEMORY))
    store.known += (distrust(first, 127),)
    point = store.choose()
    assert point is not None
    assert (point.checkpoint, point.attempt) == (100, "job-0-aa.0")


def test_other_near_copies_of_the_same_cycle_are_doubtful() -> None:
    """What spoiled one near copy may have spoiled all that its cycle saved nearby; what it saved to the global tier and
    what other cycles saved is not doubtful, and a bad copy in the global tier says nothing of others."""
    one = distrust(load(120, "local", cycle=2, attempt="job-1-bb.3"), 121)
    assert all(is_doubtful(Copy(110, "job-1-bb.1", tier), [one]) for tier in NEAR)
    assert not is_excluded(Copy(110, "job-1-bb.1", Tier.LOCAL), {}, [one])
    assert not is_doubtful(Copy(110, "job-1-bb.1", Tier.GLOBAL), [one])
    assert not any(is_doubtful(Copy(110, f"job-{cycle}-cc.1", Tier.LOCAL), [one]) for cycle in (0, 2, 11))
    assert not is_doubtful(Copy(110, "job-1-bb.1", Tier.LOCAL), [distrust(load(120, "global"), 121)])


def test_near_copies_are_excluded_and_the_global_one_is_tried() -> None:
    """After an invalid result from a node-local tier the same checkpoint is loaded from the global tier, which has
    digests of its own; what is then saved on top of it is trusted."""
    store = Store()
    store.save(120, "job-0-aa.1", None, [*NEAR, Tier.GLOBAL])
    first = store.load(1)
    assert first is not None
    assert first.tier == "memory"
    store.known += (distrust(first, 121),)
    second = store.load(2)
    assert second is not None
    assert (second.checkpoint, second.tier) == (120, "global")
    store.save(130, "job-2-cc.0", second.attempt, NEAR)
    point = store.choose()
    assert point is not None
    assert point.checkpoint == 130


def test_the_global_checkpoint_goes_with_all_that_descends_from_it() -> None:
    """An invalid result from the global tier: the checkpoint is excluded in every tier, an older one is loaded, and
    descendants are excluded over any number of checkpoints."""
    store = Store()
    store.save(100, "job-0-aa.0", None, [Tier.GLOBAL])
    store.save(120, "job-0-aa.1", None, [*NEAR, Tier.GLOBAL])
    store.save(130, "job-7-bb.0", "job-0-aa.1", [Tier.GLOBAL])
    store.save(140, "job-8-cc.0", "job-7-bb.0", NEAR)
    store.known += (distrust(load(120, "global", attempt="job-0-aa.1"), 125),)
    point = store.choose()
    assert point is not None
    assert point.checkpoint == 100
    assert all(is_excluded(copy, store.lineage, store.known) for copy in store.copies if copy.checkpoint > 100)


def test_descendants_are_known_even_where_a_link_was_deleted() -> None:
    """What an earlier cycle saved after it had loaded the copy is passed over, though the checkpoint between is gone
    and the manifest of the newest names a parent that nobody knows."""
    near = load(100, "local", cycle=1, attempt="job-0-aa.0")
    child = load(110, "local", cycle=2, attempt="job-1-bb.0")
    again = load(100, "memory", cycle=3, attempt="job-0-aa.0")
    one = distrust(again, 103, loads=[near, child, again])
    assert set(one.tainted) == {"job-1", "job-2", "job-3"}
    grandchild = Copy(120, "job-2-cc.0", Tier.GLOBAL)
    assert is_excluded(grandchild, {"job-2-cc.0": "job-1-bb.0"}, [one])
    assert not is_excluded(Copy(120, "job-20-cc.0", Tier.LOCAL), {}, [one])


@pytest.mark.parametrize("iteration", [99, 121])
def test_outside_the_window_nothing_is_excluded(iteration: int) -> None:
    """An invalid result that comes later than the window says nothing of what was loaded; the reason says so."""
    judgement = judge(load(100), iteration, known=[], loads=[])
    assert judgement.excluded is None
    assert "beyond the suspect window" in judgement.reason


def test_without_a_load_nothing_is_excluded() -> None:
    """A cycle that began afresh, or of which nothing is known, has no copy to blame."""
    assert judge(None, 5, known=[], loads=[]).excluded is None
    assert judge(load(3), None, known=[], loads=[]).excluded is None


def test_a_second_time_from_the_global_tier_stops() -> None:
    """One older global checkpoint is tried; when that gives an invalid result too, it is no copy's fault."""
    first = distrust(load(120, "global"), 125)
    judgement = judge(load(100, "global"), 110, known=[first], loads=[])
    assert judgement.excluded is None
    assert "second" in judgement.reason


def test_a_copy_is_excluded_once() -> None:
    """A copy that is loaded although it is excluded ends the run: telling it again would change nothing."""
    first = distrust(load(120), 121)
    assert judge(load(120, "memory"), 122, known=[first], loads=[]).excluded is None


def test_progress_beyond_the_invalid_result_settles_it() -> None:
    """Once training committed a later checkpoint than the one that failed, another invalid result is judged afresh;
    what was excluded stays so."""
    first = distrust(load(120, "global"), 125)
    (still,) = settle([first], 125)
    assert not still.settled
    known = settle([first], 126)
    assert is_excluded(Copy(120, first.attempt, Tier.GLOBAL), {}, known)
    assert judge(load(500, "global"), 505, known=known, loads=[]).excluded is not None


def test_the_farthest_near_tier_is_judged() -> None:
    """Where ranks loaded from several tiers, the farthest near one is named; global only when all loaded from there."""
    assert tier_of_load(["memory", "replica", "local"]) == "replica"
    assert tier_of_load(["global", "memory"]) == "memory"
    assert tier_of_load(["global", "global"]) == "global"


def test_the_list_survives_the_environment() -> None:
    """Workers read from the text what the coordinator wrote, and an empty variable means that all is trusted."""
    known = (distrust(load(120), 121), distrust(load(100, "global"), 101))
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
    """Whatever is saved where, and however soon every cycle's result is invalid: after at most MAX_OPEN restarts the
    run stops, and until then no cycle loads a excluded copy, or one that descends from it."""
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
