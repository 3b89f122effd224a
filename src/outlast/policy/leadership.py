"""Which part of a partitioned job continues, and which of two coordinators yields.

With several endpoints each side of a network partition can host a coordinator. Only the one with the *quorum* of the
last cycle that ran on all of its nodes may form cycles. Members are the holders of that cycle's slots and the spares
that waited when it began. A part has the quorum with more than half of the slot holders; or exactly half of them and
more than half of the spares; or exactly half of both and the holder of the lowest slot.

Members known to be dead (the kernel closed the connection, or they deregistered) do not count; silent ones do, as they
may run elsewhere. Two disjoint parts cannot both have the quorum, whatever each knows of the dead: with n members, dead
sets A and B, and a >= (n - |A|)/2, b >= (n - |B|)/2, a + b <= n - |A u B| forces |A| = |B| = |A u B|, so A = B and a
tie, which both resolve in the same way. A cycle becomes the electorate once all of its nodes have started it and were
notified. Until then the members that took a place in it decide, too (:func:`has_quorum_of`).

A *term* numbers a coordinator's leadership. A new coordinator takes a term above all reported ones; agents obey no
lower term than before. (Lamport's ballots, and the terms of Ongaro and Ousterhout's Raft, 2014; no log is replicated,
since agents carry the state that a coordinator needs.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Electorate:
    """Number of members of the last cycle that ran."""

    num_slots: int
    num_spares: int = 0

    def has_quorum(
        self,
        slots: Collection[int],
        spares: Collection[int] = (),
        *,
        dead_slots: Collection[int] = (),
        dead_spares: Collection[int] = (),
    ) -> bool:
        """Return whether a part of the members may continue.

        Args:
            slots: Slots whose holders are in this part.
            spares: Numbers of the spares in this part.
            dead_slots: Slots whose holders are known to be dead.
            dead_spares: Numbers of the spares known to be dead.
        """
        present = set(slots)
        living = set(range(self.num_slots)) - (set(dead_slots) - present)
        balance = 2 * len(present) - len(living)
        if balance:
            return balance > 0
        here = set(spares)
        balance = 2 * len(here) - (self.num_spares - len(set(dead_spares) - here))
        if balance:
            return balance > 0
        return bool(present) and min(living) in present


class Seat(Protocol):
    """A node's place in a cycle; see :class:`outlast.launch.protocol.SlotPlace`."""

    @property
    def order(self) -> tuple[int, int]: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def slot(self) -> int | None: ...
    @property
    def num_spares(self) -> int: ...
    @property
    def spare(self) -> int | None: ...
    @property
    def num_kept(self) -> int: ...


def has_quorum_of(
    claims: Collection[tuple[Seat | None, Seat | None]],
    *,
    dead_slots: Collection[int] = (),
    dead_spares: Collection[int] = (),
) -> bool:
    """Return whether the nodes that reached a new coordinator may continue without the others.

    They need the quorum of the newest cycle that any of them knows to have run on all nodes, and of a newer one that
    some took a place in. The newer one is ignored if it cannot have run on all of its nodes: it kept so many slot
    holders of the former (``num_kept``) that one of them must be here, and has not taken its place.

    Args:
        claims: For each node, its place in the newest cycle known to have run, and in the newest it took a place in.
        dead_slots: Slots of the newest cycle that ran whose holders are known to be dead.
        dead_spares: Spares of that cycle known to be dead.
    """
    never = (-1, -1)
    ran = max((seat.order for seat, _ in claims if seat is not None), default=never)
    taken = max((seat.order for _, seat in claims if seat is not None), default=never)
    here: list[Seat] = [seat for seat, _ in claims if seat is not None and seat.order == ran]
    holders_here = {seat.slot for seat in here if seat.slot is not None}
    if here and not _electorate(here).has_quorum(
        holders_here,
        {seat.spare for seat in here if seat.spare is not None},
        dead_slots=dead_slots,
        dead_spares=dead_spares,
    ):
        return False
    if taken <= ran:
        return bool(here)
    newer = [(seat, place) for seat, place in claims if place is not None and place.order == taken]
    if here:
        num_took = sum(seat is not None and seat.order == ran and seat.slot is not None for seat, _ in newer)
        least_kept_here = len(holders_here) + newer[0][1].num_kept - here[0].num_slots
        if least_kept_here > num_took:
            return True
    places = [place for _, place in newer]
    if not here and places[0].num_kept:
        return False  # an earlier cycle ran, with unknown members
    return _electorate(places).has_quorum(
        {place.slot for place in places if place.slot is not None},
        {place.spare for place in places if place.spare is not None},
    )


def _electorate(seats: Collection[Seat]) -> Electorate:
    # Later spares were counted once all slot holders knew of them; other spares may not know yet.
    return Electorate(next(iter(seats)).num_slots, max(seat.num_spares for seat in seats))


def may_begin(order: int, *, num_slots: int, max_nodes: int, num_endpoints: int) -> bool:
    """Return whether a coordinator may form a job's first cycle, once its slots are filled.

    Where there are enough nodes for two worlds, only the coordinator at the first endpoint may: no earlier cycle
    defines a quorum.

    Args:
        order: Number of the coordinator's endpoint.
        num_slots: Nodes that train.
        max_nodes: Maximum number of nodes; 0 = not known.
    """
    return order == 0 or num_endpoints == 1 or 0 < max_nodes < 2 * num_slots


def should_change_job(*, num_endpoints: int, leads: bool) -> bool:
    """Return whether an agent whose job the coordinator does not know joins the coordinator's job.

    With a single endpoint no other coordinator can serve the agent's job. With several one may; the agent then changes
    only to a job that has begun.

    Args:
        leads: The coordinator leads its job.
    """
    return num_endpoints == 1 or leads


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    term: int
    leads: bool
    """It has formed a cycle, or adopted one with the quorum, and still has the quorum."""
    order: int
    """Number of its endpoint."""


def should_yield(own: Leadership, other: Leadership) -> bool:
    """Return whether a coordinator hands its agents over to another one of the same job; exactly one of two does."""
    mine, theirs = ((one.leads, one.term if one.leads else 0, -one.order) for one in (own, other))
    return mine < theirs
