"""Learned timeouts: what is learned, from what, and what is left alone."""

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


def taught(seen=SEEN, earlier=None, *, finished=True, faulted=(), configured=CONFIGURED, factor=5.0) -> Learned:
    return learn(
        seen, earlier or Learned(), configured=configured, safety_factor=factor, finished=finished, faulted=faulted
    )


def late(
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


def test_longest_times_factor_is_learned():
    """A timeout is the longest duration times the safety factor, for everything that qualifies."""
    assert taught() == Learned(
        sections={"setup": 50.0, "step": 10.0, "checkpointing": 30.0, "eval": 15.0},
        out_of_section_s=FLOOR_S,
        initial_heartbeat_s=60.0,
        heartbeat_s=20.0,
    )


def test_earlier_learned_value_merges_as_mean():
    """A value learned earlier counts as much as the new one."""
    earlier = Learned(sections={"step": 30.0}, heartbeat_s=40.0)
    assert taught(earlier=earlier).sections["step"] == 20.0
    assert taught(earlier=earlier).heartbeat_s == 30.0


def test_nothing_falls_below_the_floor():
    """However fast a section is, its timeout leaves room for a hiccup."""
    assert taught(changed(longest_s={"step": 0.001})).sections["step"] == FLOOR_S


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        (changed(restored=False), "setup"),
        (changed(counts={"step": 15}), "step"),
        (changed(counts={"step": 16}), "checkpointing"),
    ],
)
def test_what_was_seen_too_seldom_teaches_nothing(seen, missing):
    """setup needs a loaded checkpoint, step 16 iterations, checkpointing a save."""
    assert missing not in taught(seen).sections


def test_time_outside_sections_needs_an_orderly_end_and_the_others():
    """It is learned at shutdown only, and only when every section that was used qualifies."""
    assert taught(finished=False).out_of_section_s is None
    assert taught(changed(restored=False)).out_of_section_s is None
    assert taught(changed(counts={"step": 16}, longest_s={"": 4.0, "step": 2.0})).out_of_section_s == 20.0
    assert taught(changed(counts={"setup": 1})).out_of_section_s is None


def test_section_that_hung_teaches_nothing():
    """A cycle that was faulted on a section leaves what was known of it as it was."""
    earlier = Learned(sections={"step": 30.0}, out_of_section_s=7.0)
    learned = taught(earlier=earlier, faulted=[late(Subject.SECTION, "step"), late(Subject.HEARTBEAT)])
    assert learned.sections["step"] == 30.0
    assert learned.sections["setup"] == 50.0
    assert learned.heartbeat_s is None
    assert learned.out_of_section_s == 7.0


def test_a_learned_time_between_heartbeats_that_was_exceeded_is_forgotten():
    """A pause that was never seen before, such as the first validation, ends one cycle at most: then the configured
    time counts again."""
    earlier = Learned(heartbeat_s=1.1, initial_heartbeat_s=40.0)
    learned = taught(earlier=earlier, faulted=[late(Subject.HEARTBEAT)])
    assert learned.heartbeat_s is None
    assert apply(Timeouts(heartbeat_s=300.0), learned).heartbeat_s == 300.0
    assert taught(earlier=earlier, faulted=[late(Subject.SECTION, "step")]).heartbeat_s is not None


def test_a_learned_timeout_is_doubled_after_a_hang_and_dropped_after_the_second():
    """Hangs without an explanation show that a learned timeout is too short: it is doubled after the first one, dropped
    after the second, and not learned again. A hang that is explained changes nothing."""
    known = Learned(sections={"checkpointing": 10.0, "step": 10.0})
    explained = taught(earlier=known, faulted=[late(Subject.SECTION, "checkpointing", timeout_s=10.0)])
    assert explained.sections["checkpointing"] == 10.0
    hang = [late(Subject.SECTION, "checkpointing", timeout_s=10.0, is_explained=False)] * 3  # of three ranks
    once = taught(earlier=known, faulted=hang)
    assert once.sections["checkpointing"] == 20.0
    twice = taught(earlier=once, faulted=hang)
    assert "checkpointing" not in twice.sections
    assert twice.sections["step"] == 10.0
    assert "checkpointing" not in taught(earlier=twice).sections


