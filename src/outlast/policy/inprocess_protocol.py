"""Messages of in-process restarts: reports of members, orders of the in-process restart coordinator, states that agents
read.

The coordinator's decisions are in :mod:`outlast.policy.inprocess_restart`. An *initial rank* identifies a process for
its whole life; a *restart count* numbers the calls of the wrapped function, from 0.

A worker inside a function wrapped by :class:`outlast.inprocess.Wrapper` is *armed*: its peers resume without it, so its
end need not end the cycle; if they cannot, they end themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import groupby
from typing import TypeVar

import msgspec

from outlast.errors import ExitReason
from outlast.policy.rank_assignment import Member

T = TypeVar("T")


class InProcessState(IntEnum):
    OFF = 0
    """Outside wrapped functions: its end is a failure of the cycle."""
    ACTIVE = 1
    RESTARTING = 2
    """Exited the function because of a fault on any rank, or is about to, and has not re-entered it."""
    RETURNED = 3
    """All ranks have completed the function; the worker is like any other from here on."""
    LEFT = 4
    """Left its peers permanently; they resume without it."""
    GAVE_UP = 5
    """The in-process restart was abandoned: the launcher must start the workers again."""
    SPARE = 6
    """Waits to replace another rank."""
    COMPLETED = 7
    """Completed the function; others have not."""


_SURVIVABLE = frozenset(InProcessState) - {InProcessState.OFF, InProcessState.RETURNED, InProcessState.GAVE_UP}
_GOING_ON = _SURVIVABLE - {InProcessState.LEFT} | {InProcessState.RETURNED}
HAS_BEGUN = frozenset({InProcessState.ACTIVE, InProcessState.SPARE, InProcessState.COMPLETED, InProcessState.RETURNED})
"""States of a worker that knows why the previous call was exited."""
_DISPENSABLE = _SURVIVABLE - {InProcessState.ACTIVE, InProcessState.RESTARTING}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStanding:
    """In-process restart state of a worker, as its page of the heartbeat memory shows it."""

    in_process: InProcessState = InProcessState.OFF
    in_process_call: int = 0
    """Number of the process's call of a wrapped function, from 0."""
    in_process_restart_count: int = 0
    """The restart that the worker is in, or begins; 0 = the first call of its function."""
    in_process_since_ns: int = 0
    """When one of these changed last, in monotonic nanoseconds of the node."""
    in_process_patience_s: float = 0.0
    """Seconds that an in-process restart may take; 0 = the worker was never armed."""


def is_survivable(
    worker: WorkerStanding, *, living: Iterable[WorkerStanding], done: Iterable[WorkerStanding], has_unseen_peers: bool
) -> bool:
    """Return whether a cycle can continue after a worker's end.

    Args:
        worker: The worker that ended with a nonzero exit code.
        living: Running workers of its node.
        done: Workers of its node that ended in order.
        has_unseen_peers: Other nodes have peers.
    """
    if worker.in_process not in _SURVIVABLE:
        return False
    if has_unseen_peers or any(peer.in_process in _GOING_ON for peer in living):
        return True
    return worker.in_process in _DISPENSABLE and any(peer.in_process != InProcessState.LEFT for peer in done)


def needs_restart(worker: WorkerStanding) -> bool:
    """Return whether the peers of a worker that ended must restart to continue without it."""
    return worker.in_process in (InProcessState.ACTIVE, InProcessState.RESTARTING)


def newest_begun(workers: Iterable[WorkerStanding]) -> tuple[int, int]:
    """Return the newest call and restart count that any worker has begun."""
    begun = [(one.in_process_call, one.in_process_restart_count) for one in workers if one.in_process in HAS_BEGUN]
    return max(begun, default=(0, 0))


