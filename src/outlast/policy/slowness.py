"""Scores: how fast a rank is compared with others of its role and with its own best, from the timings of a window.

Timings are the rank's *own* time: time in nested sections, and waiting where it is marked, is not part of it. Values
that are not durations (NaN, negative) are counted and left out.

The score of a section on a rank is ``min(1, reference / median)``. The *relative* reference is the lower median of the
role's ranks (NVIDIA's resiliency extension uses the fastest rank; then one outlier flags all others), the *individual*
one the rank's own best so far. A rank's score is the mean of its sections' scores, weighted by count times mean, that
is, the time spent; sections that it never entered are not part of it. Time outside all sections (:data:`OUTSIDE`) is
weighted by its median.

A rank is *slow* in a section if the score is below a limit; if it is outside noise, by the robust z of its time among
the others' (median absolute deviation of the others, plus in squares the standard errors of the medians and a floor of
1 % of the reference); and if it is relevant: 1 % of a step. Times vary in proportion to themselves, so a slow rank's
own error is reduced to the geometric mean of its time and the reference; a rank that takes ten times as long is not
hidden by its own noise. The individual score is compared with the own best times the lower median of all ranks'
slowdown: if all become slower, no rank is slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

OUTSIDE = "outside forward, backward and optimizer"
"""Name of the section for a step's time outside all others: data loading, callbacks, other Python code."""


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Duration of one section or kernel on one rank in a window."""

    name: str
    count: int = 0
    """Number of times measured."""
    median_s: float = 0.0
    spread_s: float = 0.0
    """Median distance of a single time from the median."""
    total_s: float = 0.0
    best_s: float = 0.0
    """The rank's best median in earlier windows; 0 = too few windows."""
    num_invalid: int = 0
    """Times that were NaN, infinite or negative; left out of everything else."""

    @property
    def is_usable(self) -> bool:
        """Whether there is a finite time above 0 to compare."""
        return self.count > 0 and math.isfinite(self.median_s) and self.median_s > 0


class RankTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Timings of one rank in a window."""

    rank: int
    """Global rank."""
    node: str = ""
    role: str = ""
    """Only ranks of one role are compared; stages of a pipeline are different roles."""
    num_steps: int = 0
    """Steps that were timed."""
    step_s: float = 0.0
    """Median seconds of a step, from its begin until the rank reached its end."""
    pace_s: float = 0.0
    """Mean seconds from one step's begin to the next one's; 0 = not known."""
    wait_s: float | None = None
    """Median seconds that the rank waited for others at the step's end; ``None`` = not known."""
    sections: tuple[Timing, ...] = ()
    """In the order in which they end within a step."""
    kernels: tuple[Timing, ...] = ()
    """Kernels of the device, or operators of torch, without collectives; empty = not timed."""

    @property
    def by_name(self) -> dict[str, Timing]:
        return {timing.name: timing for timing in self.sections}

    @property
    def has_times(self) -> bool:
        return any(timing.is_usable for timing in (*self.sections, *self.kernels))


