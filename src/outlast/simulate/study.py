"""Many runs of one scenario: the mean with its interval, what would change it, and sweeps.

A change is judged by runs that see the same faults with it and without it (common random numbers): the differences vary
far less than the runs do. What is advised lies outside the noise: the 99 % interval of the mean difference is above 0.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outlast import clock
from outlast.config.base import nearest
from outlast.errors import ConfigError
from outlast.policy.recovery_point import Tier
from outlast.simulate.closed_form import BestIntervals, ClosedForm, best_intervals, evaluate
from outlast.simulate.run import SimulatedRun, find_partners, simulate
from outlast.simulate.scenario import Scenario
from outlast.wording import count

__all__ = ["SWEEPS", "Advice", "StudyResult", "Sweep", "SweepRow", "parse_sweep", "run_study", "run_sweep"]

LEAST_POINTS = 0.05
"""Gains below this are not advised, be they ever so certain."""
_ADVICE_FAILURES = 30_000
"""About so many failures are simulated for each change that is tried: it bounds how long advice takes."""
_LEAST_REPEATS = 4
Progress = Callable[[str], None]
"""Is called with a line of progress, for people."""


def quantile_of_t(share: float, freedom: int) -> float:
    """Return Student's quantile: the value that a share of the distribution lies below.

    Exact for 1 and 2 degrees of freedom, else Fisher's expansion (Abramowitz and Stegun, 26.7.5).
    """
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        wide = 2.0 * share - 1.0
        return wide * math.sqrt(2.0 / (1.0 - wide * wide))
    z = statistics.NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))


def interval_of(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """Return the confidence interval of a mean; of one value the whole line."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = quantile_of_t(0.5 + level / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def ettr_of(runs: Sequence[SimulatedRun]) -> tuple[float, tuple[float, float]]:
    """Return the mean ETTR of some runs and its 95 % interval, which stays between 0 and 1."""
    values = [run.ettr for run in runs]
    low, high = interval_of(values)
    return statistics.fmean(values), (max(0.0, low), min(1.0, high))


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One change that pays."""

    text: str
    """``two more spares: +1.8 points``."""
    gain_points: float
    """Mean gain of ETTR, in percentage points."""
    gain_ci: tuple[float, float]
    """Its 99 % interval."""
    change: dict[str, float]
    """Settings to their new values."""


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a sweep."""

    value: float
    ettr: float
    ettr_ci: tuple[float, float]
    closed_form: float
    num_failures: float
    partition: dict[str, float]


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sweep."""

    name: str
    unit: str
    rows: tuple[SweepRow, ...]
    best: float
    """The value with the highest mean ETTR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What many runs of a scenario show."""

    scenario: Scenario
    runs: Sequence[SimulatedRun]
    ettr: float
    ettr_ci: tuple[float, float]
    """95 % interval of the mean."""
    closed_form: ClosedForm
    young: BestIntervals
    best: BestIntervals | None
    """The best intervals among those that were simulated; ``None`` = none were."""
    advice: Sequence[Advice] = ()
    tried: int = 0
    """How many changes were simulated for advice."""
    sweeps: Sequence[SweepResult] = field(default_factory=tuple)
    wall_s: float = 0.0
    """How long the simulation took."""

    @property
    def agrees(self) -> bool:
        """Whether the closed form lies in the interval of the simulation."""
        low, high = self.ettr_ci
        return low <= self.closed_form.ettr <= high

    @property
    def partition(self) -> dict[str, float]:
        """Mean seconds of each part; they add up to the wall time of a run."""
        return mean_partition(self.runs)

    @property
    def num_failures(self) -> float:
        """Mean number of failures of a run."""
        return statistics.fmean(run.num_failures for run in self.runs)

    @property
    def num_stops(self) -> float:
        """Mean number of times that the ladder stopped a run."""
        return statistics.fmean(len(run.stops) for run in self.runs)

    @property
    def stop_reason(self) -> str:
        """The ladder's reason for the first stop; empty = there was none."""
        return next((run.stops[0].reason for run in self.runs if run.stops), "")

    @property
    def loads(self) -> dict[str, float]:
        """Mean number of loads from each tier."""
        total: Counter[str] = Counter()
        for run in self.runs:
            total.update(run.loads)
        return {str(tier): total[str(tier)] / len(self.runs) for tier in Tier if total[str(tier)]}

    def to_fields(self) -> dict[str, Any]:
        """Return it for JSON."""
        form = self.closed_form
        best = None if self.best is None else {"near_s": self.best.near_s, "global_s": self.best.global_s}
        return {
            "wall_s": round(self.wall_s, 3),
            "ettr": self.ettr,
            "ettr_ci": list(self.ettr_ci),
            "closed_form": form.ettr,
            "closed_form_agrees": self.agrees,
            "closed_form_holds": form.holds,
            "closed_form_terms": {
                "mtbf_s": None if math.isinf(form.mtbf_s) else form.mtbf_s,
                "overhead_s": form.overhead_s,
                "lost_s": form.lost_s,
                "saving": form.saving,
                "num_stops": form.num_stops if math.isfinite(form.num_stops) else None,
                "first_order": form.first_order,
            },
            "simulated_s": self.scenario.duration_s,
            "repeats": len(self.runs),
            "partition": self.partition,
            "num_failures": self.num_failures,
            "num_by_kind": _mean_counts([run.num_by_kind for run in self.runs]),
            "lost_iterations": statistics.fmean(run.lost_iterations for run in self.runs),
            "loads": self.loads,
            "verdicts": _mean_counts([run.verdicts for run in self.runs]),
            "num_stops": self.num_stops,
            "stop_reason": self.stop_reason,
            "young_intervals": {"near_s": self.young.near_s, "global_s": self.young.global_s},
            "best_intervals": best,
            "advice": [msgspec.to_builtins(one) for one in self.advice],
            "num_changes_tried": self.tried,
            "sweeps": [msgspec.to_builtins(one) for one in self.sweeps],
            "settings": self.scenario.to_fields(),
        }


