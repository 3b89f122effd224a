"""Deadlines: which timeouts apply to a rank, when they pass, how long a watchdog sleeps, how timeouts are learned.

Two styles, usable together: *heartbeats* (from attachment to the first one, then between two) and *sections* (each open
one, and the time outside all of them). Every open section is checked, so that an outer one that takes too long is found
while an inner one is within its timeout. During an in-process restart only the restart's own timeout applies; ranks
that wait there, as spares or for the others to finish, have none.

A learned timeout is the longest duration over all ranks times a safety factor, at least :data:`FLOOR_S`, averaged with
the one learned before. Durations observed too seldom, or in a cycle that hung in the section, are not used. A learned
timeout ends no run that the configured one would not end (:func:`enforced_s`), and is dropped where hangs show that it
is too short (:func:`learn`).

:class:`Protection` is the line that reports what a run is protected against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from outlast.policy.inprocess_protocol import InProcessState, WorkerStanding
from outlast.wording import count

if TYPE_CHECKING:
    from outlast.config.launching import FaultToleranceConfig

STEP = "step"
"""This section is not enforced in the first iterations of a cycle."""
DEFAULT_HEARTBEAT_S = 1800.0
"""Default timeout between heartbeats under an agent, for a rank with a session, unless its section has a longer
timeout."""
HEARTBEAT_WITHOUT_AGENT_S = 300.0
"""Default timeout between heartbeats without an agent, where ``enable_ft_package`` is set and no timeout is; as NVRx
and Megatron-Bridge."""


DEFAULT_EXIT_S = 1800.0
"""How long a rank may be idle after the first clean exit in its cycle, where ``exit_timeout`` is not given."""


@dataclass(frozen=True, slots=True)
class BoardSection:
    name: str
    start_ns: int
    ordinal: int = 0
    """How many sections of this name the worker entered before in this cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts(WorkerStanding):
    """State of one rank as its deadlines need it; times in monotonic nanoseconds of its node, 0 = never."""

    local_rank: int
    global_rank: int = -1
    """-1 = not known yet."""
    pid: int = 0
    iteration: int = 0
    attached: bool = False
    """The worker has a monitor; a plain script never does."""
    finished: bool = False
    attached_ns: int = 0
    last_heartbeat_ns: int = 0
    promises_heartbeats: bool = False
    """A healthy worker sends heartbeats regularly."""
    sections: tuple[BoardSection, ...] = ()
    """Open sections, outermost first, as many as the heartbeat memory records."""
    depth: int = 0
    """Number of open sections, including those too deep to be recorded."""
    left_ns: int = 0
    """When the last outermost section was exited."""


