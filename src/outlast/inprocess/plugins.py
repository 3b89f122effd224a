"""Plug-ins of the wrapper: their arguments, ready-made ones, and the set of one wrapper.

A ``rank_assignment`` plug-in takes an :class:`Assignment` and returns another one. The first one gets the last
assignment, in which survivors have their ranks and dead ranks left gaps. ``Compose`` runs several from left to right;
the first must close the gaps. Every other plug-in takes a :class:`State`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outlast.config.base import require
from outlast.config.training import InProcessRestartConfig
from outlast.env import environ
from outlast.errors import ConfigError, RestartAbort, UnhealthyRank
from outlast.policy.rank_assignment import (
    Assignment,
    Member,
    Rule,
    fill_gaps,
    hold_back,
    keep_first,
    keep_multiple,
    shift_up,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """This rank's place in one restart."""

    initial_rank: int
    """The rank that this process was started as; it stays the same."""
    initial_world_size: int
    """How many processes were started, spares included."""
    rank: int | None
    """Its rank in the function; ``None``: it is a spare."""
    world_size: int
    """How many processes are left, spares included."""
    active_world_size: int
    """How many ranks run the function."""
    iteration: int
    """Number of the restart; 0 = the function's first call."""
    node: str
    """Name of the node."""
    fault_counts: Mapping[int, int] = field(default_factory=dict)
    """Faults so far, by initial rank; consequences of another rank's fault do not count."""

    @property
    def active_rank(self) -> int | None:
        """The rank in the function, by its longer name."""
        return self.rank

    @property
    def is_spare(self) -> bool:
        """Whether this process waits to take another one's place."""
        return self.rank is None


class Compose:
    """Call plug-ins from left to right, each with the result of the one before it.

    A plug-in that returns ``None`` passes its argument on, so that plug-ins with effects (``initialize``, ``abort``,
    ``finalize``, ``health_check``) and plug-ins that decide (``rank_assignment``) are composed in the same way. The
    first one that raises ends the call; those to its right are not called.

    Args:
        plugins: Functions or instances; at least one.

    Raises:
        ConfigError: There is none, or one cannot be called.
    """

    def __init__(self, *plugins: Callable[[Any], Any]) -> None:
        require(bool(plugins), "Compose() has no plug-ins; name at least one")
        for plugin in plugins:
            text = f"Compose was given {plugin!r}, which cannot be called; pass an instance or a function"
            require(callable(plugin), text)
        self._plugins = plugins

    def __call__(self, value: Any) -> Any:
        """Return the result of the last plug-in."""
        for plugin in self._plugins:
            returned = plugin(value)
            value = value if returned is None else returned
        return value

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self._plugins))})"

    def labels(self) -> dict[str, str]:
        """Return the labels that its plug-ins give this rank's place."""
        return {name: text for plugin in self._plugins for name, text in labels_of(plugin).items()}


