"""What the textbooks say: Young's intervals, and the ETTR of a run in one formula.

ETTR is the effective training time ratio: productive step time over wall time. For a run with an interval ``tau``
between saves, a stall of ``C`` in each, and failures every ``M`` seconds with an overhead of ``R``, to first order::

    ETTR ~ tau / (tau + C) * (1 - (R + (tau + C) / 2) / M)

(A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024; the first factor
is what saves cost, and half an interval is what a failure loses: J. W. Young, 1974.) :func:`ettr` is that.

Where failures are not rare, one may come during a recovery, which costs less than one during training.
:func:`evaluate` knows that, after J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", 2006. A recovery has a part ``U`` in which no process runs that could fail, and a part ``V`` in which a failure
begins it anew. With failures at a rate ``l = 1 / M``, one stretch of training after another takes the time::

    M + exp(l V) U + (exp(l V) - 1) M

of which training is ``M``. Of that the last failure takes away what was not committed: with a save every ``a``
seconds, committed ``s`` seconds later, on average::

    (1 - exp(-l s)) M + exp(-l s) (M - a / (exp(l a) - 1))

Where failures are rare this is the formula above. ``U``, ``V`` are means over the kinds of failures; with two
tiers each failure loses what its tier does not have. A run that the ladder stops waits: as often as so many cycles in a
row are too short for a save as it allows. Preemptions and waits for nodes are left out, and times between failures are
exponential.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from outlast.policy.checkpoint_plan import GLOBAL_SHARE, optimal_interval_s
from outlast.simulate.run import find_partners
from outlast.simulate.scenario import Scenario, SimulatedFault

__all__ = ["BestIntervals", "ClosedForm", "best_intervals", "ettr", "evaluate", "global_share"]

MAX_SHARE = 0.25
"""Up to this share of the time between failures a failure's cost is far from all of it."""