class Subject(StrEnum):
    SECTION = "section"
    OUT_OF_SECTION = "out_of_section"
    HEARTBEAT = "heartbeat"
    INITIAL_HEARTBEAT = "initial_heartbeat"
    RESTART_IN_PROCESS = "restart_in_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts in force, in seconds; ``None`` = not enforced."""

    initial_heartbeat_s: float | None = None
    heartbeat_s: float | None = None
    sections: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section_s: float | None = None
    num_warmup_iterations: int = 0
    """The first this many ``step`` sections of a cycle are not enforced."""
    defaults: frozenset[Subject] = frozenset()
    """Default heartbeat timeouts, enforced only on ranks that promise heartbeats. A change of section counts as a
    heartbeat, and a longer timeout of an open section, or of the time outside sections, applies instead."""
    calculated: frozenset[str] = frozenset()
    """Enforced timeouts that the worker calculated, by :attr:`Expired.key`."""

    @classmethod
    def of_rank(
        cls, config: FaultToleranceConfig, *, configured: FaultToleranceConfig, replaces_dead_ranks: bool
    ) -> Timeouts:
        """Return the timeouts enforced on a rank, defaults included.

        Args:
            config: The settings, with learned timeouts.
            configured: The settings without learned timeouts.
            replaces_dead_ranks: The launcher replaces a rank that is ended, so default timeouts are enforced.
        """
        names = (name for name in FIELD_OF_SETTING if configured.given.get(name))
        alone = not replaces_dead_ranks and configured.given.get("enable_ft_package") is True and not any(names)
        heartbeat_s = HEARTBEAT_WITHOUT_AGENT_S if alone else DEFAULT_HEARTBEAT_S
        return cls.from_config(config, with_defaults=replaces_dead_ranks or alone, heartbeat_s=heartbeat_s)

    @classmethod
    def from_config(
        cls,
        config: FaultToleranceConfig,
        *,
        with_defaults: bool = False,
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
    ) -> Timeouts:
        """Return the timeouts of a config; none where hang detection is off.

        Args:
            with_defaults: Add the default heartbeat timeouts where the config has none.
            heartbeat_s: The default between two heartbeats.
        """
        if config.given.get("enable_ft_package") is False:
            return cls()
        initial_s, later_s = config.initial_rank_heartbeat_timeout, config.rank_heartbeat_timeout
        defaults = set()
        if with_defaults and "rank_heartbeat_timeout" not in config.given:
            later_s = heartbeat_s
            defaults.add(Subject.HEARTBEAT)
        if with_defaults and "initial_rank_heartbeat_timeout" not in config.given:
            initial_s = max(DEFAULT_HEARTBEAT_S, later_s or 0.0)
            defaults.add(Subject.INITIAL_HEARTBEAT)
        return cls(
            initial_heartbeat_s=initial_s,
            heartbeat_s=later_s,
            sections=dict(config.rank_section_timeouts),
            out_of_section_s=config.rank_out_of_section_timeout,
            num_warmup_iterations=config.num_warmup_iterations,
            defaults=frozenset(defaults),
        )

    def of(self, subject: Subject, section: str | None = None) -> float | None:
        return _timeout_of(self, subject, section)

    def by_setting(self) -> dict[str, float | None]:
        """Return the timeouts by setting name, those of sections as ``rank_section_timeouts:NAME``."""
        found = {name: getattr(self, of) for name, of in FIELD_OF_SETTING.items() if of != "sections"}
        return found | {f"rank_section_timeouts:{name}": seconds for name, seconds in self.sections.items()}

    def smallest_s(self) -> float | None:
        every = (self.initial_heartbeat_s, self.heartbeat_s, self.out_of_section_s, *self.sections.values())
        return min((seconds for seconds in every if seconds is not None), default=None)

    def describe(self, source: Callable[[str], str] | None = None) -> str:
        """Return all timeouts in one line; ``source`` returns where a field of the config comes from, if it is to be
        shown."""

        def where(name: str) -> str:
            return "" if source is None else f" ({source(name)})"

        parts = []
        named = [f"{name} {_seconds(seconds)}" for name, seconds in sorted(self.sections.items())]
        parts.append("section timeouts: " + (", ".join(named) or "none") + where("rank_section_timeouts"))
        parts.append(f"out of section: {_seconds(self.out_of_section_s)}" + where("rank_out_of_section_timeout"))
        first = _seconds(self.initial_heartbeat_s) + where("initial_rank_heartbeat_timeout")
        parts.append(f"heartbeats: first {first}, later {_seconds(self.heartbeat_s)}" + where("rank_heartbeat_timeout"))
        return "; ".join(parts)


FIELD_OF_SETTING = {
    "initial_rank_heartbeat_timeout": "initial_heartbeat_s",
    "rank_heartbeat_timeout": "heartbeat_s",
    "rank_section_timeouts": "sections",
    "rank_out_of_section_timeout": "out_of_section_s",
}
"""Setting to field of :class:`Timeouts`."""


FIELD_OF_SUBJECT = {
    Subject.OUT_OF_SECTION: "out_of_section_s",
    Subject.HEARTBEAT: "heartbeat_s",
    Subject.INITIAL_HEARTBEAT: "initial_heartbeat_s",
}
"""Timeouts other than those of sections: subject to field of :class:`Timeouts` and :class:`Learned`."""


