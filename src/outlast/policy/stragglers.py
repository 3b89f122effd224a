"""Stragglers: which ranks are reported as slow, why the others are not, and whether a rank or its node is slow.

A rank is reported when it is slow (:mod:`outlast.policy.slowness`) in the same section in ``confirmations`` windows in
a row. Not reported:

* a rank among many slow ones: the lower median is the reference, so the norm is what at least half of a role does;
* a rank that waits. Where ranks meet within a step, all others wait for a slow one, and their sections grow by its
  delay. So a rank's excess in a section counts as waiting when another rank, which had lost time in earlier sections of
  the step where this one had not, has by the section's end lost about as much. Where waiting is marked
  (``detector.waiting()``) it is not timed at all.

Ranks that are slow by the same amount in the same section may be a slow one and one that waits for it: durations alone
cannot decide, and the report says so.

A node is responsible only if all of its ranks are slow and ranks of other nodes are not (:func:`judge_scope`).
Otherwise the decision is about the rank: its process and its GPU.

A small benchmark on the rank and on others shows whether the processor or the work is slow (:func:`judge_machine`). A
rank that is slow in training and as fast as the others in a matrix product, a memory copy and messages has more work,
or another process uses its processor; replacing its node would not help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from outlast.config.training import StragglerDetectionConfig
from outlast.policy.slowness import (
    KERNELS,
    MIN_SAMPLES,
    OUTSIDE,
    REFERENCES,
    Z_LIMIT,
    Basis,
    RankTimings,
    Slowness,
    measure_individual,
    measure_relative,
    remarks,
    score_ranks,
)

_EXPLAINS = 0.6
"""Share of the time that a rank lost by a section's end that another rank must have lost to explain it."""
_BROUGHT = 0.25
"""Share of a rank's excess in a section that the other rank must have lost before it; else both lost it there."""
_NONE_OF_IT = 0.5
"""Upper limit of the waiting rank's loss before the section, as a share of the other rank's."""
_EQUAL = 0.1
"""Relative difference up to which excesses count as equal."""


class Scope(StrEnum):
    """Subject of a decision about a slow rank."""

    RANK = "rank"
    """The rank alone: its process and its GPU."""
    NODE = "node"
    """The node: all ranks there are slow compared with ranks of other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slow in a window, or in enough of them to be reported."""

    rank: int
    """Global rank."""
    node: str
    role: str
    basis: Basis
    section: str
    """``kernels`` = the device's kernels together."""
    score: float
    """Of that section: 0 to 1."""
    ratio: float
    """Its time divided by the reference."""
    excess_s: float
    """Seconds that it adds to a step."""
    z: float
    """Robust standard deviations beyond the others."""
    num_windows: int
    """Windows in a row in which it was slow there, this one included."""
    equally_slow: tuple[int, ...] = ()
    """Ranks that are slow there by the same amount: one of them may wait for the other."""
    scope: Scope = Scope.RANK
    scope_reason: str = ""
    """Why the decision has this scope; empty = not known."""

    def describe(self) -> str:
        where = self.section if self.section == OUTSIDE else f"in {self.section!r}"
        line = (
            f"Rank={self.rank} Node={self.node} takes {self.ratio:.2f} times as long {where} as "
            f"{REFERENCES[self.basis]}: "
            f"{self.excess_s * 1e3:.3g} ms a step, score {self.score:.2f}, windows in a row {self.num_windows}"
        )
        if self.equally_slow:
            line += f"; so does rank {', '.join(map(str, self.equally_slow))}: one may be waiting for the other"
        if self.scope_reason:
            about = "the node" if self.scope == Scope.NODE else "the rank (its process or GPU), not the node"
            line += f"; the decision is about {about}: {self.scope_reason}"
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRank:
    """A rank that appears slow because it waits for another one."""

    rank: int
    section: str
    for_rank: int
    in_section: str
    """Where the other rank loses that time."""

    def describe(self) -> str:
        return (
            f"rank {self.rank} is not slow in {self.section!r}: it waits there for rank {self.for_rank}, "
            f"which loses as much in {self.in_section!r}"
        )


