"""The plan: which faults strike, whom and at which iterations, and what the cluster must look like when they do.

Pure, and the same for the same seed. A scene is what the cluster looks like at one moment.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from outlast.errors import ConfigError, ExitReason
from outlast.incidents import Event, EventKind, IncidentKind, Rung

_LEAD = 4
"""Generations before the first fault that costs a restart; meanwhile a slow rank is looked for."""
_SLOW_BY = 3
"""Iteration by which a rank becomes slow: the first ones are not timed, so that the first report has it all."""
_GAP = 3
"""Generations between two of them. A restart goes back by two at most (the newest may not be committed when the fault
strikes), so that at least one newer than what was restored lies before the next, and one in the global tier too."""
_CALM = 2
"""Generations from the last fault that costs a restart to the moment when a rank gets a notice."""
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
    """A notice, as before a preemption: all ranks save and exit, and another job resumes."""

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
        """Whether a plan of faults causes it within the training; else the demo causes it from outside."""
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
    """Global rank that it strikes; ``None`` when it is a node."""
    slot: int | None = None
    """Node rank that it strikes; ``None`` when it is a rank."""


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


_MARGIN = 2
"""Iterations before one in which a planned fault strikes: from there on nothing else strikes until that is settled."""
_PATIENCE = 8
"""Reports in which a slow rank may be named; then the demo continues without."""


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
class Loss:
    """A loss that rank 0 printed, and the iteration that it is of."""

    iteration: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All ranks, and all that is in the journal."""

    ranks: tuple[RankScene, ...]
    events: Sequence[Event]
    """By time."""
    loss: Loss | None = None
    """The newest that rank 0 printed."""
    running: tuple[str, ...] = ()
    """Nodes whose agent runs."""
    of_job: Sequence[Event] = field(init=False, repr=False, compare=False)
    """The events of the newest job that has had workers; all, before there are any."""

    def __post_init__(self) -> None:
        job = next((event.job for event in reversed(self.events) if event.kind == EventKind.CYCLE_STARTED), None)
        object.__setattr__(self, "of_job", [event for event in self.events if job in (None, event.job)])

    def select(self, *kinds: EventKind, cycle: int | None = None) -> list[Event]:
        """Return the newest job's events of some kinds, of all its cycles or of one."""
        return [event for event in self.of_job if event.kind in kinds and cycle in (None, event.cycle)]

    @property
    def cycle(self) -> int:
        """The newest cycle that has workers, of the newest job; -1 = none yet."""
        return max((event.cycle or 0 for event in self.select(EventKind.CYCLE_STARTED)), default=-1)

    @property
    def iteration(self) -> int:
        """Iterations done by the foremost rank of the newest cycle; 0 while none has restored anything."""
        cycle = self.cycle
        on_boards = [one.iteration for one in self.ranks if one.cycle == cycle]
        written = self.select(EventKind.RESTORED, EventKind.PROGRESS, EventKind.SESSION_ENDED, cycle=cycle)
        return max([*on_boards, *(event.iteration or 0 for event in written)], default=0)

    @property
    def is_training(self) -> bool:
        """Whether the newest cycle has done an iteration, or restored one, and no verdict has ended it."""
        verdicts = (event.data["verdict"] for event in self.select(EventKind.VERDICT, cycle=self.cycle))
        is_decided = any(verdict.get("exit_code") != ExitReason.FINISHED for verdict in verdicts)
        return self.cycle >= 0 and self.iteration > 0 and not is_decided

    @property
    def durable(self) -> int | None:
        """The newest committed generation's iteration."""
        committed = (_generation(event) for event in self.events if event.kind == EventKind.SAVE_COMMITTED)
        return max((iteration for iteration in committed if iteration is not None), default=None)

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that have joined, carry no rank in the newest cycle, and may get a slot."""
        joined = {event.data["name"] for event in self.select(EventKind.NODE_JOINED)}
        others = self.ranks_by_node().keys() | self.quarantined
        return tuple(node for node in self.running if node in joined and node not in others)

    @property
    def quarantined(self) -> frozenset[str]:
        """Nodes that get no slot any more."""
        verdicts = (event.data["verdict"] for event in self.events if event.kind == EventKind.VERDICT)
        return frozenset(node for verdict in verdicts for node in verdict.get("quarantine", ()))

    def has_struck(self, fault: DemoFault) -> bool:
        """Return whether a fault is on record as caused."""
        struck = (event for event in self.events if event.kind == EventKind.FAULT_SIMULATED)
        return any(event.data["fault"] == fault.deed and event.rank == fault.rank for event in struck)

    def is_judged(self, fault: DemoFault) -> bool:
        """Return whether something was done about a planned fault, or, of a slow rank, whether it was named."""
        if fault.deed == Deed.SLOW:
            reports = [event for event in self.events if event.kind == EventKind.STRAGGLER_REPORT]
            return any(fault.rank in event.data["named"] for event in reports) or len(reports) >= _PATIENCE
        for event in self.events:
            if event.kind in (EventKind.INCIDENT, EventKind.VERDICT) and {"verdict", "incident"} <= event.data.keys():
                incident, rung = event.data["incident"], event.data["verdict"]["rung"]
                is_its = "diagnosis" in incident.get("evidence", {}) and incident.get("rank") == fault.rank
                if is_its and (rung == Rung.RERUN_STEP) == (fault.deed == Deed.NAN):
                    return True
        return False

    def safe(self, cycle: int, *, num_ranks: int, tier: str | None = None) -> int:
        """Return the newest generation that all ranks saw committed in a cycle; 0 = none.

        Args:
            cycle: The cycle.
            num_ranks: How many ranks there are.
            tier: Committed to this tier; ``None`` = to any.
        """
        ranks: dict[int, set[int | None]] = {}
        for event in self.select(EventKind.SAVE_COMMITTED, cycle=cycle):
            if (tier is None or tier in event.data["tiers"]) and (generation := _generation(event)) is not None:
                ranks.setdefault(generation, set()).add(event.rank)
        return max((generation for generation, seen in ranks.items() if len(seen) >= num_ranks), default=0)

    def restored(self, cycle: int) -> int:
        """Return the iteration that a cycle resumed from; 0 = it started from the beginning."""
        return max((event.iteration or 0 for event in self.select(EventKind.RESTORED, cycle=cycle)), default=0)

    def holder(self, slot: int) -> str:
        """Return the node that holds a slot in the newest cycle.

        Raises:
            LookupError: None does.
        """
        for event in reversed(self.select(EventKind.CYCLE_STARTED, cycle=self.cycle)):
            if event.data.get("node_rank") == slot:
                return event.node
        raise LookupError(f"no node holds slot {slot}")

    def ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        """Return the nodes that carry ranks in the newest cycle, or did in the last one, with their ranks."""
        started = self.select(EventKind.CYCLE_STARTED, cycle=self.cycle)
        return {event.node: tuple(event.data["ranks"]) for event in started}


def is_time(
    fault: DemoFault, scene: Scene, *, world_size: int, after_cycle: int, planned: Sequence[DemoFault] = ()
) -> bool:
    """Return whether a fault may strike from outside now.

    Args:
        fault: The fault.
        scene: What the cluster looks like.
        world_size: Number of ranks.
        after_cycle: The cycle that the last fault struck; the next one strikes a later one.
        planned: Faults that strike by themselves, in their iterations.
    """
    cycle = scene.cycle
    if cycle <= after_cycle:
        return False
    if any(event.kind == EventKind.VERDICT and (event.cycle or 0) >= cycle for event in scene.of_job):
        return False  # it is ending for another reason
    here = [one for one in scene.ranks if one.cycle == cycle]
    if len(here) < world_size or any(one.iteration < fault.iteration for one in here):
        return False
    coming = [other for other in planned if not scene.is_judged(other)]
    if any(scene.iteration >= other.iteration - _MARGIN for other in coming):
        return False  # a restart now would wipe out what it did, or is about to do
    if fault.deed == Deed.LEAVE:
        return True
    if fault.deed.needs_spare and len(scene.spares) <= sum(other.deed.needs_spare for other in coming):
        return False  # no node could take its place, or that of a planned fault's node
    tier = "global" if fault.deed == Deed.SPOIL else None
    return scene.safe(cycle, num_ranks=world_size, tier=tier) > scene.restored(cycle)


def _generation(event: Event) -> int | None:
    if event.iteration is not None:
        return event.iteration
    generation = event.data.get("generation")
    return generation if isinstance(generation, int) else None