def next_begun(reached: tuple[int, int], begun: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the oldest call and restart count among ``begun`` that is after ``reached``."""
    return min((one for one in begun if one > reached), default=None)


def has_resumed(worker: WorkerStanding, reached: tuple[int, int]) -> bool:
    """Return whether others progressed after the end of a worker that was in the function, or about to enter it.

    Args:
        worker: Its state at its end.
        reached: The newest call and restart count that others have begun.
    """
    return reached >= (
        worker.in_process_call,
        worker.in_process_restart_count + (worker.in_process == InProcessState.ACTIVE),
    )


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_iterations: int | None = None
    """In-process restarts; ``None`` = no limit."""
    max_no_progress_restarts: int | None = None
    """Restarts in a row without progress; ``None`` = no limit."""
    barrier_timeout_s: float = 120.0
    """Seconds in which a member must be ready for the next call."""
    completion_timeout_s: float = 120.0
    """Seconds from the first completed rank to the last."""
    last_call_wait_s: float = 1.0
    """Seconds to wait for the root cause when all known faults are consequences."""


_ORDERLY_EXITS = frozenset(ExitReason) - {ExitReason.FAILED, ExitReason.BAD_INPUT, ExitReason.UNHEALTHY_NODE}


def is_orderly_exit(code: object) -> bool:
    """Return whether ``sys.exit(code)`` in the function ends a call of it like a return.

    All ranks exit in this way together, as a session does after a shutdown request or an invalid result. Any other exit
    is the loss of the rank, which keeps its exit code.
    """
    return code is None or (isinstance(code, int) and code in _ORDERLY_EXITS)


WAITS = "waits_in_collective"
"""Key of a fault's evidence: ``yes`` if the rank waited for others."""


class RankFaultKind(StrEnum):
    EXCEPTION = "exception"
    """The wrapped function or a plug-in raised."""
    DIED = "died"
    SOFT_TIMEOUT = "soft_timeout"
    """Its main thread made no progress, though the interpreter was free."""
    HARD_TIMEOUT = "hard_timeout"
    """It was stopped, held the GIL, or could not be interrupted; its agent process ended it."""
    LINK_LOST = "link_lost"
    """Its agent process cannot be reached."""
    COMPLETION_TIMEOUT = "completion_timeout"
    """It did not complete in time after others had."""
    BARRIER_TIMEOUT = "barrier_timeout"
    """It was not ready for the next call in time."""


_TEXTS = {
    RankFaultKind.DIED: "its process is gone",
    RankFaultKind.LINK_LOST: "its agent process is out of reach",
}


class RankFault(msgspec.Struct, frozen=True, kw_only=True, tag="f", array_like=True, omit_defaults=True):
    initial_rank: int
    restart_count: int
    """The call in which it occurred."""
    kind: RankFaultKind
    summary: str = ""
    """Details beyond the kind; sent to every member."""
    is_consequence: bool = False
    """A connection to another rank broke: that rank's fault is the root cause."""
    evidence: dict[str, str] = {}

    @property
    def text(self) -> str:
        return self.summary or _TEXTS.get(self.kind) or str(self.kind).replace("_", " ")

    @property
    def is_victims(self) -> bool:
        """Whether the rank only waited for another one that hung; it is then not blamed."""
        return self.kind == RankFaultKind.SOFT_TIMEOUT and self.evidence.get(WAITS) == "yes"


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="y", array_like=True):
    """The rank exited the function, its process groups are gone, its checks passed: it can enter the call."""

    restart_count: int
    store_address: str
    """``host port`` of the bound socket that it would host that call's store on."""
    iteration: int = -1
    """Highest number of optimizer steps that the rank has completed in any call; -1 = unknown."""


