"""Learned timeouts: what is learned, from what, and what is left alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.policy.deadlines import FLOOR_S, Expired, Learned, Observation, Subject, Timeouts, apply, combine, learn

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


def late(subject: Subject, section: str | None = None) -> Expired:
    return Expired(
        subject=subject,
        local_rank=0,
        global_rank=0,
        pid=1,
        section=section,
        timeout_s=1,
        elapsed_s=2,
        since_ns=0,
        iteration=0,
    )


def changed(**facts) -> Observation:
    from msgspec.structs import replace

    return replace(SEEN, **facts)


def test_longest_times_factor_is_learned():
    """A timeout is the longest duration times the safety factor, for everything that qualifies."""
    assert taught() == Learned(
        sections={"setup": 50.0, "step": 10.0, "checkpointing": 30.0, "eval": 15.0},
        out_of_section_s=5.0,
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
    assert taught(changed(counts={"step": 16})).out_of_section_s == 5.0
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


def test_unnamed_sections_stay_measured_only():
    """A section that the config does not name, other than the three known ones, is not learned."""
    assert "eval" not in taught(configured=Timeouts()).sections
    assert "step" in taught(configured=Timeouts()).sections


def test_few_heartbeats_teach_only_the_first_one():
    """The time between heartbeats needs more than 16 of them."""
    learned = taught(changed(num_heartbeats=16))
    assert (learned.initial_heartbeat_s, learned.heartbeat_s) == (60.0, None)


def test_learned_values_replace_configured_ones():
    """Learned values are enforced in the place of configured ones, and what is off stays off."""
    learned = Learned(
        sections={"setup": 50.0, "step": 10.0, "checkpointing": 30.0, "eval": 15.0},
        out_of_section_s=5.0,
        initial_heartbeat_s=3.0,
        heartbeat_s=20.0,
    )
    configured = Timeouts(sections={"step": 180.0, "setup": None}, heartbeat_s=100.0, initial_heartbeat_s=1800.0)
    assert apply(configured, learned) == Timeouts(
        sections={"step": 10.0, "setup": None, "checkpointing": 30.0},
        heartbeat_s=20.0,
        initial_heartbeat_s=20.0,  # never below the other
        out_of_section_s=None,
    )
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
