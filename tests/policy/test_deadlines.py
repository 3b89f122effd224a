"""Deadlines of ranks: which ones are enforced, and that a watchdog never sleeps past one."""

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


def test_first_heartbeat_has_a_separate_timeout():
    """Until the first heartbeat the initial timeout counts from the attachment; afterwards the heartbeat timeout
    counts."""
    assert subjects(rank(), ALL, 10.9) == []
    assert subjects(rank(), ALL, 11) == [(Subject.INITIAL_HEARTBEAT, None)]
    beating = rank(last_heartbeat_ns=20 * S)
    assert subjects(beating, ALL, 24.9) == []
    assert subjects(beating, ALL, 25) == [(Subject.HEARTBEAT, None)]


def test_every_open_section_is_checked():
    """An outer section that exceeds its timeout is detected although the inner one is within its timeout."""
    state = rank(
        last_heartbeat_ns=40 * S, sections=(BoardSection("setup", 20 * S), BoardSection("step", 40 * S, ordinal=1))
    )
    assert subjects(state, ALL, 41) == [(Subject.SECTION, "setup")]
    assert subjects(state, ALL, 42) == [(Subject.SECTION, "setup"), (Subject.SECTION, "step")]


def test_warmup_iterations_have_no_deadline():
    """The first steps of a cycle have no deadline."""
    assert deadlines(rank(sections=(BoardSection("step", S, ordinal=0),)), replace(ALL, initial_heartbeat_s=None)) == []
    assert deadlines(rank(sections=(BoardSection("step", S, ordinal=1),)), replace(ALL, initial_heartbeat_s=None))


def test_time_outside_sections_needs_a_used_section():
    """The out-of-section timeout does not apply to a worker that never used a section."""
    only = Timeouts(out_of_section_s=3, sections={"step": 2})
    assert subjects(rank(), only, 100) == []
    assert subjects(rank(left_ns=10 * S), only, 13) == [(Subject.OUT_OF_SECTION, None)]
    assert subjects(rank(left_ns=10 * S, sections=(BoardSection("eval", 11 * S),)), only, 100) == []


def test_sections_without_a_timeout_have_no_deadline():
    """A section that is not configured, or configured with None, has no deadline."""
    state = rank(sections=(BoardSection("eval", S), BoardSection("data", S)))
    assert deadlines(state, Timeouts(sections={"data": None, "step": 1})) == []


def test_finished_and_unattached_ranks_have_no_deadline():
    """A rank that finished or never attached has no deadline."""
    late = rank(last_heartbeat_ns=S, sections=(BoardSection("setup", S),))
    assert deadlines(late, ALL)
    assert deadlines(replace(late, finished=True), ALL) == []
    assert deadlines(replace(late, attached=False), ALL) == []


def test_report_line_describes_the_exceeded_timeout():
    """The line contains rank, node, pid, section, timeout, elapsed time and iteration."""
    state = rank(iteration=57, sections=(BoardSection("step", 0, ordinal=9),))
    (one,) = expired(state, Timeouts(sections={"step": 180.0}), round(182.1 * S))
    assert one.describe("worker-1") == (
        "rank 3 (node worker-1, pid 4711): section 'step' exceeded 180.0 s (182.1 s so far, iteration 57)"
    )


def test_config_fields_map_to_timeouts():
    """Every timeout of the config is enforced under its meaning."""
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


def test_default_timeouts_need_promised_heartbeats():
    """Default heartbeat timeouts apply to ranks with a session only. They do not end a script that marks its own
    sections, or a session that moves from section to section without a loop."""
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


def test_default_timeout_yields_to_a_longer_one():
    """A default waits as long as a longer timeout, or None, that is configured for the open sections or the time
    outside them. A shorter one ends a rank itself and does not change the default."""
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


