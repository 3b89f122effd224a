"""Deadlines: what is judged, when, and that a watchdog never oversleeps."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from outlast.config import FaultToleranceConfig
from outlast.policy.deadlines import BoardSection, Learned, Subject, Timeouts, deadlines, expired, override, wake_at_ns
from outlast.policy.inprocess_protocol import InProcessState
from outlast.runtime.board import RankState

S = 1_000_000_000
ALL = Timeouts(
    initial_heartbeat_s=10,
    heartbeat_s=5,
    sections={"step": 2, "setup": 20},
    out_of_section_s=3,
    num_warmup_iterations=1,
)


def rank(**facts) -> RankState:
    base = RankState(local_rank=0, global_rank=3, pid=4711, attached=True, attached_ns=S)
    sections = facts.get("sections", ())
    return replace(base, depth=len(sections), **facts)


def subjects(state, timeouts, now_s) -> list:
    return [(one.subject, one.section) for one in expired(state, timeouts, round(now_s * S))]


def test_first_heartbeat_has_its_own_timeout():
    """Until the first heartbeat the initial timeout counts from the attachment, afterwards the other one."""
    assert subjects(rank(), ALL, 10.9) == []
    assert subjects(rank(), ALL, 11) == [(Subject.INITIAL_HEARTBEAT, None)]
    beating = rank(last_heartbeat_ns=20 * S)
    assert subjects(beating, ALL, 24.9) == []
    assert subjects(beating, ALL, 25) == [(Subject.HEARTBEAT, None)]


def test_every_open_section_is_judged():
    """An outer section that takes too long is found although the inner one is within its own timeout."""
    state = rank(
        last_heartbeat_ns=40 * S, sections=(BoardSection("setup", 20 * S), BoardSection("step", 40 * S, ordinal=1))
    )
    assert subjects(state, ALL, 41) == [(Subject.SECTION, "setup")]
    assert subjects(state, ALL, 42) == [(Subject.SECTION, "setup"), (Subject.SECTION, "step")]


def test_warmup_iterations_are_not_enforced():
    """The cycle's first steps have no deadline, whatever is open around them."""
    assert deadlines(rank(sections=(BoardSection("step", S, ordinal=0),)), replace(ALL, initial_heartbeat_s=None)) == []
    assert deadlines(rank(sections=(BoardSection("step", S, ordinal=1),)), replace(ALL, initial_heartbeat_s=None))


def test_time_outside_sections_counts_once_sections_were_used():
    """A worker that never used a section is not judged by the time outside of them."""
    only = Timeouts(out_of_section_s=3, sections={"step": 2})
    assert subjects(rank(), only, 100) == []
    assert subjects(rank(left_ns=10 * S), only, 13) == [(Subject.OUT_OF_SECTION, None)]
    assert subjects(rank(left_ns=10 * S, sections=(BoardSection("eval", 11 * S),)), only, 100) == []


def test_unknown_sections_and_none_are_not_enforced():
    """A section without a timeout, or with none, has no deadline."""
    state = rank(sections=(BoardSection("eval", S), BoardSection("data", S)))
    assert deadlines(state, Timeouts(sections={"data": None, "step": 1})) == []


def test_finished_and_plain_ranks_are_never_reported():
    """A rank that finished, or never attached, has no deadline."""
    late = rank(last_heartbeat_ns=S, sections=(BoardSection("setup", S),))
    assert deadlines(late, ALL)
    assert deadlines(replace(late, finished=True), ALL) == []
    assert deadlines(replace(late, attached=False), ALL) == []


def test_report_line_is_the_one_users_search_for():
    """The line names rank, node, pid, section, timeout, time so far and iteration."""
    state = rank(iteration=57, sections=(BoardSection("step", 0, ordinal=9),))
    (one,) = expired(state, Timeouts(sections={"step": 180.0}), round(182.1 * S))
    assert one.describe("worker-1") == (
        "rank 3 (node worker-1, pid 4711): section 'step' exceeded 180.0 s (182.1 s so far, iteration 57)"
    )


def test_config_gives_the_timeouts():
    """Every timeout of the config is enforced under its own meaning."""
    config = FaultToleranceConfig(
        initial_rank_heartbeat_timeout=8,
        rank_heartbeat_timeout=4,
        rank_section_timeouts={"step": 2},
        rank_out_of_section_timeout=1,
        num_warmup_iterations=6,
    )
    timeouts = Timeouts.from_config(config)
    assert timeouts == Timeouts(
        initial_heartbeat_s=8, heartbeat_s=4, sections={"step": 2}, out_of_section_s=1, num_warmup_iterations=6
    )
    assert timeouts.smallest_s() == 1
    assert "step 2.0 s" in timeouts.describe()