class Expired(msgspec.Struct, frozen=True, kw_only=True):
    subject: Subject
    local_rank: int
    global_rank: int
    pid: int
    section: str | None
    """``None`` unless the subject is a section."""
    timeout_s: float
    elapsed_s: float
    since_ns: int
    iteration: int
    is_explained: bool = False
    """The ranks' positions show a cause of the hang other than a timeout that is too short."""
    is_calculated: bool = False

    @property
    def key(self) -> str:
        return _key_of(self.subject, self.section)

    def describe(self, node: str) -> str:
        """Return the log line; users search for its text."""
        what = {
            Subject.SECTION: f"section {self.section!r}",
            Subject.OUT_OF_SECTION: "time outside sections",
            Subject.HEARTBEAT: "time since the last heartbeat",
            Subject.INITIAL_HEARTBEAT: "time to the first heartbeat",
            Subject.RESTART_IN_PROCESS: "restart inside the process",
        }[self.subject]
        return (
            f"rank {self.global_rank} (node {node}, pid {self.pid}): {what} exceeded {self.timeout_s:.1f} s "
            f"({self.elapsed_s:.1f} s so far, iteration {self.iteration})"
        )


def _key_of(subject: Subject, section: str | None = None) -> str:
    return f"{subject} {section}" if section else str(subject)


@dataclass(frozen=True, slots=True)
class _PassingTimeout:
    subject: Subject
    section: str | None
    since_ns: int
    timeout_s: float

    @property
    def at_ns(self) -> int:
        return self.since_ns + round(self.timeout_s * 1e9)


_WAITS = (InProcessState.SPARE, InProcessState.COMPLETED, InProcessState.LEFT)


def _of(rank: RankFacts, timeouts: Timeouts) -> Iterator[_PassingTimeout]:
    if rank.in_process == InProcessState.RESTARTING:
        since_ns, patience_s = rank.in_process_since_ns, rank.in_process_patience_s
        yield _PassingTimeout(Subject.RESTART_IN_PROCESS, None, since_ns, patience_s)
        return
    if not rank.attached or rank.finished or rank.in_process in _WAITS:
        return
    is_restarted = rank.in_process == InProcessState.ACTIVE and rank.in_process_restart_count > 0
    restarted_ns = rank.in_process_since_ns if is_restarted else 0
    heartbeat = Subject.HEARTBEAT if rank.last_heartbeat_ns else Subject.INITIAL_HEARTBEAT
    seconds = timeouts.heartbeat_s if rank.last_heartbeat_ns else timeouts.initial_heartbeat_s
    since_ns = max(rank.last_heartbeat_ns or rank.attached_ns, restarted_ns)
    if heartbeat in timeouts.defaults:
        since_ns = max(since_ns, rank.left_ns, *(section.start_ns for section in rank.sections))
        seconds = _unless_given(rank, timeouts, seconds)
    if seconds is not None and (heartbeat not in timeouts.defaults or rank.promises_heartbeats):
        yield _PassingTimeout(heartbeat, None, since_ns, seconds)
    for section in rank.sections:
        seconds = timeouts.sections.get(section.name)
        if seconds is None or (section.name == STEP and section.ordinal < timeouts.num_warmup_iterations):
            continue
        if section.start_ns >= restarted_ns:
            yield _PassingTimeout(Subject.SECTION, section.name, section.start_ns, seconds)
    if not rank.depth and rank.left_ns and timeouts.out_of_section_s is not None:
        yield _PassingTimeout(Subject.OUT_OF_SECTION, None, max(rank.left_ns, restarted_ns), timeouts.out_of_section_s)


def _unless_given(rank: RankFacts, timeouts: Timeouts, default_s: float | None) -> float | None:
    """Return the default, or the longest timeout given for where the rank is, if longer; ``None`` if one of them is."""
    given = [timeouts.sections[section.name] for section in rank.sections if section.name in timeouts.sections]
    if not rank.depth and timeouts.out_of_section_s is not None:
        given.append(timeouts.out_of_section_s)
    if default_s is None or None in given:
        return None
    return max([default_s, *(seconds for seconds in given if seconds is not None)])


def deadlines(rank: RankFacts, timeouts: Timeouts) -> list[int]:
    """Return when each timeout of a rank passes, earliest first, in monotonic nanoseconds.

    A rank that never attached (a plain script) or finished has none, except during an in-process restart.
    """
    return sorted(deadline.at_ns for deadline in _of(rank, timeouts))