def test_configured_heartbeat_timeout_is_not_a_default():
    """A configured heartbeat timeout, including None, applies to every rank; a longer one raises the default of the
    first heartbeat."""
    off = FaultToleranceConfig(initial_rank_heartbeat_timeout=None, rank_heartbeat_timeout=None)
    assert Timeouts.from_config(off, with_defaults=True).smallest_s() is None
    timeouts = Timeouts.from_config(FaultToleranceConfig(rank_heartbeat_timeout=7200.0), with_defaults=True)
    assert (timeouts.initial_heartbeat_s, timeouts.heartbeat_s) == (7200.0, 7200.0)
    assert deadlines(rank(last_heartbeat_ns=20 * S), timeouts) == [7220 * S]
    assert Timeouts.from_config(FaultToleranceConfig()).smallest_s() is None


def test_enable_ft_package_alone_uses_nvrx_timeouts():
    """``enable_ft_package`` alone enforces 1800 s and 300 s on a session; configured and learned timeouts take
    precedence."""
    on = FaultToleranceConfig(enable_ft_package=True)

    def enforced_timeouts(
        config: FaultToleranceConfig, *, replaces_dead_ranks: bool = False, **learned: float
    ) -> Timeouts:
        return Timeouts.of_rank(config.changed(**learned), configured=config, replaces_dead_ranks=replaces_dead_ranks)

    timeouts = enforced_timeouts(on)
    assert (timeouts.initial_heartbeat_s, timeouts.heartbeat_s) == (1800.0, 300.0)
    session = rank(promises_heartbeats=True, last_heartbeat_ns=20 * S)
    assert subjects(session, timeouts, 320) == [(Subject.HEARTBEAT, None)]
    assert deadlines(rank(last_heartbeat_ns=20 * S), timeouts) == []
    assert enforced_timeouts(on, rank_heartbeat_timeout=50.0).heartbeat_s == 50.0
    assert enforced_timeouts(on, replaces_dead_ranks=True) == Timeouts.from_config(on, with_defaults=True)
    for other in (on.changed(rank_section_timeouts={"step": 9.0}), on.changed(enable_ft_package=False)):
        assert enforced_timeouts(other) == Timeouts.from_config(other)
    assert enforced_timeouts(FaultToleranceConfig()).smallest_s() is None


def test_disabled_ft_package_enforces_no_timeout():
    """``enable_ft_package=False`` disables every timeout, whatever else is set."""
    config = FaultToleranceConfig(enable_ft_package=False, rank_section_timeouts={"step": 1.0})
    assert Timeouts.from_config(config, with_defaults=True) == Timeouts.from_config(config) == Timeouts()


def test_no_timeout_means_no_wake_up():
    """Without a timeout the watchdog never has to wake up."""
    assert wake_at_ns([rank()], Timeouts(sections={"step": None}), 5) is None


# The property: a watchdog that sleeps until the time it computed detects every timeout at the same nanosecond as an
# observer that checks continuously.

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
    """Return the state in the heartbeat memory after each event."""
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
    heartbeat=seconds,
    step=seconds,
    setup=seconds,
    outside=seconds,
    warmup=st.integers(0, 2),
    defaults=st.sets(st.sampled_from([Subject.HEARTBEAT, Subject.INITIAL_HEARTBEAT])),
)
def test_sleeping_watchdog_never_oversleeps(scripts, first, heartbeat, step, setup, outside, warmup, defaults):
    """Sleeping until the earliest deadline, or for the smallest timeout, detects every timeout without delay."""
    timeouts = Timeouts(
        initial_heartbeat_s=first,
        heartbeat_s=heartbeat,
        sections={"step": step, "setup": setup},
        out_of_section_s=outside,
        num_warmup_iterations=warmup,
        defaults=frozenset(defaults),
    )
    histories = [play(script) for script in scripts]
    end = max(history[-1][0] for history in histories) + S

    def observe_continuously() -> int | None:
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
    assert seen == observe_continuously()


def restarting(state: InProcessState, iteration: int = 1, **facts) -> RankState:
    return rank(
        in_process=state,
        in_process_restart_count=iteration,
        in_process_since_ns=50 * S,
        in_process_patience_s=7.0,
        **facts,
    )


