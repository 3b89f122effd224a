"""What the ladder knows: what it remembers of a run, what is known of a cycle's end, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind, Rung
from outlast.policy.quarantine import Distrusted, Load
from outlast.policy.rerun import Diagnosis, InvalidResultCase, Replay

__all__ = ["MAX_HISTORY", "CycleEnd", "LadderState", "LadderStep", "Limits", "begin_job", "begin_run"]

MAX_HISTORY = 64
"""How many of the newest entries each of the ladder's lists keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may be tried."""

    max_restarts: int = 3
    """Restarts in a row without progress in between; 0 = none at all."""

    max_restarts_total: int | None = None
    """Restarts over the whole run, with or without progress; ``None`` = no limit."""

    max_no_progress_cycles: int = 3
    """Cycles in a row that may end without progress, where progress can be known."""

    max_node_faults: int = 3
    """Faults after which a node gives its slot to a spare, where one waits; 0 = never."""

    max_same_device_reruns: int = 2
    """Restarts on the same devices for the same exit code 16, where its worker left no diagnosis, which has a limit of
    its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleEnd:
    """How a cycle ended, or what its workers recovered from in process, as far as all nodes together know."""

    cycle: int
    incident: Incident | None
    """The cause, not what it did to others; ``None`` only when the cycle finished or was preempted."""

    finished: bool = False
    """Every worker ended with exit code 0."""

    recovered_in_process: bool = False
    """It did not end after all: its workers restarted inside their processes."""

    preempted: bool = False
    """The job was requested to shut down."""

    preempted_saved: bool = False
    """The workers saved what they had before they left."""

    durable_iteration: int | None = None
    """Highest iteration that any rank knows to be committed; ``None`` = none yet."""

    progress_known: bool = False
    """A worker reports its saves to us, so that no new one means no progress."""

    had_session: bool = False
    """A worker had a session, or a monitor: more is known of the run than the exit codes of its processes."""

    num_spares: int = 0
    """Nodes that wait for a slot, may have one, and fit the slot of the node that the cause points at."""

    may_shrink: bool = False
    """The world may continue without a node if no spare waits."""

    load: Load | None = None
    """What the workers had loaded; ``None`` = nothing, or it is not known."""

    is_permanent: bool = False
    """All ranks failed alike before their first step, and a restart cannot help; see ``policy.causes``."""

    diagnosis: Diagnosis | None = None
    """What the workers knew of the invalid result, or slow rank, because of which they left; ``None`` = they left
    none."""

    def __post_init__(self) -> None:
        assert self.incident is not None or self.finished or self.preempted, "a failed cycle needs its incident"

    @property
    def exit_code(self) -> int | None:
        """Exit code with which a worker ended by itself; ``None`` where the cause is another one."""
        if self.incident is None or self.incident.kind != IncidentKind.WORKER_FAILED:
            return None
        return self.incident.exit_code

    @property
    def is_invalid_result(self) -> bool:
        """Whether it ended because a worker judged a result invalid."""
        verdicts = (ExitReason.RESUME_TO_DISAMBIGUATE, ExitReason.FAILED_VALIDATION)
        return not self.finished and not self.preempted and self.exit_code in verdicts

    @property
    def is_slow_rank(self) -> bool:
        """Whether it ended because all ranks left for the sake of a slow one."""
        return not self.finished and not self.preempted and self.exit_code == ExitReason.STRAGGLER


class LadderStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One remembered decision."""

    cycle: int
    job: str = ""
    incident: str = ""
    rung: Rung
    reason: str
    durable_iteration: int | None = None
    time: str = ""
    """When it was decided, ISO 8601 in UTC; whoever writes the file fills it in, and no decision reads it."""


