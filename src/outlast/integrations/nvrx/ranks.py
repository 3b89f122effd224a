"""A rank's place in a restart by NVRx's names, and the rules of NVRx that assign ranks.

The rules take and return an :class:`outlast.inprocess.Assignment`, as the engine's do. :class:`LayeredTree` follows the
documented steps of NVRx's ``Tree``.
"""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping

from outlast import env
from outlast.config.base import require
from outlast.errors import ConfigError, RestartAbort
from outlast.policy.rank_assignment import Assignment, Member, fill_gaps, keep_first, keep_multiple, shift_up


class Mode(enum.Enum):
    """What this rank does now."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


@dataclasses.dataclass(frozen=True)
class FrozenWrapperState:
    """This rank's place in one restart, by NVRx's names."""

    rank: int | None
    """Its rank in the function; of a spare, the rank that it was started as."""
    world_size: int
    """How many processes are left, spares included."""
    active_rank: int | None = None
    """Its rank in the function; ``None``: it is a spare."""
    active_world_size: int | None = None
    """How many ranks run the function."""
    initial_rank: int | None = None
    """The rank that it was started as."""
    initial_world_size: int | None = None
    """How many processes were started."""
    iteration: int = 0
    """Number of the restart; 0 = the function's first call."""
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None
    """What the function raised here last, if it did in the call that was left."""
    node: str = ""
    """Name of the node."""
    fault_counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Faults so far, by initial rank."""

    @classmethod
    def from_env(cls) -> FrozenWrapperState:
        """Return it as it is before the first call."""
        place = env.read_worker()
        rank, size = place.global_rank, place.world_size
        return cls(rank, size, initial_rank=rank, initial_world_size=size, node=place.node)


class AssignmentRule(ABC):
    """A rule that assigns ranks. The engine gives it an ``Assignment``, and no store.

    Raises:
        ConfigError: By a class of the script's own: NVRx's context does not exist here.
    """

    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__:
            raise ConfigError(
                f"{cls.__qualname__} is a rank assignment of your own, and NVRx's context does not exist here; pass a "
                "function that takes and returns an outlast.inprocess.Assignment"
            )

    @abstractmethod
    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment to use."""


class ActivateAllRanks(AssignmentRule):
    """Make all spares ranks, behind the others."""

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without spares."""
        return assignment.with_order([*assignment.in_order(), *assignment.spares])


class ShiftRanksUp(AssignmentRule):
    """Move survivors up into the gaps, in order; spares follow behind them."""

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps."""
        return shift_up(assignment)


class FillGapsFromTheEnd(AssignmentRule):
    """Fill gaps with spares, and where there are none, with the last ranks."""

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps."""
        return fill_gaps(assignment, may_shrink=True)


class AtMostActive(AssignmentRule):
    """Make ranks spares beyond a number.

    Args:
        max_active_world_size: Most ranks that run the function; ``None`` = all.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        limit = max_active_world_size
        require(limit is None or limit >= 1, f"max_active_world_size={limit} must be at least 1; None = all")
        self._limit = limit

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment with at most that many ranks."""
        return assignment if self._limit is None else keep_first(assignment, self._limit)


class ActiveDivisibleBy(AssignmentRule):
    """Make the last ranks spares, so that a number divides how many run the function.

    Args:
        divisor: The number.
    """

    def __init__(self, divisor: int = 1) -> None:
        require(divisor >= 1, f"divisor={divisor} must be at least 1")
        self._divisor = divisor

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment with a multiple of that many ranks."""
        return keep_multiple(assignment, self._divisor)


class LayerFlag(enum.Flag):
    """Where a gap in a branch may be filled from."""

    RESERVE = enum.auto()
    """From the spares of the branch."""
    BACKFILL = enum.auto()
    """By the last rank of the branch."""


@dataclasses.dataclass
class Layer:
    """One layer of a :class:`LayeredTree`, which divides each branch of the layer before it."""

    min_ranks: int | None = 1
    """Fewest living ranks of a branch; one with fewer is given up, with all its ranks."""
    max_ranks: int | None = None
    """Most ranks of a branch that run the function; ``None`` = no limit."""
    key_or_fn: str | Callable[[FrozenWrapperState], str] = ""
    """The branch that a rank is in: a text, or a function of its state, asked once on each rank."""
    flag: LayerFlag | None = None
    """Where a gap in a branch may be filled from; ``None`` = from nowhere."""