def test_hangs_at_calculated_timeouts_are_counted_apart():
    """A timeout that the script calculated itself is not a learned one: its hangs are counted for it alone, once for
    each cycle, unless they are explained."""
    known = Learned(sections={"step": 10.0})
    hang = late(Subject.SECTION, "step", timeout_s=20.0, is_explained=False, is_calculated=True)
    once = taught(earlier=known, faulted=[hang, hang])
    assert once.sections["step"] == 10.0
    assert (once.num_hangs, once.num_calculated_hangs) == ({}, {"section step": 1})
    explained = late(Subject.SECTION, "step", timeout_s=20.0, is_calculated=True)
    assert taught(earlier=once, faulted=[explained]).num_calculated_hangs == {"section step": 1}
    assert taught(earlier=once, faulted=[hang]).num_calculated_hangs == {"section step": 2}


def test_a_hang_at_a_given_timeout_does_not_count_against_a_learned_one():
    """Where the given value was enforced, the learned one was not too short."""
    known = Learned(sections={"step": 10.0})
    assert taught(earlier=known, faulted=[late(Subject.SECTION, "step", timeout_s=180.0, is_explained=False)]) == (
        taught(earlier=known, faulted=[late(Subject.SECTION, "step", timeout_s=180.0)])
    )


def test_options_that_set_the_learned_timeouts_are_suggested():
    """The line can be pasted into the command, rounded up to seconds; nothing learned suggests nothing."""
    learned = Learned(sections={"step": 10.2, "setup": 50.0}, out_of_section_s=12.0, heartbeat_s=20.0)
    assert learned.suggest() == "--ft-rank-section-timeouts=setup:50,step:11 --ft-rank-out-of-section-timeout=12"
    beats = Learned(heartbeat_s=20.0, initial_heartbeat_s=11.0)
    assert beats.suggest() == "--ft-initial-rank-heartbeat-timeout=20 --ft-rank-heartbeat-timeout=20"
    assert Learned().suggest() == ""


def test_unnamed_sections_stay_measured_only():
    """A section that the config does not name, other than the three known ones, is not learned."""
    assert "eval" not in taught(configured=Timeouts()).sections
    assert "step" in taught(configured=Timeouts()).sections


def test_few_heartbeats_teach_only_the_first_one():
    """The time between heartbeats needs more than 16 of them."""
    learned = taught(changed(num_heartbeats=16))
    assert (learned.initial_heartbeat_s, learned.heartbeat_s) == (60.0, None)


def test_learned_values_extend_configured_ones():
    """A learned value is enforced where it is longer than the given one, or where none was given; a timeout that is off
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
def test_nodes_may_report_in_any_order(seen, random):
    """What several nodes saw together does not depend on who reported first, or how it was grouped."""
    shuffled = random.sample(seen, len(seen))
    assert combine(shuffled) == combine(seen)
    assert combine([combine(seen[:2]), combine(seen[2:])]) == combine(seen)


@given(observations, st.floats(1, 10))
def test_learned_timeout_exceeds_everything_seen(seen, factor):
    """Nothing that was seen would have exceeded what is learned from it."""
    together = combine(seen)
    learned = taught(together, factor=factor)
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
def test_a_learned_timeout_ends_no_run_that_a_given_one_would_not(rank, configured, learned, put, now_ns):
    """Whatever was learned, or calculated by the script: a rank exceeds a given timeout with it only if it does without
    it, and a timeout that nobody gave has room for ordinary pauses."""
    rank = replace(rank, depth=len(rank.sections))
    late_without = {one.key for one in expired(rank, configured, now_ns)}
    for one in expired(rank, put(configured, learned), now_ns):
        given_s = None if one.subject in configured.defaults else configured.of(one.subject, one.section)
        assert one.key in late_without if given_s is not None else one.elapsed_s >= FLOOR_S


@given(seconds, maybe, st.booleans())
def test_enforced_timeouts_have_a_floor(learned_s, configured_s, is_default):
    """Never below a given timeout, half of a default one, or the floor; and never below the learned one."""
    found = enforced_s(learned_s, configured_s, is_default=is_default)
    assert found >= max(learned_s, FLOOR_S, (configured_s or 0.0) / (2 if is_default else 1))