def _mean_counts(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    names = sorted({name for one in counts for name in one})
    return {name: sum(one.get(name, 0) for one in counts) / len(counts) for name in names}


def mean_partition(runs: Sequence[SimulatedRun]) -> dict[str, float]:
    """Return the mean seconds of each part."""
    return {name: statistics.fmean(run.partition[name] for run in runs) for name in runs[0].partition}


class _Runner:
    """Run scenarios, say how far it is, and remember which nodes are partners."""

    def __init__(self, seed: int, progress: Progress) -> None:
        self._seed, self._progress = seed, progress
        self._partners: dict[tuple[int, int, int, int | None], Sequence[Sequence[int]]] = {}
        self._said_s = self.began_s = clock.now_s()
        self._num = 0

    def partners(self, scenario: Scenario) -> Sequence[Sequence[int]]:
        key = (scenario.num_nodes, scenario.node_size, scenario.copies, scenario.replication_jump)
        if key not in self._partners:
            self._partners[key] = find_partners(scenario)
        return self._partners[key]

    def run(self, scenario: Scenario, repeats: int, what: str) -> list[SimulatedRun]:
        """Simulate runs; the same number in two scenarios is the same seed."""
        partners, runs = self.partners(scenario), list[SimulatedRun]()
        for number in range(repeats):
            runs.append(simulate(scenario, self._seed * 1_000_003 + number, partners=partners))
            self._num += 1
            now_s = clock.now_s()
            if now_s - self._said_s >= 2.0:
                self._said_s = now_s
                self._progress(f"{what}: run {number + 1} of {repeats}; {now_s - self.began_s:.0f} s")
        return runs


def run_study(
    scenario: Scenario,
    *,
    repeats: int = 20,
    seed: int = 0,
    advise: bool = True,
    sweeps: Sequence[Sweep] = (),
    progress: Progress = lambda line: None,
) -> StudyResult:
    """Simulate a scenario, changes to it, and sweeps of it.

    Args:
        scenario: What is simulated.
        repeats: Runs with seeds of their own, at least 2.
        seed: Names the study; the same one gives the same result.
        advise: Whether changes are tried.
        sweeps: What is swept.
        progress: Is called now and then with a line for people.

    Raises:
        ConfigError: There are fewer than two repeats, or a sweep has a value that the scenario refuses.
    """
    if repeats < 2:
        raise ConfigError(f"repeats={repeats} must be at least 2: one run has no interval")
    planned = [(sweep, [sweep.apply(scenario, value) for value in sweep.values]) for sweep in sweeps]
    runner = _Runner(seed, progress)
    partners = runner.partners(scenario)
    runs = runner.run(scenario, repeats, "as it is")
    young = best_intervals(scenario, partners)
    advice, best, tried = list[Advice](), None, 0
    if advise:
        advice, best, tried = _advise(runner, scenario, runs, young)
    mean, interval = ettr_of(runs)
    return StudyResult(
        scenario=scenario,
        runs=runs,
        ettr=mean,
        ettr_ci=interval,
        closed_form=evaluate(scenario, partners),
        young=young,
        best=best,
        advice=advice,
        tried=tried,
        sweeps=tuple(_run_sweep(runner, sweep, scenarios, repeats) for sweep, scenarios in planned),
        wall_s=clock.now_s() - runner.began_s,
    )


# -- advice ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Change:
    """A neighbour of a scenario."""

    text: str
    group: str
    """Of the changes of one group the best one is advised."""
    values: Mapping[str, Any]


def _advise(
    runner: _Runner, scenario: Scenario, runs: Sequence[SimulatedRun], young: BestIntervals
) -> tuple[list[Advice], BestIntervals, int]:
    failures = max(1.0, statistics.fmean(run.num_failures for run in runs))
    repeats = min(len(runs), max(_LEAST_REPEATS, int(_ADVICE_FAILURES / failures)))
    changes = _list_changes(scenario, runs, young)
    before = runs[:repeats]
    base = statistics.fmean(run.ettr for run in before)
    chosen: dict[str, tuple[_Change, Advice]] = {}
    tries = {"interval": {_interval_s(scenario): base}, "global": {scenario.global_every * scenario.slow_step_s: base}}
    for change in changes:
        after = runner.run(scenario.change(**change.values), repeats, change.text)
        if change.group in tries:
            tries[change.group][next(iter(change.values.values()))] = statistics.fmean(run.ettr for run in after)
        advice = _compare(change, before, after)
        # A later change of a group goes further, and is advised only where it brings clearly more.
        known = chosen.get(change.group)
        if advice is not None and (known is None or advice.gain_points > known[1].gain_points * 1.2 + LEAST_POINTS):
            chosen[change.group] = (change, advice)
    found = sorted((advice for _, advice in chosen.values()), key=lambda one: -one.gain_points)
    best = BestIntervals(near_s=_pick(tries["interval"], young.near_s), global_s=_pick(tries["global"], young.global_s))
    return found, best, len(changes)


def _pick(tries: Mapping[float, float], young_s: float) -> float:
    """Return the interval with the highest ETTR; of those that are as good, the nearest to Young's."""
    most = max(tries.values())
    good = [seconds for seconds, ettr in tries.items() if ettr > most - LEAST_POINTS / 100]
    return min(good, key=lambda seconds: abs(seconds - young_s))


def _interval_s(scenario: Scenario) -> float:
    return scenario.near_every * scenario.slow_step_s


def _compare(change: _Change, before: Sequence[SimulatedRun], after: Sequence[SimulatedRun]) -> Advice | None:
    """Return the advice to make a change; ``None``: it does not pay, or nobody can tell."""
    points = [100.0 * (new.ettr - old.ettr) for old, new in zip(before, after, strict=True)]
    gain, (low, high) = statistics.fmean(points), interval_of(points, level=0.99)
    if gain < LEAST_POINTS or low <= 0:
        return None
    text = f"{change.text}: +{gain:.{1 if gain >= 0.1 else 2}f} points"
    return Advice(text=text, gain_points=gain, gain_ci=(low, high), change=dict(change.values))


def _list_changes(scenario: Scenario, runs: Sequence[SimulatedRun], young: BestIntervals) -> list[_Change]:
    """Return the changes that could pay, in each group the smallest first."""
    changes: list[_Change] = []
    parts, costs, limits = mean_partition(runs), scenario.costs, scenario.limits_in_force
    if parts["idle"] > 0:
        for more in sorted({1, 2, 4, 8, max(1, scenario.spares)}):
            text = f"{_in_words(more)} more {'spare' if more == 1 else 'spares'}"
            changes.append(_Change(text, "spares", {"num_spares": scenario.spares + more}))
    changes += _list_intervals(scenario, young)
    if scenario.near_every and scenario.copies < scenario.num_nodes:
        text = f"replicate to one more node (replication {scenario.copies + 1})"
        changes.append(_Change(text, "replication", {"replication": scenario.copies + 1}))
        size, rack = scenario.node_size, scenario.nodes_per_rack
        jump = scenario.replication_jump or size
        if scenario.copies > 1 and jump < rack * size and scenario.num_nodes > rack > 1:
            text = f"put near copies into another rack (replication_jump {rack * size} instead of {jump})"
            changes.append(_Change(text, "jump", {"replication_jump": rack * size}))
    if any(run.stops for run in runs):
        cycles, restarts = 2 * max(1, limits.max_no_progress_cycles), 2 * max(1, limits.max_restarts)
        text = (
            f"allow {count(cycles, 'cycle')} without progress instead of {limits.max_no_progress_cycles} "
            f"(max_no_progress_cycles={cycles}, --max-restarts {restarts})"
        )
        changes.append(_Change(text, "limits", {"max_no_progress_cycles": cycles, "max_restarts": restarts}))
    if parts["detection"] > 0 and costs.hang_timeout_s > 10:
        text = f"notice hangs after {_seconds(costs.hang_timeout_s / 2)} instead of {_seconds(costs.hang_timeout_s)}"
        changes.append(_Change(text, "hangs", {"hang_timeout_s": costs.hang_timeout_s / 2}))
    if costs.start_up_s > 1:
        text = f"start up in {_seconds(costs.start_up_s / 2)} instead of {_seconds(costs.start_up_s)}"
        changes.append(_Change(text, "start-up", {"start_up_s": costs.start_up_s / 2}))
    return changes


def _list_intervals(scenario: Scenario, young: BestIntervals) -> list[_Change]:
    changes = []
    step_s = scenario.slow_step_s
    now_s, now_far_s = _interval_s(scenario), scenario.global_every * step_s
    near_s = young.near_s
    if not scenario.near_every and scenario.failures_per_s > 0:
        near_s = best_intervals(scenario.change(interval_s=None)).near_s
    for name, group, best_s, from_s, where in (
        ("interval_s", "interval", near_s, now_s, "the near tiers"),
        ("global_interval_s", "global", young.global_s, now_far_s, "all tiers"),
    ):
        known = {from_s}
        for factor in (1.0, 0.5, 2.0):
            to_s = max(1, round(best_s * factor / step_s)) * step_s
            if best_s <= 0 or to_s in known:
                continue
            known.add(to_s)
            instead = f" instead of {_seconds(from_s)}" if from_s else ""
            changes.append(_Change(f"save to {where} every {_seconds(to_s)}{instead}", group, {name: to_s}))
    return changes


def _in_words(number: int) -> str:
    return {1: "one", 2: "two", 3: "three", 4: "four", 8: "eight"}.get(number, str(number))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


# -- sweeps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """What can be swept."""

    setting: str
    unit: str
    is_whole: bool = False
    factor: float = 1.0
    """From the unit of the sweep to that of the setting."""


SWEEPS: Mapping[str, _Axis] = {
    "interval": _Axis("interval_s", "s"),
    "interval-iterations": _Axis("interval_iterations", "iterations", is_whole=True),
    "global-interval": _Axis("global_interval_s", "s"),
    "global-interval-iterations": _Axis("global_interval_iterations", "iterations", is_whole=True),
    "spares": _Axis("num_spares", "nodes", is_whole=True),
    "replication": _Axis("replication", "nodes", is_whole=True),
    "replication-jump": _Axis("replication_jump", "ranks", is_whole=True),
    "ranks": _Axis("num_ranks", "ranks", is_whole=True),
    "mttf": _Axis("rank_mttf_hours", "h"),
    "failure-every": _Axis("failure_every_s", "s"),
    "repair": _Axis("repair_s", "h", factor=3600.0),
    "hang-timeout": _Axis("hang_timeout_s", "s"),
    "restart": _Axis("restart_s", "s"),
    "start-up": _Axis("start_up_s", "s"),
    "save-stall": _Axis("save_stall_s", "s"),
    "max-no-progress-cycles": _Axis("max_no_progress_cycles", "cycles", is_whole=True),
}
"""What can be swept, by its name on the command line."""
_MAX_VALUES = 200


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values that one setting takes in turn."""

    name: str
    values: tuple[float, ...]

    def apply(self, scenario: Scenario, value: float) -> Scenario:
        """Return the scenario with one value.

        Raises:
            ConfigError: It refuses the value.
        """
        axis = SWEEPS[self.name]
        values: dict[str, Any] = {axis.setting: int(value) if axis.is_whole else value * axis.factor}
        if axis.setting.endswith("interval_iterations"):
            values = {axis.setting.replace("iterations", "s"): None} | values
        elif axis.setting.endswith("interval_s"):
            values = {axis.setting.replace("_s", "_iterations"): None} | values
        return scenario.change(**values)


def parse_sweep(text: str) -> Sweep:
    """Read ``interval=10,30,60`` or ``spares=0:8:2`` (from, to, step; the end is included).

    Raises:
        ConfigError: It is neither, names nothing that can be swept, or has too many values.
    """
    name, sign, values = (part.strip() for part in text.partition("="))
    if not sign or not values:
        raise ConfigError(f"the sweep {text!r} must be NAME=VALUE,VALUE,... or NAME=FROM:TO:STEP, such as spares=0:8:2")
    if name not in SWEEPS:
        raise ConfigError(f"there is no sweep {name!r}; {nearest(name, SWEEPS)}")
    try:
        if ":" in values:
            numbers = _expand(*(float(part) for part in values.split(":")))
        else:
            numbers = [float(part) for part in values.split(",")]
    except (ValueError, TypeError):
        raise ConfigError(f"the sweep {text!r}: {values!r} must be numbers such as 10,30,60, or 0:8:2") from None
    if not 1 <= len(numbers) <= _MAX_VALUES:
        raise ConfigError(f"the sweep {text!r} has {len(numbers)} values; give 1 to {_MAX_VALUES}")
    if not all(math.isfinite(number) and (number.is_integer() or not SWEEPS[name].is_whole) for number in numbers):
        kind = "whole numbers" if SWEEPS[name].is_whole else "finite numbers"
        raise ConfigError(f"the sweep {text!r}: the values of {name} must be {kind}")
    return Sweep(name, tuple(dict.fromkeys(numbers)))


def _expand(first: float, last: float, step: float = 1.0) -> list[float]:
    if not (math.isfinite(first) and math.isfinite(last) and math.isfinite(step) and step > 0):
        raise ValueError
    num = min(_MAX_VALUES + 1, math.floor((last - first) / step + 1e-9) + 1)
    return [first + step * number for number in range(max(0, num))]


def run_sweep(scenario: Scenario, sweep: Sweep, *, repeats: int = 20, seed: int = 0) -> SweepResult:
    """Simulate a scenario with each value of a sweep.

    Args:
        scenario: What is simulated.
        sweep: The setting and its values.
        repeats: Runs for each value, with the same seeds.
        seed: Names the study.
    """
    scenarios = [sweep.apply(scenario, value) for value in sweep.values]
    return _run_sweep(_Runner(seed, lambda line: None), sweep, scenarios, repeats)


def _run_sweep(runner: _Runner, sweep: Sweep, scenarios: Sequence[Scenario], repeats: int) -> SweepResult:
    rows = []
    for value, scenario in zip(sweep.values, scenarios, strict=True):
        runs = runner.run(scenario, repeats, f"{sweep.name}={value:g}")
        mean, interval = ettr_of(runs)
        rows.append(
            SweepRow(
                value=value,
                ettr=mean,
                ettr_ci=interval,
                closed_form=evaluate(scenario, runner.partners(scenario)).ettr,
                num_failures=statistics.fmean(run.num_failures for run in runs),
                partition=mean_partition(runs),
            )
        )
    best = max(rows, key=lambda row: row.ettr)
    return SweepResult(name=sweep.name, unit=SWEEPS[sweep.name].unit, rows=tuple(rows), best=best.value)
