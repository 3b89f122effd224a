"""Learned timeouts: the observations they come from, their bounds, and when they are dropped."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.deadlines import (
    FLOOR_S,
    BoardSection,
    Expired,
    Learned,
    Observation,
    RankFacts,
    Subject,
    Timeouts,
    apply,
    combine,
    enforced_s,
    expired,
    learn,
    override,
)

SEEN = Observation(
    longest_s={"setup": 10.0, "step": 2.0, "checkpointing": 6.0, "eval": 3.0, "": 1.0},
    counts={"setup": 1, "step": 16, "checkpointing": 1, "eval": 4},
    restored=True,
    initial_heartbeat_s=12.0,
    heartbeat_gap_s=4.0,
    num_heartbeats=17,
)
CONFIGURED = Timeouts(sections={"setup": 600.0, "step": 180.0, "eval": 90.0})


def learn_all(seen=SEEN, earlier=None, *, finished=True, faulted=(), configured=CONFIGURED, factor=5.0) -> Learned:
    return learn(
        seen, earlier or Learned(), configured=configured, safety_factor=factor, finished=finished, faulted=faulted
    )


def late_fault(
    subject: Subject,
    section: str | None = None,
    *,
    timeout_s: float = 1.0,
    is_explained: bool = True,
    is_calculated: bool = False,
) -> Expired:
    return Expired(
        subject=subject,
        local_rank=0,
        global_rank=0,
        pid=1,
        section=section,
        timeout_s=timeout_s,
        elapsed_s=2 * timeout_s,
        since_ns=0,
        iteration=0,
        is_explained=is_explained,
        is_calculated=is_calculated,
    )


def changed(**facts) -> Observation:
    from msgspec.structs import replace

    return replace(SEEN, **facts)


def test_learned_timeout_is_the_longest_times_the_factor():
    """A timeout is the longest duration times the safety factor, for everything that qualifies."""
    assert learn_all() == Learned(
        sections={"setup": 50.0, "step": 10.0, "checkpointing": 30.0, "eval": 15.0},
        out_of_section_s=FLOOR_S,
        initial_heartbeat_s=60.0,
        heartbeat_s=20.0,
    )


def test_learned_value_is_averaged_with_the_earlier_one():
    """A value learned earlier counts as much as the new one."""
    earlier = Learned(sections={"step": 30.0}, heartbeat_s=40.0)
    assert learn_all(earlier=earlier).sections["step"] == 20.0
    assert learn_all(earlier=earlier).heartbeat_s == 30.0


def test_learned_timeouts_have_a_floor():
    """However fast a section is, its timeout leaves room for a short delay."""
    assert learn_all(changed(longest_s={"step": 0.001})).sections["step"] == FLOOR_S


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        (changed(restored=False), "setup"),
        (changed(counts={"step": 15}), "step"),
        (changed(counts={"step": 16}), "checkpointing"),
    ],
)
def test_too_few_observations_are_not_learned(seen, missing):
    """Learning needs a loaded checkpoint for setup, 16 iterations for step, and a save for checkpointing."""
    assert missing not in learn_all(seen).sections


def test_time_outside_sections_is_learned_at_shutdown_only():
    """The time is learned only at shutdown, and only if every section that was used qualifies."""
    assert learn_all(finished=False).out_of_section_s is None
    assert learn_all(changed(restored=False)).out_of_section_s is None
    assert learn_all(changed(counts={"step": 16}, longest_s={"": 4.0, "step": 2.0})).out_of_section_s == 20.0
    assert learn_all(changed(counts={"setup": 1})).out_of_section_s is None


def test_hung_section_is_not_learned():
    """A cycle with a fault in a section does not change the learned value of that section."""
    earlier = Learned(sections={"step": 30.0}, out_of_section_s=7.0)
    learned = learn_all(earlier=earlier, faulted=[late_fault(Subject.SECTION, "step"), late_fault(Subject.HEARTBEAT)])
    assert learned.sections["step"] == 30.0
    assert learned.sections["setup"] == 50.0
    assert learned.heartbeat_s is None
    assert learned.out_of_section_s == 7.0


def test_exceeded_learned_heartbeat_timeout_is_dropped():
    """A new pause, such as the first validation, ends at most one cycle: then the configured timeout applies again."""
    earlier = Learned(heartbeat_s=1.1, initial_heartbeat_s=40.0)
    learned = learn_all(earlier=earlier, faulted=[late_fault(Subject.HEARTBEAT)])
    assert learned.heartbeat_s is None
    assert apply(Timeouts(heartbeat_s=300.0), learned).heartbeat_s == 300.0
    assert learn_all(earlier=earlier, faulted=[late_fault(Subject.SECTION, "step")]).heartbeat_s is not None


def test_unexplained_hangs_double_then_drop_learned_timeout():
    """An unexplained hang doubles the learned timeout; a second one drops it permanently. An explained hang changes
    nothing."""
    known = Learned(sections={"checkpointing": 10.0, "step": 10.0})
    explained = learn_all(earlier=known, faulted=[late_fault(Subject.SECTION, "checkpointing", timeout_s=10.0)])
    assert explained.sections["checkpointing"] == 10.0
    hang = [late_fault(Subject.SECTION, "checkpointing", timeout_s=10.0, is_explained=False)] * 3  # of three ranks
    once = learn_all(earlier=known, faulted=hang)
    assert once.sections["checkpointing"] == 20.0
    twice = learn_all(earlier=once, faulted=hang)
    assert "checkpointing" not in twice.sections
    assert twice.sections["step"] == 10.0
    assert "checkpointing" not in learn_all(earlier=twice).sections


def test_hangs_at_calculated_timeouts_count_separately():
    """An unexplained hang at a timeout that the script calculated counts for that timeout only, once per cycle."""
    known = Learned(sections={"step": 10.0})
    hang = late_fault(Subject.SECTION, "step", timeout_s=20.0, is_explained=False, is_calculated=True)
    once = learn_all(earlier=known, faulted=[hang, hang])
    assert once.sections["step"] == 10.0
    assert (once.num_hangs, once.num_calculated_hangs) == ({}, {"section step": 1})
    explained = late_fault(Subject.SECTION, "step", timeout_s=20.0, is_calculated=True)
    assert learn_all(earlier=once, faulted=[explained]).num_calculated_hangs == {"section step": 1}
    assert learn_all(earlier=once, faulted=[hang]).num_calculated_hangs == {"section step": 2}


def test_hang_at_a_configured_timeout_keeps_the_learned_one():
    """If the configured value was enforced, the learned one was not too short."""
    known = Learned(sections={"step": 10.0})
    assert learn_all(
        earlier=known, faulted=[late_fault(Subject.SECTION, "step", timeout_s=180.0, is_explained=False)]
    ) == (learn_all(earlier=known, faulted=[late_fault(Subject.SECTION, "step", timeout_s=180.0)]))


def test_learned_timeouts_are_suggested_as_options():
    """The line can be pasted into the command, rounded up to seconds; without learned values there is no suggestion."""
    learned = Learned(sections={"step": 10.2, "setup": 50.0}, out_of_section_s=12.0, heartbeat_s=20.0)
    assert learned.suggest() == "--ft-rank-section-timeouts=setup:50,step:11 --ft-rank-out-of-section-timeout=12"
    heartbeats = Learned(heartbeat_s=20.0, initial_heartbeat_s=11.0)
    assert heartbeats.suggest() == "--ft-initial-rank-heartbeat-timeout=20 --ft-rank-heartbeat-timeout=20"
    assert Learned().suggest() == ""


def test_unconfigured_sections_are_not_learned():
    """A section that is neither configured nor one of the three known ones is not learned."""
    assert "eval" not in learn_all(configured=Timeouts()).sections
    assert "step" in learn_all(configured=Timeouts()).sections


def test_few_heartbeats_learn_only_the_initial_timeout():
    """The time between heartbeats needs more than 16 of them."""
    learned = learn_all(changed(num_heartbeats=16))
    assert (learned.initial_heartbeat_s, learned.heartbeat_s) == (60.0, None)


def test_learned_values_extend_configured_ones():
    """A learned value is enforced if it is longer than the configured one or none is configured; a timeout that is off
    stays off."""
    learned = Learned(
        sections={"setup": 50.0, "step": 10.0, "checkpointing": 30.0, "eval": 15.0},
        out_of_section_s=5.0,
        initial_heartbeat_s=3.0,
        heartbeat_s=20.0,
    )
    configured = Timeouts(sections={"step": 180.0, "setup": None}, heartbeat_s=15.0, initial_heartbeat_s=15.0)
    assert apply(configured, learned) == Timeouts(
        sections={"step": 180.0, "setup": None, "checkpointing": 30.0},
        heartbeat_s=20.0,
        initial_heartbeat_s=20.0,  # never below the other
        out_of_section_s=None,
    )
    defaults = replace(CONFIGURED, heartbeat_s=1800.0, defaults=frozenset({Subject.HEARTBEAT}))
    assert apply(defaults, learned).heartbeat_s == 900.0
    defaults = replace(defaults, sections={})
    assert apply(defaults, learned).sections == {"setup": 50.0, "step": 10.0, "checkpointing": 900.0}
    assert apply(configured, Learned()) == configured


observations = st.lists(
    st.builds(
        Observation,
        longest_s=st.dictionaries(st.sampled_from(["step", "setup", ""]), st.floats(0, 100)),
        counts=st.dictionaries(st.sampled_from(["step", "setup"]), st.integers(0, 40)),
        restored=st.booleans(),
        heartbeat_gap_s=st.floats(0, 100),
    ),
    max_size=5,
)


@given(observations, st.randoms())
def test_merge_of_observations_is_order_independent(seen, random):
    """The merged observations of several nodes do not depend on order or grouping."""
    shuffled = random.sample(seen, len(seen))
    assert combine(shuffled) == combine(seen)
    assert combine([combine(seen[:2]), combine(seen[2:])]) == combine(seen)


@given(observations, st.floats(1, 10))
def test_learned_timeout_exceeds_all_observations(seen, factor):
    """No observation would have exceeded the timeout that is learned from it."""
    together = combine(seen)
    learned = learn_all(together, factor=factor)
    assert all(seconds >= max(FLOOR_S, together.longest_s[name]) for name, seconds in learned.sections.items())


seconds = st.floats(0.1, 1000)
names = st.sampled_from(["step", "setup", "checkpointing", "eval"])
maybe = st.one_of(st.none(), seconds)
learned_values = st.builds(
    Learned,
    sections=st.dictionaries(names, seconds),
    out_of_section_s=maybe,
    initial_heartbeat_s=maybe,
    heartbeat_s=maybe,
)
configured_values = st.builds(
    Timeouts,
    sections=st.dictionaries(names, maybe),
    out_of_section_s=maybe,
    initial_heartbeat_s=maybe,
    heartbeat_s=maybe,
    defaults=st.frozensets(st.sampled_from([Subject.HEARTBEAT, Subject.INITIAL_HEARTBEAT])),
)
times_ns = st.integers(1, 10**12)
ranks = st.builds(
    RankFacts,
    local_rank=st.just(0),
    attached=st.just(True),
    attached_ns=times_ns,
    last_heartbeat_ns=st.one_of(st.just(0), times_ns),
    sections=st.one_of(st.just(()), st.tuples(st.builds(BoardSection, name=names, start_ns=times_ns))),
    left_ns=st.one_of(st.just(0), times_ns),
)


@given(ranks, configured_values, learned_values, st.sampled_from([apply, override]), times_ns)
def test_learned_timeout_never_undercuts_a_configured_one(rank, configured, learned, put, now_ns):
    """With learned or calculated timeouts a rank exceeds a configured timeout only if it does without them, and a
    timeout that is not configured has room for ordinary pauses."""
    rank = replace(rank, depth=len(rank.sections))
    late_without = {one.key for one in expired(rank, configured, now_ns)}
    for one in expired(rank, put(configured, learned), now_ns):
        given_s = None if one.subject in configured.defaults else configured.of(one.subject, one.section)
        assert one.key in late_without if given_s is not None else one.elapsed_s >= FLOOR_S


@given(seconds, maybe, st.booleans())
def test_enforced_timeouts_have_a_floor(learned_s, configured_s, is_default):
    """An enforced timeout is never below the configured one, half of a default one, the floor or the learned one."""
    found = enforced_s(learned_s, configured_s, is_default=is_default)
    assert found >= max(learned_s, FLOOR_S, (configured_s or 0.0) / (2 if is_default else 1))
