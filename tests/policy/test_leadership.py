"""A divided job: at most one part goes on, and of two coordinators one yields."""

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


def test_majority_of_slots_goes_on() -> None:
    """Three of five slots go on, two do not, whatever spares are with them."""
    electorate = Electorate(5, 4)
    assert electorate.has_quorum({1, 2, 3})
    assert not electorate.has_quorum({0, 4}, {0, 1, 2, 3})


def test_spares_decide_between_halves() -> None:
    """Of two halves the one with most spares goes on; without spares, the one with the lowest slot."""
    assert Electorate(2, 1).has_quorum({1}, {0})
    assert not Electorate(2, 1).has_quorum({0})
    assert Electorate(2).has_quorum({0})
    assert not Electorate(2).has_quorum({1})


def test_dead_nodes_do_not_count() -> None:
    """A node that is known to be dead cannot go on elsewhere: the other one of two goes on."""
    assert Electorate(2).has_quorum({1}, dead_slots={0})
    assert not Electorate(3).has_quorum({2})
    assert Electorate(3).has_quorum({2}, dead_slots={0, 1})


def test_nobody_is_no_quorum() -> None:
    """A part without a slot's holder never goes on."""
    assert not Electorate(1).has_quorum(set(), dead_slots={0})
    assert not Electorate(2, 3).has_quorum(set(), {0, 1, 2})


Divided = tuple[Electorate, list[tuple[set[int], set[int], set[int], set[int]]]]


@st.composite
def divided(draw: st.DrawFn) -> Divided:
    """An electorate in two parts that share nobody; each knows some of the dead."""
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


@given(divided())
def test_two_parts_never_go_on(job: Divided) -> None:
    """Whatever each part knows of the dead, not both go on."""
    electorate, parts = job
    allowed = [electorate.has_quorum(a, b, dead_slots=c, dead_spares=d) for a, b, c, d in parts]
    assert not all(allowed)


@given(divided())
def test_more_members_never_harm(job: Divided) -> None:
    """A part that goes on does so with one more slot's holder, too."""
    electorate, ((slots, spares, dead_slots, dead_spares), _) = job
    if electorate.has_quorum(slots, spares, dead_slots=dead_slots, dead_spares=dead_spares):
        for more in set(range(electorate.num_slots)) - slots - dead_slots:
            assert electorate.has_quorum({*slots, more}, spares, dead_slots=dead_slots, dead_spares=dead_spares)


@st.composite
def successions(draw: st.DrawFn) -> list[list[tuple[Place | None, Place | None]]]:
    """What the members of two cycles claim, in two parts that share nobody.

    The first cycle ran. The second was formed by a coordinator with the first one's quorum; some of its nodes took
    their place, and if all did some were told that it ran.
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
            took = Place(2, num_next, index, num_kept=len(kept))
            index += 1
            if not is_whole and not draw(st.booleans()):
                nodes.append((ran, ran))
            else:
                nodes.append((took if is_whole and draw(st.booleans()) else ran, took))
        else:
            nodes.append((ran, ran))
    where = [draw(st.sampled_from("ab-")) for _ in nodes]
    return [[node for node, part in zip(nodes, where, strict=True) if part == name] for name in "ab"]


@given(successions())
def test_two_parts_never_go_on_between_two_cycles(parts: list[list[tuple[Place | None, Place | None]]]) -> None:
    """Also where a network breaks while the next cycle starts, not both parts go on."""
    assert not all(has_quorum_of(part) for part in parts)


def test_whole_job_goes_on_after_a_start_that_few_took() -> None:
    """Where one node took a place in a cycle that the others never heard of, all of them together go on."""
    old = [Place(1, 3, slot) for slot in range(3)]
    took = replace(old[0], cycle=2, num_kept=3)
    assert has_quorum_of([(old[0], took), (old[1], old[1]), (old[2], old[2])])
    assert not has_quorum_of([(old[0], took)])


def test_first_cycle_of_a_job_that_could_be_twice() -> None:
    """With too few nodes for a second world any endpoint begins a job, otherwise the first."""
    assert may_begin(1, num_slots=2, max_nodes=3, num_endpoints=2)
    assert not may_begin(1, num_slots=2, max_nodes=4, num_endpoints=2)
    assert not may_begin(1, num_slots=2, max_nodes=0, num_endpoints=2)
    assert may_begin(0, num_slots=2, max_nodes=4, num_endpoints=2)


LEADERSHIPS = st.builds(Leadership, term=st.integers(0, 3), leads=st.booleans(), order=st.integers(0, 3))


@given(LEADERSHIPS, LEADERSHIPS)
def test_of_two_coordinators_one_yields(one: Leadership, other: Leadership) -> None:
    """Exactly one of two at different endpoints yields, and never one that leads to one that does not."""
    if one.order == other.order:
        return
    assert should_yield(one, other) != should_yield(other, one)
    if one.leads and not other.leads:
        assert should_yield(other, one)
