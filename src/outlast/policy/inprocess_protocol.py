"""What members of an in-process restart report, what the hub orders, and what a worker's agent reads of it.

The hub's decisions about these messages are in :mod:`outlast.policy.inprocess_restart`. An *initial rank* identifies
a process for its whole life; a *restart count* numbers the calls of the wrapped function, from 0.

For its agent a worker that runs a function which :class:`outlast.inprocess.Wrapper` calls again after a fault is
*armed*. Its peers resume without it, so that its end need not end the cycle; if they cannot, they end themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import msgspec

from outlast.errors import ExitReason
from outlast.policy.rank_assignment import Member


class InProcessState(IntEnum):
    """How a worker stands with restarts inside its process."""

    OFF = 0
    """It is in no wrapped function: its end is a failure of the cycle."""
    ACTIVE = 1
    """It runs the function."""
    RESTARTING = 2
    """It left the function because of a fault somewhere, or is about to, and has not begun it anew."""
    RETURNED = 3
    """All are done with the function; what the worker does now is like any other worker's."""
    LEFT = 4
    """It left its peers permanently, and they resume without it."""
    GAVE_UP = 5
    """The restart inside the processes is abandoned: their launcher must start them again."""
    SPARE = 6
    """It waits to take the place of another."""
    COMPLETED = 7
    """It is done with the function, others are not."""


_SURVIVABLE = frozenset(InProcessState) - {InProcessState.OFF, InProcessState.RETURNED, InProcessState.GAVE_UP}
_GOING_ON = _SURVIVABLE - {InProcessState.LEFT} | {InProcessState.RETURNED}
HAS_BEGUN = frozenset({InProcessState.ACTIVE, InProcessState.SPARE, InProcessState.COMPLETED, InProcessState.RETURNED})
"""States of a worker that knows why the restart call before was left."""
_DISPENSABLE = _SURVIVABLE - {InProcessState.ACTIVE, InProcessState.RESTARTING}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStanding:
    """How a worker stands with restarts inside its process, as its page of the board shows it."""

    in_process: InProcessState = InProcessState.OFF
    in_process_call: int = 0
    """Which of the process's calls of a wrapped function that is about, from 0."""
    in_process_restart_count: int = 0
    """The restart that the worker is in, or goes to; 0 = the first call of its function."""
    in_process_since_ns: int = 0
    """When one of these changed last, in monotonic nanoseconds of the node."""
    in_process_patience_s: float = 0.0
    """Seconds that a restart inside the process may take; 0 = it was never armed."""


def is_survivable(
    worker: WorkerStanding, *, living: Iterable[WorkerStanding], done: Iterable[WorkerStanding], has_unseen_peers: bool
) -> bool:
    """Return whether a cycle can go on after a worker's end.

    Args:
        worker: The one that ended with anything but 0.
        living: Those of its node that run.
        done: Those of its node that ended in order.
        has_unseen_peers: There are peers on other nodes.
    """
    if worker.in_process not in _SURVIVABLE:
        return False
    if has_unseen_peers or any(peer.in_process in _GOING_ON for peer in living):
        return True
    return worker.in_process in _DISPENSABLE and any(peer.in_process != InProcessState.LEFT for peer in done)


def needs_restart(worker: WorkerStanding) -> bool:
    """Return whether the peers of a worker that ended must restart to go on without it."""
    return worker.in_process in (InProcessState.ACTIVE, InProcessState.RESTARTING)


def newest_begun(workers: Iterable[WorkerStanding]) -> tuple[int, int]:
    """Return the newest call and restart call that a worker has begun, whatever it does in it."""
    begun = [(one.in_process_call, one.in_process_restart_count) for one in workers if one.in_process in HAS_BEGUN]
    return max(begun, default=(0, 0))