def expired(rank: RankFacts, timeouts: Timeouts, now_ns: int) -> list[Expired]:
    """Return every timeout that a rank has exceeded, the longest overdue first."""
    late = sorted((d for d in _of(rank, timeouts) if d.at_ns <= now_ns), key=lambda d: d.at_ns)
    return [
        Expired(
            subject=deadline.subject,
            local_rank=rank.local_rank,
            global_rank=rank.global_rank,
            pid=rank.pid,
            section=deadline.section,
            timeout_s=deadline.timeout_s,
            elapsed_s=(now_ns - deadline.since_ns) / 1e9,
            since_ns=deadline.since_ns,
            iteration=rank.iteration,
            is_calculated=_key_of(deadline.subject, deadline.section) in timeouts.calculated,
        )
        for deadline in late
    ]


def wake_at_ns(ranks: Iterable[RankFacts], timeouts: Timeouts, now_ns: int) -> int | None:
    """Return until when a watchdog may sleep; ``None`` = nothing is enforced.

    Returns the earliest deadline ahead, at most ``now_ns`` plus the smallest timeout. That is exact: whatever begins
    during the sleep begins after ``now_ns`` and cannot expire earlier, so no rank needs to wake the watchdog. Only
    in-process restarts have timeouts of their own; ranks that begin one wake it.

    Args:
        ranks: Read from the heartbeat memory *after* ``now_ns`` was taken.
        now_ns: Monotonic nanoseconds.
    """
    ahead = [at for rank in ranks for at in deadlines(rank, timeouts) if at > now_ns]
    smallest = timeouts.smallest_s()
    if smallest is not None:
        ahead.append(now_ns + round(smallest * 1e9))
    return min(ahead, default=None)


def _seconds(value: float | None) -> str:
    return "not enforced" if value is None else f"{value:.1f} s"


FLOOR_S = 10.0
"""Minimum of learned timeouts: pauses of some seconds (a validation, garbage collection, a slow disk) are ordinary, and
may not have been observed."""
MAX_HANGS = 2
"""Unexplained hangs after which a learned timeout is dropped."""
MIN_ITERATIONS = 16
"""Sections ``step``, and heartbeats, that a cycle needs before their durations are used."""
SETUP = "setup"
CHECKPOINTING = "checkpointing"
STANDARD = (SETUP, STEP, CHECKPOINTING)
"""Sections that are learned without having been configured."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Longest durations of some ranks in one cycle, in seconds; sent between nodes as JSON."""

    longest_s: Mapping[str, float] = {}
    """By section; ``""`` = the longest time outside all sections."""
    counts: Mapping[str, int] = {}
    """How often each section was closed, by the rank that closed it most often."""
    restored: bool = False
    initial_heartbeat_s: float = 0.0
    """Longest time from a rank's start to its first heartbeat; 0 = there was none."""
    heartbeat_gap_s: float = 0.0
    """Longest time between two heartbeats of a rank."""
    num_heartbeats: int = 0
    """Of the rank that sent the most."""


