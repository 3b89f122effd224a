"""What a rank knows of its place among the others, from the orders that it was given and the faults since."""

from __future__ import annotations

from collections.abc import Iterable

from outlast import env
from outlast.inprocess import messages as m
from outlast.inprocess.state import State
from outlast.policy.restart_faults import add_fault, count_causes

__all__ = ["OwnFacts"]


class OwnFacts:
    """The last order to go, and the faults since.

    Args:
        place: This process's place at its start.

    Thread: the main thread; :meth:`describe` from any.
    """

    def __init__(self, place: env.WorkerEnv) -> None:
        self.place = place
        self.iteration = 0
        """The one that this rank was told to enter last."""
        self._go: m.Go | None = None
        self._faults: tuple[m.Fault, ...] = ()

    def note_go(self, go: m.Go) -> None:
        """Note an order to go; its counts have all faults before it."""
        self._go, self.iteration, self._faults = go, go.iteration, ()

    def note_faults(self, faults: Iterable[m.Fault]) -> None:
        """Note faults since the last order to go."""
        for fault in faults:
            self._faults = add_fault(self._faults, fault)

    def describe(self) -> State:
        """Return it as plug-ins are told."""
        go, place = self._go, self.place
        ranks = go.ranks if go is not None else {}
        return State(
            initial_rank=place.global_rank,
            initial_world_size=place.world_size,
            rank=ranks.get(place.global_rank),
            world_size=len(ranks) or place.world_size,
            active_world_size=go.active_world_size if go is not None else place.world_size,
            iteration=self.iteration,
            node=place.node,
            fault_counts=count_causes(go.fault_counts if go is not None else {}, self._faults),
        )