def labels_of(plugin: object) -> Mapping[str, str]:
    """Return the labels that a ``rank_assignment`` plug-in gives this rank's place, for ``Member.labels``.

    Its method ``labels()``, if it has one, is called once on every rank.
    """
    labels = getattr(plugin, "labels", None)
    return labels() if callable(labels) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryController:
    """End restarting in process by ``RestartAbort``; an ``initialize`` plug-in.

    Raises:
        ConfigError: A limit is out of range.
    """

    max_iterations: int | None = None
    """Most restarts; ``None``: no limit, 0: none."""
    min_world_size: int = 1
    """Fewest processes to continue with, spares included."""
    min_active_world_size: int = 1
    """Fewest ranks to run the function with."""

    def __post_init__(self) -> None:
        limit = self.max_iterations
        require(limit is None or limit >= 0, f"max_iterations={limit} must not be negative; None = no limit")
        for name in ("min_world_size", "min_active_world_size"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")

    def __call__(self, state: State) -> None:
        """Check the limits.

        Raises:
            RestartAbort: A limit is passed; the message names it.
        """
        if self.max_iterations is not None and state.iteration > self.max_iterations:
            limit = f"this would be restart {state.iteration} of max_iterations={self.max_iterations}"
        elif state.world_size < self.min_world_size:
            limit = f"{state.world_size} processes are left of min_world_size={self.min_world_size}"
        elif state.active_world_size < self.min_active_world_size:
            limit = f"{state.active_world_size} ranks would run of min_active_world_size={self.min_active_world_size}"
        else:
            return
        raise RestartAbort(
            f"{limit}; look at the faults before, and restart the job",
            counts={
                "restarts": state.iteration,
                "living": state.world_size,
                "active": state.active_world_size,
                "faults": sum(state.fault_counts.values()),
            },
            rank=state.initial_rank,
            node=state.node,
            iteration=state.iteration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCounter:
    """Permanently remove a rank that fails too often; a ``health_check`` plug-in.

    Raises:
        ConfigError: The limit is out of range.
    """

    max_rank_faults: int | None = None
    """Most faults of a rank; one more removes it. ``None``: no limit. Consequences of another rank's fault do not
    count."""

    def __post_init__(self) -> None:
        limit = self.max_rank_faults
        require(limit is None or limit >= 0, f"max_rank_faults={limit} must not be negative; None = no limit")

    def __call__(self, state: State) -> None:
        """Check this rank.

        Raises:
            UnhealthyRank: It has failed too often.
        """
        faults = state.fault_counts.get(state.initial_rank, 0)
        if self.max_rank_faults is not None and faults > self.max_rank_faults:
            raise UnhealthyRank(
                f"rank {state.initial_rank} failed {faults} times, more than max_rank_faults={self.max_rank_faults} "
                "allows; look at its node",
                rank=state.initial_rank,
                node=state.node,
                iteration=state.iteration,
            )


@dataclass(frozen=True, slots=True)
class ShiftRanks:
    """Move survivors up into the gaps, in order; spares follow them. Shrinks when no spares are left."""

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps."""
        return shift_up(assignment)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillGaps:
    """Let spares take dead ranks' places; survivors keep their ranks.

    Raises:
        ConfigError: The granularity is unknown.
    """

    granularity: str = "rank"
    """``rank``: any spare takes any rank's place. ``node``: spares of the same node come first; where they do not
    suffice, all ranks of the node move together to a node with as many spares, and its survivors become spares."""
    may_shrink: bool = False
    """When no spares are left, the last ranks move into the gaps (with ``node`` all move up, in order); off:
    ``RestartAbort``."""

    def __post_init__(self) -> None:
        require(self.granularity in ("node", "rank"), f"granularity={self.granularity!r} must be node or rank")

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps.

        Raises:
            RestartAbort: Spares do not suffice, and it must not shrink.
        """
        whole = 1 if self.granularity == "node" else None
        return fill_gaps(assignment, place=lambda member: (member.node,), whole=whole, may_shrink=self.may_shrink)


@dataclass(frozen=True, slots=True)
class MaxActiveWorldSize:
    """Make ranks beyond a number spares.

    Args:
        limit: Most ranks that run the function, at least 1.

    Raises:
        ConfigError: It is below 1.
    """

    limit: int

    def __post_init__(self) -> None:
        require(self.limit >= 1, f"MaxActiveWorldSize({self.limit}): the limit must be at least 1")

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment with at most that many ranks."""
        return keep_first(assignment, self.limit)


@dataclass(frozen=True, slots=True)
class ActiveWorldSizeDivisibleBy:
    """Make the last ranks spares, so that the number of active ranks is a multiple of a number.

    Args:
        divisor: The number, at least 1.

    Raises:
        ConfigError: It is below 1.
    """

    divisor: int

    def __post_init__(self) -> None:
        require(self.divisor >= 1, f"ActiveWorldSizeDivisibleBy({self.divisor}): the divisor must be at least 1")

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment with a multiple of that many ranks."""
        return keep_multiple(assignment, self.divisor)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a :class:`Tree`, such as its racks.

    Args:
        key: Identifies a rank's part of the machine at this level: the name of an environment variable, or a function
            without arguments, called once on every rank; ``"node"``: the node's name.
        spare: Ranks that each part holds back, in addition to those of the levels within it.
        whole: Replace parts of this level as a whole: one whose own spares do not suffice is given up, and its ranks
            move together to another part.

    Raises:
        ConfigError: The spare is negative, or the name empty.
    """

    key: str | Callable[[], str]
    spare: int = 0
    whole: bool = False

    def __post_init__(self) -> None:
        require(self.spare >= 0, f"Level(spare={self.spare}) must not be negative")
        require(self.key != "", "Level(key='') must name an environment variable, or be a function")

    def part(self) -> str:
        """Return this rank's part of the machine at this level.

        Raises:
            ConfigError: The environment variable is not set.
        """
        if not isinstance(self.key, str):
            return str(self.key())
        if (value := environ().get(self.key)) is None:
            raise ConfigError(f"Level({self.key!r}): this environment variable is not set; set it on every rank")
        return value


class Tree:
    """Hold spares back at every level of the machine, and fill each gap from the nearest.

    At the start each part of each level holds its last ranks back. Later a gap is filled by a spare of the same
    innermost part, else of the next wider one, and so on; survivors keep their ranks, except those of a ``whole`` part
    that is given up::

        Tree(Level("RACK", spare=8), Level("node", spare=1, whole=True))

    Args:
        levels: From the widest to the narrowest; at least one.
        may_shrink: As for :class:`FillGaps`.

    Raises:
        ConfigError: There is no level, or more than one is ``whole``.
    """

    def __init__(self, *levels: Level, may_shrink: bool = False) -> None:
        require(bool(levels), "Tree() has no levels; name at least one")
        require(sum(level.whole for level in levels) <= 1, "more than one Level of a Tree has whole=True; keep one")
        self._levels = {f"tree-{number}": level for number, level in enumerate(levels)}
        self._may_shrink = may_shrink

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps.

        Raises:
            RestartAbort: Spares do not suffice, and it must not shrink.
        """
        levels = self._levels.values()
        if not assignment.previous:
            spares = [level.spare for level in levels]
            return hold_back(assignment, place=self._place, spares=spares)
        whole = next((number + 1 for number, level in enumerate(levels) if level.whole), None)
        return fill_gaps(assignment, place=self._place, whole=whole, may_shrink=self._may_shrink)

    def __repr__(self) -> str:
        return f"Tree({', '.join(map(repr, self._levels.values()))}, may_shrink={self._may_shrink})"

    def labels(self) -> dict[str, str]:
        """Return this rank's parts of the machine, for ``Member.labels``.

        Raises:
            ConfigError: An environment variable is not set.
        """
        return {name: level.part() for name, level in self._levels.items() if level.key != "node"}

    def _place(self, member: Member) -> list[str]:
        levels = self._levels.items()
        return [member.node if level.key == "node" else member.labels[name] for name, level in levels]


Plugin = Callable[[State], Any]


def _nothing(state: State) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugins:
    """The plug-ins of one wrapper; see :class:`outlast.inprocess.Wrapper`."""

    initialize: Plugin
    abort: Plugin
    finalize: Plugin
    health_check: Plugin
    rank_assignment: Rule
    completion: Plugin
    terminate: Plugin

    @property
    def has_abort(self) -> bool:
        return self.abort is not _nothing

    @classmethod
    def settle(cls, config: InProcessRestartConfig, **given: Callable[[Any], Any] | None) -> Plugins:
        """Return the plug-ins to use.

        Raises:
            ConfigError: One cannot be called.
        """
        for name, plugin in given.items():
            text = f"{name}={plugin!r} cannot be called; pass an instance or a function"
            require(plugin is None or callable(plugin), text)
        assignment = given.pop("rank_assignment") or FillGaps(granularity=config.granularity)
        chosen = {name: plugin or _nothing for name, plugin in given.items()}
        own_check, counter = chosen["health_check"], FaultCounter(max_rank_faults=config.max_rank_faults)

        def health_check(state: State) -> None:
            counter(state)
            own_check(state)

        chosen["health_check"] = health_check
        return cls(rank_assignment=assignment, **chosen)
