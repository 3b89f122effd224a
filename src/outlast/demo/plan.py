"""The plan: which faults strike, whom, and at which iterations. Pure, and the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from outlast.errors import ConfigError
from outlast.incidents import IncidentKind

__all__ = ["NUM_FAULTS", "Fault", "Shape", "draw_faults", "least_iterations"]

_LEAD = 2
"""Generations before the first fault."""
_GAP = 3
"""Generations between two faults. A restart goes back by two at most (the newest may not be committed when the fault
strikes), so that at least one newer than what was restored lies before the next, and one in the global tier too."""
_TAIL = 2
"""Generations after the last fault."""
_KINDS = (IncidentKind.WORKER_DIED, IncidentKind.WORKER_HUNG, IncidentKind.NODE_LOST)
NUM_FAULTS = len(_KINDS) + 1
"""One of each kind, and at the end a lost node whose ranks' copies on other nodes are bad."""
_GLOBAL_EVERY = 2
"""Of the saves, those that also go to the global tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the demo's world is, and how long it trains."""

    num_nodes: int = 2
    nproc_per_node: int = 2
    iterations: int = 100
    save_interval: int = 5
    """Iterations between two saves to the near tiers."""

    @property
    def global_save_interval(self) -> int:
        """Iterations between two saves to all tiers."""
        return _GLOBAL_EVERY * self.save_interval

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.nproc_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault to cause."""

    kind: IncidentKind
    """The incident that it should be noticed as."""
    iteration: int
    """It strikes once this many iterations are done."""
    rank: int | None = None
    """Global rank that it befalls; ``None`` when it is a node."""
    slot: int | None = None
    """Node rank that it befalls; ``None`` when it is a rank."""
    spoils_copies: bool = False
    """Whether a byte is flipped before in every copy that other nodes hold."""

    @property
    def action(self) -> str:
        """What is done, for people."""
        deed = {
            IncidentKind.WORKER_DIED: "SIGKILL of a rank",
            IncidentKind.WORKER_HUNG: "SIGSTOP of a rank",
            IncidentKind.NODE_LOST: "SIGKILL of a node's agent, disk erased",
        }[self.kind]
        return f"{deed}, copies damaged" if self.spoils_copies else deed


def least_iterations(save_interval: int) -> int:
    """Return how many iterations the faults need at least."""
    return (_LEAD + _GAP * (NUM_FAULTS - 1) + _TAIL) * save_interval


def draw_faults(seed: int, shape: Shape) -> tuple[Fault, ...]:
    """Return one fault of each kind, in the order in which they strike, and a lost node with spoiled copies after them.

    Order, victims and iterations depend on the arguments alone. No fault strikes at the iteration of a save, so that
    each of them costs something; the last one strikes after a generation that is on the nodes alone, so that all ranks
    have to go back further than to the newest.

    Raises:
        ConfigError: There are too few iterations for four faults.
    """
    least = least_iterations(shape.save_interval)
    if shape.iterations < least:
        raise ConfigError(f"--iterations={shape.iterations} is too few for four faults; give at least {least}")
    numbers = random.Random(seed)
    kinds = numbers.sample(_KINDS, len(_KINDS))
    if kinds[-1] == IncidentKind.NODE_LOST:
        kinds.insert(numbers.randrange(len(kinds) - 1), kinds.pop())  # another spare has time to come before the next
    kinds.append(IncidentKind.NODE_LOST)
    spare_room = (shape.iterations - least) // shape.save_interval
    shifts = sorted(numbers.randint(0, spare_room) for _ in kinds)
    if (_LEAD + _GAP * (NUM_FAULTS - 1) + shifts[-1]) % _GLOBAL_EVERY == 0:
        shifts = [min(shift, shifts[-1] - 1) for shift in shifts]
    faults = []
    for index, (kind, shift) in enumerate(zip(kinds, shifts, strict=True)):
        generation = _LEAD + _GAP * index + shift
        offset = numbers.randint(1, shape.save_interval - 1) if shape.save_interval > 1 else 0
        is_node = kind == IncidentKind.NODE_LOST
        faults.append(
            Fault(
                kind=kind,
                iteration=generation * shape.save_interval + offset,
                rank=None if is_node else numbers.randrange(shape.world_size),
                slot=numbers.randrange(shape.num_nodes) if is_node else None,
                spoils_copies=index == NUM_FAULTS - 1,
            )
        )
    return tuple(faults)