def lower_median(values: Iterable[float]) -> float:
    """Return the middle of at least one value; of two the smaller, so that half of the ranks may be slow."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def summarise(name: str, values_s: Sequence[float], *, best_s: float = 0.0, num_more: int = 0) -> Timing:
    """Return the summary of single times.

    Args:
        name: The section or kernel.
        values_s: Seconds of each; values that are not durations are counted and left out.
        best_s: The rank's best median in earlier windows.
        num_more: Times that are not in ``values_s`` but took as long on average.
    """
    valid = [value for value in values_s if math.isfinite(value) and value >= 0]
    num_invalid = len(values_s) - len(valid)
    if not valid:
        return Timing(name=name, best_s=best_s, num_invalid=num_invalid)
    median_s = lower_median(valid)
    count = len(valid) + num_more
    return Timing(
        name=name,
        count=count,
        median_s=median_s,
        spread_s=lower_median(abs(value - median_s) for value in valid),
        total_s=math.fsum(valid) / len(valid) * count,
        best_s=best_s,
        num_invalid=num_invalid,
    )


def remarks(ranks: Sequence[RankTimings]) -> Iterator[str]:
    """Yield a line for everything that cannot be compared: invalid times, sections that some ranks never entered."""
    for owner in ranks:
        for timing in (*owner.sections, *owner.kernels):
            if timing.num_invalid or not math.isfinite(timing.median_s):
                many = f"{timing.num_invalid} of {timing.num_invalid + timing.count}" if timing.num_invalid else "all"
                yield f"rank {owner.rank}: {many} times of {timing.name!r} are invalid (NaN, negative) and left out"
        if not owner.num_steps and not owner.has_times:
            yield f"rank {owner.rank} timed nothing: it cannot be compared"
    for role, members in _by_role(ranks).items():
        among = f" of role {role!r}" if role else ""
        entered: dict[str, list[int]] = {}
        for owner in members:
            for timing in owner.sections:
                if timing.count + timing.num_invalid:
                    entered.setdefault(timing.name, []).append(owner.rank)
        for name, who in entered.items():
            missing = [owner.rank for owner in members if owner.rank not in set(who)]
            if missing and len(who) > len(missing):
                yield (
                    f"rank {', '.join(map(str, missing))} never entered section {name!r}, which {len(who)} of "
                    f"{len(members)} ranks{among} entered: not compared there"
                )
            elif missing:
                yield (
                    f"only rank {', '.join(map(str, who))} of {len(members)} ranks{among} entered section {name!r}"
                    + (": nothing to compare with" if len(who) == 1 else "")
                )


KERNELS = "kernels"
"""Name for all kernels of a rank together."""
MIN_SAMPLES = 3
"""Times that a median needs before a rank is judged by it."""
NOISE_FLOOR = 0.01
"""Share of the reference: differences between sound machines that no spread shows."""
RELEVANT_SHARE = 0.01
"""Share of a step that a section must add to be reported."""
Z_LIMIT = 4.0
"""Robust standard deviations beyond the others; 3.5 is usual for single values."""
_CROWD = 32
"""From this number of values on, a rank is not left out of those that it is compared with."""
_SIGMA_OF_MAD = 1.4826
"""Standard deviation of normal values divided by their median absolute deviation."""
_ERROR_OF_MEDIAN = 1.2533
"""Standard error of a median divided by that of a mean."""


class Basis(StrEnum):
    """Reference of a comparison."""

    RELATIVE = "relative"
    """The other ranks of its role."""
    INDIVIDUAL = "individual"
    """Its own best so far."""


REFERENCES = {
    Basis.RELATIVE: "the median of the ranks",
    Basis.INDIVIDUAL: "its own best so far, beyond what the other ranks slowed down by",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How slow one rank is in one section, or in its kernels together."""

    basis: Basis
    rank: int
    name: str
    """The section, or :data:`KERNELS`."""
    score: float
    """0 to 1, 1 = as fast as the reference."""
    ratio: float
    """Its time divided by the reference; 1.3 = 30 % slower."""
    excess_s: float
    """Seconds that it adds to a step."""
    z: float
    """Robust standard deviations beyond the others."""
    is_judged: bool
    """There were enough times to judge it."""
    is_relevant: bool
    """It adds enough to a step to be reported."""

    def is_slow(self, limit: float) -> bool:
        """Return whether the score is below the limit, outside noise and relevant."""
        return self.is_judged and self.is_relevant and 1 / self.ratio < limit and self.z > Z_LIMIT


