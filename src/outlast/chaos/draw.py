"""What a plan leaves open, drawn from its seed: the same on every rank, in every cycle. Pure.

Each draw has a key of its own (fault, purpose, iteration) and depends on nothing else, so that it does not matter
which ranks draw, how often, or from which iteration a restarted run goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from outlast.chaos.fault import Fault
from outlast.chaos.plan import FaultPlan
from outlast.env import WorkerEnv

__all__ = ["Occurrence", "PlannedFault", "planned_faults"]

_SCALE = 1 << 64


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault together with what tells its draws from those of others."""

    seed: int
    index: int
    """Its place in the plan, from 0."""
    fault: Fault
    fault_id: str
    """Names it in the journal and in its marker: place and fingerprint; an edited fault is another."""

    def draw(self, count: int, purpose: str, iteration: int = 0) -> int:
        """Return a number from 0 to below ``count``."""
        return self._number(purpose, iteration) * count // _SCALE

    def is_due(self, iteration: int) -> bool:
        """Say whether the step at this iteration is struck, on whatever rank; one with ``after_s`` is not asked."""
        if self.fault.rate is None:
            return iteration == self.fault.iteration
        return self._number("due", iteration) < self.fault.rate * _SCALE

    def befalls(self, place: WorkerEnv, device: str, iteration: int) -> bool:
        """Say whether this rank is struck when the step at this iteration is."""
        fault = self.fault
        if fault.rank is not None:
            return place.global_rank == fault.rank
        if fault.node is not None:
            return place.node == fault.node
        if fault.device is not None:
            return device == fault.device
        return place.global_rank == self.draw(place.world_size, "rank", iteration)

    def can_befall(self, place: WorkerEnv, device: str) -> bool:
        """Say whether this rank is struck at any iteration."""
        is_drawn = self.fault.rank is None and self.fault.node is None and self.fault.device is None
        return (is_drawn and self.fault.rate is not None) or self.befalls(place, device, self.fault.iteration or 0)

    def next_due(self, iteration: int, *, horizon: int) -> int | None:
        """Return the first iteration from this one on at which it is due.

        Args:
            iteration: Where to begin.
            horizon: How many iterations to look at where each has to be drawn.

        Returns:
            The iteration; ``iteration + horizon`` if nothing is due before; ``None`` when it is never due again.
        """
        if self.fault.rate is None:
            due = self.fault.iteration
            return due if due is not None and due >= iteration else None
        ahead = range(iteration, iteration + horizon)
        return next((number for number in ahead if self.is_due(number)), ahead.stop)

    def _number(self, purpose: str, iteration: int) -> int:
        key = f"{self.seed}/{self.index}/{purpose}/{iteration}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time that a fault is due on this rank."""

    planned: PlannedFault
    iteration: int

    @property
    def fault(self) -> Fault:
        """The fault."""
        return self.planned.fault

    def draw(self, count: int, purpose: str) -> int:
        """Return a number from 0 to below ``count``, drawn for this iteration."""
        return self.planned.draw(count, purpose, self.iteration)


def planned_faults(plan: FaultPlan) -> Iterator[PlannedFault]:
    """Yield a plan's faults with their names."""
    for index, fault in enumerate(plan.faults):
        content = json.dumps([plan.seed, fault.to_mapping()], sort_keys=True).encode()
        fingerprint = hashlib.blake2b(content, digest_size=4).hexdigest()
        yield PlannedFault(plan.seed, index, fault, f"{index}-{fingerprint}")