class Learned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Learned timeouts, in seconds; missing = not learned."""

    sections: Mapping[str, float] = {}
    out_of_section_s: float | None = None
    initial_heartbeat_s: float | None = None
    heartbeat_s: float | None = None
    num_hangs: Mapping[str, int] = {}
    """Unexplained hangs by :attr:`Expired.key`; a timeout with :data:`MAX_HANGS` of them is not learned again."""
    num_calculated_hangs: Mapping[str, int] = {}
    """Unexplained hangs at timeouts that the worker calculated."""

    def of(self, subject: Subject, section: str | None = None) -> float | None:
        return _timeout_of(self, subject, section)

    def with_timeout(self, subject: Subject, section: str | None, seconds: float | None) -> Learned:
        """Return a copy with one timeout changed; ``None`` = removed."""
        if subject == Subject.SECTION:
            others = {name: value for name, value in self.sections.items() if name != section}
            sections = others if seconds is None else {**others, section or "": seconds}
            return msgspec.structs.replace(self, sections=sections)
        return msgspec.structs.replace(self, **{FIELD_OF_SUBJECT[subject]: seconds})

    def suggest(self) -> str:
        """Return the ``outlast run`` options that set these timeouts; empty = nothing was learned.

        Heartbeat timeouts are suggested only where no section was learned: a rare pause between two steps may exceed
        them.
        """
        sections = ",".join(f"{name}:{math.ceil(seconds)}" for name, seconds in sorted(self.sections.items()))
        values: dict[str, str | float | None] = {
            "rank-section-timeouts": sections or None,
            "rank-out-of-section-timeout": self.out_of_section_s,
        }
        if not sections and self.heartbeat_s is not None:
            values["initial-rank-heartbeat-timeout"] = max(self.initial_heartbeat_s or 0.0, self.heartbeat_s)
            values["rank-heartbeat-timeout"] = self.heartbeat_s
        return " ".join(
            f"--ft-{name}={value if isinstance(value, str) else math.ceil(value)}"
            for name, value in values.items()
            if value is not None
        )


def _timeout_of(timeouts: Timeouts | Learned, subject: Subject, section: str | None) -> float | None:
    if subject == Subject.SECTION:
        return timeouts.sections.get(section or "")
    return getattr(timeouts, FIELD_OF_SUBJECT[subject]) if subject in FIELD_OF_SUBJECT else None


def combine(observations: Iterable[Observation]) -> Observation:
    """Return the maximum of everything that several ranks or nodes observed."""
    seen = list(observations)

    def highest(of: Iterable[Mapping[str, float]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, value in (pair for one in of for pair in one.items()):
            found[name] = max(value, found.get(name, value))
        return found

    return Observation(
        longest_s=highest(one.longest_s for one in seen),
        counts={name: int(times) for name, times in highest(one.counts for one in seen).items()},
        restored=any(one.restored for one in seen),
        initial_heartbeat_s=max((one.initial_heartbeat_s for one in seen), default=0.0),
        heartbeat_gap_s=max((one.heartbeat_gap_s for one in seen), default=0.0),
        num_heartbeats=max((one.num_heartbeats for one in seen), default=0),
    )


def learn(
    seen: Observation,
    earlier: Learned,
    *,
    configured: Timeouts,
    safety_factor: float,
    finished: bool,
    faulted: Iterable[Expired] = (),
) -> Learned:
    """Return the learned timeouts after a cycle.

    Args:
        seen: The combined observations of all ranks in the cycle.
        earlier: Timeouts learned before the cycle.
        configured: Sections named here are learned, as are ``setup``, ``step`` and ``checkpointing``; others are
            measured only.
        safety_factor: A timeout is the longest duration times this.
        finished: The cycle ended in order, which learning the time outside sections requires.
        faulted: Timeouts exceeded in the cycle; nothing is learned about them. An unexplained hang doubles a learned
            timeout, the second one drops it. A learned heartbeat timeout is dropped at each hang: a rare pause between
            two steps, such as a validation, must not end every cycle.
    """
    faulted = list(faulted)
    bad_sections = {one.section for one in faulted if one.subject == Subject.SECTION}
    bad = {one.subject for one in faulted}
    earlier = _doubt(earlier, faulted, configured)
    given_up = {key for key, num in earlier.num_hangs.items() if num >= MAX_HANGS}

    def value(longest_s: float, before: float | None) -> float:
        new = max(FLOOR_S, longest_s * safety_factor)
        return new if before is None else (new + before) / 2

    sections = dict(earlier.sections)
    for name in {*STANDARD, *configured.sections} - bad_sections:
        if f"{Subject.SECTION} {name}" in given_up:
            continue
        if name in seen.longest_s and _is_trusted(name, seen):
            sections[name] = value(seen.longest_s[name], earlier.sections.get(name))
    changes: dict[str, float | None] = {}
    used = [name for name in STANDARD if seen.counts.get(name)]
    all_trusted = STEP in used and all(_is_trusted(name, seen) and name not in bad_sections for name in used)
    if finished and all_trusted and "" in seen.longest_s and Subject.OUT_OF_SECTION not in bad:
        changes["out_of_section_s"] = value(seen.longest_s[""], earlier.out_of_section_s)
    whole_start = not seen.counts.get(SETUP) or _is_trusted(
        SETUP, seen
    )  # a load is part of the time to the first heartbeat
    if seen.initial_heartbeat_s > 0 and whole_start and Subject.INITIAL_HEARTBEAT not in bad:
        changes["initial_heartbeat_s"] = value(seen.initial_heartbeat_s, earlier.initial_heartbeat_s)
    if Subject.HEARTBEAT in bad:
        changes["heartbeat_s"] = None
    elif seen.num_heartbeats > MIN_ITERATIONS:
        changes["heartbeat_s"] = value(seen.heartbeat_gap_s, earlier.heartbeat_s)
    for subject in given_up & FIELD_OF_SUBJECT.keys():
        changes.pop(FIELD_OF_SUBJECT[Subject(subject)], None)
    return msgspec.structs.replace(earlier, sections=sections, **changes)


def _doubt(learned: Learned, faulted: Iterable[Expired], configured: Timeouts) -> Learned:
    """Double or drop the learned timeouts that caused unexplained hangs; configured ones are not affected."""
    in_force = apply(configured, learned)
    unexplained = [one for one in faulted if not one.is_explained]
    if keys := {one.key for one in unexplained if one.is_calculated}:
        counts = {**learned.num_calculated_hangs, **{key: learned.num_calculated_hangs.get(key, 0) + 1 for key in keys}}
        learned = msgspec.structs.replace(learned, num_calculated_hangs=counts)
    for key, one in {one.key: one for one in unexplained if not one.is_calculated}.items():
        now_s, configured_s = in_force.of(one.subject, one.section), configured.of(one.subject, one.section)
        if learned.of(one.subject, one.section) is None or now_s is None or now_s == configured_s:
            continue
        num = learned.num_hangs.get(key, 0) + 1
        learned = learned.with_timeout(one.subject, one.section, 2 * now_s if num < MAX_HANGS else None)
        learned = msgspec.structs.replace(learned, num_hangs={**learned.num_hangs, key: num})
    return learned


def enforced_s(learned_s: float, configured_s: float | None, *, is_default: bool = False) -> float:
    """Return the timeout to enforce where one was learned.

    Args:
        configured_s: The one that would be enforced otherwise; ``None`` = none.
        is_default: ``configured_s`` is a default value.

    Returns:
        At least the given timeout, half of a default one, or :data:`FLOOR_S` where there is neither, so that a learned
            timeout ends no run that a given one would not end.
    """
    least_s = 0.0 if configured_s is None else configured_s / 2 if is_default else configured_s
    return max(learned_s, least_s, FLOOR_S)


def apply(configured: Timeouts, learned: Learned) -> Timeouts:
    """Return the timeouts to enforce: the learned ones where they are longer, or where none is configured.

    Timeouts configured as not enforced stay so: a section set to ``none``, and heartbeats and the time outside sections
    without a timeout. ``setup``, ``step`` and ``checkpointing`` need not be configured.
    """
    sections = dict(configured.sections)
    for name, seconds in learned.sections.items():
        wanted = configured.sections[name] is not None if name in configured.sections else name in STANDARD
        if wanted:
            sections[name] = _enforced_in_section_s(configured, name, seconds)

    def choose(subject: Subject) -> float | None:
        set_s, learned_s = configured.of(subject), learned.of(subject)
        if set_s is None or learned_s is None:
            return set_s
        return enforced_s(learned_s, set_s, is_default=subject in configured.defaults)

    heartbeat, initial = choose(Subject.HEARTBEAT), choose(Subject.INITIAL_HEARTBEAT)
    is_learned = (initial, heartbeat) != (configured.initial_heartbeat_s, configured.heartbeat_s)
    if initial is not None and heartbeat is not None and is_learned:
        initial = max(initial, heartbeat)  # the first heartbeat also waits for start-up
    return replace(
        configured,
        sections=sections,
        out_of_section_s=choose(Subject.OUT_OF_SECTION),
        heartbeat_s=heartbeat,
        initial_heartbeat_s=initial,
    )


def _enforced_in_section_s(configured: Timeouts, section: str, learned_s: float) -> float:
    """Return the timeout of a section to enforce.

    The duration of loads and saves depends on the tier, and the next one may be slower. No heartbeats are sent
    meanwhile, so the default heartbeat timeout applies to these sections.
    """
    given_s = configured.sections.get(section)
    subject = {SETUP: Subject.INITIAL_HEARTBEAT, CHECKPOINTING: Subject.HEARTBEAT}.get(section)
    if given_s is None and subject in configured.defaults:
        return enforced_s(learned_s, configured.of(subject), is_default=True)
    return enforced_s(learned_s, given_s)


def override(timeouts: Timeouts, calculated: Learned, num_hangs: Mapping[str, int] | None = None) -> Timeouts:
    """Return the timeouts with those that the worker calculated, at least :func:`enforced_s`, also where none is
    configured.

    Args:
        num_hangs: Unexplained hangs at calculated timeouts, by :attr:`Expired.key`: one doubles the timeout,
            :data:`MAX_HANGS` drop it.
    """

    def num(subject: Subject, section: str | None = None) -> int:
        return (num_hangs or {}).get(_key_of(subject, section), 0)

    used = {one for one in FIELD_OF_SUBJECT if calculated.of(one) is not None and num(one) < MAX_HANGS}
    sections = {name: s for name, s in calculated.sections.items() if num(Subject.SECTION, name) < MAX_HANGS}

    def choose(subject: Subject) -> float | None:
        set_s, calculated_s = timeouts.of(subject), calculated.of(subject)
        if subject not in used or calculated_s is None:
            return set_s
        return enforced_s(calculated_s, set_s, is_default=subject in timeouts.defaults) * (1 << num(subject))

    def choose_in(name: str, calculated_s: float) -> float:
        return _enforced_in_section_s(timeouts, name, calculated_s) * (1 << num(Subject.SECTION, name))

    chosen = replace(
        timeouts,
        sections={**timeouts.sections, **{name: choose_in(name, seconds) for name, seconds in sections.items()}},
        out_of_section_s=choose(Subject.OUT_OF_SECTION),
        heartbeat_s=choose(Subject.HEARTBEAT),
        initial_heartbeat_s=choose(Subject.INITIAL_HEARTBEAT),
        defaults=timeouts.defaults - used,
    )
    places = [*((subject, None) for subject in FIELD_OF_SUBJECT), *((Subject.SECTION, name) for name in sections)]
    changed = (_key_of(*place) for place in places if chosen.of(*place) != timeouts.of(*place))
    return replace(chosen, calculated=frozenset(changed))


def _is_trusted(name: str, seen: Observation) -> bool:
    times = seen.counts.get(name, 0)
    if name == SETUP:
        return seen.restored and times >= 1
    return times >= (MIN_ITERATIONS if name == STEP else 1)


NO_SESSION = "the script has called neither outlast.init() nor RankMonitor()"
NO_INIT = "the script has not called outlast.init()"
NOT_YET = "the script has not called outlast.init() yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Protection of a run; each text begins with ``yes`` or ``no``."""

    max_restarts: int
    hangs: str
    nodes: str
    of_session: str = ""
    """Saves, and the response to a preemption notice; empty = no session has reported."""
    why_unknown: str = NO_SESSION
    """Why no session has reported."""

    @property
    def has_gap(self) -> bool:
        """Whether protection that a long run needs is off; a spare node is not needed."""
        return not self.max_restarts or self.hangs.startswith("no") or "checkpoints no" in self.of_session

    def describe(self) -> str:
        death = (
            f"death yes ({count(self.max_restarts, 'restart')})" if self.max_restarts else "death no (--max-restarts=0)"
        )
        session = self.of_session or f"checkpoints and preemption unknown ({self.why_unknown})"
        return f"protected: {death}; hang {self.hangs}; node loss {self.nodes}; {session}"


