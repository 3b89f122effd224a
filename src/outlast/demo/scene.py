"""The scene: what the demo's cluster looks like at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outlast.demo.plan import Fault
from outlast.incidents import Event, EventKind, IncidentKind

__all__ = ["RankScene", "Scene", "is_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScene:
    """One rank, as its node's heartbeat board has it."""

    rank: int
    node: str
    pid: int
    cycle: int
    iteration: int
    """Iterations done."""
    section: str = ""
    """Path of its open sections, joined by ``/``; empty outside all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All ranks, and all that is in the journal."""

    ranks: tuple[RankScene, ...]
    events: Sequence[Event]
    """By time."""
    loss: float | None = None
    """The newest that rank 0 printed."""
    running: tuple[str, ...] = ()
    """Nodes whose agent runs."""

    @property
    def cycle(self) -> int:
        """The newest cycle that has workers; -1 = none yet."""
        cycles = (event.cycle for event in self.events if event.kind == EventKind.CYCLE_STARTED)
        return max((cycle for cycle in cycles if cycle is not None), default=-1)

    @property
    def iteration(self) -> int:
        """Iterations done by the foremost rank of the newest cycle; 0 while none has restored anything."""
        cycle = self.cycle
        on_boards = [one.iteration for one in self.ranks if one.cycle == cycle]
        kinds = (EventKind.RESTORED, EventKind.PROGRESS, EventKind.SESSION_ENDED)
        written = [event.iteration or 0 for event in self.events if event.kind in kinds and event.cycle == cycle]
        return max([*on_boards, *written], default=0)

    @property
    def durable(self) -> int | None:
        """The newest committed generation's iteration."""
        committed = (_generation(event) for event in self.events if event.kind == EventKind.SAVE_COMMITTED)
        return max((iteration for iteration in committed if iteration is not None), default=None)

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that have joined and carry no rank in the newest cycle."""
        cycle = self.cycle
        joined = {event.data["name"] for event in self.events if event.kind == EventKind.NODE_JOINED}
        started = (event for event in self.events if event.kind == EventKind.CYCLE_STARTED)
        busy = {event.node for event in started if event.cycle == cycle}
        return tuple(node for node in self.running if node in joined and node not in busy)

    def safe(self, cycle: int, *, num_ranks: int, tier: str | None = None) -> int:
        """Return the newest generation that all ranks saw committed in a cycle; 0 = none.

        Args:
            cycle: The cycle.
            num_ranks: How many ranks there are.
            tier: Committed to this tier; ``None`` = to any.
        """
        ranks: dict[int, set[int | None]] = {}
        for event in self.events:
            if event.kind != EventKind.SAVE_COMMITTED or event.cycle != cycle:
                continue
            if (tier is None or tier in event.data["tiers"]) and (generation := _generation(event)) is not None:
                ranks.setdefault(generation, set()).add(event.rank)
        return max((generation for generation, seen in ranks.items() if len(seen) >= num_ranks), default=0)

    def restored(self, cycle: int) -> int:
        """Return the iteration that a cycle went on from; 0 = it began anew."""
        found = (e.iteration for e in self.events if e.kind == EventKind.RESTORED and e.cycle == cycle)
        return max((iteration for iteration in found if iteration is not None), default=0)

    def holder(self, slot: int) -> str:
        """Return the node that holds a slot in the newest cycle.

        Raises:
            LookupError: None does.
        """
        for event in reversed(self.events):
            is_start = event.kind == EventKind.CYCLE_STARTED and event.cycle == self.cycle
            if is_start and event.data.get("node_rank") == slot:
                return event.node
        raise LookupError(f"no node holds slot {slot}")

    def ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        """Return the nodes that carry ranks in the newest cycle, with their ranks."""
        cycle = self.cycle
        started = (event for event in self.events if event.kind == EventKind.CYCLE_STARTED and event.cycle == cycle)
        return {event.node: tuple(event.data["ranks"]) for event in started}


def is_time(fault: Fault, scene: Scene, *, world_size: int, after_cycle: int) -> bool:
    """Return whether a fault may strike now.

    Args:
        fault: The fault.
        scene: What the cluster looks like.
        world_size: Number of ranks.
        after_cycle: The cycle that the last fault struck; the next one strikes a later one.
    """
    cycle = scene.cycle
    if cycle <= after_cycle:
        return False
    if any(event.kind == EventKind.VERDICT and (event.cycle or 0) >= cycle for event in scene.events):
        return False  # it is ending for another reason
    here = [one for one in scene.ranks if one.cycle == cycle]
    if len(here) < world_size or any(one.iteration < fault.iteration for one in here):
        return False
    if fault.kind == IncidentKind.NODE_LOST and not scene.spares:
        return False  # nobody could take its place
    tier = "global" if fault.spoils_copies else None
    return scene.safe(cycle, num_ranks=world_size, tier=tier) > scene.restored(cycle)


def _generation(event: Event) -> int | None:
    if event.iteration is not None:
        return event.iteration
    generation = event.data.get("generation")
    return generation if isinstance(generation, int) else None