class LayeredTree(AssignmentRule):
    """Assign ranks by their place in the machine.

    At first the ranks are made active in order, as far as each branch's ``max_ranks`` allow. Later branches that fell
    below ``min_ranks`` are given up, and a gap is filled from the nearest branch around it that lets spares be taken,
    else by the last rank of one that lets that be; what is left is closed by moving ranks up.

    Args:
        layers: From the whole machine to its smallest part.
        world_size_filter: Returns how many of that many ranks are to run the function.

    Raises:
        ConfigError: There is no layer.
    """

    def __init__(self, layers: list[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        require(bool(layers), "Tree(layers=[]) has no layers; name at least one")
        self.layers, self.world_size_filter = layers, world_size_filter

    def labels(self) -> dict[str, str]:
        """Return this rank's branches, for ``Member.labels``."""
        state = FrozenWrapperState.from_env()
        keys = [layer.key_or_fn for layer in self.layers]
        return {f"layer-{number}": str(key(state) if callable(key) else key) for number, key in enumerate(keys)}

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps.

        Raises:
            RestartAbort: Fewer ranks live than the whole machine has to have.
        """
        growing = _Growing(self.layers, assignment)
        if not growing.usable:
            raise RestartAbort(
                f"{len(assignment.living)} ranks live, and no part of the machine has its min_ranks; restart the job",
                iteration=assignment.iteration,
            )
        if not assignment.previous:
            growing.activate_all()
        else:
            growing.fill_from_spares()
            growing.fill_from_the_end()
        ended = growing.closed()
        if self.world_size_filter is not None:
            wanted = self.world_size_filter(ended.active_world_size)
            text = f"world_size_filter returned {wanted} for {ended.active_world_size} ranks; it must not return more"
            require(0 <= wanted <= ended.active_world_size, text)
            ended = keep_first(ended, wanted)
        return ended


class _Growing:
    """Ranks on their way into a tree."""

    def __init__(self, layers: list[Layer], given: Assignment) -> None:
        self._layers, self._given = layers, given
        depth = len(layers)
        self._paths = {
            member.initial_rank: tuple(member.labels.get(f"layer-{number}", "") for number in range(depth))
            for member in given.members
        }
        living = {member.initial_rank for member in given.living}
        for number in range(depth, 0, -1):  # a branch that is given up counts for nothing in the one around it
            least = layers[number - 1].min_ranks or 1
            counts = self._count(living, number)
            living = {initial for initial in living if counts[self._paths[initial][:number]] >= least}
        self.usable = living
        """Initial ranks that can be given a rank."""
        self._ranks = {initial: rank for initial, rank in given.ranks.items() if initial in living}

    def activate_all(self) -> None:
        """Give ranks in the order of the branches, as far as there is room."""
        order = list[tuple[str, ...]]()
        for initial in self._paths:
            if self._paths[initial] not in order:
                order.append(self._paths[initial])
        firsts: dict[tuple[str, ...], int] = {}
        for number, path in enumerate(order):
            for depth in range(len(path) + 1):
                firsts.setdefault(path[:depth], number)
        by_branch = sorted(
            self.usable,
            key=lambda one: ([firsts[self._paths[one][:d]] for d in range(len(self._layers) + 1)], one),
        )
        self._ranks = {}
        for initial in by_branch:
            if self._has_room(initial):
                self._ranks[initial] = len(self._ranks)

    def fill_from_spares(self) -> None:
        """Fill each gap from the nearest branch whose spares may be taken."""
        for gap in self._gaps():
            for branch in self._branches_around(gap, LayerFlag.RESERVE):
                spares = (one for one in self._members(branch) if one not in self._ranks and self._has_room(one))
                if (found := next(spares, None)) is not None:
                    self._ranks[found] = gap
                    break

    def fill_from_the_end(self) -> None:
        """Fill each gap by the last rank of the nearest branch of which that may be taken."""
        for gap in self._gaps():
            for branch in self._branches_around(gap, LayerFlag.BACKFILL):
                active = [one for one in self._members(branch) if self._ranks.get(one, -1) > gap]
                if active:
                    self._ranks[max(active, key=lambda one: self._ranks[one])] = gap
                    break

    def closed(self) -> Assignment:
        """Return the assignment, with ranks moved up into the gaps that are left."""
        members = {member.initial_rank: member for member in self._given.members}
        order: list[Member] = [members[one] for one in sorted(self._ranks, key=lambda one: self._ranks[one])]
        return self._given.with_order(order)

    def _gaps(self) -> list[int]:
        taken = set(self._ranks.values())
        return [rank for rank in sorted(self._given.previous) if rank not in taken]

    def _branches_around(self, gap: int, flag: LayerFlag) -> Iterator[tuple[str, ...]]:
        """Yield the branches around a gap that have the flag, from the smallest on, until one has it not."""
        path = self._paths[self._given.previous[gap].initial_rank]
        for number in range(len(self._layers), 0, -1):
            if flag not in (self._layers[number - 1].flag or LayerFlag(0)):
                return
            yield path[:number]

    def _members(self, branch: tuple[str, ...]) -> list[int]:
        return [one for one in sorted(self.usable) if self._paths[one][: len(branch)] == branch]

    def _has_room(self, initial: int) -> bool:
        path = self._paths[initial]
        for number, layer in enumerate(self._layers, start=1):
            num_active = self._count(self._ranks, number).get(path[:number], 0)
            if layer.max_ranks is not None and num_active >= layer.max_ranks:
                return False
        return True

    def _count(self, ranks: Iterable[int], depth: int) -> dict[tuple[str, ...], int]:
        counts: dict[tuple[str, ...], int] = {}
        for initial in ranks:
            branch = self._paths[initial][:depth]
            counts[branch] = counts.get(branch, 0) + 1
        return counts