def test_restarting_rank_has_only_the_restart_deadline():
    """While a rank restarts, only the time limit of the restart applies."""
    open_sections = (BoardSection("step", 20 * S, ordinal=5),)
    state = restarting(InProcessState.RESTARTING, last_heartbeat_ns=20 * S, sections=open_sections)
    assert subjects(state, ALL, 56.9) == []
    assert subjects(state, ALL, 57) == [(Subject.RESTART_IN_PROCESS, None)]
    assert subjects(state, Timeouts(), 57) == [(Subject.RESTART_IN_PROCESS, None)]
    never_attached = replace(state, attached=False)
    assert subjects(never_attached, ALL, 57) == [(Subject.RESTART_IN_PROCESS, None)]
    assert wake_at_ns([state], Timeouts(), 51 * S) == 57 * S


def test_restart_resets_all_deadlines():
    """After a restart, sections from before it are ignored and all other deadlines count from its end."""
    stale = (BoardSection("setup", 20 * S),)
    state = restarting(InProcessState.ACTIVE, last_heartbeat_ns=20 * S, sections=stale)
    assert subjects(state, ALL, 54.9) == []
    assert subjects(state, ALL, 55) == [(Subject.HEARTBEAT, None)]
    fresh = replace(state, sections=(*stale, BoardSection("step", 51 * S, ordinal=1)), depth=2)
    assert subjects(fresh, replace(ALL, heartbeat_s=None), 100) == [(Subject.SECTION, "step")]
    outside = restarting(InProcessState.ACTIVE, left_ns=20 * S)
    assert subjects(outside, Timeouts(out_of_section_s=3), 52.9) == []
    assert subjects(outside, Timeouts(out_of_section_s=3), 53) == [(Subject.OUT_OF_SECTION, None)]


def test_outer_sections_count_in_the_first_call():
    """Sections opened before the first call of a wrapped function are checked until the function restarts."""
    state = restarting(InProcessState.ACTIVE, iteration=0, sections=(BoardSection("setup", 20 * S),))
    assert (Subject.SECTION, "setup") in subjects(state, ALL, 60)


def test_ranks_waiting_in_a_wrapper_have_no_deadline():
    """A spare, a rank that waits for the others to finish, and a rank that has exited have no deadline."""
    for state in (InProcessState.SPARE, InProcessState.COMPLETED, InProcessState.LEFT):
        assert subjects(restarting(state, last_heartbeat_ns=S), ALL, 9999) == []


def test_calculated_timeouts_take_precedence():
    """Calculated timeouts are enforced if they are longer than configured ones or none is configured; half of a default
    is the minimum."""
    config = FaultToleranceConfig(rank_section_timeouts={"step": 180.0, "setup": 600.0})
    timeouts = Timeouts.from_config(config, with_defaults=True)
    calculated = Learned(sections={"step": 2.0, "setup": 700.0, "other": 30.0}, out_of_section_s=40.0, heartbeat_s=5.0)
    overridden = override(timeouts, calculated)
    assert overridden.sections == {"step": 180.0, "setup": 700.0, "other": 30.0}
    assert (overridden.out_of_section_s, overridden.heartbeat_s) == (40.0, 900.0)
    assert overridden.initial_heartbeat_s == timeouts.initial_heartbeat_s
    assert overridden.defaults == {Subject.INITIAL_HEARTBEAT}
    assert overridden.calculated == {"section setup", "section other", "out_of_section", "heartbeat"}
    assert override(timeouts, Learned()) == timeouts
    assert {one.is_calculated for one in expired(rank(sections=(BoardSection("other", S),)), overridden, 40 * S)} == {
        True
    }


def test_unexplained_hang_doubles_a_calculated_timeout():
    """A second unexplained hang drops the calculated timeout and restores the configured one; other timeouts stay."""
    timeouts = Timeouts(sections={"step": 12.0})
    calculated = Learned(sections={"step": 15.0, "load": 20.0}, heartbeat_s=30.0)
    once = override(timeouts, calculated, {"section step": 1, "heartbeat": 1})
    assert (once.sections, once.heartbeat_s) == ({"step": 30.0, "load": 20.0}, 60.0)
    twice = override(timeouts, calculated, {"section step": 2, "heartbeat": 2})
    assert (twice.sections, twice.heartbeat_s) == ({"step": 12.0, "load": 20.0}, None)
    assert twice.calculated == {"section load"}