def test_defaults_hold_for_ranks_that_promise_heartbeats_alone():
    """Where nobody sets a timeout of heartbeats an agent has one, for whoever has a session; a script that marks its
    own sections, or a session that goes from section to section without a loop, is not ended by it."""
    timeouts = Timeouts.from_config(FaultToleranceConfig(), with_defaults=True)
    assert (timeouts.initial_heartbeat_s, timeouts.heartbeat_s) == (1800.0, 1800.0)
    assert deadlines(rank(), timeouts) == deadlines(rank(last_heartbeat_ns=20 * S), timeouts) == []
    session = rank(promises_heartbeats=True)
    assert subjects(session, timeouts, 1800.9) == []
    assert subjects(session, timeouts, 1801) == [(Subject.INITIAL_HEARTBEAT, None)]
    assert subjects(replace(session, last_heartbeat_ns=20 * S), timeouts, 1820) == [(Subject.HEARTBEAT, None)]
    assert deadlines(replace(session, left_ns=100 * S), timeouts) == [1900 * S]
    inside = replace(session, last_heartbeat_ns=20 * S, sections=(BoardSection("evaluation", 500 * S),), depth=1)
    assert deadlines(inside, timeouts) == [2300 * S]


def test_a_default_never_ends_what_a_longer_timeout_allows():
    """What is given for the open sections, or for the time outside all of them, is longer than a default or none: the
    default waits as long. A shorter one ends a rank itself, and leaves the default as it is."""
    config = FaultToleranceConfig(
        rank_section_timeouts={"setup": 3600, "step": 7200, "export": None, "save": 60},
        rank_out_of_section_timeout=5400,
    )
    timeouts = Timeouts.from_config(config, with_defaults=True)
    session = rank(promises_heartbeats=True)
    assert subjects(session, timeouts, 5400.9) == []
    assert subjects(session, timeouts, 5401) == [(Subject.INITIAL_HEARTBEAT, None)]
    loading = replace(session, sections=(BoardSection("setup", 2 * S),), depth=1)
    assert subjects(loading, timeouts, 3601.9) == []
    assert (Subject.SECTION, "setup") in subjects(loading, timeouts, 3602)
    step = BoardSection("step", 20 * S, ordinal=5)
    in_step = replace(session, last_heartbeat_ns=20 * S, sections=(step,), depth=1)
    assert subjects(in_step, timeouts, 7219.9) == []
    assert (Subject.SECTION, "step") in subjects(in_step, timeouts, 7220)
    assert deadlines(replace(in_step, sections=(BoardSection("export", 20 * S),)), timeouts) == []
    saving = replace(in_step, sections=(BoardSection("save", 20 * S),))
    assert deadlines(saving, timeouts) == [80 * S, 1820 * S]
    nested = replace(in_step, sections=(step, BoardSection("save", 30 * S)), depth=2)
    assert deadlines(nested, timeouts) == [90 * S, 7220 * S, 7230 * S]
    assert deadlines(replace(in_step, sections=(), depth=0, left_ns=30 * S), timeouts) == [5430 * S, 5430 * S]
    set_by_hand = replace(timeouts, heartbeat_s=1800.0, defaults=frozenset())
    assert 1820 * S in deadlines(in_step, set_by_hand)


def test_a_given_timeout_of_heartbeats_is_no_default():
    """What is given holds for every rank, none included, and a longer one lifts the default of the first heartbeat."""
    off = FaultToleranceConfig(initial_rank_heartbeat_timeout=None, rank_heartbeat_timeout=None)
    assert Timeouts.from_config(off, with_defaults=True).smallest_s() is None
    timeouts = Timeouts.from_config(FaultToleranceConfig(rank_heartbeat_timeout=7200.0), with_defaults=True)
    assert (timeouts.initial_heartbeat_s, timeouts.heartbeat_s) == (7200.0, 7200.0)
    assert deadlines(rank(last_heartbeat_ns=20 * S), timeouts) == [7220 * S]
    assert Timeouts.from_config(FaultToleranceConfig()).smallest_s() is None


