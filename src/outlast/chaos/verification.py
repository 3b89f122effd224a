"""Which faults of a plan never struck, read from the run's journal: a test of a recovery needs its fault."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

from outlast.chaos.draw import PlannedFault, planned_faults
from outlast.chaos.fault import Fault
from outlast.chaos.plan import FaultPlan
from outlast.incidents import EventKind
from outlast.journal import read

__all__ = ["MissingFault", "verify_fired"]


@dataclass(frozen=True, slots=True)
class MissingFault:
    """A planned fault that did not strike, or not each time that it was due."""

    index: int
    """Its place in the plan, from 0."""
    fault: Fault
    iterations: tuple[int, ...]
    """Where it was due; empty when that is not known: with ``after_s``, or with a rate that drew no iteration."""
    reached: int
    """The highest iteration that the journal knows of."""

    def describe(self) -> str:
        """Return one line for people."""
        where = f" (due at {', '.join(map(str, self.iterations))})" if self.fault.rate and self.iterations else ""
        return f"faults[{self.index}] did not strike: {self.fault.describe()}{where}; the run reached {self.reached}"


def verify_fired(plan: FaultPlan, run_dir: str | os.PathLike[str]) -> list[MissingFault]:
    """Return the faults of a plan that did not strike in a run, in the plan's order; none: all did.

    A fault with a rate is missing when it did not strike at one of the iterations drawn for it, of those that the
    run is known to have reached, or when it drew none at all.

    Args:
        plan: The plan that the run was given.
        run_dir: The run directory; its journal is read.
    """
    struck: defaultdict[str, set[int]] = defaultdict(set)
    reached = 0
    for event in read(run_dir):
        reached = max(reached, event.iteration or 0)
        if event.kind == EventKind.FAULT_SIMULATED and event.iteration is not None:
            struck[str(event.data.get("fault_id"))].add(event.iteration)
    missing = []
    for planned in planned_faults(plan):
        due = _due(planned, reached)
        left = tuple(iteration for iteration in due if iteration not in struck[planned.fault_id])
        if left or not struck[planned.fault_id]:
            missing.append(MissingFault(planned.index, planned.fault, left, reached))
    return missing


def _due(planned: PlannedFault, reached: int) -> tuple[int, ...]:
    if planned.fault.rate is not None:
        return tuple(iteration for iteration in range(reached) if planned.is_due(iteration))
    return () if planned.fault.iteration is None else (planned.fault.iteration,)
