"""Which part of a divided job goes on, and which of two coordinators yields.

A network that breaks apart leaves agents on both sides, and with several endpoints each side can host a coordinator.
Only one may form cycles: the one with the *quorum* of the last cycle that ran on all of its nodes. The members are the
holders of that cycle's slots, and the spares that waited when it began. A part has the quorum with

* more than half of the slots' holders, or
* exactly half of them and more than half of the spares, or
* exactly half of both, and the holder of the lowest slot.

Who is known to be dead (the kernel closed its connection, it said goodbye) does not count as a member; who only went
silent does, since it may go on elsewhere. Two parts that share no member cannot both have the quorum, whatever each of
them knows of the dead (``tests/policy/test_leadership.py`` proves it over arbitrary parts): with n members, dead sets A
and B, and a >= (n - |A|)/2, b >= (n - |B|)/2, a + b <= n - |A u B| forces |A| = |B| = |A u B|, so A = B and a tie, which
both decide alike. And whoever has the quorum of the next cycle that ran on all of its nodes shares a member with
whoever had the one before: a cycle runs only once every one of its nodes has taken its place.

A *term* numbers a coordinator's leadership. A coordinator that takes over takes one above all that it is told of;
agents obey no lower one than they have obeyed. (Lamport's ballots, and the terms of Ongaro and Ousterhout's Raft,
2014; no log is replicated here, since agents carry all that a coordinator has to know.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


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


def may_begin(num_here: int, *, num_slots: int, max_nodes: int, num_endpoints: int) -> bool:
    """Return whether a coordinator may form a job's first cycle, once its slots are filled.

    Where the job could be there twice (several endpoints, and spares for a second world), most of its nodes must be
    here; with one endpoint there is one coordinator.

    Args:
        num_here: Nodes that are here, spares too.
        num_slots: Nodes that train.
        max_nodes: Most nodes that may join; 0 = not known.
        num_endpoints: Places where a coordinator may be.
    """
    return num_endpoints == 1 or max_nodes < 2 * num_slots or 2 * num_here > max_nodes


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
