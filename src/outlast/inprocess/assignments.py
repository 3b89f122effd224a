"""Ready-made ``rank_assignment`` plug-ins.

Each takes an :class:`Assignment` and returns another one. It begins as what is left of the last one: survivors have
their ranks, the dead have left gaps. ``Compose`` runs several from left to right; the first must close the gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outlast.env import environ
from outlast.errors import ConfigError
from outlast.policy.rank_assignment import (
    Assignment,
    Member,
    fill_gaps,
    hold_back,
    keep_first,
    keep_multiple,
    shift_up,
)

__all__ = [
    "ActiveWorldSizeDivisibleBy",
    "Assignment",
    "FillGaps",
    "Level",
    "MaxActiveWorldSize",
    "Member",
    "ShiftRanks",
    "Tree",
]


@dataclass(frozen=True, slots=True)
class ShiftRanks:
    """Move survivors up into the gaps, in order; reserves follow behind them. Shrinks once reserves are spent."""

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps."""
        return shift_up(assignment)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillGaps:
    """Let reserves take dead ranks' places; survivors keep their ranks.

    Raises:
        ConfigError: The granularity is unknown.
    """

    granularity: str = "rank"
    """``rank``: any reserve takes any rank's place. ``node``: first reserves of the same node do; where they do not
    suffice, all ranks of the node go together to one with as many reserves, and its survivors become reserves."""
    may_shrink: bool = False
    """What follows once reserves are spent: the last ranks move into the gaps (with ``node`` all move up, in order);
    off: ``RestartAbort``."""

    def __post_init__(self) -> None:
        if self.granularity not in ("node", "rank"):
            raise ConfigError(f"granularity={self.granularity!r} must be node or rank")

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps.

        Raises:
            RestartAbort: Reserves do not suffice, and it must not shrink.
        """
        whole = 1 if self.granularity == "node" else None
        return fill_gaps(assignment, place=lambda member: (member.node,), whole=whole, may_shrink=self.may_shrink)


@dataclass(frozen=True, slots=True)
class MaxActiveWorldSize:
    """Make ranks reserves beyond a number.

    Args:
        limit: Most ranks that run the function, at least 1.

    Raises:
        ConfigError: It is below 1.
    """

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"MaxActiveWorldSize({self.limit}): the limit must be at least 1")

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment with at most that many ranks."""
        return keep_first(assignment, self.limit)


@dataclass(frozen=True, slots=True)
class ActiveWorldSizeDivisibleBy:
    """Make the last ranks reserves, so that a number divides how many run the function.

    Args:
        divisor: The number, at least 1.

    Raises:
        ConfigError: It is below 1.
    """

    divisor: int

    def __post_init__(self) -> None:
        if self.divisor < 1:
            raise ConfigError(f"ActiveWorldSizeDivisibleBy({self.divisor}): the divisor must be at least 1")

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment with a multiple of that many ranks."""
        return keep_multiple(assignment, self.divisor)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a :class:`Tree`, such as its racks.

    Args:
        key: What tells a rank's part of the machine at this level: the name of an environment variable, or a function
            without arguments, asked once on every rank; ``"node"`` = the node's name.
        reserve: Ranks that each part holds back, beyond those that the levels within it hold back.
        whole: Replace parts of this level as a whole: one whose own reserves do not suffice is given up, and its ranks
            go together to another part.

    Raises:
        ConfigError: The reserve is negative, or the name empty.
    """

    key: str | Callable[[], str]
    reserve: int = 0
    whole: bool = False

    def __post_init__(self) -> None:
        if self.reserve < 0:
            raise ConfigError(f"Level(reserve={self.reserve}) must not be negative")
        if self.key == "":
            raise ConfigError("Level(key='') must name an environment variable, or be a function")

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
    """Hold reserves back at every level of the machine, and fill each gap from the nearest.

    At the start each part of each level holds its last ranks back. Later a gap is filled by a reserve of the same
    innermost part, else of the next wider one, and so on; survivors keep their ranks, but for those of a ``whole``
    part that is given up::

        Tree(Level("RACK", reserve=8), Level("node", reserve=1, whole=True))

    Args:
        levels: From the widest to the narrowest; at least one.
        may_shrink: As for :class:`FillGaps`.

    Raises:
        ConfigError: There is no level, or more than one is ``whole``.
    """

    def __init__(self, *levels: Level, may_shrink: bool = False) -> None:
        if not levels:
            raise ConfigError("Tree() has no levels; name at least one")
        if sum(level.whole for level in levels) > 1:
            raise ConfigError("more than one Level of a Tree has whole=True; keep one")
        self._levels = levels
        self._may_shrink = may_shrink
        self._names = [f"tree-{number}" for number in range(len(levels))]

    def __call__(self, assignment: Assignment) -> Assignment:
        """Return the assignment without gaps.

        Raises:
            RestartAbort: Reserves do not suffice, and it must not shrink.
        """
        if not assignment.previous:
            reserves = [level.reserve for level in self._levels]
            return hold_back(assignment, place=self._place, reserves=reserves)
        whole = next((number + 1 for number, level in enumerate(self._levels) if level.whole), None)
        return fill_gaps(assignment, place=self._place, whole=whole, may_shrink=self._may_shrink)

    def __repr__(self) -> str:
        return f"Tree({', '.join(map(repr, self._levels))}, may_shrink={self._may_shrink})"

    def labels(self) -> dict[str, str]:
        """Return this rank's parts of the machine, for ``Member.labels``.

        Raises:
            ConfigError: An environment variable is not set.
        """
        named = zip(self._names, self._levels, strict=True)
        return {name: level.part() for name, level in named if level.key != "node"}

    def _place(self, member: Member) -> list[str]:
        named = zip(self._names, self._levels, strict=True)
        return [member.node if level.key == "node" else member.labels[name] for name, level in named]