@dataclass(frozen=True, slots=True)
class Streaks:
    """State kept from window to window."""

    lengths: Mapping[tuple[int, Basis, str], int] = field(default_factory=dict)
    """Rank, basis and section to the number of windows in a row in which it was slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results of a window."""

    relative: Mapping[int, float]
    """Relative score by global rank; empty = not calculated, or nothing to compare with."""
    individual: Mapping[int, float]
    """Individual score by global rank; 1.0 until a rank has enough windows."""
    measured: tuple[Slowness, ...] = ()
    """Every rank in every section."""
    named: tuple[Straggler, ...] = ()
    """Slow for long enough; worst first, a rank once for each basis."""
    newly_named: tuple[int, ...] = ()
    """Ranks among them that were not reported in the window before."""
    suspects: tuple[Straggler, ...] = ()
    """Slow, but not yet for long enough."""
    waiting: tuple[WaitingRank, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be compared, and why."""
    why_none: str = ""
    """Why no rank is reported; empty = one is."""
    below_threshold: tuple[int, ...] = ()
    """Reported ranks whose score is below the configured threshold: those to stop for."""

    @property
    def named_ranks(self) -> tuple[int, ...]:
        """Reported global ranks, worst first."""
        return tuple(dict.fromkeys(one.rank for one in self.named))


def judge(streaks: Streaks, ranks: Sequence[RankTimings], config: StragglerDetectionConfig) -> tuple[Streaks, Findings]:
    """Return the results of a window, and the state for the next one.

    Args:
        streaks: The state of the window before.
        ranks: The timings of all ranks.
        config: Thresholds, and what is calculated.
    """
    measured: list[Slowness] = []
    if config.calc_relative_gpu_perf:
        measured += measure_relative(ranks)
    if config.calc_individual_gpu_perf:
        measured += measure_individual(ranks)
    limits = {
        Basis.RELATIVE: max(config.noticeable_score, config.gpu_relative_perf_threshold),
        Basis.INDIVIDUAL: max(config.noticeable_score, config.gpu_individual_perf_threshold),
    }
    looks_slow = [one for one in measured if one.is_slow(limits[one.basis])]
    slow, waiting = _excuse(measured, looks_slow, ranks)
    waits = {_key(one) for one in looks_slow} - {_key(one) for one in slow}
    scored = [replace(one, score=1.0) if _key(one) in waits else one for one in measured]
    relative, individual = (
        score_ranks(ranks, [one for one in scored if one.basis == basis])
        for basis in (Basis.RELATIVE, Basis.INDIVIDUAL)
    )
    if config.calc_individual_gpu_perf:
        individual = {owner.rank: 1.0 for owner in ranks if owner.has_times} | individual
    after = _lengthen(streaks, slow, measured)
    owners = {owner.rank: owner for owner in ranks}
    stragglers = [_straggler(one, owners[one.rank], after, slow, ranks) for one in slow]
    named = _worst_of_each(one for one in stragglers if one.num_windows >= config.confirmations)
    suspects = _worst_of_each(one for one in stragglers if one.num_windows < config.confirmations)
    before = {rank for (rank, _, _), length in streaks.lengths.items() if length >= config.confirmations}
    findings = Findings(
        relative=relative,
        individual=individual,
        measured=tuple(measured),
        named=named,
        newly_named=tuple(dict.fromkeys(one.rank for one in named if one.rank not in before)),
        suspects=suspects,
        waiting=waiting,
        notes=tuple(remarks(ranks)),
        below_threshold=_below_threshold(named, relative, individual, config),
    )
    return after, findings if named else replace(findings, why_none=_why_none(findings, ranks, config, limits))


def _excuse(
    measured: Sequence[Slowness], slow: Sequence[Slowness], ranks: Sequence[RankTimings]
) -> tuple[list[Slowness], tuple[WaitingRank, ...]]:
    """Return the slow ranks that do not wait for another one, and which ranks wait for which."""
    excesses_s: dict[tuple[Basis, int], dict[str, float]] = {}
    for one in measured:
        if one.name != KERNELS and one.excess_s > 0:
            excesses_s.setdefault((one.basis, one.rank), {})[one.name] = one.excess_s
    orders = {owner.rank: {timing.name: index for index, timing in enumerate(owner.sections)} for owner in ranks}
    kept, waiting = [], []
    for one in slow:
        found = None if one.name == KERNELS else _find_cause(one, excesses_s, orders)
        if found is None:
            kept.append(one)
        else:
            waiting.append(WaitingRank(rank=one.rank, section=one.name, for_rank=found[0], in_section=found[1]))
    return kept, tuple(dict.fromkeys(waiting))


def _find_cause(
    one: Slowness, excesses_s: Mapping[tuple[Basis, int], Mapping[str, float]], orders: Mapping[int, Mapping[str, int]]
) -> tuple[int, str] | None:
    """Return the rank that a slow one waits for, and the section in which that rank loses most before they meet."""
    causes: list[tuple[float, int, str]] = []
    for (basis, rank), others_s in excesses_s.items():
        if basis != one.basis or rank == one.rank:
            continue
        order = {**orders[rank], **orders[one.rank]}
        before_s = {name: seconds for name, seconds in others_s.items() if order[name] < order[one.name]}
        own_s = excesses_s[basis, one.rank]
        own_before_s = sum(seconds for name, seconds in own_s.items() if order[name] < order[one.name])
        lag_s = sum(before_s.values())
        if (
            lag_s >= _BROUGHT * one.excess_s
            and own_before_s <= _NONE_OF_IT * lag_s
            and lag_s + others_s.get(one.name, 0.0) >= _EXPLAINS * (own_before_s + one.excess_s)
        ):
            causes.append((lag_s, rank, max(before_s, key=lambda name: before_s[name])))
    if not causes:
        return None
    _, rank, section = max(causes, key=lambda cause: (cause[0], -cause[1]))
    return rank, section


def _key(one: Slowness) -> tuple[int, Basis, str]:
    return one.rank, one.basis, one.name


def _lengthen(streaks: Streaks, slow: Iterable[Slowness], measured: Iterable[Slowness]) -> Streaks:
    """Return the streaks after a window: extended for slow ranks, ended for ranks that were judged and are not."""
    now = {_key(one) for one in slow}
    judged = {_key(one) for one in measured if one.is_judged}
    kept = {key: length for key, length in streaks.lengths.items() if key not in judged}
    return Streaks({**kept, **{key: streaks.lengths.get(key, 0) + 1 for key in now}})


def judge_scope(rank: int, slow: Set[int], ranks: Sequence[RankTimings]) -> tuple[Scope, str]:
    """Return whether a slow rank or its node is responsible, and why.

    Args:
        rank: Its global rank.
        slow: All ranks that are slow in the same section and on the same basis, this one included.
        ranks: The timings of all ranks.
    """
    owners = {owner.rank: owner for owner in ranks if owner.has_times}
    node, role = owners[rank].node, owners[rank].role
    here = sorted(other for other, owner in owners.items() if owner.node == node)
    healthy_here = [other for other in here if other not in slow]
    healthy_elsewhere = [
        other for other, owner in owners.items() if owner.node != node and owner.role == role and other not in slow
    ]
    if len({owner.node for owner in owners.values()}) == 1:
        return Scope.RANK, "all ranks that are compared are on one node"
    if healthy_here:
        return Scope.RANK, f"rank {', '.join(map(str, healthy_here))} of the same node is not slow"
    if not healthy_elsewhere:
        return Scope.RANK, "no rank of another node that is not slow does the same work"
    if len(here) == 1:
        return Scope.NODE, "its only rank is slow compared with ranks of other nodes"
    return Scope.NODE, f"all its ranks ({', '.join(map(str, here))}) are slow compared with ranks of other nodes"


def _straggler(
    one: Slowness, owner: RankTimings, streaks: Streaks, slow: Sequence[Slowness], ranks: Sequence[RankTimings]
) -> Straggler:
    equally_slow = (
        other.rank
        for other in slow
        if (other.basis, other.name) == (one.basis, one.name)
        and other.rank != one.rank
        and abs(other.excess_s - one.excess_s) <= _EQUAL * one.excess_s
    )
    scope, reason = judge_scope(
        one.rank, {other.rank for other in slow if (other.basis, other.name) == (one.basis, one.name)}, ranks
    )
    return Straggler(
        scope=scope,
        scope_reason=reason,
        rank=one.rank,
        node=owner.node,
        role=owner.role,
        basis=one.basis,
        section=one.name,
        score=one.score,
        ratio=one.ratio,
        excess_s=one.excess_s,
        z=one.z,
        num_windows=streaks.lengths[(one.rank, one.basis, one.name)],
        equally_slow=tuple(sorted(equally_slow)),
    )


def _worst_of_each(stragglers: Iterable[Straggler]) -> tuple[Straggler, ...]:
    """Return each rank's worst section for each basis, worst first."""
    worst: dict[tuple[int, Basis], Straggler] = {}
    for one in sorted(stragglers, key=lambda one: (-one.excess_s, one.rank)):
        worst.setdefault((one.rank, one.basis), one)
    return tuple(worst.values())


def _below_threshold(
    named: Iterable[Straggler],
    relative: Mapping[int, float],
    individual: Mapping[int, float],
    config: StragglerDetectionConfig,
) -> tuple[int, ...]:
    """Return the reported ranks whose score, as a whole or in their slow section, is below its threshold."""
    found = []
    for one in named:
        if one.basis == Basis.RELATIVE:
            score, threshold = relative.get(one.rank, 1.0), config.gpu_relative_perf_threshold
        else:
            score, threshold = individual.get(one.rank, 1.0), config.gpu_individual_perf_threshold
        if min(score, one.score) < threshold:
            found.append(one.rank)
    return tuple(dict.fromkeys(found))


def _why_none(
    findings: Findings,
    ranks: Sequence[RankTimings],
    config: StragglerDetectionConfig,
    limits: Mapping[Basis, float],
) -> str:
    if findings.suspects:
        first = findings.suspects[0]
        others = len({one.rank for one in findings.suspects}) - 1
        more = f", and {others} others" if others > 1 else ", and another one" if others else ""
        return (
            f"rank {first.rank}{more} is slow in {first.section!r} ({first.ratio:.2f} times), in {first.num_windows} "
            f"of the {config.confirmations} windows in a row that it takes"
        )
    if not any(one.is_judged for one in findings.measured):
        if len(ranks) == 1:
            return "there is one rank, and nothing to compare it with"
        if any(one.name != KERNELS for one in findings.measured):
            return f"too little was timed: fewer than {MIN_SAMPLES} times of each section"
        return "there is nothing to compare yet"
    slower = [score for score in findings.individual.values() if score < config.noticeable_score]
    if findings.individual and len(slower) * 2 > len(findings.individual):
        return (
            f"{len(slower)} of {len(findings.individual)} ranks are slower than at their best "
            f"(median score {sorted(slower)[len(slower) // 2]:.2f}): the work changed, or something that all share"
        )
    if findings.waiting:
        return findings.waiting[0].describe()
    unsure = [
        one for one in findings.measured if one.is_judged and one.is_relevant and 1 / one.ratio < limits[one.basis]
    ]
    if unsure:
        worst = max(unsure, key=lambda one: (one.z, one.excess_s))
        return (
            f"rank {worst.rank} takes {worst.ratio:.2f} times as long in {worst.name!r}, but the others differ too "
            f"much among themselves for this to count as slow ({worst.z:.1f} of {Z_LIMIT:g} standard deviations)"
        )
    share = share_compared(ranks, findings.measured)
    where = "" if share is None else f" in what was compared, {share:.0%} of a step"
    return f"all ranks are within noise of each other{where}"


def share_compared(ranks: Sequence[RankTimings], measured: Iterable[Slowness]) -> float | None:
    """Return the share of a step in sections that were judged, on the rank where it is smallest.

    The rest of a step (waits for other ranks, data, time outside sections) may hide a slow rank. ``None`` = not known:
    kernels were compared, which are timed in few steps, or no rank reported how long a step takes.
    """
    judged = {(one.rank, one.name) for one in measured if one.is_judged}
    if any(name == KERNELS for _, name in judged):
        return None
    shares = []
    for owner in ranks:
        steps_s = owner.num_steps * (owner.pace_s or owner.step_s)
        if steps_s > 0:
            timed_s = sum(one.total_s for one in owner.sections if (owner.rank, one.name) in judged)
            shares.append(min(1.0, timed_s / steps_s))
    return min(shares, default=None)


SLOWER = 1.15
"""A product or copy is slow from this ratio to the slowest of the others on."""
SLOWER_LINK = 1.5
"""Messages are slow from this ratio on; they vary more."""


class SlownessCause(StrEnum):
    """Cause of a slow rank."""

    MACHINE = "machine"
    """The node's processor or memory: the same work takes longer on its ranks than on other nodes."""
    PROCESS = "process"
    """The rank's GPU, processor cores or process: the same work takes longer there, and not on the whole node."""
    LINK = "link"
    """The rank's network connection."""
    WORK = "work"
    """None of these: the same work takes as long as elsewhere."""
    UNKNOWN = "unknown"
    """There was nothing to compare with."""


class MachineTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank's times for the benchmark, in seconds."""

    rank: int
    """Global rank."""
    product_s: float
    """A matrix product on the training device."""
    copy_s: float
    """A copy within that device's memory."""
    exchange_s: Mapping[str, float] = {}
    """A message round trip, by the other rank (as text), for those that this rank began."""


class MachineDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the benchmark for a rank."""

    rank: int
    node: str
    cause: SlownessCause
    reason: str
    """The measurements, as text."""

    def describe(self) -> str:
        meaning = {
            SlownessCause.MACHINE: "the node is slow",
            SlownessCause.PROCESS: "the rank's GPU, processor cores or process is slow, not the node",
            SlownessCause.LINK: "the rank's connection is slow",
            SlownessCause.WORK: (
                "the same work takes as long as on other ranks: what the rank has to do is slow, or another process "
                "takes its time"
            ),
            SlownessCause.UNKNOWN: "it is not known whether the rank or its work is slow",
        }[self.cause]
        return f"Rank={self.rank} Node={self.node}: {meaning} ({self.reason})"


def ranks_to_stop_for(findings: Findings, causes: Mapping[int, SlownessCause]) -> tuple[int, ...]:
    """Return the ranks below a threshold, without those that may only wait for another one.

    Args:
        causes: Causes by rank, as the checks of the machines found them.
    """
    ambiguous = {one.rank for one in findings.named if one.equally_slow}
    in_work = (SlownessCause.WORK, SlownessCause.UNKNOWN)
    verified = {rank for rank, cause in causes.items() if cause not in in_work}
    return tuple(rank for rank in findings.below_threshold if rank not in ambiguous or rank in verified)


def choose_others(
    suspect: int, nodes: Mapping[int, str], roles: Mapping[int, str], scores: Mapping[int, float], slow: Sequence[int]
) -> tuple[int, ...]:
    """Return up to two ranks to compare a suspect with: not slow, on other nodes, of its role, the fastest first.

    Args:
        suspect: Its global rank.
        nodes: Node of each rank.
        roles: Role of each rank.
        scores: Relative score of each rank that has one.
        slow: Ranks that are slow too.
    """
    candidates = [rank for rank in nodes if rank != suspect and rank not in slow]

    def rating(rank: int) -> tuple[bool, bool, float, int]:
        return (nodes[rank] == nodes[suspect], roles[rank] != roles[suspect], -scores.get(rank, 0.0), rank)

    first = sorted(candidates, key=rating)[:1]
    # The second one on yet another node if possible: messages between two nodes are to be compared.
    rest = sorted(
        (rank for rank in candidates if rank not in first),
        key=lambda rank: (any(nodes[rank] == nodes[other] for other in first), rating(rank)),
    )
    return tuple(sorted([*first, *rest[:1]]))


def judge_machine(
    suspect: MachineTimes,
    others: Sequence[MachineTimes],
    *,
    node: str,
    scope: Scope = Scope.RANK,
    shares_memory: bool = False,
) -> MachineDecision:
    """Return the benchmark's result for a suspect.

    Args:
        suspect: Its times; ``exchange_s`` are messages with the others.
        others: Their times; of two, ``exchange_s`` of one are messages with the other.
        node: The suspect's node, for the message.
        scope: Whether the whole node is slow in training; only then can it be the cause.
        shares_memory: All ranks of a node use its memory, as without GPUs: copies show nothing about a single rank.
    """
    if not others:
        return MachineDecision(
            rank=suspect.rank, node=node, cause=SlownessCause.UNKNOWN, reason="no other rank to compare with"
        )
    product = suspect.product_s / max(other.product_s for other in others)
    copy = suspect.copy_s / max(other.copy_s for other in others)
    between = [seconds for other in others for seconds in other.exchange_s.values()]
    whom = " and ".join(str(other.rank) for other in others)
    if shares_memory and scope == Scope.RANK:
        slower, reason = product, f"matrix product {product:.2f} times as long as on rank {whom}"
    else:
        slower = max(product, copy)
        reason = f"matrix product {product:.2f} and memory copy {copy:.2f} times as long as on rank {whom}"
    link = None
    if between and suspect.exchange_s:
        link = min(suspect.exchange_s.values()) / max(between)
        reason += f", messages {link:.2f} times as long as between those"
    if slower >= SLOWER:
        cause = SlownessCause.MACHINE if scope == Scope.NODE else SlownessCause.PROCESS
    elif link is not None and link >= SLOWER_LINK:
        cause = SlownessCause.LINK
    else:
        cause = SlownessCause.WORK
    return MachineDecision(rank=suspect.rank, node=node, cause=cause, reason=reason)