def describe_hangs(timeouts: Timeouts | None, where: str, *, has_session: bool | None, origins: dict[str, str]) -> str:
    """Return how hangs are detected.

    Args:
        timeouts: The enforced timeouts; ``None`` = hang detection is off.
        where: The setting that turned hang detection off.
        has_session: A rank sends heartbeats; ``None`` = not yet.
        origins: Where each timeout setting comes from, by name.
    """
    if timeouts is None:
        return f"no (enable_ft_package is false, {where})"
    if has_session is None:
        return f"unknown ({NOT_YET})"
    if not has_session:
        return f"no ({NO_SESSION})"
    parts = []
    if timeouts.sections:
        named = ", ".join(f"{name} {seconds:g} s" for name, seconds in sorted(timeouts.sections.items()))
        parts.append(f"{named} from {origins['rank_section_timeouts']}")
    others = (
        ("outside of sections", timeouts.out_of_section_s, "rank_out_of_section_timeout"),
        ("first heartbeat", timeouts.initial_heartbeat_s, "initial_rank_heartbeat_timeout"),
        ("heartbeat", timeouts.heartbeat_s, "rank_heartbeat_timeout"),
    )
    parts += [f"{what} {seconds:g} s from {origins[name]}" for what, seconds, name in others if seconds is not None]
    return f"yes ({', '.join(parts)})" if parts else "no (set rank_section_timeouts)"


