"""The checkpoint that all ranks resume from, and the copies of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.recovery_point import Copy, Tier, choose_best_point, choose_recovery_point

COPY = st.builds(Copy, st.integers(0, 5), st.sampled_from("ab"), st.sampled_from(Tier), st.sampled_from(["", "n", "m"]))
TABLE = st.lists(st.sets(COPY, max_size=8), max_size=4)
REFUSED = st.dictionaries(st.integers(0, 3), st.sets(COPY, max_size=4))


def _usable(table: list[set[Copy]], refused: dict[int, set[Copy]]) -> list[set[Copy]]:
    return [held - refused.get(rank, set()) for rank, held in enumerate(table)]


@given(TABLE, REFUSED)
def test_choice_is_complete_newest_and_nearest(table: list[set[Copy]], refused: dict[int, set[Copy]]) -> None:
    """Every rank has a part of the chosen attempt that is not rejected; no newer attempt is complete, and no part is
    nearer."""
    usable = _usable(table, refused)
    complete = set.intersection(*({(c.checkpoint, c.attempt) for c in held} for held in usable)) if usable else set()
    point = choose_recovery_point(table, refused)
    if point is None:
        assert not complete
        return
    assert (point.checkpoint, point.attempt) in complete
    assert point.checkpoint == max(checkpoint for checkpoint, _ in complete)
    for copy, held in zip(point.copies, usable, strict=True):
        own = [c for c in held if (c.checkpoint, c.attempt) == (point.checkpoint, point.attempt)]
        assert copy in own
        assert copy.tier == min(c.tier for c in own)


@given(TABLE, REFUSED, st.randoms())
def test_choice_does_not_depend_on_order(table: list[set[Copy]], refused: dict[int, set[Copy]], shuffler) -> None:
    """The same facts in any order give the same copies for all ranks."""
    reported = []
    for held in table:
        copies = list(held)
        shuffler.shuffle(copies)
        reported.append(copies)
    assert choose_recovery_point(reported, refused) == choose_recovery_point(table, refused)


@given(TABLE)
def test_rejecting_every_choice_terminates(table: list[set[Copy]]) -> None:
    """With each rejection the choice gets no newer, no rejected copy is chosen again, and finally there is no
    choice."""
    refused: dict[int, set[Copy]] = {rank: set() for rank in range(len(table))}
    checkpoints = []
    while (point := choose_recovery_point(table, refused)) is not None:
        checkpoints.append(point.checkpoint)
        assert point.copies[0] not in refused[0]
        refused[0].add(point.copies[0])
    assert checkpoints == sorted(checkpoints, reverse=True)


def test_nearer_attempt_of_one_iteration_is_chosen() -> None:
    """Of two complete attempts the one with nearer copies is chosen; for equal distances the choice is
    deterministic."""
    near, far = Copy(7, "a", Tier.MEMORY, "n"), Copy(7, "b", Tier.GLOBAL)
    point = choose_recovery_point([{near, far}, {near, far}])
    assert point is not None
    assert point.attempt == "a"
    one, other = Copy(7, "a", Tier.LOCAL, "n"), Copy(7, "b", Tier.LOCAL, "n")
    point = choose_recovery_point([{other, one}])
    assert point is not None
    assert point.attempt == "b"


KEYS = st.sets(st.tuples(st.integers(0, 5), st.sampled_from("ab")))


@given(TABLE, REFUSED, st.data(), KEYS)
def test_finite_checkpoints_are_preferred(
    table: list[set[Copy]], refused: dict[int, set[Copy]], data: st.DataObject, not_finite: set[tuple[int, str]]
) -> None:
    """The newest complete finite checkpoint is chosen, else the newest complete one; in both groups doubtful copies
    come last."""
    doubtful = [data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set() for held in table]
    chosen = choose_best_point(table, refused, doubtful=doubtful, not_finite=not_finite)
    usable = _usable(table, refused)
    finite = [{copy for copy in held if (copy.checkpoint, copy.attempt) not in not_finite} for held in usable]
    certain = [
        [copies - uncertain for copies, uncertain in zip(one, doubtful, strict=True)] for one in (finite, usable)
    ]
    expected = next(filter(None, map(choose_recovery_point, (certain[0], finite, certain[1], usable))), None)
    assert chosen == expected
    assert (chosen is None) == (choose_recovery_point(table, refused) is None)
    if not not_finite and not any(doubtful):
        assert chosen == choose_recovery_point(table, refused)


@given(TABLE, KEYS)
def test_newest_is_chosen_if_none_is_finite(table: list[set[Copy]], not_finite: set[tuple[int, str]]) -> None:
    """If every complete checkpoint contains infinities, as with masks, the newest is chosen."""
    newest = choose_recovery_point(table)
    chosen = choose_best_point(table, {}, not_finite=not_finite)
    assert (newest is None) == (chosen is None)
    if newest is not None and chosen is not None and chosen != newest:
        assert (newest.checkpoint, newest.attempt) in not_finite
        assert (chosen.checkpoint, chosen.attempt) not in not_finite
        assert chosen.checkpoint <= newest.checkpoint


@given(TABLE, REFUSED, st.data())
def test_last_resort_copies_are_chosen_last(
    table: list[set[Copy]], refused: dict[int, set[Copy]], data: st.DataObject
) -> None:
    """The choice ignores last-resort copies, unless nothing else is complete."""
    last = [data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set() for held in table]
    others = [held - left for held, left in zip(table, last, strict=True)]
    chosen = choose_best_point(table, refused, last=last)
    assert chosen == (choose_best_point(others, refused) or choose_best_point(table, refused))
