"""The plan: which faults strike, whom, and at which iterations. Pure, and the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from outlast.errors import ConfigError
from outlast.incidents import IncidentKind

__all__ = ["NUM_FAULTS", "Deed", "DemoFault", "Shape", "draw_faults", "least_iterations"]

_LEAD = 4
"""Generations before the first fault that costs a restart; meanwhile a slow rank is looked for."""
_SLOW_BY = 3
"""Iteration by which a rank becomes slow: the first ones are not timed, so that the first report has it all."""
_GAP = 3
"""Generations between two of them. A restart goes back by two at most (the newest may not be committed when the fault
strikes), so that at least one newer than what was restored lies before the next, and one in the global tier too."""
_CALM = 2
"""Generations from the last fault that costs a restart to the moment when a rank is told to leave."""
_TAIL = 2
"""Generations after that."""
_GLOBAL_EVERY = 2
"""Of the saves, those that also go to the global tier."""


class Deed(StrEnum):
    """What is done, for people."""

    KILL = "SIGKILL of a rank"
    STOP = "SIGSTOP of a rank"
    LOSE = "SIGKILL of a node's agent, disk erased"
    SPOIL = "SIGKILL of a node's agent, disk erased, copies damaged"
    """A byte is flipped before in every copy that other nodes hold."""
    NAN = "NaN in an activation"
    FLIP = "bit flip in a weight"
    SLOW = "slow forward of a rank"
    """Until its process is replaced by another one, after the next fault."""
    LEAVE = "SIGTERM of a rank"
    """A notice, as before a preemption: all ranks save and leave, and another job goes on."""

    @property
    def expected(self) -> IncidentKind | None:
        """The incident that it should be noticed as; ``None``: it is to be none."""
        return _EXPECTED.get(self)

    @property
    def loses_node(self) -> bool:
        """Whether a node is gone after it, rather than a rank struck."""
        return self in (Deed.LOSE, Deed.SPOIL)

    @property
    def is_planned(self) -> bool:
        """Whether a plan of faults has it befall the training from within; else the demo does it from outside."""
        return self in (Deed.SLOW, Deed.NAN, Deed.FLIP)

    @property
    def needs_spare(self) -> bool:
        """Whether a node has to wait to take a slot after it."""
        return self.loses_node or self == Deed.FLIP


_EXPECTED = {
    Deed.KILL: IncidentKind.WORKER_DIED,
    Deed.STOP: IncidentKind.WORKER_HUNG,
    Deed.LOSE: IncidentKind.NODE_LOST,
    Deed.SPOIL: IncidentKind.NODE_LOST,
    Deed.NAN: IncidentKind.INVALID_RESULT,
    Deed.FLIP: IncidentKind.INVALID_RESULT,
}
_DRAWN = (Deed.KILL, Deed.STOP, Deed.LOSE, Deed.FLIP)
_LAST = _LEAD + _GAP * len(_DRAWN) + 1
"""Generations before the last fault, at least: so many that the newest is not in the global tier."""
NUM_FAULTS = len(_DRAWN) + 4
"""Four in any order and a lost node whose ranks' copies are bad, which cost a restart each; a slow rank and a NaN,
which cost none; and at the end a notice to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the demo's world is, and how long it trains."""

    num_nodes: int = 2
    nproc_per_node: int = 2
    iterations: int = 115
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
class DemoFault:
    """One fault to cause."""

    deed: Deed
    iteration: int
    """It strikes once this many iterations are done; a planned one in the step that follows."""
    rank: int | None = None
    """Global rank that it befalls; ``None`` when it is a node."""
    slot: int | None = None
    """Node rank that it befalls; ``None`` when it is a rank."""


def least_iterations(save_interval: int) -> int:
    """Return how many iterations the faults need at least."""
    return (_LAST + _CALM + _TAIL) * save_interval


def draw_faults(seed: int, shape: Shape) -> tuple[DemoFault, ...]:
    """Return one fault of each kind, in the order in which they strike.

    Order, victims and iterations depend on the arguments alone. No fault strikes at the iteration of a save, so that
    each restart costs something. The lost node with spoiled copies is the last that costs one, after a generation that
    is on the nodes alone, so that all ranks have to go back further than to the newest. The NaN comes a generation
    before one of the others, or two. The slow rank is the first, and no bit flips before a restart has made it fast
    again. The notice to leave comes at the end.

    Raises:
        ConfigError: There are too few iterations for the faults.
    """
    least = least_iterations(shape.save_interval)
    if shape.iterations < least:
        raise ConfigError(f"--iterations={shape.iterations} is too few for {NUM_FAULTS} faults; give at least {least}")
    numbers = random.Random(seed)
    deeds = numbers.sample(_DRAWN, len(_DRAWN))
    if deeds[0] == Deed.FLIP:
        deeds[0], deeds[1] = deeds[1], deeds[0]  # it comes in its iteration, whether the slow rank is named or not
    if deeds[-1] == Deed.LOSE:
        deeds.insert(numbers.randrange(len(deeds) - 1), deeds.pop())  # another spare has time to come before the next
    deeds.append(Deed.SPOIL)
    spare_room = (shape.iterations - least) // shape.save_interval
    shifts = sorted(numbers.randint(0, spare_room) for _ in deeds)
    if (_LAST + shifts[-1]) % _GLOBAL_EVERY == 0:
        shifts = [min(shift, shifts[-1] - 1) for shift in shifts]
    *earlier, latest = shifts
    generations = [*(_LEAD + _GAP * index + shift for index, shift in enumerate(earlier)), _LAST + latest]
    before_nan = numbers.choice(generations) - 1
    drawn = [*zip(deeds, generations, strict=True), (Deed.NAN, before_nan), (Deed.LEAVE, generations[-1] + _CALM)]
    faults = [_draw_fault(numbers, deed, generation, shape) for deed, generation in drawn]
    slow_from = numbers.randint(1, max(1, min(_SLOW_BY, shape.save_interval - 1)))
    faults.append(DemoFault(deed=Deed.SLOW, iteration=slow_from, rank=numbers.randrange(shape.world_size)))
    return tuple(sorted(faults, key=lambda fault: fault.iteration))


def _draw_fault(numbers: random.Random, deed: Deed, generation: int, shape: Shape) -> DemoFault:
    offset = numbers.randint(1, shape.save_interval - 1) if shape.save_interval > 1 else 0
    return DemoFault(
        deed=deed,
        iteration=generation * shape.save_interval + offset,
        rank=None if deed.loses_node else numbers.randrange(shape.world_size),
        slot=numbers.randrange(shape.num_nodes) if deed.loses_node else None,
    )
