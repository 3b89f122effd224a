"""What the textbooks say: Young's intervals, and the ETTR of a run in one formula.

ETTR is the effective training time ratio: productive step time over wall time. For a run with an interval ``tau``
between saves, a stall of ``C`` in each, and failures every ``M`` seconds with an overhead of ``R`` each::

    ETTR ~ tau / (tau + C) * (1 - (R + (tau + C) / 2) / M)

(A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024; the first factor
is what saves cost, and half an interval is what a failure loses: J. W. Young, 1974, and J. T. Daly, 2006.)

It holds while ``R + tau`` is short against ``M``, nodes need not be waited for, and the ladder does not stop the run.
Here ``R`` is the mean over the kinds of failures, and with two tiers each failure loses half the interval of the tier
that it is recovered from, and what was not committed yet. Preemptions are left out.
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

FIRST_ORDER = 0.02
"""Up to this share of the time between failures a failure's cost is small."""


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
    mtbf_s: float
    """Infinite: there are no failures."""
    overhead_s: float
    """Mean seconds from a failure until training goes on."""
    lost_s: float
    """Mean seconds of training that a failure loses."""
    saving: float
    """Share of the time that is left where nothing fails."""
    holds: bool
    """Whether what a failure costs is short, at most a fiftieth of the time between failures: the formula is of first
    order, and wrong by about the square of that."""


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
    share = global_share(scenario, partners)
    overhead_s, rate = _overhead_s(scenario, share), scenario.failures_per_s
    if rate <= 0:
        return ClosedForm(
            ettr=saving / (1 + scenario.slow_share),
            mtbf_s=math.inf,
            overhead_s=overhead_s,
            lost_s=0.0,
            saving=saving,
            holds=True,
        )
    # A save to all tiers goes to the near ones, too.
    near_lost_s = _mean_age(scenario.near_every, scenario.global_every) * step_s / saving + costs.save_s
    # Without saves to a tier all that was trained until then is lost: half the run, where it is long.
    far_lost_s = far_s / saving / 2.0 + costs.global_save_s if far_s else scenario.duration_s / 2.0
    lost_s = share * far_lost_s + ((1.0 - share) * near_lost_s if near_s else 0.0)
    cost_s = overhead_s + lost_s
    return ClosedForm(
        ettr=max(0.0, saving / (1 + scenario.slow_share) * (1.0 - cost_s * rate)),
        mtbf_s=1.0 / rate,
        overhead_s=overhead_s,
        lost_s=lost_s,
        saving=saving,
        holds=cost_s * rate <= FIRST_ORDER and (bool(far_s) or share == 0.0),
    )


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


def _overhead_s(scenario: Scenario, share: float) -> float:
    """Return the mean seconds from a failure until training goes on."""
    costs = scenario.costs
    near_s = costs.load_memory_s if scenario.use_memory else costs.load_local_s
    detection_s = {
        SimulatedFault.PROCESS: costs.detection_s,
        SimulatedFault.HANG: costs.hang_timeout_s,
        SimulatedFault.NODE: costs.node_timeout_s,
        SimulatedFault.RACK: costs.node_timeout_s,
    }
    shares = _shares(scenario)
    always_s = costs.restart_s + costs.rendezvous_of(scenario.num_nodes) + costs.start_up_s
    takes_nodes = shares[SimulatedFault.NODE] + shares[SimulatedFault.RACK]
    load_s = share * costs.load_global_s
    if scenario.near_every:
        load_s += max(0.0, takes_nodes - share) * max(costs.load_replica_s, near_s) + (1.0 - takes_nodes) * near_s
    return always_s + load_s + sum(shares[kind] * seconds for kind, seconds in detection_s.items())


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
