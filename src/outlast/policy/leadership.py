"""Which part of a divided job goes on, and which of two coordinators yields.

A network that breaks apart leaves agents on both sides, and with several endpoints each side can host a coordinator.
Only one may form cycles: the one with the *quorum* of the last cycle that ran on all of its nodes. The members are the
holders of that cycle's slots, and the spares that waited when it began. A part has the quorum with

* more than half of the slots' holders, or
* exactly half of them and more than half of the spares, or
* exactly half of both, and the holder of the lowest slot.

Who is known to be dead (the kernel closed its connection, it said goodbye) does not count as a member; who only went
silent does, since it may go on elsewhere. Two parts that share no member cannot both have the quorum, whatever each of
them knows of the dead (``tests/policy/test_leadership.py`` holds it over arbitrary parts): with n members, dead sets A
and B, and a >= (n - |A|)/2, b >= (n - |B|)/2, a + b <= n - |A u B| forces |A| = |B| = |A u B|, so A = B and a tie,
which both decide alike. A cycle becomes the electorate once all of its nodes have started it; those are told so. Until
then somebody who has taken a place in it speaks for both (:func:`has_quorum_of`).

A *term* numbers a coordinator's leadership. A coordinator that takes over takes one above all that it is told of;
agents obey no lower one than they have obeyed. (Lamport's ballots, and the terms of Ongaro and Ousterhout's Raft,
2014; no log is replicated here, since agents carry all that a coordinator has to know.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Electorate:
    """The members of the last cycle that ran, by their numbers."""

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
        """Return whether a part of the members may go on.

        Args:
            slots: Slots whose holders are in this part.
            spares: Spares that are.
            dead_slots: Slots whose holders are known to be dead.
            dead_spares: Spares that are.
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
    """Return whether nodes that came to a new coordinator may go on without the others.

    They need the quorum of the newest cycle that any of them knows to have run on all of its nodes, and of a newer one
    that some of them have taken a place in, unless that one can never have run on all of its nodes: it kept so many
    holders of the former's slots (``num_kept``) that one of them must be here and has not taken its place.

    Args:
        claims: Of each node, its place in the newest cycle that it knows to have run, and in the newest it has taken.
        dead_slots: Slots of the newest cycle that ran whose holders are known to be dead.
        dead_spares: Spares beside it that are.
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
        return False  # a cycle ran before it, and nobody here knows who was in that
    return _electorate(places).has_quorum(
        {place.slot for place in places if place.slot is not None},
        {place.spare for place in places if place.spare is not None},
    )


def _electorate(seats: Collection[Seat]) -> Electorate:
    # Spares that came later were counted once all holders of slots knew of them, other spares perhaps not yet.
    return Electorate(next(iter(seats)).num_slots, max(seat.num_spares for seat in seats))


def may_begin(order: int, *, num_slots: int, max_nodes: int, num_endpoints: int) -> bool:
    """Return whether a coordinator may form a job's first cycle, once its slots are filled.

    Where there are nodes enough for two worlds, only the coordinator at the first endpoint may: no cycle has run whose
    members could decide.

    Args:
        order: Number of the coordinator's endpoint.
        num_slots: Nodes that train.
        max_nodes: Most nodes that may join; 0 = not known.
        num_endpoints: Places where a coordinator may be.
    """
    return order == 0 or num_endpoints == 1 or 0 < max_nodes < 2 * num_slots


def should_change_job(*, num_endpoints: int, leads: bool) -> bool:
    """Return whether an agent whose job is not known to a coordinator of its run joins the job of that coordinator.

    At the only endpoint no other coordinator can serve the agent's own job any more. With several endpoints another one
    may; the agent changes to a job that has begun.

    Args:
        num_endpoints: Places where a coordinator may be.
        leads: The coordinator leads its job.
    """
    return num_endpoints == 1 or leads


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """How a coordinator stands."""

    term: int
    leads: bool
    """It has formed a cycle, or adopted one with the quorum, and still has the quorum."""
    order: int
    """Number of its endpoint."""


def should_yield(own: Leadership, other: Leadership) -> bool:
    """Return whether a coordinator hands its agents over to another one of the same job.

    Of two, one yields and the other does not.
    """
    return (own.leads, own.term if own.leads else 0, -own.order) < (
        other.leads,
        other.term if other.leads else 0,
        -other.order,
    )
