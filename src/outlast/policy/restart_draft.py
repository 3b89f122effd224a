"""A restart in the making: what is known so far, and the orders that follow from it so far.

:mod:`outlast.policy.restarts` decides what happens to both.
"""

from __future__ import annotations

import msgspec

from outlast.policy.restart_faults import add_fault, count_causes, judge
from outlast.policy.restart_limits import RestartLimits
from outlast.policy.restart_orders import Fault, MemberFacts, Order
from outlast.policy.restart_state import Member, RestartState, Send

__all__ = ["Draft", "describe_member"]

_MAX_FAULTS = 16
"""Faults that are told to everybody; a thousand ranks may all say that they lost a connection."""


class Draft:
    """The state and the orders of one event.

    Args:
        state: Before the event.
        limits: Of restarts.
        at_s: When it happened.
    """

    def __init__(self, state: RestartState, limits: RestartLimits, at_s: float) -> None:
        self.state, self.limits, self.at_s = state, limits, at_s
        self.actions: list[Send] = []

    @property
    def told_faults(self) -> tuple[Fault, ...]:
        """The faults since the last order to go as everybody is told them, causes first."""
        return judge(self.state.faults)[:_MAX_FAULTS]

    @property
    def fault_counts(self) -> dict[int, int]:
        """Causes by initial rank, those since the last order to go among them."""
        return count_causes(self.state.fault_counts, self.state.faults)

    def note(self, fault: Fault) -> None:
        """Add a fault."""
        self.replace(faults=add_fault(self.state.faults, fault))

    def remove(self, rank: int) -> None:
        """Take a member out; ranks that were being assigned are out of date then."""
        members = {**self.state.members}
        member = members.pop(rank)
        gap = () if member.active_rank is None else (describe_member(rank, member, is_alive=False),)
        self.replace(members=members, gone=(*self.state.gone, *gap), question=None)

    def set_member(self, rank: int, member: Member) -> None:
        """Put a member in the place of what was known of it."""
        self.replace(members={**self.state.members, rank: member})

    def replace(self, **changes: object) -> None:
        """Change what is known."""
        self.state = msgspec.structs.replace(self.state, **changes)

    def send(self, rank: int, order: Order) -> None:
        """Give one member an order."""
        self.actions.append(Send(to=(rank,), order=order))

    def send_all(self, order: Order) -> None:
        """Give everybody who has come an order."""
        to = tuple(sorted(rank for rank, member in self.state.members.items() if member.is_here))
        self.actions.append(Send(to=to, order=order))


def describe_member(rank: int, member: Member, *, is_alive: bool = True) -> MemberFacts:
    """Return a member for those who assign ranks."""
    return MemberFacts(
        initial_rank=rank,
        node=member.node,
        active_rank=member.active_rank,
        is_alive=is_alive,
        labels=dict(member.labels),
    )