@dataclass(frozen=True, slots=True)
class _MeasuredValue:
    """A time, or a slowdown relative to the own best, with its standard error."""

    value: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class _Others:
    """Distribution that a rank is compared with."""

    middle: float
    spread: float
    error: float

    @classmethod
    def of(cls, values: Sequence[_MeasuredValue]) -> _Others:
        middle = lower_median(one.value for one in values)
        spread = _SIGMA_OF_MAD * lower_median(abs(one.value - middle) for one in values)
        return cls(middle, spread, lower_median(one.error for one in values))

    def z(self, one: _MeasuredValue, reference: float) -> float:
        """Return how many robust standard deviations a value lies above these, or above a higher reference."""
        reference = max(self.middle, reference)
        own_error = one.error * math.sqrt(min(1.0, reference / one.value))
        noise = math.hypot(self.spread, own_error, self.error, NOISE_FLOOR * reference)
        return (one.value - reference) / noise


def _others_of_each(values: Sequence[_MeasuredValue]) -> list[_Others | None]:
    """Return the others for each value, ``None`` = there are none; in a crowd one more or less changes nothing."""
    if len(values) >= _CROWD:
        return [_Others.of(values)] * len(values)
    rests = ([*values[:index], *values[index + 1 :]] for index in range(len(values)))
    return [_Others.of(rest) if rest else None for rest in rests]


def measure_relative(ranks: Sequence[RankTimings]) -> list[Slowness]:
    """Return how slow each rank is in each section, and in its kernels, compared with the others of its role.

    Sections that only one rank of a role timed are left out.
    """
    found = []
    for members in _by_role(ranks).values():
        for name in _names(members):
            timed = [
                (member, timing) for member in members if (timing := member.by_name.get(name)) and timing.is_usable
            ]
            if len(timed) < 2:
                continue
            reference_s = lower_median(timing.median_s for _, timing in timed)
            values = [_MeasuredValue(timing.median_s, _error_s(timing)) for _, timing in timed]
            found += _compare(Basis.RELATIVE, timed, values, reference=reference_s, normal=reference_s)
        found += _measure_kernels(Basis.RELATIVE, members, _role_references(members))
    return found


def measure_individual(ranks: Sequence[RankTimings]) -> list[Slowness]:
    """Return how slow each rank is in each section, and in its kernels, compared with its own best so far.

    A single rank has a score but is not judged: no other shows whether everything became slower.
    """
    found = []
    for name in _names(ranks):
        timed = [
            (owner, timing)
            for owner in ranks
            if (timing := owner.by_name.get(name)) and timing.is_usable and timing.best_s > 0
        ]
        values = [
            _MeasuredValue(timing.median_s / timing.best_s, _error_s(timing) / timing.best_s) for _, timing in timed
        ]
        shared = max(1.0, lower_median(one.value for one in values)) if values else 1.0
        found += _compare(Basis.INDIVIDUAL, timed, values, reference=shared, normal=1.0)
    own = {owner.rank: {timing.name: timing.best_s for timing in owner.kernels} for owner in ranks}
    return found + _measure_kernels(Basis.INDIVIDUAL, ranks, own)


def _compare(
    basis: Basis,
    timed: Sequence[tuple[RankTimings, Timing]],
    values: Sequence[_MeasuredValue],
    *,
    reference: float,
    normal: float,
) -> list[Slowness]:
    """Return how slow each rank is in one section.

    Args:
        basis: Reference of the comparison.
        timed: The ranks, with their times.
        values: The values to compare: seconds, or multiples of the own best.
        reference: The reference value.
        normal: The value of a rank whose score is 1.
    """
    found = []
    for (owner, timing), one, others in zip(timed, values, _others_of_each(values), strict=True):
        unit_s = 1.0 if basis == Basis.RELATIVE else timing.best_s
        excess_s = timing.count / max(1, owner.num_steps) * unit_s * (one.value - reference)
        found.append(
            Slowness(
                basis=basis,
                rank=owner.rank,
                name=timing.name,
                score=min(1.0, normal / one.value),
                ratio=one.value / reference,
                excess_s=max(0.0, excess_s),
                z=others.z(one, reference) if others is not None else 0.0,
                is_judged=timing.count >= MIN_SAMPLES and others is not None,
                is_relevant=excess_s >= RELEVANT_SHARE * _step_s(owner),
            )
        )
    return found