def next_begun(reached: tuple[int, int], begun: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the oldest call and restart call, of those that workers have begun, after the one that was reached."""
    return min((one for one in begun if one > reached), default=None)


def has_resumed(worker: WorkerStanding, reached: tuple[int, int]) -> bool:
    """Return whether others got on after the end of a worker that was in the function, or on its way to it.

    Args:
        worker: How it stood at its end.
        reached: The newest call and restart call that others have begun.
    """
    return reached >= (
        worker.in_process_call,
        worker.in_process_restart_count + (worker.in_process == InProcessState.ACTIVE),
    )


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds in-process restarts."""

    max_iterations: int | None = None
    """Restarts in process; ``None``: no bound."""
    max_no_progress_restarts: int | None = None
    """Restarts in a row without progress; ``None``: no bound."""
    barrier_timeout_s: float = 120.0
    """Seconds that a member has to be ready for the next call."""
    completion_timeout_s: float = 120.0
    """Seconds from the first completed rank to the last."""
    last_call_wait_s: float = 1.0
    """Seconds that the cause is waited for when all known faults are consequences of another one."""


_ORDERLY_EXITS = frozenset(ExitReason) - {ExitReason.FAILED, ExitReason.BAD_INPUT, ExitReason.UNHEALTHY_NODE}


def is_orderly_exit(code: object) -> bool:
    """Return whether ``sys.exit(code)`` in the function ends a call of it like a return.

    All ranks exit so together, as a session does after a shutdown request or an invalid result. Any other exit is the
    loss of the rank, which keeps its exit code.
    """
    return code is None or (isinstance(code, int) and code in _ORDERLY_EXITS)


WAITS = "waits_in_collective"
"""Key of a fault's evidence: ``yes`` where the rank waited for others."""


class RankFaultKind(StrEnum):
    """What went wrong on a rank."""

    EXCEPTION = "exception"
    """The wrapped function or a plug-in raised."""
    DIED = "died"
    """Its process is gone."""
    SOFT_TIMEOUT = "soft_timeout"
    """Its main thread made no progress, though the interpreter was free."""
    HARD_TIMEOUT = "hard_timeout"
    """It was stopped, or held the interpreter's lock, or could not be interrupted; its agent process ended it."""
    LINK_LOST = "link_lost"
    """Its agent process cannot be reached."""
    COMPLETION_TIMEOUT = "completion_timeout"
    """Others had completed long since."""
    BARRIER_TIMEOUT = "barrier_timeout"
    """It was not ready for the next call in time."""


_TEXTS = {
    RankFaultKind.DIED: "its process is gone",
    RankFaultKind.LINK_LOST: "its agent process is out of reach",
}


class RankFault(msgspec.Struct, frozen=True, kw_only=True, tag="f", array_like=True, omit_defaults=True):
    """Something went wrong on a rank."""

    initial_rank: int
    restart_count: int
    """The call in which it happened."""
    kind: RankFaultKind
    summary: str = ""
    """More than the kind tells; it goes to every member."""
    is_consequence: bool = False
    """It only means that a connection to another rank broke: another rank's fault is the cause."""
    evidence: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The summary, or what the kind tells."""
        return self.summary or _TEXTS.get(self.kind) or str(self.kind).replace("_", " ")

    @property
    def is_victims(self) -> bool:
        """Whether the rank only waited for another one that hung; it is not held against it."""
        return self.kind == RankFaultKind.SOFT_TIMEOUT and self.evidence.get(WAITS) == "yes"


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="y", array_like=True):
    """The rank is out of the function, its groups are gone, its checks passed: it can enter ``call``."""

    restart_count: int
    store_address: str
    """``host port`` of the socket that it has bound and would host that call's store on."""
    iteration: int = -1
    """Highest number of optimizer steps that the rank has completed in any call; -1: unknown."""


class Completed(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The function returned, or ended by an orderly exit (:func:`is_orderly_exit`)."""

    restart_count: int
    exit_code: int = 0
    """Of that exit; 0 = it returned."""


class Left(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The rank is permanently removed."""

    reason: str
    fatal: bool = False
    """All have to stop."""


RankRuns = tuple[tuple[int, int, int | None], ...]
"""Who is which rank: runs of a first initial rank, how many, and the first active rank; ``None``: all are spares."""


def rank_runs(ranks: Mapping[int, int | None]) -> RankRuns:
    """Return active ranks by initial rank as runs: every member gets them, and most have the same distance."""
    runs: list[tuple[int, int, int | None]] = []
    for initial in sorted(ranks):
        active = ranks[initial]
        if runs:
            first, num, at = runs[-1]
            expected = None if at is None else at + num
            if initial == first + num and active == expected:
                runs[-1] = (first, num + 1, at)
                continue
        runs.append((initial, 1, active))
    return tuple(runs)


def _ranks_of(runs: RankRuns) -> dict[int, int | None]:
    return {first + at: None if active is None else active + at for first, num, active in runs for at in range(num)}


class MemberRun(msgspec.Struct, frozen=True, array_like=True):
    """Members in a row that differ in nothing but their ranks, which follow one another."""

    first: int
    num: int
    node: str
    rank: int | None = None
    alive: bool = True
    labels: dict[str, str] = {}


def member_runs(members: Iterable[Member]) -> tuple[MemberRun, ...]:
    """Return members as runs, by initial rank."""
    runs: list[MemberRun] = []
    for one in sorted(members, key=lambda member: member.initial_rank):
        if runs:
            last = runs[-1]
            rank = None if last.rank is None else last.rank + last.num
            same = (last.first + last.num, last.node, rank, last.alive, last.labels)
            if same == (one.initial_rank, one.node, one.rank, one.alive, one.labels):
                runs[-1] = msgspec.structs.replace(last, num=last.num + 1)
                continue
        runs.append(MemberRun(one.initial_rank, 1, one.node, one.rank, one.alive, dict(one.labels)))
    return tuple(runs)


class Assigned(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, omit_defaults=True):
    """The answer to :class:`Assign`."""

    ordinal: int
    """Of the question."""
    ranks: dict[int, int | None] = {}
    """Active rank by initial rank; ``None``: a spare; not in it: is permanently removed."""
    error: str = ""
    """Why no ranks can be assigned; all stop with it."""


Report = RankReady | RankFault | Completed | Left | Assigned


class Restart(msgspec.Struct, frozen=True, kw_only=True, tag="r", array_like=True):
    """Leave the function (a spare: stop waiting), and report :class:`RankReady` for the next call."""

    restart_count: int
    """The next one; what runs with a lower number is to be left."""
    faults: tuple[RankFault, ...] = ()


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Assign active ranks to these members and answer :class:`Assigned`."""

    ordinal: int
    """To be repeated in the answer."""
    restart_count: int
    runs: tuple[MemberRun, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """By initial rank; also those that had an active rank in the call before and are gone."""
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
    """``host port`` where the rank with active rank 0 listens."""
    faults: tuple[RankFault, ...] = ()
    """Why the call before ended; causes first, no more than 16; without those that the order to restart had."""
    fault_counts: dict[int, int] = {}
    """Number of faults by initial rank, all calls together."""

    @property
    def ranks(self) -> dict[int, int | None]:
        """Active rank by initial rank of all members; ``None``: a spare; who is not in it is permanently removed."""
        return _ranks_of(self.runs)


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """All active ranks have completed; the wrapper returns."""

    restart_count: int
    exit_code: int = 0
    """With which active ranks exit, and a spare, too; 0 = the function returned."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, omit_defaults=True):
    """In-process restart cannot help any more; the wrapper raises."""

    reason: str
    restart_count: int
    fault_counts: dict[int, int] = {}
    """Number of faults by initial rank, all calls together."""


class Expel(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """This member counts as dead and is ended by its agent process."""

    reason: str


class MemberStanding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a member stands, for a hub that was not there when it got there."""

    restart_count: int = -1
    """The last one that it was ordered to enter; -1: none yet."""
    runs: RankRuns = ()
    """Of that :class:`Go`."""
    fault_counts: dict[int, int] = {}
    """Of that :class:`Go`."""
    restart: int = -1
    """The call of the last :class:`Restart`; -1: none yet."""
    ready: RankReady | None = None
    """What it reported last."""
    completed: int = -1
    """The call that it completed last."""
    exit_code: int = 0
    """As in its :class:`Completed`."""
    faults: tuple[RankFault, ...] = ()
    """Its own, since that :class:`Go`."""

    @property
    def ranks(self) -> dict[int, int | None]:
        """Active rank by initial rank of that :class:`Go`."""
        return _ranks_of(self.runs)


Order = Restart | Assign | Go | Finish | Abort | Expel
