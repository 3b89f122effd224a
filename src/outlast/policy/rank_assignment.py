"""Rank assignment: which members run the function at a restart, and which wait as spares.

An assignment begins as the rest of the last one, with a gap at the rank of every member that died. Rules turn it into
one with ranks 0, 1, 2, ... without gaps; each takes an assignment and returns another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outlast.errors import ConfigError, RestartAbort


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process that was started as a rank, dead or alive."""

    initial_rank: int
    """The rank that it was started as; identifies the member."""
    node: str
    rank: int | None = None
    """Its current rank; ``None`` = a spare, or there was no restart yet."""
    alive: bool = True
    """Whether it can be given a rank. A member that died since the last restart leaves a gap at its rank."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Reported location beyond the node, such as the rack; by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Ranks of the members, as far as they are decided."""

    members: tuple[Member, ...]
    """All members, by initial rank."""
    iteration: int
    """Number of the restart that ranks are assigned for; 0 = the first call of the function."""
    target: int | None = None
    """Configured number of active ranks; ``None`` = all."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """Initial rank to rank of the active members; the other living members are spares."""

    @property
    def living(self) -> tuple[Member, ...]:
        """The members that can be given a rank, by initial rank."""
        return tuple(member for member in self.members if member.alive)

    @property
    def spares(self) -> tuple[Member, ...]:
        """The living members without a rank, by initial rank."""
        return tuple(member for member in self.living if member.initial_rank not in self.ranks)

    @property
    def active_world_size(self) -> int:
        return len(self.ranks)

    @property
    def previous(self) -> dict[int, Member]:
        """The members by current rank, dead ones included."""
        return {member.rank: member for member in self.members if member.rank is not None}

    @property
    def wanted(self) -> int:
        """Number of ranks if none is given up: the target, else as many as before."""
        return self.target if self.target is not None else len(self.previous) or len(self.members)

    def with_order(self, order: Iterable[Member], limit: int | None = None) -> Assignment:
        """Return a copy with ranks 0, 1, 2, ... for the given members, the first ``limit`` of them."""
        chosen = list(order)[:limit]
        return replace(self, ranks={member.initial_rank: rank for rank, member in enumerate(chosen)})

    def in_order(self) -> list[Member]:
        """Return the members with a rank, by rank."""
        by_initial = {member.initial_rank: member for member in self.members}
        return [by_initial[initial] for initial, _ in sorted(self.ranks.items(), key=lambda item: item[1])]


Rule = Callable[[Assignment], Assignment]
"""Turns an assignment into another one."""
Place = Callable[[Member], Sequence[str]]
"""Location of a member, from the widest part of the cluster to the narrowest, such as rack and node."""


def assign(
    rule: Rule, members: Iterable[Member], *, iteration: int, active_world_size: int | None
) -> dict[int, int | None]:
    """Return the rank of every living member, ``None`` for spares, by its initial rank.

    Members that the rule marks as not alive are left out.

    Args:
        rule: The rule to apply.
        members: At least all living members.
        iteration: Number of the restart; 0 = the first call of the function.
        active_world_size: Number of active ranks; ``None`` = all.

    Raises:
        RestartAbort: The living members do not suffice for the rule.
        ConfigError: The rule's result is not a valid assignment: a duplicate rank, a gap, a dead member, or no member.
    """
    everybody = tuple(sorted(members, key=lambda member: member.initial_rank))
    begin = Assignment(members=everybody, iteration=iteration, target=active_world_size)
    if begin.previous:
        kept = {member.initial_rank: member.rank for member in begin.living if member.rank is not None}
        begin = replace(begin, ranks=kept)
    else:
        begin = begin.with_order(begin.living, active_world_size)
    ended = rule(begin)
    _check(ended, begin)
    staying = {member.initial_rank for member in ended.living}
    return {rank: ended.ranks.get(rank) for one in begin.living if (rank := one.initial_rank) in staying}


def _check(ended: object, begin: Assignment) -> None:
    if not isinstance(ended, Assignment):
        raise ConfigError(f"rank_assignment returned {type(ended).__name__}; it must return an Assignment")
    living = {member.initial_rank for member in begin.living} & {member.initial_rank for member in ended.living}
    strangers = sorted(set(ended.ranks) - living)
    if strangers:
        raise ConfigError(f"rank_assignment gave ranks to initial ranks {strangers}, which do not live; leave them out")
    if sorted(ended.ranks.values()) != list(range(len(ended.ranks))):
        raise ConfigError(
            f"rank_assignment gave the ranks {sorted(ended.ranks.values())}; they must be 0, 1, 2, ... without a gap"
        )
    if not ended.ranks:
        raise RestartAbort(
            f"rank_assignment leaves none of {len(begin.living)} living ranks active; restart the job",
            iteration=begin.iteration,
        )


def shift_up(given: Assignment) -> Assignment:
    """Return the assignment with survivors moved up into the gaps before them, in order, and spares behind them.

    Ranks up to the target are assigned while members remain.
    """
    return given.with_order([*given.in_order(), *given.spares], given.target)


def keep_first(given: Assignment, limit: int) -> Assignment:
    """Return the assignment with ranks from ``limit`` on made spares."""
    return replace(given, ranks={initial: rank for initial, rank in given.ranks.items() if rank < limit})


def keep_multiple(given: Assignment, divisor: int) -> Assignment:
    """Return the assignment with the last ranks made spares, so that ``divisor`` divides the number of the others."""
    return keep_first(given, given.active_world_size // divisor * divisor)


def fill_gaps(
    given: Assignment,
    *,
    place: Place = lambda member: (),
    whole: int | None = None,
    may_shrink: bool = False,
) -> Assignment:
    """Return the assignment with every gap filled by the nearest spare; survivors keep their ranks.

    Args:
        given: An assignment, with gaps or without.
        place: Location of members; a spare that shares more parts of it with the dead member is nearer. Among equally
            near ones the lowest initial rank is taken.
        whole: Number of parts of ``place`` that make a unit. If a unit's own spares cannot fill its gaps, its members
            become spares, and all its ranks move together to the nearest unit with room. ``None`` = ranks are replaced
            one by one.
        may_shrink: Once the spares are used, move the last ranks into the remaining gaps (with units: move all up)
            instead of raising.

    Raises:
        RestartAbort: The spares do not suffice, and ``may_shrink`` is false.
    """
    filling = _Filling(given, place)
    if whole is None:
        filling.fill_each()
    else:
        filling.fill_units(whole)
    gaps = filling.gaps()
    if not gaps:
        return replace(given, ranks=filling.ranks)
    if not may_shrink:
        spent = f"of {given.wanted} ranks {len(gaps)} cannot be filled from {len(filling.free)} spares"
        unit = "" if whole is None else " that sit together"
        raise RestartAbort(
            f"{spent}{unit}; restart the job, or pass a rank_assignment that may shrink", iteration=given.iteration
        )
    filling.close(by_moving_last=whole is None)
    return replace(given, ranks=filling.ranks)


class _Filling:
    def __init__(self, given: Assignment, place: Place) -> None:
        self.ranks = {initial: rank for initial, rank in given.ranks.items() if rank < given.wanted}
        self._wanted = given.wanted
        self._previous = given.previous
        self._places = {member.initial_rank: tuple(place(member)) for member in given.members}
        self._depth = max((len(place) for place in self._places.values()), default=0)
        self._living = [member.initial_rank for member in given.living]

    @property
    def free(self) -> list[int]:
        return [initial for initial in self._living if initial not in self.ranks]

    def gaps(self) -> list[int]:
        taken = set(self.ranks.values())
        return [rank for rank in range(self._wanted) if rank not in taken]

    def fill_each(self) -> None:
        """Fill gaps one by one, those that a near spare can fill first."""
        for distance in range(self._depth + 1):
            for gap in self.gaps():
                origin = self._origin(gap)
                near = [initial for initial in self.free if self._distance(origin, self._places[initial]) <= distance]
                if near:
                    self.ranks[near[0]] = gap

    def fill_units(self, whole: int) -> None:
        """Fill gaps from within their units; move the units that cannot be filled, shortest distance first."""
        units: dict[tuple[str, ...] | None, list[int]] = {}
        holders = {rank: initial for initial, rank in self.ranks.items()}
        for rank in range(self._wanted):
            origin = self._places[holders[rank]] if rank in holders else self._origin(rank)
            units.setdefault(None if origin is None else origin[:whole], []).append(rank)
        broken: list[tuple[tuple[str, ...] | None, list[int]]] = []
        for unit, ranks in units.items():
            missing = [rank for rank in ranks if rank not in holders]
            own = [initial for initial in self.free if self._places[initial][:whole] == unit]
            if len(own) >= len(missing):
                self.ranks.update(zip(own, missing, strict=False))
            else:
                broken.append((unit, ranks))
        for _, ranks in broken:
            for rank in ranks:
                if rank in holders:
                    del self.ranks[holders[rank]]
        for distance in range(self._depth + 1):
            for unit, ranks in list(broken):
                if (members := self._room(unit, len(ranks), distance, whole)) is not None:
                    self.ranks.update(zip(members, ranks, strict=True))
                    broken.remove((unit, ranks))

    def close(self, *, by_moving_last: bool) -> None:
        ordered = sorted(self.ranks, key=lambda initial: self.ranks[initial])
        if not by_moving_last:
            self.ranks = {initial: rank for rank, initial in enumerate(ordered)}
            return
        size = len(ordered)
        beyond = [initial for initial in ordered if self.ranks[initial] >= size]
        self.ranks.update(zip(beyond, [gap for gap in self.gaps() if gap < size], strict=True))

    def _origin(self, rank: int) -> tuple[str, ...] | None:
        """Return the location of a rank's last holder; ``None`` = not known."""
        holder = self._previous.get(rank)
        return None if holder is None else self._places[holder.initial_rank]

    def _distance(self, one: tuple[str, ...] | None, other: tuple[str, ...]) -> int:
        """Return how many parts of two locations are below their common ones."""
        if one is None:
            return self._depth
        shared = 0
        while shared < min(len(one), len(other)) and one[shared] == other[shared]:
            shared += 1
        return self._depth - shared

    def _room(self, unit: tuple[str, ...] | None, size: int, distance: int, whole: int) -> list[int] | None:
        """Return the members of the smallest unit with room at most this far away."""
        rooms: dict[tuple[str, ...], list[int]] = {}
        for initial in self.free:
            rooms.setdefault(self._places[initial][:whole], []).append(initial)
        fits = [
            (len(members), members)
            for other, members in rooms.items()
            if len(members) >= size and self._distance(unit, other) <= distance
        ]
        return min(fits)[1][:size] if fits else None


def hold_back(given: Assignment, *, place: Place, spares: Sequence[int]) -> Assignment:
    """Return a first assignment in which every part of the cluster keeps its own spares.

    Args:
        given: The members; none has had a rank yet.
        place: Location of members, with as many parts as ``spares``.
        spares: For each part of a location, from the widest to the narrowest, the number of members held back in it, in
            addition to those held back in narrower parts; always the last ones.

    Raises:
        RestartAbort: Fewer ranks remain than the target.
    """
    chosen = list(given.living)
    for depth in range(len(spares), 0, -1):
        groups: dict[tuple[str, ...], list[Member]] = {}
        for member in chosen:
            groups.setdefault(tuple(place(member))[:depth], []).append(member)
        chosen = [member for group in groups.values() for member in group[: max(0, len(group) - spares[depth - 1])]]
        chosen.sort(key=lambda member: member.initial_rank)
    if given.target is not None and len(chosen) < given.target:
        raise RestartAbort(
            f"spares of the topology leave {len(chosen)} of {len(given.living)} ranks, but active_world_size="
            f"{given.target}; hold fewer spares back, or lower active_world_size",
            iteration=given.iteration,
        )
    return given.with_order(chosen, given.target)