def describe_nodes(*, num_slots: int, max_nodes: int, min_nodes: int | None, num_spares: int) -> str:
    """Return what the loss of a node leads to.

    Args:
        num_slots: Nodes that train.
        max_nodes: Nodes that may join.
        min_nodes: Nodes with which training continues; ``None`` = all.
        num_spares: Spares that wait for a slot now.
    """
    parts = []
    if num_spares > 0:
        parts.append(count(num_spares, "spare"))
    if min_nodes is not None and min_nodes < num_slots:
        parts.append(f"continues with {min_nodes} of {num_slots} nodes")
    if parts:
        return f"yes ({', '.join(parts)})"
    missing = count(max_nodes - num_slots, "spare")
    return f"no (none of up to {missing} is here)" if max_nodes > num_slots else "no (no spare node)"


def describe_saves(
    *,
    tiers: tuple[str, ...],
    interval: int | str,
    near_interval: int | str,
    is_notified: bool,
    saved_by: str | None = None,
) -> str:
    """Return where a session saves, and how it responds to a preemption notice.

    Args:
        tiers: Tiers that it saves to; empty = none.
        interval: Iterations between saves to all tiers; 0 = only at a shutdown, at the end, or by hand.
        near_interval: Iterations between saves to the node-local tiers alone.
        is_notified: Preemption notices reach it.
        saved_by: Who saves in its place; ``None`` = the session does, or it is not known.
    """
    if saved_by is not None:
        saves = f"checkpoints by {saved_by}"
    elif not tiers:
        saves = "checkpoints no (set checkpoint.directory)"
    elif not interval and not near_interval:
        saves = f"checkpoints no (none before the end: set checkpoint.save_interval; to {' + '.join(tiers)})"
    else:
        often = [f"every {interval} iterations" if interval != "auto" else "at automatic intervals"] if interval else []
        if near_interval:
            near = "at automatic intervals" if near_interval == "auto" else f"every {near_interval} iterations"
            often.append(f"{near} to the node-local tiers")
        saves = f"checkpoints {' and '.join(often)} to {' + '.join(tiers)}"
    if not is_notified:
        leaving = "preemption no (outlast.init() was not called in the main thread)"
    else:
        leaving = "preemption yes" if tiers or saved_by is not None else "preemption no (nothing is saved)"
    return f"{saves}; {leaving}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """A rank that runs although another rank of its cycle exited with 0; times in monotonic nanoseconds."""

    global_rank: int
    last_heartbeat_ns: int = 0
    """0 = never."""
    last_active_ns: int = 0
    """When its processes last used a processor; 0 = not since the first clean exit."""

    def idle_s(self, first_exit_ns: int, now_ns: int, *, counts_processor: bool) -> float:
        """Return the seconds since the first clean exit, or since the rank's last heartbeat or activity if later."""
        active_ns = self.last_active_ns if counts_processor else 0
        return (now_ns - max(first_exit_ns, self.last_heartbeat_ns, active_ns)) / 1e9


@dataclass(frozen=True, slots=True)
class ExitLimit:
    """How long ranks may run after the first clean exit in their cycle.

    A configured limit counts from the first clean exit or the rank's last heartbeat. The default one also requires that
    the rank's processes are idle: the rank may export a model for hours.
    """

    seconds: float | None
    """``None`` = no limit."""
    is_given: bool

    @classmethod
    def from_config(cls, config: FaultToleranceConfig) -> ExitLimit:
        """Return the limit of an agent; by default none where hang detection is off."""
        if "exit_timeout" in config.given:
            return cls(config.exit_timeout, is_given=True)
        return cls(None if config.given.get("enable_ft_package") is False else DEFAULT_EXIT_S, is_given=False)

    def overdue(self, ranks: Iterable[LateRank], *, first_exit_ns: int, now_ns: int) -> list[LateRank]:
        """Return the ranks to end, of those that still run."""
        limit_s, default = math.inf if self.seconds is None else self.seconds, not self.is_given
        return [rank for rank in ranks if rank.idle_s(first_exit_ns, now_ns, counts_processor=default) >= limit_s]
