"""Learned timeouts: from observed durations to timeouts.

A timeout is the longest duration observed over all ranks times a safety factor, never below :data:`FLOOR_S`.
A value learned now is merged with one learned earlier as their mean, and replaces a configured one. What was
seen too seldom, or in a cycle that hung at it, teaches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from outlast.policy.deadlines import STEP, Expired, Subject, Timeouts

__all__ = ["FLOOR_S", "MIN_ITERATIONS", "Learned", "Observation", "apply", "combine", "learn"]

FLOOR_S = 1.0
"""Seconds below which no timeout is learned."""
MIN_ITERATIONS = 16
"""Sections ``step``, and heartbeats, of a cycle before their durations are trusted."""
SETUP = "setup"
CHECKPOINTING = "checkpointing"
STANDARD = (SETUP, STEP, CHECKPOINTING)
"""Sections that are learned without having been configured."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The longest durations that some ranks had in one cycle, in seconds; travels between nodes as JSON."""

    longest_s: Mapping[str, float] = {}
    """By section; under ``""`` the longest time outside all sections."""
    counts: Mapping[str, int] = {}
    """How often each section was closed, by the rank that closed it most often."""
    restored: bool = False
    """A checkpoint was loaded in the cycle."""
    initial_heartbeat_s: float = 0.0
    """Longest time from a rank's start to its first heartbeat; 0 = there was none."""
    heartbeat_gap_s: float = 0.0
    """Longest time between two heartbeats of a rank."""
    num_heartbeats: int = 0
    """Of the rank that gave most."""


class Learned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Timeouts that were learned, in seconds; what is missing was not learned."""

    sections: Mapping[str, float] = {}
    out_of_section_s: float | None = None
    initial_heartbeat_s: float | None = None
    heartbeat_s: float | None = None


def combine(observations: Iterable[Observation]) -> Observation:
    """Return what several ranks or nodes saw together: the maximum of everything."""
    longest: dict[str, float] = {}
    counts: dict[str, int] = {}
    together = Observation()
    for one in observations:
        for name, seconds in one.longest_s.items():
            longest[name] = max(seconds, longest.get(name, 0.0))
        for name, count in one.counts.items():
            counts[name] = max(count, counts.get(name, 0))
        together = msgspec.structs.replace(
            together,
            restored=together.restored or one.restored,
            initial_heartbeat_s=max(together.initial_heartbeat_s, one.initial_heartbeat_s),
            heartbeat_gap_s=max(together.heartbeat_gap_s, one.heartbeat_gap_s),
            num_heartbeats=max(together.num_heartbeats, one.num_heartbeats),
        )
    return msgspec.structs.replace(together, longest_s=longest, counts=counts)


def learn(
    seen: Observation,
    earlier: Learned,
    *,
    configured: Timeouts,
    safety_factor: float,
    finished: bool,
    faulted: Iterable[Expired] = (),
) -> Learned:
    """Return what is known after a cycle.

    Args:
        seen: All ranks' observations of the cycle, combined.
        earlier: What was learned before the cycle.
        configured: The config's timeouts. Sections that it names are learned, and so are ``setup``, ``step``
            and ``checkpointing``; any other stays measured and not enforced.
        safety_factor: A timeout is the longest duration times this.
        finished: The cycle came to its orderly end, as the time outside sections needs.
        faulted: Timeouts that were exceeded in the cycle; nothing is learned about them.
    """
    faulted = list(faulted)
    bad_sections = {one.section for one in faulted if one.subject == Subject.SECTION}
    bad = {one.subject for one in faulted}

    def value(longest_s: float, before: float | None) -> float:
        new = max(FLOOR_S, longest_s * safety_factor)
        return new if before is None else (new + before) / 2

    sections = dict(earlier.sections)
    for name in {*STANDARD, *configured.sections} - bad_sections:
        if name in seen.longest_s and _is_trusted(name, seen):
            sections[name] = value(seen.longest_s[name], earlier.sections.get(name))
    learned = msgspec.structs.replace(earlier, sections=sections)

    used = [name for name in STANDARD if seen.counts.get(name)]
    all_trusted = STEP in used and all(_is_trusted(name, seen) and name not in bad_sections for name in used)
    if finished and all_trusted and "" in seen.longest_s and Subject.OUT_OF_SECTION not in bad:
        outside = value(seen.longest_s[""], earlier.out_of_section_s)
        learned = msgspec.structs.replace(learned, out_of_section_s=outside)
    whole_start = not seen.counts.get(SETUP) or _is_trusted(SETUP, seen)  # a load is part of the way to the first one
    if seen.initial_heartbeat_s > 0 and whole_start and Subject.INITIAL_HEARTBEAT not in bad:
        first = value(seen.initial_heartbeat_s, earlier.initial_heartbeat_s)
        learned = msgspec.structs.replace(learned, initial_heartbeat_s=first)
    if seen.num_heartbeats > MIN_ITERATIONS and Subject.HEARTBEAT not in bad:
        gap = value(seen.heartbeat_gap_s, earlier.heartbeat_s)
        learned = msgspec.structs.replace(learned, heartbeat_s=gap)
    return learned


def apply(configured: Timeouts, learned: Learned) -> Timeouts:
    """Return the timeouts to enforce: learned ones in the place of configured ones.

    What is configured as not enforced stays so: a section that is named with ``none``, and heartbeats and the
    time outside sections where they have no timeout. ``setup``, ``step`` and ``checkpointing`` need not be
    configured.
    """
    sections = dict(configured.sections)
    for name, seconds in learned.sections.items():
        wanted = configured.sections[name] is not None if name in configured.sections else name in STANDARD
        if wanted:
            sections[name] = seconds

    def choose(set_s: float | None, learned_s: float | None) -> float | None:
        return set_s if set_s is None or learned_s is None else learned_s

    heartbeat = choose(configured.heartbeat_s, learned.heartbeat_s)
    initial = choose(configured.initial_heartbeat_s, learned.initial_heartbeat_s)
    if (
        initial is not None
        and heartbeat is not None
        and (initial, heartbeat)
        != (
            configured.initial_heartbeat_s,
            configured.heartbeat_s,
        )
    ):
        initial = max(initial, heartbeat)  # the first heartbeat also waits for start-up
    return replace(
        configured,
        sections=sections,
        out_of_section_s=choose(configured.out_of_section_s, learned.out_of_section_s),
        heartbeat_s=heartbeat,
        initial_heartbeat_s=initial,
    )


def _is_trusted(name: str, seen: Observation) -> bool:
    count = seen.counts.get(name, 0)
    if name == SETUP:
        return seen.restored and count >= 1
    return count >= (MIN_ITERATIONS if name == STEP else 1)
