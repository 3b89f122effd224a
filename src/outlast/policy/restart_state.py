"""What is known of the members of an in-process restart, and what can happen to them.

:mod:`outlast.policy.restarts` decides what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from outlast.policy.restart_orders import Abort, Fault, FaultKind, Finish, Go, MemberFacts, Order, Report, Standing

__all__ = [
    "Came",
    "Event",
    "Isolated",
    "Lost",
    "Member",
    "Phase",
    "Question",
    "RestartState",
    "Said",
    "Send",
    "Tick",
    "begin",
    "take_over",
]


class Phase(StrEnum):
    """Where the members are, as a whole."""

    FORMING = "forming"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A living member."""

    node: str
    is_here: bool = False
    """It has come; before, it is only expected."""
    active_rank: int | None = None
    """In the iteration that runs or ran last."""
    store_address: str | None = None
    """It is ready for the iteration that forms, and would host its store there; ``None``: it is not."""
    completed: bool = False
    labels: Mapping[str, str] = {}
    """What it says of its place beyond its node."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A member has been asked to assign the ranks."""

    ordinal: int
    to: int
    asked_s: float


class RestartState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known."""

    phase: Phase
    iteration: int
    """The one that forms, runs, or ran last."""
    members: Mapping[int, Member]
    """Living ones by initial rank."""
    began_s: float
    """When the phase began."""
    gone: tuple[MemberFacts, ...] = ()
    """Those that have gone since the last order to go and had an active rank; they leave gaps."""
    go: Go | None = None
    """The order to enter the iteration that runs, where this hub gave it."""
    faults: tuple[Fault, ...] = ()
    """Since the last order to go."""
    fault_counts: Mapping[int, int] = {}
    """Causes by initial rank, up to the last order to go."""
    question: Question | None = None
    num_questions: int = 0
    """Ordinal of the last question; another hub's begin elsewhere, so that answers to it are not taken."""
    last_call_s: float | None = None
    """Until when the cause of the known faults is waited for."""
    first_completed_s: float | None = None
    end: Finish | Abort | None = None
    """The last order."""


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """A member is linked to the hub, for the first time or again."""

    initial_rank: int
    node: str
    standing: Standing
    at_s: float
    labels: Mapping[str, str] = {}
    """What it says of its place beyond its node."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A member reported."""

    initial_rank: int
    report: Report
    at_s: float


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A member's process is gone, or counts as gone."""

    initial_rank: int
    kind: FaultKind
    summary: str
    at_s: float


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time has passed; see :func:`next_deadline_s`."""

    at_s: float


class Isolated(msgspec.Struct, frozen=True, kw_only=True):
    """Most members are out of reach, and may go on elsewhere: those here must not."""

    reason: str
    at_s: float


Event = Came | Said | Lost | Tick | Isolated


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Give these members an order."""

    to: tuple[int, ...]
    order: Order


def begin(world_size: int, at_s: float) -> RestartState:
    """Return the state before anyone has come."""
    members = {rank: Member(node="") for rank in range(world_size)}
    return RestartState(phase=Phase.FORMING, iteration=0, members=members, began_s=at_s)


def take_over(
    standings: Mapping[int, Standing], nodes: Mapping[int, str], world_size: int, at_s: float
) -> RestartState:
    """Return the state for a hub that follows one that is gone.

    Args:
        standings: Of the members that came, by initial rank.
        nodes: Node of every member that lived when the old hub spoke last; empty: no iteration was formed yet.
        world_size: Initial one.
        at_s: The time.

    Nobody has come yet in this state: follow with :class:`Came` for each, and :class:`Lost` for each that has not.
    """
    newest = max(standings.values(), key=lambda standing: standing.iteration)
    restart = max(standing.restart for standing in standings.values())
    if newest.iteration < 0 or not nodes:
        return msgspec.structs.replace(begin(world_size, at_s), num_questions=int(at_s * 1e6))
    members = {
        rank: Member(node=node, active_rank=newest.ranks.get(rank))
        for rank, node in nodes.items()
        # Who was left out of the last iteration leaves, whatever the old hub managed to say of it.
        if rank in newest.ranks
    }
    all_went = all(standing.iteration == newest.iteration for standing in standings.values())
    forming = restart > newest.iteration or not all_went
    return RestartState(
        phase=Phase.FORMING if forming else Phase.RUNNING,
        iteration=newest.iteration + 1 if forming else newest.iteration,
        members=members,
        began_s=at_s,
        num_questions=int(at_s * 1e6),
        gone=tuple(
            MemberFacts(initial_rank=rank, node="", active_rank=active, is_alive=False)
            for rank, active in newest.ranks.items()
            if active is not None and rank not in nodes
        ),
        fault_counts=newest.fault_counts,
    )
