"""The state of a rank under NVRx's names, and NVRx's rank assignment rules.

A rule takes and returns an :class:`outlast.inprocess.Assignment` and decides for all ranks at once, as the engine's
rules do. Given NVRx's :class:`RankAssignmentCtx`, a rule decides for the one rank of that context, as in NVRx, so that
scripts can test their rules. :class:`LayeredTree` follows the documented steps of NVRx's ``Tree``.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

from outlast import env
from outlast.config.base import require
from outlast.errors import ConfigError, OutlastError, RestartAbort
from outlast.inprocess.rank import RankLeft
from outlast.policy.rank_assignment import Assignment, Member, fill_gaps, keep_first, shift_up


class RestartError(OutlastError):
    """An in-process restart failed."""


class RankDiscarded(RestartError, RankLeft):
    """The rank assignment excludes this rank, or the other ranks continued without it."""


class Mode(enum.Enum):
    """Role of this rank."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


@dataclasses.dataclass
class WrapperState:
    """The state of this rank in one restart, with NVRx's field names."""

    rank: int | None
    """Rank in the function; for a spare its initial rank."""
    world_size: int
    """Number of remaining processes, spares included."""
    active_rank: int | None = None
    """Rank in the function; ``None`` for a spare."""
    active_world_size: int | None = None
    """Number of ranks that run the function."""
    initial_rank: int | None = None
    """Rank with which this process was started."""
    initial_world_size: int | None = None
    """Number of processes that were started."""
    iteration: int = 0
    """Number of the restart; 0 = the first call of the function."""
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None
    """Exception that the function raised on this rank in the failed call."""
    node: str = ""
    fault_counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Faults so far, by initial rank."""

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> WrapperState:
        """Return the state before the first call."""
        place = env.read_worker()
        return cls(place.global_rank, place.world_size, node=place.node)

    def freeze(self) -> FrozenWrapperState:
        """Return a copy whose fields cannot be set, as plug-ins get it."""
        return FrozenWrapperState(**vars(self))


if TYPE_CHECKING:
    FrozenWrapperState = WrapperState
else:
    FrozenWrapperState = dataclasses.make_dataclass(
        "FrozenWrapperState",
        [(field.name, field.type, field) for field in dataclasses.fields(WrapperState)],
        namespace={"__doc__": "A :class:`WrapperState` whose fields cannot be set.", "__module__": __name__},
        frozen=True,
    )


@dataclasses.dataclass
class RankAssignmentCtx:
    """NVRx's argument of a rule: the state of one rank, and the terminated ranks."""

    state: WrapperState
    store: Any
    """A store of NVRx; :class:`LayeredTree` exchanges the branches of all ranks through it."""
    terminated_ranks: set[int]
    """Terminated ranks, as numbers below ``state.world_size``."""