def test_switched_on_without_an_agent_means_the_timeouts_of_nvrx():
    """``enable_ft_package`` with nothing else enforces 1800 s and 300 s on a session; any timeout that is given stands
    for itself, and what was learned comes before."""
    on = FaultToleranceConfig(enable_ft_package=True)

    def enforced(config: FaultToleranceConfig, *, replaces_dead_ranks: bool = False, **learned: float) -> Timeouts:
        return Timeouts.of_rank(config.changed(**learned), configured=config, replaces_dead_ranks=replaces_dead_ranks)

    timeouts = enforced(on)
    assert (timeouts.initial_heartbeat_s, timeouts.heartbeat_s) == (1800.0, 300.0)
    session = rank(promises_heartbeats=True, last_heartbeat_ns=20 * S)
    assert subjects(session, timeouts, 320) == [(Subject.HEARTBEAT, None)]
    assert deadlines(rank(last_heartbeat_ns=20 * S), timeouts) == []
    assert enforced(on, rank_heartbeat_timeout=50.0).heartbeat_s == 50.0
    assert enforced(on, replaces_dead_ranks=True) == Timeouts.from_config(on, with_defaults=True)
    for other in (on.changed(rank_section_timeouts={"step": 9.0}), on.changed(enable_ft_package=False)):
        assert enforced(other) == Timeouts.from_config(other)
    assert enforced(FaultToleranceConfig()).smallest_s() is None


def test_a_config_that_says_no_watches_nothing():
    """enable_ft_package=False switches every timeout off, whatever else is set."""
    config = FaultToleranceConfig(enable_ft_package=False, rank_section_timeouts={"step": 1.0})
    assert Timeouts.from_config(config, with_defaults=True) == Timeouts.from_config(config) == Timeouts()


def test_nothing_enforced_sleeps_for_ever():
    """Without a timeout there is nothing to wake up for."""
    assert wake_at_ns([rank()], Timeouts(sections={"step": None}), 5) is None


# The property: a watchdog that sleeps as told, and looks at nothing in between, notices every timeout at the very
# nanosecond at which an all-seeing observer would.

TICK = S // 1000
seconds = st.one_of(st.none(), st.integers(1, 400).map(lambda ticks: ticks / 1000))
events = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.sampled_from(["attach", "beat", "finish", "leave", "enter step", "enter setup", "enter other"]),
    ),
    max_size=14,
)


def play(script) -> list[tuple[int, RankState]]:
    """Return what the board shows from each moment on."""
    now, state, counts, history = 0, RankState(local_rank=0), {}, [(0, RankState(local_rank=0))]
    for wait, event in script:
        now += wait * TICK + 1
        if event == "attach" and not state.attached:
            state = replace(state, attached=True, attached_ns=now, promises_heartbeats=True)
        elif not state.attached:
            continue
        elif event == "beat":
            state = replace(state, last_heartbeat_ns=now)
        elif event == "finish":
            state = replace(state, finished=True)
        elif event == "leave" and state.sections:
            inner = state.sections[:-1]
            state = replace(state, sections=inner, depth=len(inner), left_ns=state.left_ns if inner else now)
        elif event.startswith("enter"):
            name = event.split()[1]
            opened = (*state.sections, BoardSection(name, now, counts.get(name, 0)))
            counts[name] = counts.get(name, 0) + 1
            state = replace(state, sections=opened, depth=len(opened))
        history.append((now, state))
    return history


@given(
    scripts=st.lists(events, min_size=1, max_size=3),
    first=seconds,
    beat=seconds,
    step=seconds,
    setup=seconds,
    outside=seconds,
    warmup=st.integers(0, 2),
    defaults=st.sets(st.sampled_from([Subject.HEARTBEAT, Subject.INITIAL_HEARTBEAT])),
)
def test_sleeping_watchdog_never_oversleeps(scripts, first, beat, step, setup, outside, warmup, defaults):
    """Sleeping until the earliest deadline, or the smallest timeout from now, is exact: nothing is noticed late."""
    timeouts = Timeouts(
        initial_heartbeat_s=first,
        heartbeat_s=beat,
        sections={"step": step, "setup": setup},
        out_of_section_s=outside,
        num_warmup_iterations=warmup,
        defaults=frozenset(defaults),
    )
    histories = [play(script) for script in scripts]
    end = max(history[-1][0] for history in histories) + S

    def all_seeing() -> int | None:
        moments = []
        for history in histories:
            for (since, state), (until, _) in zip(history, [*history[1:], (end + 1, None)], strict=True):
                moments += [max(at, since) for at in deadlines(state, timeouts) if max(at, since) < until]
        return min(moments, default=None)

    now, seen = 0, None
    for _ in range(10_000):
        states = [[state for since, state in history if since <= now][-1] for history in histories]
        if any(expired(state, timeouts, now) for state in states):
            seen = now
            break
        wake = wake_at_ns(states, timeouts, now)
        if wake is None or wake > end:
            break
        assert wake > now
        now = wake
    assert seen == all_seeing()