def ettr(*, interval_s: float, stall_s: float, overhead_s: float, mtbf_s: float) -> float:
    """Return the ETTR of a run with one tier, between 0 and 1.

    Args:
        interval_s: Seconds of training between two saves, above 0; infinite = none are made.
        stall_s: Seconds that training waits in each.
        overhead_s: Seconds from a failure until training goes on.
        mtbf_s: Mean seconds between failures; infinite = there are none.
    """
    saving = 1.0 if math.isinf(interval_s) else interval_s / (interval_s + stall_s)
    if math.isinf(mtbf_s):
        return saving
    return max(0.0, saving * (1.0 - (overhead_s + (interval_s + stall_s) / 2.0) / mtbf_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """The formula's answer, and what went into it."""

    ettr: float
    first_order: float
    """The same to first order: what a failure costs, times the rate of failures."""
    mtbf_s: float
    """Infinite: there are no failures."""
    overhead_s: float
    """Mean seconds from a failure during training until training goes on, if nothing fails meanwhile."""
    lost_s: float
    """Mean seconds of training that a failure loses, where failures are rare."""
    saving: float
    """Share of the time that is left where nothing fails."""
    num_stops: float
    """How often the ladder stops the run."""
    holds: bool
    """Whether the formula is about such a run: a failure costs at most a quarter of the time between two, these times
    are exponential, stopped runs are started again, and spares are not used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestIntervals:
    """Young's optima, in seconds of training; 0 = no failure needs the tier."""

    near_s: float
    global_s: float


def global_share(scenario: Scenario, partners: Sequence[Sequence[int]] | None = None) -> float:
    """Return the share of the failures after which only the global tier has a copy of every shard.

    Failures that come before the near copies of an earlier one are replaced are left out.

    Args:
        scenario: What is simulated.
        partners: Its partners, where they are known already.
    """
    if not scenario.near_every:
        return 1.0
    held = find_partners(scenario) if partners is None else partners
    lost = scenario.node_share if scenario.copies == 1 else 0.0
    if scenario.rack_share > 0:
        size, num = scenario.nodes_per_rack, scenario.num_nodes
        # By the slot that is struck: the last rack may be a smaller one.
        fatal = 0
        for first in range(0, num, size):
            rack = range(first, min(first + size, num))
            if any(all(partner in rack for partner in held[slot]) for slot in rack):
                fatal += len(rack)
        lost += scenario.rack_share * fatal / num
    return lost


def evaluate(scenario: Scenario, partners: Sequence[Sequence[int]] | None = None) -> ClosedForm:
    """Return the ETTR that the formula gives for a scenario.

    Args:
        scenario: What is simulated.
        partners: Its partners, where they are known already.
    """
    costs, step_s = scenario.costs, scenario.slow_step_s
    near_s, far_s = scenario.near_every * step_s, scenario.global_every * step_s
    stall_share = 0.0
    if far_s:
        stall_share += costs.global_save_stall_s / far_s
    if near_s:
        both = 1.0 / math.lcm(scenario.near_every, scenario.global_every) / step_s if far_s else 0.0
        stall_share += costs.save_stall_s * (1.0 / near_s - both)
    saving = 1.0 / (1.0 + stall_share)
    useful = saving / (1.0 + scenario.slow_share)
    share = global_share(scenario, partners)
    way = _find_way_back(scenario, share)
    rate = scenario.failures_per_s
    if rate <= 0:
        return ClosedForm(
            ettr=useful,
            first_order=useful,
            mtbf_s=math.inf,
            overhead_s=way.dead_s + way.open_s,
            lost_s=0.0,
            saving=saving,
            num_stops=0.0,
            holds=True,
        )
    # A save to all tiers goes to the near ones, too.
    near_age_s = _mean_age(scenario.near_every, scenario.global_every) * step_s / saving
    # Without saves to a tier all that was trained until then is lost: half the run, where it is long.
    far_lost_s = far_s / saving / 2.0 + costs.global_save_s if far_s else scenario.duration_s / 2.0
    lost_s = share * far_lost_s + ((1.0 - share) * (near_age_s + costs.save_s) if near_s else 0.0)
    first_order = useful * (1.0 - (way.dead_s + way.open_s + lost_s) * rate)
    # And so that a failure may come at any time:
    mtbf_s = 1.0 / rate
    num_attempts = math.exp(min(rate * way.open_s, 700.0))
    overhead_s = num_attempts * way.dead_s + (num_attempts - 1.0) * mtbf_s
    near_lost_s = _lost_in_a_stretch(rate, 2.0 * near_age_s, costs.save_s)
    if far_s:  # a save that a failure cuts off before it is committed leaves the one before it
        gap_s = far_s / saving
        far_lost_s = gap_s * (math.exp(min(rate * costs.global_save_s, 700.0)) - 0.5) + costs.global_save_s
    stretch_lost_s = share * far_lost_s + ((1.0 - share) * near_lost_s if near_s else 0.0)
    stops = _stops_in_a_stretch(scenario, rate, num_attempts, way.open_s, 2.0 * near_age_s + costs.save_s)
    waited_s = stops * max(0.0, (scenario.restart_stopped_s or 0.0) - costs.restart_s)
    stretch_s = mtbf_s + overhead_s + waited_s
    cost_s = overhead_s + stretch_lost_s
    return ClosedForm(
        ettr=max(0.0, useful * (mtbf_s - stretch_lost_s) / stretch_s),
        first_order=max(0.0, first_order),
        mtbf_s=mtbf_s,
        overhead_s=way.dead_s + way.open_s,
        lost_s=lost_s,
        saving=saving,
        num_stops=stops * scenario.duration_s / stretch_s,
        holds=(
            cost_s * rate <= MAX_SHARE
            and (bool(far_s) or share == 0.0)
            and scenario.weibull_shape is None
            and scenario.trace is None
            and scenario.restart_stopped_s is not None
            and _spares_suffice(scenario)
        ),
    )


def _lost_in_a_stretch(rate: float, every_s: float, save_s: float) -> float:
    """Return the mean seconds of training since the newest committed save, when a failure ends a stretch of it."""
    late = math.exp(-rate * save_s)
    since_s = 1.0 / rate - every_s / math.expm1(min(rate * every_s, 700.0)) if every_s > 0 else 0.0
    return (1.0 - late) / rate + late * since_s


def _stops_in_a_stretch(
    scenario: Scenario, rate: float, num_attempts: float, open_s: float, to_first_save_s: float
) -> float:
    """Return how often the ladder stops the run, for each stretch of training: runs of cycles without a save.

    W. Feller, "An Introduction to Probability Theory and Its Applications", vol. 1, XIII.7: of trials that fail with a
    chance ``p`` it takes ``(1 - p^r) / ((1 - p) p^r)`` until ``r`` of them in a row have.
    """
    if not scenario.near_every and not scenario.global_every:
        return 0.0
    limits = scenario.limits_in_force
    in_a_row = min(limits.max_no_progress_cycles, limits.max_restarts)
    if in_a_row < 1:  # every failure stops it
        return 1.0
    chance = -math.expm1(-rate * (open_s + to_first_save_s))
    power = chance**in_a_row
    return num_attempts * (1.0 - chance) * power / (1.0 - power) if power < 1.0 else math.inf


def _spares_suffice(scenario: Scenario) -> bool:
    """Return whether hardly ever more nodes are being repaired than there are spares: Poisson, three deviations."""
    a_failure = scenario.node_share + scenario.rack_share * scenario.nodes_per_rack
    away = a_failure * scenario.failures_per_s * scenario.repair_s
    return away + 3.0 * math.sqrt(away) <= scenario.spares


def _mean_age(near: int, far: int) -> float:
    """Return the mean number of iterations since the newest save, of two kinds with intervals of their own."""
    if 0 in (near, far):
        return (near + far) / 2.0
    period = math.lcm(near, far)
    if period // near + period // far > 10_000:
        return min(near, far) / 2.0
    saves = sorted({*range(0, period + 1, near), *range(0, period + 1, far)})
    squares: int = sum((after - before) ** 2 for before, after in pairwise(saves))
    return squares / (2.0 * period)


@dataclass(frozen=True, slots=True)
class _WayBack:
    """Mean seconds of a recovery, of its two parts."""

    dead_s: float
    """No process runs that could fail: from the failure to new processes."""
    open_s: float
    """From then on until training goes on."""


def _find_way_back(scenario: Scenario, share: float) -> _WayBack:
    costs = scenario.costs
    near_s = costs.load_memory_s if scenario.use_memory else costs.load_local_s
    detection_s = {
        SimulatedFault.PROCESS: costs.detection_s,
        SimulatedFault.HANG: costs.hang_timeout_s,
        SimulatedFault.NODE: costs.node_timeout_s,
        SimulatedFault.RACK: costs.node_timeout_s,
    }
    shares = _shares(scenario)
    takes_nodes = shares[SimulatedFault.NODE] + shares[SimulatedFault.RACK]
    load_s = share * costs.load_global_s
    if scenario.near_every:
        load_s += max(0.0, takes_nodes - share) * max(costs.load_replica_s, near_s) + (1.0 - takes_nodes) * near_s
    return _WayBack(
        dead_s=costs.restart_s + sum(shares[kind] * seconds for kind, seconds in detection_s.items()),
        open_s=costs.rendezvous_of(scenario.num_nodes) + costs.start_up_s + load_s,
    )


def _shares(scenario: Scenario) -> dict[SimulatedFault, float]:
    """Return the share of each kind of failure; of a trace, those that it has."""
    if scenario.trace is None:
        return {
            SimulatedFault.PROCESS: scenario.process_share,
            SimulatedFault.HANG: scenario.hang_share,
            SimulatedFault.NODE: scenario.node_share,
            SimulatedFault.RACK: scenario.rack_share,
        }
    kinds = [SimulatedFault.PROCESS, SimulatedFault.HANG, SimulatedFault.NODE, SimulatedFault.RACK]
    num = max(1, sum(fault.kind in kinds for fault in scenario.trace))
    return {kind: sum(fault.kind == kind for fault in scenario.trace) / num for kind in kinds}


def best_intervals(scenario: Scenario, partners: Sequence[Sequence[int]] | None = None) -> BestIntervals:
    """Return the intervals that lose the least time to first order.

    A tier's interval weighs its stall against the failures that are recovered from it. Where no kind of failure needs
    the global tier, two in short succession may: then the share is the one that outlast assumes for automatic
    intervals.

    Args:
        scenario: What is simulated.
        partners: Its partners, where they are known already.
    """
    rate, costs = scenario.failures_per_s, scenario.costs
    if rate <= 0:
        return BestIntervals(near_s=0.0, global_s=0.0)
    share = global_share(scenario, partners)
    near_s = 0.0
    if scenario.near_every and share < 1.0:
        near_s = optimal_interval_s(costs.save_stall_s, rate * (1.0 - share))
        near_s = max(near_s, costs.save_s, scenario.slow_step_s)
    far_s = optimal_interval_s(costs.global_save_stall_s, rate * (share or GLOBAL_SHARE))
    return BestIntervals(near_s=near_s, global_s=max(far_s, costs.global_save_s, scenario.slow_step_s))