class Completed(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The function returned, or ended by an orderly exit (:func:`is_orderly_exit`)."""

    restart_count: int
    exit_code: int = 0
    """0 = the function returned."""


class Left(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The rank is permanently removed."""

    reason: str
    fatal: bool = False
    """All ranks have to stop."""


RankRuns = tuple[tuple[int, int, int | None], ...]
"""Active ranks as runs: first initial rank, length, first active rank; ``None`` = all are spares."""


def _runs(ranks: Iterable[tuple[int, int | None, T]]) -> Iterator[tuple[int, int, int | None, T]]:
    """Yield first initial rank, length, first rank and rest of each run of ascending initial ranks and ranks."""

    def run_of(one: tuple[int, tuple[int, int | None, T]]) -> tuple[int, int | None, T]:
        index, (initial, rank, rest) = one
        return initial - index, None if rank is None else rank - index, rest

    for _, group in groupby(enumerate(sorted(ranks, key=lambda one: one[0])), run_of):
        run = [one for _, one in group]
        first, rank, rest = run[0]
        yield first, len(run), rank, rest


def rank_runs(ranks: Mapping[int, int | None]) -> RankRuns:
    """Return active ranks by initial rank as runs, which keeps the message to every member short."""
    return tuple(run[:3] for run in _runs((initial, rank, None) for initial, rank in ranks.items()))


def _ranks_of(runs: RankRuns) -> dict[int, int | None]:
    return {first + at: None if active is None else active + at for first, num, active in runs for at in range(num)}


class MemberRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive members that differ in nothing but their ranks, which are consecutive, too."""

    first: int
    num: int
    node: str
    rank: int | None = None
    alive: bool = True
    labels: dict[str, str] = {}


def member_runs(members: Iterable[Member]) -> tuple[MemberRun, ...]:
    runs = _runs((one.initial_rank, one.rank, (one.node, one.alive, dict(one.labels))) for one in members)
    return tuple(MemberRun(first, num, node, rank, alive, labels) for first, num, rank, (node, alive, labels) in runs)


class Assigned(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, omit_defaults=True):
    """The response to :class:`Assign`."""

    ordinal: int
    """That of the :class:`Assign`."""
    ranks: dict[int, int | None] = {}
    """Active rank by initial rank; ``None`` = a spare; missing = permanently removed."""
    error: str = ""
    """Why no ranks can be assigned; all ranks stop with this error."""


Report = RankReady | RankFault | Completed | Left | Assigned


class Restart(msgspec.Struct, frozen=True, kw_only=True, tag="r", array_like=True):
    """Exit the function (a spare: stop waiting), and report :class:`RankReady` for the next call."""

    restart_count: int
    """That of the next call; calls with a lower count are to be exited."""
    faults: tuple[RankFault, ...] = ()


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Assign active ranks to these members and respond with :class:`Assigned`."""

    ordinal: int
    """Repeated in the response."""
    restart_count: int
    runs: tuple[MemberRun, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """By initial rank; includes members that had an active rank in the previous call and are gone."""
        return tuple(
            Member(
                initial_rank=run.first + at,
                node=run.node,
                rank=None if run.rank is None else run.rank + at,
                alive=run.alive,
                labels=run.labels,
            )
            for run in self.runs
            for at in range(run.num)
        )


class Go(msgspec.Struct, frozen=True, kw_only=True, tag="g", array_like=True):
    """Enter the function."""

    restart_count: int
    runs: RankRuns
    active_world_size: int
    store_address: str
    """``host port`` where active rank 0 listens."""
    faults: tuple[RankFault, ...] = ()
    """Why the previous call ended; root causes first, at most 16; without those already in the :class:`Restart`."""
    fault_counts: dict[int, int] = {}
    """Number of faults by initial rank, over all calls."""

    @property
    def ranks(self) -> dict[int, int | None]:
        """Active rank by initial rank of all members; ``None`` = a spare; missing = permanently removed."""
        return _ranks_of(self.runs)


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """All active ranks have completed; the wrapper returns."""

    restart_count: int
    exit_code: int = 0
    """Exit code for active ranks and spares; 0 = the function returned."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, omit_defaults=True):
    """In-process restart cannot continue; the wrapper raises."""

    reason: str
    restart_count: int
    fault_counts: dict[int, int] = {}
    """Number of faults by initial rank, over all calls."""


class Expel(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The member counts as dead, and its agent process ends it."""

    reason: str


class MemberStanding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a member, for a coordinator that took over."""

    restart_count: int = -1
    """Restart count of the last :class:`Go`; -1 = none yet."""
    runs: RankRuns = ()
    """Of that :class:`Go`."""
    fault_counts: dict[int, int] = {}
    """Of that :class:`Go`."""
    restart: int = -1
    """Restart count of the last :class:`Restart`; -1 = none yet."""
    ready: RankReady | None = None
    completed: int = -1
    """The last call that it completed."""
    exit_code: int = 0
    """As in its :class:`Completed`."""
    faults: tuple[RankFault, ...] = ()
    """Its own faults since that :class:`Go`."""

    @property
    def ranks(self) -> dict[int, int | None]:
        """Active rank by initial rank of that :class:`Go`."""
        return _ranks_of(self.runs)


Order = Restart | Assign | Go | Finish | Abort | Expel