def score_ranks(ranks: Sequence[RankTimings], measured: Iterable[Slowness]) -> dict[int, float]:
    """Return each rank's score: of its kernels if they were timed, else of its weighted sections; ranks without times
    have none."""
    weights = {owner.rank: {timing.name: _weight_s(timing) for timing in owner.sections} for owner in ranks}
    kernels: dict[int, float] = {}
    sums: dict[int, tuple[float, float]] = {}
    for one in measured:
        if one.name == KERNELS:
            kernels[one.rank] = one.score
            continue
        weight, (above, below) = weights[one.rank][one.name], sums.get(one.rank, (0.0, 0.0))
        sums[one.rank] = (above + weight * one.score, below + weight)
    scores = {rank: above / below for rank, (above, below) in sums.items() if below > 0}
    return dict(sorted({**scores, **kernels}.items()))


def _measure_kernels(
    basis: Basis, members: Sequence[RankTimings], references_s: Mapping[int, Mapping[str, float]]
) -> list[Slowness]:
    scored: list[tuple[RankTimings, float]] = []
    for owner in members:
        above = below = 0.0
        for timing in owner.kernels:
            if timing.is_usable and (reference_s := references_s[owner.rank].get(timing.name, 0.0)) > 0:
                above += timing.total_s * min(1.0, reference_s / timing.median_s)
                below += timing.total_s
        if above > 0:
            scored.append((owner, above / below))
    values = [_MeasuredValue(1 / score) for _, score in scored]
    found = []
    shared = max(1.0, lower_median(one.value for one in values)) if values else 1.0
    for (owner, score), one, others in zip(scored, values, _others_of_each(values), strict=True):
        ratio = one.value / (1.0 if basis == Basis.RELATIVE else shared)
        found.append(
            Slowness(
                basis=basis,
                rank=owner.rank,
                name=KERNELS,
                score=score,
                ratio=ratio,
                excess_s=max(0.0, _step_s(owner) * (1 - 1 / ratio)),
                z=others.z(one, shared) if others is not None else 0.0,
                is_judged=others is not None,
                is_relevant=True,
            )
        )
    return found


def _role_references(members: Sequence[RankTimings]) -> dict[int, dict[str, float]]:
    """Return, for each rank, the lower median of each kernel that at least two ranks of the role have run."""
    medians: dict[str, list[float]] = {}
    for member in members:
        for timing in member.kernels:
            if timing.is_usable:
                medians.setdefault(timing.name, []).append(timing.median_s)
    references_s = {name: lower_median(values) for name, values in medians.items() if len(values) > 1}
    return dict.fromkeys((member.rank for member in members), references_s)


def _weight_s(timing: Timing) -> float:
    """Return the weight of a section in a rank's score, in seconds.

    Outside the sections a rank may spend minutes now and then, as in an evaluation; the mean would outweigh the
    sections.
    """
    return timing.count * timing.median_s if timing.name == OUTSIDE else timing.total_s


def _error_s(timing: Timing) -> float:
    return _ERROR_OF_MEDIAN * _SIGMA_OF_MAD * timing.spread_s / math.sqrt(timing.count)


def _step_s(owner: RankTimings) -> float:
    """Return the seconds of a step; without steps those of all sections together."""
    if owner.step_s > 0:
        return owner.step_s
    return math.fsum(timing.total_s for timing in owner.sections if timing.is_usable) / max(1, owner.num_steps)


def _by_role(ranks: Sequence[RankTimings]) -> dict[str, list[RankTimings]]:
    roles: dict[str, list[RankTimings]] = {}
    for owner in ranks:
        roles.setdefault(owner.role, []).append(owner)
    return roles


def _names(ranks: Sequence[RankTimings]) -> list[str]:
    return list(dict.fromkeys(timing.name for owner in ranks for timing in owner.sections))