class AssignmentRule(ABC):
    """Base class of rank assignment rules.

    A script's own subclass implements ``__call__`` for the :class:`RankAssignmentCtx` of one rank, as in NVRx. One rank
    decides for all ranks: it calls a copy of the instance for each rank, with that rank's context. The copies, and
    their attributes, are lost when the deciding rank dies.

    Raises:
        ConfigError: A script's own subclass uses the store of the context, which no rank has.
    """

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith(__name__.rpartition(".")[0]):
            return
        if (own := vars(cls).get("__call__")) is None:
            return

        @functools.wraps(own)
        def call(self: AssignmentRule, given: Any) -> Any:
            return _assign_each(self, own, given) if isinstance(given, Assignment) else own(self, given)

        cls.__call__ = call  # type: ignore[method-assign]
        for name in {name for base in cls.__mro__[1:] for name in getattr(base, "__abstractmethods__", ())}:
            if getattr(getattr(cls, name), "__isabstractmethod__", False):
                setattr(cls, name, _refuse_assignment)

    @overload
    def __call__(self, given: Assignment) -> Assignment: ...
    @overload
    def __call__(self, given: RankAssignmentCtx) -> RankAssignmentCtx: ...
    def __call__(self, given: Assignment | RankAssignmentCtx) -> Assignment | RankAssignmentCtx:
        """Return the assignment, or the context, to use.

        Raises:
            RankDiscarded: With a context: its rank is terminated.
        """
        if isinstance(given, RankAssignmentCtx):
            return self.assign_one(given)
        return self.assign(given)

    @abstractmethod
    def assign(self, assignment: Assignment) -> Assignment:
        """Return the assignment to use."""

    def assign_one(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Assign the rank of a context its new rank among all ranks, active and inactive.

        Raises:
            RankDiscarded: The rank is terminated.
        """
        state, gone = ctx.state, set(ctx.terminated_ranks)
        members = tuple(
            Member(initial_rank=rank, node="", rank=rank, alive=rank not in gone) for rank in range(state.world_size)
        )
        kept = {member.initial_rank: member.initial_rank for member in members if member.alive}
        ended = self.assign(Assignment(members=members, iteration=state.iteration, ranks=kept))
        rank = state.rank
        if rank is None or rank not in ended.ranks:
            raise _discarded(rank, gone)
        ctx.state = dataclasses.replace(state, rank=ended.ranks[rank], world_size=len(kept))
        ctx.terminated_ranks = set()
        return ctx


def _refuse_assignment(self: AssignmentRule, *_: Any) -> Any:
    raise NotImplementedError(f"{type(self).__qualname__} decides for the rank of a RankAssignmentCtx only")


class _RefusingStore:
    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"a rank assignment of your own uses ctx.store.{name}, and no rank has NVRx's store; decide by ctx.state "
            "and ctx.terminated_ranks, or pass a function that takes and returns an outlast.inprocess.Assignment"
        )


def _assign_each(rule: AssignmentRule, own: Callable[[Any, Any], Any], given: Assignment) -> Assignment:
    """Return the assignment that results from calling a script's own rule once for each rank.

    Ranks are numbered as in NVRx: active ranks first, with gaps where ranks died, then the spares. A rule that changes
    only the number of a rank does not change which ranks run the function.

    Raises:
        ConfigError: The instance cannot be copied, or does not return a context.
    """
    numbers, gone = _number(given)
    copies: dict[int, AssignmentRule] = vars(rule).setdefault("_copies", {})
    ends: dict[int, WrapperState] = {}
    for initial, number in numbers.items():
        if initial not in copies:
            try:
                copies[initial] = copy.deepcopy(rule, {id(copies): {}})
            except Exception as error:
                text = f"{type(rule).__qualname__} cannot be copied for each rank ({error})"
                raise ConfigError(f"{text}; keep in it what can be copied") from error
        active = given.ranks.get(initial)
        state = WrapperState(
            rank=number,
            world_size=len(numbers) + len(gone),
            active_rank=active,
            active_world_size=given.active_world_size,
            initial_rank=initial,
            initial_world_size=len(given.members),
            iteration=given.iteration,
            mode=Mode.INACTIVE if active is None else Mode.ACTIVE,
        )
        try:
            ended = own(copies[initial], RankAssignmentCtx(dataclasses.replace(state), _RefusingStore(), set(gone)))
        except RankDiscarded:
            continue
        text = f"{type(rule).__qualname__} returned {type(ended).__name__}; it must return a RankAssignmentCtx"
        require(isinstance(ended, RankAssignmentCtx), text)
        if ended.state.mode != Mode.TERMINATED:
            ends[initial] = ended.state
    is_renumbered = all(one.active_rank == given.ranks.get(initial) for initial, one in ends.items())
    if is_renumbered:
        order = sorted((one.rank or 0, initial) for initial, one in ends.items() if one.active_rank is not None)
        ranks = {initial: rank for rank, (_, initial) in enumerate(order)}
    else:
        ranks = {initial: one.active_rank for initial, one in ends.items() if one.active_rank is not None}
    members = tuple(dataclasses.replace(one, alive=one.initial_rank in ends) for one in given.members)
    return dataclasses.replace(given, members=members, ranks=ranks)


def _number(given: Assignment) -> tuple[dict[int, int], set[int]]:
    """Return the number of each living member by initial rank, and the numbers of terminated ranks."""
    size = max((*given.ranks.values(), *given.previous), default=-1) + 1
    gone = set(range(size)) - set(given.ranks.values())
    if sorted(given.ranks.values()) == list(range(len(given.ranks))):
        size, gone = len(given.ranks), set()  # there is no gap
    spares = {member.initial_rank: size + number for number, member in enumerate(given.spares)}
    return {**given.ranks, **spares}, gone


def _discarded(rank: int | None, gone: set[int]) -> RankDiscarded:
    shown = ", ".join(map(str, sorted(gone)[:16])) + (", ..." if len(gone) > 16 else "")
    return RankDiscarded(f"rank {rank} is permanently removed: ranks {shown} are gone", rank=rank)


class ShiftRanksUp(AssignmentRule):
    """Close gaps by moving survivors up, in order; spares follow behind."""

    def assign(self, assignment: Assignment) -> Assignment:
        return shift_up(assignment)


class FillGapsFromTheEnd(AssignmentRule):
    """Fill gaps with spares, and without spares with the last ranks."""

    def assign(self, assignment: Assignment) -> Assignment:
        return fill_gaps(assignment, may_shrink=True)


class FilterRule(AssignmentRule):
    """A rule that limits how many ranks run the function; the first ranks do."""

    def assign(self, assignment: Assignment) -> Assignment:
        return keep_first(assignment, self.limit(assignment.active_world_size))

    def assign_one(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        state = ctx.state
        before = state.world_size if state.active_world_size is None else min(state.active_world_size, state.world_size)
        size = self.limit(before)
        is_active = state.rank is not None and state.rank < size
        ctx.state = dataclasses.replace(
            state,
            mode=Mode.ACTIVE if is_active else Mode.INACTIVE,
            active_rank=state.rank if is_active else None,
            active_world_size=size,
        )
        return ctx

    @abstractmethod
    def limit(self, size: int) -> int:
        """Return how many of ``size`` ranks run the function."""


class ActivateAllRanks(FilterRule):
    """Activate all spares, behind the other ranks."""

    def assign(self, assignment: Assignment) -> Assignment:
        return assignment.with_order([*assignment.in_order(), *assignment.spares])

    def assign_one(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        ctx.state = dataclasses.replace(ctx.state, active_world_size=None)
        return super().assign_one(ctx)

    def limit(self, size: int) -> int:
        return size


class AtMostActive(FilterRule):
    """Limit the number of active ranks; the others become spares."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        limit = max_active_world_size
        require(limit is None or limit >= 1, f"max_active_world_size={limit} must be at least 1; None = all")
        self.max_active_world_size = limit

    def limit(self, size: int) -> int:
        return size if self.max_active_world_size is None else min(size, self.max_active_world_size)


class ActiveDivisibleBy(FilterRule):
    """Make the last ranks spares, so that the number of active ranks is a multiple of ``divisor``."""

    def __init__(self, divisor: int = 1) -> None:
        require(divisor >= 1, f"divisor={divisor} must be at least 1")
        self.divisor = divisor

    def limit(self, size: int) -> int:
        return size // self.divisor * self.divisor


Key = str | int | Callable[[FrozenWrapperState], Any]


def _key_of(key: Key, state: WrapperState) -> str:
    return str(key(state.freeze()) if callable(key) else key)


class CountedGroups(AssignmentRule):
    """Permanently remove all ranks of a group, such as a node, of which too few survive.

    Rules to its left close the gaps: ``Compose(ShiftRanks(), FilterCountGroupedByKey(...))``.

    Args:
        key_or_fn: The group of a rank: a text, or a function of its state, called once on each rank.
        condition: Returns for the number of surviving ranks of a group whether the group stays.
        timeout: Accepted and not needed: one rank counts for all, within ``barrier_timeout``.
    """

    _num_made = 0

    def __init__(
        self, key_or_fn: Key, condition: Callable[[int], bool], timeout: timedelta = timedelta(seconds=60)
    ) -> None:
        require(callable(condition), f"condition={condition!r} cannot be called; pass a function of a number of ranks")
        self.key_or_fn, self.condition, self.timeout = key_or_fn, condition, timeout
        self._label = f"group-{CountedGroups._num_made}"
        CountedGroups._num_made += 1

    def labels(self) -> dict[str, str]:
        """Return this rank's group, for ``Member.labels``."""
        return {self._label: _key_of(self.key_or_fn, WrapperState.from_env())}

    def assign(self, assignment: Assignment) -> Assignment:
        counts = Counter(member.labels.get(self._label, "") for member in assignment.living)
        staying = {group for group, num in counts.items() if self.condition(num)}
        members = tuple(
            dataclasses.replace(one, alive=one.alive and one.labels.get(self._label, "") in staying)
            for one in assignment.members
        )
        living = {member.initial_rank for member in members if member.alive}
        ranks = {initial: rank for initial, rank in assignment.ranks.items() if initial in living}
        return dataclasses.replace(assignment, members=members, ranks=ranks)

    def assign_one(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Refuse a context, in which the ranks of a group cannot be counted.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "FilterCountGroupedByKey cannot count in a RankAssignmentCtx: that has no store of outlast's; pass it to "
            "Wrapper(rank_assignment=...), or give it an outlast.inprocess.Assignment"
        )


class LayerFlag(enum.Flag):
    """Sources from which a gap in a branch may be filled."""

    RESERVE = enum.auto()
    """The spares of the branch."""
    BACKFILL = enum.auto()
    """The last ranks of the branch."""


@dataclasses.dataclass
class Layer:
    """One layer of a :class:`LayeredTree`, which divides each branch of the layer before it."""

    min_ranks: int | None = 1
    """Fewest surviving ranks of a branch; a branch with fewer is removed with all its ranks."""
    max_ranks: int | None = None
    """Most ranks of a branch that run the function at first; ``None`` = no limit. Filling a gap may exceed the limit.
    """
    key_or_fn: Key = ""
    """The branch of a rank: a text, or a function of its state, called once on each rank."""
    flag: LayerFlag | None = None
    """Sources from which a gap in a branch may be filled; ``None`` = none."""


class LayeredTree(AssignmentRule):
    """Assign ranks by their place in the machine.

    At first, ranks are activated in order as far as the ``max_ranks`` of each branch allow. After a fault, branches
    below ``min_ranks`` are removed. A gap is filled by the last spare of the nearest enclosing branch with ``RESERVE``,
    else by one of the last ranks of the widest enclosing branch with ``BACKFILL``. Remaining gaps are closed by moving
    ranks up.

    Args:
        layers: From the whole machine to its smallest part.
        world_size_filter: Returns how many of that many ranks run the function.

    Raises:
        ConfigError: There is no layer.
    """

    def __init__(self, layers: list[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        require(bool(layers), "Tree(layers=[]) has no layers; name at least one")
        self.layers, self.world_size_filter = layers, world_size_filter
        self.init_rank_map: dict[int, Leaf] = {}
        """With a context: the leaves of all ranks, by initial rank."""
        self._by_rank: list[int] = []

    def labels(self) -> dict[str, str]:
        """Return this rank's branches, for ``Member.labels``."""
        return self._labels(self._keys(WrapperState.from_env()))

    def assign(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps.

        Raises:
            RestartAbort: No branch of the first layer has its ``min_ranks``.
        """
        growing = _Growing(self.layers, assignment)
        if not growing.usable:
            raise RestartAbort(
                f"{len(assignment.living)} ranks live, and no part of the machine has its min_ranks; restart the job",
                iteration=assignment.iteration,
            )
        return self._grow(growing, assignment)

    def assign_one(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Assign the rank of a context its new rank; the first call reads the branches of all ranks from the store.

        Raises:
            RuntimeError: Ranks differ in the key of the first layer.
            RankDiscarded: The rank is terminated, or its branch is removed.
        """
        state = ctx.state
        if not self.init_rank_map:
            self._plant(state, ctx.store)
        gone = {self._by_rank[rank] for rank in ctx.terminated_ranks}
        leaves = self.init_rank_map
        members = [
            Member(
                initial_rank=initial,
                node="",
                rank=leaf.state.active_rank,
                alive=initial not in gone and leaf.state.mode != Mode.TERMINATED,
                labels=leaf.labels,
            )
            for initial, leaf in leaves.items()
        ]
        if all(leaf.state.mode == Mode.INITIALIZED for leaf in leaves.values()):
            everybody = tuple(dataclasses.replace(member, alive=True) for member in members)
            begun = Assignment(members=everybody, iteration=0)
            ranks = _Growing(self.layers, begun, gives_up=False).activated().ranks
            members = [dataclasses.replace(one, rank=ranks.get(one.initial_rank)) for one in members]
        kept = {one.initial_rank: one.rank for one in members if one.alive and one.rank is not None}
        given = Assignment(members=tuple(members), iteration=state.iteration, ranks=kept)
        growing = _Growing(self.layers, given)
        ended = self._grow(growing, given) if growing.usable else dataclasses.replace(given, ranks={})
        for initial, leaf in leaves.items():
            leaf.state = dataclasses.replace(
                state,
                rank=None,
                world_size=len(growing.usable),
                active_rank=(active := ended.ranks.get(initial)),
                active_world_size=ended.active_world_size,
                initial_rank=initial,
                mode=Mode.INACTIVE if active is None else Mode.ACTIVE,
            )
            if initial not in growing.usable:
                leaf.state.mode = Mode.TERMINATED
        self._number()
        assert state.initial_rank is not None
        own = leaves[state.initial_rank].state
        if own.mode == Mode.TERMINATED:
            raise _discarded(state.rank, ctx.terminated_ranks)
        ctx.state, ctx.terminated_ranks = dataclasses.replace(own), set()
        return ctx

    def _grow(self, growing: _Growing, given: Assignment) -> Assignment:
        ended = growing.activated() if not given.previous else growing.filled()
        if self.world_size_filter is not None:
            wanted = self.world_size_filter(ended.active_world_size)
            text = f"world_size_filter returned {wanted} for {ended.active_world_size} ranks; it must not return more"
            require(0 <= wanted <= ended.active_world_size, text)
            ended = keep_first(ended, wanted)
        return ended

    def _keys(self, state: WrapperState) -> list[str]:
        return [_key_of(layer.key_or_fn, state) for layer in self.layers]

    @staticmethod
    def _labels(keys: Iterable[object]) -> dict[str, str]:
        return {f"layer-{number}": str(key) for number, key in enumerate(keys)}

    def _plant(self, state: WrapperState, store: Any) -> None:
        """Read all ranks and their branches from a store, through NVRx's calls."""
        everybody = range(state.world_size)
        store.send_state(state, state.rank)
        states = store.get_states(everybody)
        store.send_key(self._keys(state), state.rank)
        keys = store.get_keys(everybody)
        roots = {str(key[0]) for key in keys}
        if len(roots) != 1:
            raise RuntimeError(f"the first layer is the whole machine, but its keys are {sorted(roots)}; use one key")
        leaves = {one.initial_rank: Leaf(one, self._labels(key)) for one, key in zip(states, keys, strict=True)}
        members = [Member(initial_rank=initial, node="", labels=leaves[initial].labels) for initial in sorted(leaves)]
        ordered = _in_order(members, len(self.layers))
        self.init_rank_map = {initial: leaves[initial] for initial in ordered}
        self._number()
        started = [leaves[initial].state.initial_rank for initial in sorted(leaves)]
        if ordered != started:
            warnings.warn(f"the tree orders the initial ranks {ordered[:16]}: not as they were started", stacklevel=4)

    def _number(self) -> None:
        """Number all ranks in the order of the tree; terminated ranks come last."""
        leaves = self.init_rank_map
        self._by_rank = sorted(leaves, key=lambda one: leaves[one].state.mode == Mode.TERMINATED)
        for rank, initial in enumerate(self._by_rank):
            leaf = leaves[initial].state
            leaf.rank = None if leaf.mode == Mode.TERMINATED else rank


@dataclasses.dataclass
class Leaf:
    """A rank in a :class:`LayeredTree`."""

    state: WrapperState
    labels: Mapping[str, str]


Branch = tuple[str, ...]
"""Keys from the first layer on."""


def _path(member: Member, depth: int) -> Branch:
    return tuple(member.labels.get(f"layer-{number}", "") for number in range(depth))


def _in_order(members: Iterable[Member], depth: int) -> list[int]:
    """Return initial ranks in the order of the tree: branches are ordered by their first rank."""
    firsts: dict[Branch, int] = {}
    paths: dict[int, Branch] = {}
    for member in members:
        path = paths[member.initial_rank] = _path(member, depth)
        for number in range(depth + 1):
            firsts.setdefault(path[:number], len(firsts))
    keys = {path: tuple(firsts[path[:number]] for number in range(depth + 1)) for path in set(paths.values())}
    return sorted(paths, key=lambda one: (keys[paths[one]], one))


class _Growing:
    """The assignment of a :class:`LayeredTree` in the making."""

    def __init__(self, layers: list[Layer], given: Assignment, *, gives_up: bool = True) -> None:
        self._layers, self._given = layers, given
        depth = len(layers)
        self._paths = {member.initial_rank: _path(member, depth) for member in given.members}
        self._order = _in_order(given.members, depth)
        living = {member.initial_rank for member in given.living}
        for number in range(depth, 0, -1) if gives_up else ():
            # A removed branch does not count in the branch around it.
            least = layers[number - 1].min_ranks or 1
            counts = Counter(self._paths[initial][:number] for initial in living)
            living = {initial for initial in living if counts[self._paths[initial][:number]] >= least}
        self.usable = living
        """Initial ranks that can be assigned a rank."""
        self._previous = given.previous
        self._ranks = {initial: rank for initial, rank in given.ranks.items() if initial in living}

    def activated(self) -> Assignment:
        """Return the first assignment: ranks in the order of the tree, within the limits of the branches."""
        num_active = Counter[Branch]()
        self._ranks = {}
        limits = [math.inf if layer.max_ranks is None else layer.max_ranks for layer in self._layers]
        for initial in self._order:
            branches = [self._paths[initial][:number] for number in self._depths]
            has_room = all(num_active[branch] < limit for branch, limit in zip(branches, limits, strict=True))
            if initial in self.usable and has_room:
                self._ranks[initial] = len(self._ranks)
                num_active.update(branches)
        return self._closed()

    def filled(self) -> Assignment:
        """Return the assignment with gaps filled by spares, else by the last ranks, else by moving ranks up."""
        self._fill_from_the_end(self._fill_from_spares())
        return self._closed()

    def _fill_from_spares(self) -> list[int]:
        """Fill each gap from the nearest branch with free spares; return the remaining gaps."""
        spares: dict[Branch, list[int]] = {}
        for initial in self._order:
            if initial in self.usable and initial not in self._ranks:
                for number in self._depths:
                    spares.setdefault(self._paths[initial][:number], []).append(initial)
        left = []
        for gap in self._gaps():
            for branch in self._branches_around(gap, LayerFlag.RESERVE):
                free = spares.get(branch, [])
                while free and free[-1] in self._ranks:
                    free.pop()
                if free:
                    self._ranks[free.pop()] = gap
                    break
            else:
                left.append(gap)
        return left

    def _fill_from_the_end(self, gaps: list[int]) -> None:
        """Fill gaps with the last ranks of the widest branches that allow it, in order."""
        domains: dict[Branch, list[int]] = {}
        for gap in gaps:
            if around := list(self._branches_around(gap, LayerFlag.BACKFILL)):
                domains.setdefault(around[-1], []).append(gap)
        active: dict[Branch, list[int]] = {}
        for initial in self._ranks:
            for number in self._depths:
                if (branch := self._paths[initial][:number]) in domains:
                    active.setdefault(branch, []).append(initial)
        for branch, missing in domains.items():
            last = sorted(active.get(branch, []), key=lambda one: self._ranks[one])[-len(missing) :]
            self._ranks.update(zip(last, missing, strict=False))

    def _closed(self) -> Assignment:
        members = {member.initial_rank: member for member in self._given.members}
        return self._given.with_order(members[one] for one in sorted(self._ranks, key=lambda one: self._ranks[one]))

    def _gaps(self) -> list[int]:
        """Return the missing ranks, in the order of the tree."""
        taken = set(self._ranks.values())
        before = {member.initial_rank: rank for rank, member in self._previous.items() if rank not in taken}
        return [before[initial] for initial in self._order if initial in before]

    def _branches_around(self, gap: int, flag: LayerFlag) -> Iterator[Branch]:
        """Yield the branches around a gap that have the flag, from the smallest on, until one does not."""
        path = self._paths[self._previous[gap].initial_rank]
        for number in range(len(self._layers), 0, -1):
            if flag not in (self._layers[number - 1].flag or LayerFlag(0)):
                return
            yield path[:number]

    @property
    def _depths(self) -> range:
        return range(1, len(self._layers) + 1)