def restarting(state: InProcessState, iteration: int = 1, **facts) -> RankState:
    return rank(
        in_process=state,
        in_process_restart_count=iteration,
        in_process_since_ns=50 * S,
        in_process_patience_s=7.0,
        **facts,
    )


def test_a_rank_in_a_restart_is_judged_by_that_alone():
    """Whatever was open or due when the restart began counts no more; the restart has a time limit of its own."""
    open_sections = (BoardSection("step", 20 * S, ordinal=5),)
    state = restarting(InProcessState.RESTARTING, last_heartbeat_ns=20 * S, sections=open_sections)
    assert subjects(state, ALL, 56.9) == []
    assert subjects(state, ALL, 57) == [(Subject.RESTART_IN_PROCESS, None)]
    assert subjects(state, Timeouts(), 57) == [(Subject.RESTART_IN_PROCESS, None)]
    never_attached = replace(state, attached=False)
    assert subjects(never_attached, ALL, 57) == [(Subject.RESTART_IN_PROCESS, None)]
    assert wake_at_ns([state], Timeouts(), 51 * S) == 57 * S


def test_what_began_before_a_restart_does_not_count_after_it():
    """A rank that is back in the function starts anew: stale sections are passed over, all other clocks set back."""
    stale = (BoardSection("setup", 20 * S),)
    state = restarting(InProcessState.ACTIVE, last_heartbeat_ns=20 * S, sections=stale)
    assert subjects(state, ALL, 54.9) == []
    assert subjects(state, ALL, 55) == [(Subject.HEARTBEAT, None)]
    fresh = replace(state, sections=(*stale, BoardSection("step", 51 * S, ordinal=1)), depth=2)
    assert subjects(fresh, replace(ALL, heartbeat_s=None), 100) == [(Subject.SECTION, "step")]
    outside = restarting(InProcessState.ACTIVE, left_ns=20 * S)
    assert subjects(outside, Timeouts(out_of_section_s=3), 52.9) == []
    assert subjects(outside, Timeouts(out_of_section_s=3), 53) == [(Subject.OUT_OF_SECTION, None)]


def test_sections_around_a_wrapped_function_count_until_it_is_called_again():
    """In the first call nothing was restarted: what was opened before it is judged as ever."""
    state = restarting(InProcessState.ACTIVE, iteration=0, sections=(BoardSection("setup", 20 * S),))
    assert (Subject.SECTION, "setup") in subjects(state, ALL, 60)


def test_ranks_that_wait_in_a_wrapper_are_not_judged():
    """A spare, a rank that waits for the others to finish, and one that has left are never late."""
    for state in (InProcessState.SPARE, InProcessState.COMPLETED, InProcessState.LEFT):
        assert subjects(restarting(state, last_heartbeat_ns=S), ALL, 9999) == []


def test_what_the_script_calculated_comes_first():
    """Calculated timeouts are enforced where they are longer than configured ones, or none was given; half of a default
    one is the least."""
    config = FaultToleranceConfig(rank_section_timeouts={"step": 180.0, "setup": 600.0})
    timeouts = Timeouts.from_config(config, with_defaults=True)
    calculated = Learned(sections={"step": 2.0, "setup": 700.0, "other": 30.0}, out_of_section_s=40.0, heartbeat_s=5.0)
    mine = override(timeouts, calculated)
    assert mine.sections == {"step": 180.0, "setup": 700.0, "other": 30.0}
    assert (mine.out_of_section_s, mine.heartbeat_s) == (40.0, 900.0)
    assert mine.initial_heartbeat_s == timeouts.initial_heartbeat_s
    assert mine.defaults == {Subject.INITIAL_HEARTBEAT}
    assert mine.calculated == {"section setup", "section other", "out_of_section", "heartbeat"}
    assert override(timeouts, Learned()) == timeouts
    assert {one.is_calculated for one in expired(rank(sections=(BoardSection("other", S),)), mine, 40 * S)} == {True}


def test_a_calculated_timeout_is_doubled_after_a_hang_without_an_explanation():
    """The second one drops it, and what is configured is enforced again; the others stay as they are."""
    timeouts = Timeouts(sections={"step": 12.0})
    calculated = Learned(sections={"step": 15.0, "load": 20.0}, heartbeat_s=30.0)
    once = override(timeouts, calculated, {"section step": 1, "heartbeat": 1})
    assert (once.sections, once.heartbeat_s) == ({"step": 30.0, "load": 20.0}, 60.0)
    twice = override(timeouts, calculated, {"section step": 2, "heartbeat": 2})
    assert (twice.sections, twice.heartbeat_s) == ({"step": 12.0, "load": 20.0}, None)
    assert twice.calculated == {"section load"}
