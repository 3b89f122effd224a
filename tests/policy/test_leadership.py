"""In a partitioned job at most one part continues, and one of two coordinators yields."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.leadership import Electorate, Leadership, has_quorum_of, may_begin, should_yield


@dataclass(frozen=True)
class Place:
    cycle: int
    num_slots: int
    slot: int | None = None
    num_spares: int = 0
    spare: int | None = None
    num_kept: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return 1, self.cycle


def test_majority_of_slots_continues() -> None:
    """Three of five slots continue and two do not, whatever spares are with them."""
    electorate = Electorate(5, 4)
    assert electorate.has_quorum({1, 2, 3})
    assert not electorate.has_quorum({0, 4}, {0, 1, 2, 3})


def test_spares_decide_between_equal_halves() -> None:
    """Of two halves the one with more spares continues; without spares, the one with the lowest slot."""
    assert Electorate(2, 1).has_quorum({1}, {0})
    assert not Electorate(2, 1).has_quorum({0})
    assert Electorate(2).has_quorum({0})
    assert not Electorate(2).has_quorum({1})


def test_dead_nodes_do_not_count() -> None:
    """A node that is known to be dead cannot continue elsewhere, so the other one of two continues."""
    assert Electorate(2).has_quorum({1}, dead_slots={0})
    assert not Electorate(3).has_quorum({2})
    assert Electorate(3).has_quorum({2}, dead_slots={0, 1})


def test_part_without_a_slot_has_no_quorum() -> None:
    """A part in which no node holds a slot never continues."""
    assert not Electorate(1).has_quorum(set(), dead_slots={0})
    assert not Electorate(2, 3).has_quorum(set(), {0, 1, 2})


Divided = tuple[Electorate, list[tuple[set[int], set[int], set[int], set[int]]]]


@st.composite
def partitions(draw: st.DrawFn) -> Divided:
    """An electorate in two disjoint parts; each knows some of the dead nodes."""
    num_slots, num_spares = draw(st.integers(1, 7)), draw(st.integers(0, 4))
    where = draw(st.lists(st.sampled_from("ab-x"), min_size=num_slots + num_spares, max_size=num_slots + num_spares))
    slots = {part: {n for n in range(num_slots) if where[n] == part} for part in "ab-x"}
    spares = {part: {n for n in range(num_spares) if where[num_slots + n] == part} for part in "ab-x"}
    parts = []
    for part in "ab":
        dead_slots = {one for one in slots["x"] if draw(st.booleans())}
        dead_spares = {one for one in spares["x"] if draw(st.booleans())}
        parts.append((slots[part], spares[part], dead_slots, dead_spares))
    return Electorate(num_slots, num_spares), parts


@given(partitions())
def test_two_parts_never_both_continue(job: Divided) -> None:
    """Whatever each part knows about dead nodes, at most one continues."""
    electorate, parts = job
    allowed = [electorate.has_quorum(a, b, dead_slots=c, dead_spares=d) for a, b, c, d in parts]
    assert not all(allowed)


@given(partitions())
def test_additional_members_keep_the_quorum(job: Divided) -> None:
    """A part with a quorum keeps it with one more holder of a slot."""
    electorate, ((slots, spares, dead_slots, dead_spares), _) = job
    if electorate.has_quorum(slots, spares, dead_slots=dead_slots, dead_spares=dead_spares):
        for more in set(range(electorate.num_slots)) - slots - dead_slots:
            assert electorate.has_quorum({*slots, more}, spares, dead_slots=dead_slots, dead_spares=dead_spares)


@st.composite
def successions(draw: st.DrawFn) -> list[list[tuple[Place | None, Place | None]]]:
    """The claims of members of two cycles, in two disjoint parts.

    The first cycle ran. A coordinator with the quorum of the first cycle formed the second one; some of its nodes
    joined it, and if all did, some were notified that it ran.
    """
    num_slots = draw(st.integers(1, 6))
    old = [Place(1, num_slots, slot) for slot in range(num_slots)]
    kept = {slot for slot in range(num_slots) if draw(st.booleans())}
    if not Electorate(num_slots).has_quorum(kept):
        kept = set(range(num_slots))
    num_new = draw(st.integers(0, 3))
    nodes: list[tuple[Place | None, Place | None]] = []
    num_next = len(kept) + num_new
    is_whole = draw(st.booleans())
    index = 0
    for slot in range(num_slots + num_new):
        ran = old[slot] if slot < num_slots else None
        if slot >= num_slots or slot in kept:
            joined = Place(2, num_next, index, num_kept=len(kept))
            index += 1
            if not is_whole and not draw(st.booleans()):
                nodes.append((ran, ran))
            else:
                nodes.append((joined if is_whole and draw(st.booleans()) else ran, joined))
        else:
            nodes.append((ran, ran))
    where = [draw(st.sampled_from("ab-")) for _ in nodes]
    return [[node for node, part in zip(nodes, where, strict=True) if part == name] for name in "ab"]


@given(successions())
def test_two_parts_never_both_continue_between_cycles(parts: list[list[tuple[Place | None, Place | None]]]) -> None:
    """If the network is partitioned while the next cycle starts, at most one part continues."""
    assert not all(has_quorum_of(part) for part in parts)


def test_whole_job_continues_after_a_partial_start() -> None:
    """If one node joined a cycle that the others do not know, all nodes together continue."""
    old = [Place(1, 3, slot) for slot in range(3)]
    joined = replace(old[0], cycle=2, num_kept=3)
    assert has_quorum_of([(old[0], joined), (old[1], old[1]), (old[2], old[2])])
    assert not has_quorum_of([(old[0], joined)])


def test_first_cycle_needs_the_first_endpoint_if_splittable() -> None:
    """With too few nodes for a second world any endpoint may begin a job; otherwise only the first may."""
    assert may_begin(1, num_slots=2, max_nodes=3, num_endpoints=2)
    assert not may_begin(1, num_slots=2, max_nodes=4, num_endpoints=2)
    assert not may_begin(1, num_slots=2, max_nodes=0, num_endpoints=2)
    assert may_begin(0, num_slots=2, max_nodes=4, num_endpoints=2)


LEADERSHIPS = st.builds(Leadership, term=st.integers(0, 3), leads=st.booleans(), order=st.integers(0, 3))


@given(LEADERSHIPS, LEADERSHIPS)
def test_one_of_two_coordinators_yields(one: Leadership, other: Leadership) -> None:
    """Exactly one of two coordinators at different endpoints yields, and never a leading one to one that does not
    lead."""
    if one.order == other.order:
        return
    assert should_yield(one, other) != should_yield(other, one)
    if one.leads and not other.leads:
        assert should_yield(other, one)