class LadderState(msgspec.Struct, frozen=True, kw_only=True):
    """What the ladder remembers from cycle to cycle and from job to job."""

    job: str = ""
    """The job that wrote this; its budgets begin afresh in the next one, see :func:`begin_job`."""
    restarts_without_progress: int = 0
    restarts_total: int = 0
    cycles_without_progress: int = 0
    best_durable: int | None = None
    """Highest durable iteration ever seen; never falls."""
    progress_known: bool = False
    """Some cycle of this run reported its saves; one that reports nothing has then made no progress."""
    had_session: bool = False
    """Some worker of this run had a session, or a monitor."""
    node_faults: dict[str, int] = {}
    """Faults that began on each node in this job; what they did to peers is not counted."""
    quarantined: tuple[str, ...] = ()
    """Nodes that get no slot any more in this job."""
    held_back: tuple[str, ...] = ()
    """Nodes that get no slot in the cycle that follows: what went wrong there is replayed elsewhere."""
    blamed: tuple[str, ...] = ()
    """Nodes whose device was found to be at fault since the last progress in this job."""
    loads: tuple[Load, ...] = ()
    """What the newest cycles of the run loaded, oldest first."""
    distrusted: tuple[Distrusted, ...] = ()
    """Copies that led to invalid results: these, and what descends from them, are not loaded again. Take an entry out
    of ``ladder.json`` to trust its copy again."""
    cases: tuple[InvalidResultCase, ...] = ()
    """Invalid results that no verdict was found for yet, and what was tried to find one."""
    replay: Replay | None = None
    """What the newest cycle was, or the next one is, started to replay; ``None`` = it trains as usual."""
    finished: bool = False
    stopped_with: int | None = None
    """Exit code of the stop that ended the last job; ``None`` while one runs or when it was re-queued."""
    history: tuple[LadderStep, ...] = ()
    """The newest decisions, oldest first."""

    @property
    def is_over(self) -> bool:
        """Whether the run has trained to its end, so that no job trains again.

        Where no worker ever had a session nobody knows whether anything was trained: an empty script ends with 0, too.
        """
        # Both of the latter are known through a session alone; files of earlier versions have only them.
        return self.finished and (self.had_session or self.progress_known or self.best_durable is not None)

    @property
    def barred(self) -> tuple[str, ...]:
        """Nodes that get no slot now."""
        return (*self.quarantined, *self.held_back)


def begin_job(state: LadderState) -> LadderState:
    """Return the state with which a new job of the run starts.

    ``--max-restarts``, node faults and what is known of nodes are a job's own. The cycles without progress keep
    counting from job to job, unless the ladder itself had ended the run permanently (exit codes 17 and 93): nothing in
    outlast re-queues such a run, so whoever starts it again has looked at it, and gets all budgets afresh.

    A replay that was pending when a job was shut down continues in the next one, wherever its ranks are then: its
    workers see whether they are on another device. Where the job just ended, the replay may have ended it, and is
    dropped. What was tried so far for an invalid result still counts.

    A run that finished without any worker ever having had a session begins anew, as with ``torchrun``.
    """
    if state.finished and not state.is_over:
        return begin_run(state)
    was_told_to_leave = bool(state.history) and state.history[-1].rung == Rung.REQUEUE_JOB
    if not was_told_to_leave:
        state = msgspec.structs.replace(state, replay=None)
    cases = tuple(case for case in state.cases if case.iteration is not None)  # others may be another job's
    state = msgspec.structs.replace(
        state, restarts_without_progress=0, node_faults={}, quarantined=(), held_back=(), blamed=(), cases=cases
    )
    if state.stopped_with in (ExitReason.NO_PROGRESS, ExitReason.FAILED_VALIDATION):
        distrusted = tuple(msgspec.structs.replace(one, settled=True) for one in state.distrusted)
        state = msgspec.structs.replace(
            state, cycles_without_progress=0, restarts_total=0, distrusted=distrusted, cases=()
        )
    return msgspec.structs.replace(state, stopped_with=None)


def begin_run(state: LadderState) -> LadderState:
    """Return the state of a new run in the directory of a finished one: all budgets afresh.

    What was saved is known by the names of its job and cycle: those that were given stay remembered, and so do the
    copies that are not to be loaded.
    """
    return LadderState(loads=state.loads, distrusted=state.distrusted, history=state.history)
