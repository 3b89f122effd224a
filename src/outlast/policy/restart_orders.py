"""What members of an in-process restart report, and what the hub orders: the words of :mod:`outlast.policy.restarts`.

An *initial rank* is who a process is for ever; an *iteration* counts the calls of the wrapped function, from 0.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = [
    "Abort",
    "Assign",
    "Assigned",
    "Candidate",
    "Completed",
    "Expel",
    "Fault",
    "FaultKind",
    "Finish",
    "Go",
    "Left",
    "MemberFacts",
    "Order",
    "Ready",
    "Report",
    "Restart",
    "Standing",
]


WAITS = "waits_in_collective"
"""Key of a fault's evidence: ``yes`` where the rank waited for others."""


class FaultKind(StrEnum):
    """What went wrong on a rank."""

    EXCEPTION = "exception"
    """The wrapped function or a plug-in raised."""
    DIED = "died"
    """Its process is gone."""
    SOFT_TIMEOUT = "soft_timeout"
    """Its main thread made no progress, though the interpreter was free."""
    HARD_TIMEOUT = "hard_timeout"
    """It was stopped, or held the interpreter's lock, or could not be interrupted; its monitor process ended it."""
    UNHEALTHY = "unhealthy"
    """Its health check failed."""
    LINK_LOST = "link_lost"
    """Its monitor process cannot be reached."""
    COMPLETION_TIMEOUT = "completion_timeout"
    """Others had completed long since."""
    BARRIER_TIMEOUT = "barrier_timeout"
    """It was not ready for the next iteration in time."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Something went wrong on a rank."""

    initial_rank: int
    iteration: int
    """The iteration in which it happened."""
    kind: FaultKind
    summary: str = ""
    is_consequence: bool = False
    """It only says that a connection to another rank broke: another rank's fault is the cause."""
    evidence: dict[str, str] = {}

    @property
    def is_victims(self) -> bool:
        """Whether the rank only waited for another one that hung; it is not held against it."""
        return self.kind == FaultKind.SOFT_TIMEOUT and self.evidence.get(WAITS) == "yes"


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank is out of the function, its groups are gone, its checks passed: it can enter ``iteration``."""

    iteration: int
    store_address: str
    """``host port`` of the socket that it has bound and would host that iteration's store on."""


class Completed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function returned."""

    iteration: int


class Left(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank leaves for good."""

    reason: str
    fatal: bool = False
    """All have to stop."""


class Assigned(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The answer to :class:`Assign`."""

    ordinal: int
    """Of the question."""
    ranks: dict[int, int | None] = {}
    """Active rank by initial rank; ``None``: a reserve; not in it: leaves for good."""
    error: str = ""
    """Why no ranks can be assigned; all stop with it."""


Report = Ready | Fault | Completed | Left | Assigned


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A member, for those who assign ranks."""

    initial_rank: int
    node: str
    active_rank: int | None
    """In the iteration before; ``None``: it was a reserve, or there was none."""
    is_alive: bool = True
    """Whether it can be given a rank; one that had a rank and is gone leaves a gap."""
    labels: dict[str, str] = {}
    """What it says of its place beyond its node."""


class Restart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Leave the function (a reserve: stop waiting), and say :class:`Ready` for the next iteration."""

    iteration: int
    """The next one; what runs with a lower number is to be left."""
    faults: tuple[Fault, ...] = ()


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Assign active ranks to these members and answer :class:`Assigned`."""

    ordinal: int
    """To be repeated in the answer."""
    iteration: int
    members: tuple[MemberFacts, ...]
    """By initial rank; also those that had an active rank in the iteration before and are gone."""


class Go(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Enter the function."""

    iteration: int
    ranks: dict[int, int | None]
    """Active rank by initial rank of all members; ``None``: a reserve; who is not in it leaves for good."""
    active_world_size: int
    store_address: str
    """``host port`` where the rank with active rank 0 listens."""
    faults: tuple[Fault, ...] = ()
    """Why the iteration before ended; causes first, no more than 16."""
    fault_counts: dict[int, int] = {}
    """Number of faults by initial rank, all iterations together."""


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All active ranks have completed; the wrapper returns."""

    iteration: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """In-process restart cannot help any more; the wrapper raises."""

    reason: str
    iteration: int
    fault_counts: dict[int, int] = {}
    """Number of faults by initial rank, all iterations together."""


class Expel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This member counts as dead and is ended by its monitor process."""

    reason: str


class Standing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a member stands, for a hub that was not there when it got there."""

    iteration: int = -1
    """The last one that it was told to enter; -1: none yet."""
    ranks: dict[int, int | None] = {}
    """Of that :class:`Go`."""
    fault_counts: dict[int, int] = {}
    """Of that :class:`Go`."""
    restart: int = -1
    """The iteration of the last :class:`Restart`; -1: none yet."""
    ready: Ready | None = None
    """What it said last."""
    completed: int = -1
    """The iteration that it completed last."""
    faults: tuple[Fault, ...] = ()
    """Its own, since that :class:`Go`."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A monitor process that may host the hub."""

    initial_rank: int
    node: str
    address: str
    """``host port``."""
    life: str
    """Names the process: a rank may have another one later."""


Order = Restart | Assign | Go | Finish | Abort | Expel
