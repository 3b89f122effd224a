"""The recovery policy: from the incident that ended a cycle to the least expensive recovery level that can still help.

:func:`decide` is the only place where restarts are granted: a pure function of the stored state
(:class:`RecoveryState`, kept in ``ladder.json`` across jobs), the end of a cycle (:class:`CycleEnd`) and the
:class:`Limits`.

Budgets reset on progress, never on time; progress is a committed checkpoint at a higher iteration than before. Within a
job any tier counts, since a restart resumes from there. A new job begins at what survived the last one, so only a
checkpoint beyond that is progress in the requeue policy.

* ``restarts_without_progress`` counts restarts since the last progress; bounded by ``max_restarts``.
* ``cycles_without_progress`` counts ended cycles without progress, where progress can be known; bounded by
  ``max_no_progress_cycles``. It outlives the job, so that requeueing cannot continue forever.
* ``restarts_total`` counts all restarts of a run; bounded by ``max_restarts_total``.

Restarts in a row without progress wait, each longer than the one before (:mod:`outlast.policy.backoff`).

A script that does not save through outlast reports no progress. Its restarts are bounded by ``max_restarts`` alone (and
the total), as by torchrun. Exception: the same error of its own code at the same place in two cycles in a row ends the
job (:func:`repeats_failure`), and so does the same error before the first step of any run, unless it appears to come
from a device, a network or a disk.

An in-process restart is granted from the same budgets. It has happened by the time of the decision; if it is not
granted the job ends, and if it is, no cycle ended without progress.

If all failures began on one node, then before the last restart that a budget allows, that node gives its slot to a
spare, if one waits (``max_node_faults=0`` turns this off). The loss of a node before any rank of its cycle completed a
step counts against that node alone, up to ``max_node_faults`` times between two steps of progress, whichever nodes they
are; a node that is lost that often gets no slot any more if the world can continue without it. After a slow rank (exit
code 18) its node gives its slot to a spare and gets none any more; without a spare the run stops, as the same workers
on the same nodes would be as slow.

The exit code of a stop shows a scheduler whether a retry can help: 93 if a retry got no further; 1 if none was made
(``max_restarts=0``), if the progress is unknown, or if the last cycle made progress and only the total is spent.

If a worker fails in the same way at the same iteration after the same node-local copy was loaded, the last restart that
a budget leaves loads another copy (``policy.recovery_point``).

An invalid result (exit codes 16 and 17, :func:`find_remedy`) has its own remedies, within the same budgets. Exit code
16 requests that the result is run again before it is judged, in this order:

1. Soon after a load from a node-local tier that copy is excluded; the next cycle loads another one.
2. Another device decides: the node that saw the result is held back, a spare takes its slot, and the next cycle replays
   the saved batches. Once for each result.
3. Without another device the same one replays it, a bounded number of times for each result. It can only show that the
   result is not reproducible.
4. Soon after a load from the global tier that checkpoint is excluded; the next cycle loads an older one.
5. Stop, with the diagnosis.

Exit code 17 reports a finding. A *correct* result stops the run: the training would repeat it. A *persistent* fault of
a device removes its node if the world can continue without it; otherwise the node gets one more chance as long as there
is no progress. If ranks outvoted a differing replica without a replay, a second such finding soon after a load points
at the loaded copy. A code without a finding, or from an undecided replay, leads to steps 1, 4 and 5. Replicas that
differ without a majority identify no root cause: their workers restart on the same devices, a bounded number of times.

A *case* is an invalid result without a final finding, identified by its step and first device, with the replays that
were granted. It is closed by a committed checkpoint beyond its iteration.

One module because it is one decision: each rule spends, or spares, the budgets that all others read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec.structs import replace

from outlast.errors import ExitReason
from outlast.incidents import Cause, Decision, Incident, IncidentKind, RecoveryLevel
from outlast.policy.backoff import DELAYS_S, restart_delay_s
from outlast.policy.causes import is_deterministic, is_of_code
from outlast.policy.recovery_point import (
    NONE_DURABLE,
    Exclusion,
    Judgement,
    Load,
    exclude_after_failure,
    judge,
    settle,
)
from outlast.policy.rerun import Diagnosis, Finding, InvalidResultCase, Replay
from outlast.wording import count

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A count in :class:`RecoveryState`, which agents report."""
MAX_HISTORY = 64
"""How many of the newest entries each list of :class:`RecoveryState` keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Budgets of the recovery policy."""

    max_restarts: int = 3
    """Restarts in a row without progress; 0 = none."""

    max_restarts_total: int | None = None
    """Restarts over the whole run, with or without progress; ``None`` = no limit."""

    max_no_progress_cycles: int = 3
    """Cycles in a row that may end without progress, where progress can be known."""

    max_node_faults: int = 3
    """Faults after which a node gives its slot to a spare, where one waits; 0 = never."""

    max_same_device_reruns: int = 2
    """Restarts on the same devices for the same exit code 16 without a diagnosis; a diagnosis has its own limit."""

    max_restart_delay_s: float = DELAYS_S[-1]
    """Longest delay of a restart after repeated failures without progress; 0 = no delay."""

    @classmethod
    def for_nodes(cls, num_nodes: int, **given: int | float | None) -> Limits:
        """Return the limits of a job of this many nodes, where those that are not given depend on its size."""
        allowed = failures_in_a_row(num_nodes)
        return cls(**{"max_restarts": allowed, "max_no_progress_cycles": allowed, **given})  # type: ignore[arg-type]


_NODES_PER_FAILURE = 4096


def failures_in_a_row(num_nodes: int) -> int:
    """Return after how many failures in a row without progress a job of this many nodes stops by default.

    Three, and one more for each 4,096 nodes beyond the first 4,096: with three, a job of 16,384 nodes that fails every
    13.5 minutes would be stopped twice a month by independent failures.
    """
    return max(3, 2 - -num_nodes // _NODES_PER_FAILURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleEnd:
    """How a cycle ended, or what its workers recovered from in process, as far as all nodes together know."""

    cycle: int
    incident: Incident | None
    """The root cause; ``None`` only when the cycle finished or was preempted."""

    finished: bool = False
    """Every worker ended with exit code 0."""

    recovered_in_process: bool = False
    """It did not end: its workers restarted in process."""

    preempted: bool = False

    preempted_saved: bool = False

    durable_iteration: int | None = None
    """Highest iteration known to survive the end of the job; ``None`` = none yet."""

    committed_iteration: int | None = None
    """Highest iteration known to be committed in any tier; ``None`` = none beyond the above."""

    progress_known: bool = False
    """A worker reports its saves, so that no new one means no progress."""

    had_session: bool = False
    """A worker had a session, or a monitor: more is known of the run than exit codes."""

    num_spares: int = 0
    """Nodes that wait for a slot and may take that of the root cause's node."""

    may_shrink: bool = False
    """The world may continue without a node if no spare waits."""

    num_nodes: int = 1
    """Nodes that took part in the cycle."""

    has_trained: bool = True
    """A rank may have completed a step."""

    ran_s: float = 0.0
    """Seconds from the cycle's start to its end; 0 = not known."""

    load: Load | None = None
    """What the workers had loaded; ``None`` = nothing, or not known."""

    is_permanent: bool = False
    """All ranks failed with the same cause before their first step, and a restart cannot help; see ``policy.causes``.
    """

    diagnosis: Diagnosis | None = None
    """The workers' diagnosis of the invalid result or slow rank; ``None`` = none."""

    def __post_init__(self) -> None:
        assert self.incident is not None or self.finished or self.preempted, "a failed cycle needs its incident"

    @property
    def newest_iteration(self) -> int | None:
        """Highest iteration from which a restart within the job can resume; ``None`` = none yet."""
        return _highest(self.durable_iteration, self.committed_iteration)

    @property
    def exit_code(self) -> int | None:
        """Exit code with which a worker ended by itself; ``None`` = the cause is another one."""
        if self.incident is None or self.incident.kind != IncidentKind.WORKER_FAILED:
            return None
        return self.incident.exit_code

    @property
    def cause(self) -> Cause | None:
        """Exception of the root cause; ``None`` = none was recorded."""
        return None if self.incident is None else self.incident.cause

    @property
    def is_invalid_result(self) -> bool:
        """Whether it ended because a worker judged a result invalid."""
        decisions = (ExitReason.RESUME_TO_DISAMBIGUATE, ExitReason.FAILED_VALIDATION)
        return not self.finished and not self.preempted and self.exit_code in decisions

    @property
    def is_slow_rank(self) -> bool:
        """Whether it ended because all ranks exited for a slow one."""
        return not self.finished and not self.preempted and self.exit_code == ExitReason.STRAGGLER


class RecoveryStep(msgspec.Struct, rename={"recovery_level": "rung"}, frozen=True, kw_only=True, omit_defaults=True):
    cycle: int
    job: str = ""
    incident: str = ""
    recovery_level: RecoveryLevel
    reason: str
    durable_iteration: int | None = None
    committed_iteration: int | None = None
    failure: str = ""
    """Exception and line of code, if a restart repeats it; see :func:`repeats_failure`."""
    has_trained: bool = True
    time: str = ""
    """Time of the decision, ISO 8601 in UTC; set when the file is written, and not read by any decision."""


class FailedCycle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a cycle failed, for comparison with the next one."""

    what: str
    """Kind of failure, exit code, type and line of the exception."""
    iteration: int
    load: Load | None = None
    committed_iteration: int | None = None


class RecoveryState(
    msgspec.Struct,
    rename={"restarts_by_level": "restarts_by_rung", "excluded": "distrusted"},
    frozen=True,
    kw_only=True,
):
    """State of the recovery policy, kept from cycle to cycle and from job to job."""

    job: str = ""
    """The job that wrote the state; its budgets are reset in the next one, see :func:`begin_job`."""
    number: Number = 0
    """Number of changes; of two states of a job, the later one has the higher number."""
    restarts_without_progress: Number = 0
    restarts_total: Number = 0
    restarts_by_level: dict[str, Number] = {}
    """Restarts of the run by recovery level, for metrics: no decision reads it, and no job resets it."""
    cycles_without_progress: Number = 0
    best_durable: int | None = None
    """Highest iteration ever known to survive the end of the job; never falls."""
    best_committed: int | None = None
    """Highest iteration that this job has committed in any tier; a restart within the job resumes from it."""
    progress_known: bool = False
    """A cycle of this run reported its saves; one that reports nothing has then made no progress."""
    had_session: bool = False
    node_faults: dict[str, Number] = {}
    """Faults that began on each node in this job; consequences on peers are not counted."""
    recent_faults: dict[str, Number] = {}
    """Faults since the last progress in this job, by the node on which each began; empty name = not known. Without
    nodes that get no slot any more."""
    free_losses: Number = 0
    """Node losses since the last progress in this job that count against the node alone."""
    quarantined: tuple[str, ...] = ()
    """Nodes that get no slot any more in this job."""
    held_back: tuple[str, ...] = ()
    """Nodes that get no slot in the next cycle: their invalid result is replayed elsewhere."""
    blamed: tuple[str, ...] = ()
    """Nodes whose device was found to be at fault since the last progress in this job."""
    loads: tuple[Load, ...] = ()
    """Loads of the newest cycles of the run, oldest first."""
    excluded: tuple[Exclusion, ...] = ()
    """Copies that led to invalid results: these, and their descendants, are not loaded again. Remove an entry from
    ``ladder.json`` to trust its copy again."""
    cases: tuple[InvalidResultCase, ...] = ()
    """Invalid results without a final finding, and the replays granted."""
    failure: FailedCycle | None = None
    """How the newest cycle failed; ``None`` = in a way that is not compared."""
    replay: Replay | None = None
    """Replay of the newest, or the next, cycle; ``None`` = it trains as usual."""
    finished: bool = False
    stopped_with: int | None = None
    """Exit code of the stop that ended the last job; ``None`` while one runs or if it was requeued."""
    history: tuple[RecoveryStep, ...] = ()
    """The newest decisions, oldest first."""

    @property
    def newest_iteration(self) -> int | None:
        return _highest(self.best_durable, self.best_committed)

    @property
    def barred(self) -> tuple[str, ...]:
        """Nodes that get no slot now."""
        return (*self.quarantined, *self.held_back)


def begin_job(state: RecoveryState) -> RecoveryState:
    """Return the state with which a new job of the run starts.

    ``--max-restarts``, node faults and facts about nodes are per job. Cycles without progress keep counting, unless the
    policy had ended the run permanently (exit codes 17 and 93): nothing in outlast requeues such a run, so a person
    restarted it, and all budgets are reset.

    A replay that was pending when a job was shut down continues in the next one, wherever its ranks are then. Where the
    job just ended, the replay may have ended it, and is dropped; the replays granted still count.

    A finished run may be given more iterations: its next job has all budgets, and the script ends at once if nothing is
    left to train.
    """
    if state.finished:
        return replace(
            begin_run(state),
            best_durable=state.best_durable,
            best_committed=state.best_durable,
            progress_known=state.progress_known,
            had_session=state.had_session,
        )
    was_shutdown_requested = bool(state.history) and state.history[-1].recovery_level == RecoveryLevel.REQUEUE_JOB
    if not was_shutdown_requested:
        state = replace(state, replay=None)
    cases = tuple(case for case in state.cases if case.iteration is not None)  # others may be another job's
    state = replace(
        state,
        best_committed=state.best_durable,
        restarts_without_progress=0,
        node_faults={},
        recent_faults={},
        free_losses=0,
        quarantined=(),
        held_back=(),
        blamed=(),
        cases=cases,
    )
    if state.stopped_with in (ExitReason.NO_PROGRESS, ExitReason.FAILED_VALIDATION):
        excluded = tuple(replace(one, settled=True) for one in state.excluded if not one.is_last_resort)
        state = replace(state, cycles_without_progress=0, restarts_total=0, excluded=excluded, cases=())
    return replace(state, stopped_with=None)


def known_durable(state: RecoveryState) -> int | None:
    """Return the newest iteration known for certain to survive the end of the job.

    Returns:
        :data:`~outlast.policy.recovery_point.NONE_DURABLE` = no cycle has committed one. ``None`` = not known: no cycle
            has ended yet, or the job before was cut off and may have committed more than was recorded.
    """
    newest = state.history[-1] if state.history else None
    if newest is None or not (
        newest.job == state.job or newest.recovery_level in (RecoveryLevel.REQUEUE_JOB, RecoveryLevel.STOP)
    ):
        return None
    return NONE_DURABLE if state.best_durable is None else state.best_durable


def merge(state: RecoveryState, kept: RecoveryState) -> RecoveryState:
    """Return the later of two states of a job, with the excluded copies of both.

    Args:
        state: That of a coordinator that takes over; may be an old one, with the changes since the takeover.
        kept: The previous coordinator's, as kept by an agent; of two states with the same number it is the later one.
    """
    older, newer = (state, kept) if kept.number >= state.number else (kept, state)
    known = {(one.attempt, one.tier) for one in newer.excluded}
    more = tuple(one for one in older.excluded if (one.attempt, one.tier) not in known)
    return replace(newer, job=state.job, excluded=(*newer.excluded, *more))


def find_outcome(state: RecoveryState) -> tuple[int, str] | None:
    """Return exit code and reason of the end of the job that wrote the state; ``None`` = it has not ended, as far as
    known."""
    if not state.history:
        return None
    newest = state.history[-1]
    if state.finished:
        return ExitReason.FINISHED, newest.reason
    if newest.recovery_level == RecoveryLevel.REQUEUE_JOB:
        return ExitReason.PREEMPTED, newest.reason
    return None if state.stopped_with is None else (state.stopped_with, newest.reason)


def find_later_outcome(state: RecoveryState, known: RecoveryState | None) -> tuple[int, str] | None:
    """Return :func:`find_outcome` for an agent that knows an earlier state of the job.

    A state that lacks the newest decision known to the agent was written by another part of a partitioned job.
    """
    if known is not None and known.history and known.history[-1] not in state.history:
        return None
    return find_outcome(state)


def begin_run(state: RecoveryState) -> RecoveryState:
    """Return the state of a new run in the directory of a finished one, with all budgets reset.

    Used job and cycle names, which identify saved checkpoints, stay recorded, and so do the excluded copies.
    """
    return RecoveryState(loads=state.loads, excluded=state.excluded, history=state.history)


_GLOBAL = "global"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to do about an invalid result; restarts are subject to the budgets."""

    what: str
    """What happened, for the message."""
    action: str
    """What is done about it and why, for the message."""
    stops: bool = False
    """The run stops with the diagnosis; everything else is a restart."""
    recovery_level: RecoveryLevel = RecoveryLevel.RESTART_WORKERS
    excluded: Exclusion | None = None
    """A copy that is not loaded again, restart or not."""
    quarantine: str = ""
    """Node that gets no slot any more; empty = none."""
    hold_back: str = ""
    """Node that gets no slot in the next cycle; empty = none."""
    replay: Replay | None = None
    case: InvalidResultCase | None = None
    """Case to store once the restart is granted."""
    faulty_node: str = ""
    """Node that the fault counts against; empty = not known."""
    is_device_fault: bool = False
    """A device of that node is at fault, and has this one chance to prove otherwise."""


def find_remedy(state: RecoveryState, end: CycleEnd, limits: Limits) -> Remedy:
    assert end.is_invalid_result
    assert end.incident is not None
    what, diagnosis = _describe(end.incident, end.diagnosis), end.diagnosis
    if end.exit_code == ExitReason.RESUME_TO_DISAMBIGUATE:
        return _disambiguate(state, end, end.incident, limits, what)
    if diagnosis is not None and diagnosis.finding == Finding.CORRECT:
        return Remedy(what=what, action="stopping: training would come to the same result again", stops=True)
    if diagnosis is not None and diagnosis.finding == Finding.REPEATED:
        return Remedy(what=what, action="stopping: it came in as many steps in a row as are allowed", stops=True)
    if diagnosis is not None and diagnosis.finding == Finding.PERSISTENT:
        return _blame(state, end, diagnosis, what)
    if diagnosis is None:
        return _judge_copy(what, _judge_load(state, end.load, _iteration(end)), faulty_node=end.incident.node)
    # A last or remote replay that decided nothing: what is left is the copy that was trained on.
    case = _find_case(state.cases, end.incident, diagnosis, end.load, is_replay=_is_replay(state, diagnosis))
    return _judge_copy(what, _judge_load(state, case.load, diagnosis.iteration))


def _disambiguate(state: RecoveryState, end: CycleEnd, incident: Incident, limits: Limits, what: str) -> Remedy:
    diagnosis = end.diagnosis
    is_replay = _is_replay(state, diagnosis)
    case = _find_case(state.cases, incident, diagnosis, end.load, is_replay=is_replay)
    judgement = _judge_load(state, case.load, _iteration(end))
    faulty = "" if diagnosis is not None else incident.node
    if judgement.excluded is not None and judgement.excluded.tier != _GLOBAL:
        return _judge_copy(what, judgement, faulty_node=faulty)
    if diagnosis is None or diagnosis.finding == Finding.SPLIT:
        if case.same_device < limits.max_same_device_reruns:
            attempt = f"try {case.same_device + 1} of {limits.max_same_device_reruns}"
            known = "there is no diagnosis" if diagnosis is None else "there is no device to hold back"
            action = f"{known}, restarting the workers on the same devices, {attempt}"
            return Remedy(what=what, action=action, case=_granted_here(case), faulty_node=faulty)
        return _judge_copy(what, judgement, faulty_node=faulty)
    if diagnosis.node and end.num_spares > 0 and not case.elsewhere:
        return Remedy(
            what=what,
            action=f"a spare takes the slot of node {diagnosis.node}, which is held back, and replays it",
            recovery_level=RecoveryLevel.REPLACE_NODE,
            hold_back=diagnosis.node,
            replay=diagnosis.replay(tries=max(diagnosis.tries, case.same_device)),
            case=replace(case, elsewhere=case.elsewhere + 1),
        )
    tries = max(case.same_device, diagnosis.tries)
    came_from_elsewhere = is_replay and diagnosis.replayed_on not in ("", diagnosis.device)
    if tries < diagnosis.max_tries and not came_from_elsewhere:
        action = f"no other device is free, replaying it on the same one, try {tries + 1} of {diagnosis.max_tries}"
        return Remedy(what=what, action=action, replay=diagnosis.replay(tries=tries), case=_granted_here(case))
    return _judge_copy(what, judgement)


def _blame(state: RecoveryState, end: CycleEnd, diagnosis: Diagnosis, what: str) -> Remedy:
    """Return the remedy for a device's persistent fault."""
    node = state.replay.node if state.replay is not None and _is_replay(state, diagnosis) else diagnosis.node
    if not diagnosis.replayed_on and state.blamed:
        judgement = _judge_load(state, end.load, diagnosis.iteration)
        if judgement.excluded is not None:
            return _judge_copy(what, judgement)
    if node in state.held_back:
        action = f"node {node} is quarantined, restarting the workers on the others"
        return Remedy(what=what, action=action, quarantine=node, faulty_node=node, is_device_fault=True)
    if node and node not in state.quarantined and (end.num_spares > 0 or end.may_shrink):
        follows = "a spare takes its slot" if end.num_spares > 0 else "training continues without it"
        action = f"node {node} is quarantined, {follows}"
        recovery_level = RecoveryLevel.REPLACE_NODE
        return Remedy(
            what=what,
            action=action,
            recovery_level=recovery_level,
            quarantine=node,
            faulty_node=node,
            is_device_fault=True,
        )
    if node in state.blamed:
        action = f"stopping: node {node} had its chance since the last progress, and no other one waits for its slot"
        return Remedy(what=what, action=action, stops=True, faulty_node=node)
    where = f"node {node}" if node else "its node"
    action = f"no other node waits for the slot of {where}, restarting the workers there, once"
    return Remedy(what=what, action=action, faulty_node=node, is_device_fault=True)


def _judge_copy(what: str, judgement: Judgement, *, faulty_node: str = "") -> Remedy:
    """Return the remedy that blames the loaded copy; without one to blame the run stops."""
    if judgement.excluded is None:
        action = f"{judgement.reason}: stopping, its diagnosis is in the journal"
        return Remedy(what=what, action=action, stops=True, faulty_node=faulty_node)
    what, action = f"{what}; {judgement.reason}", "restarting the workers, which load another copy"
    return Remedy(what=what, action=action, excluded=judgement.excluded, faulty_node=faulty_node)


def _judge_load(state: RecoveryState, load: Load | None, iteration: int | None) -> Judgement:
    return judge(load, iteration, known=state.excluded, loads=state.loads)


def _is_replay(state: RecoveryState, diagnosis: Diagnosis | None) -> bool:
    """Return whether the cycle was started to replay this very result."""
    return diagnosis is not None and state.replay is not None and diagnosis.iteration == state.replay.iteration


def _iteration(end: CycleEnd) -> int | None:
    assert end.incident is not None
    return end.diagnosis.iteration if end.diagnosis is not None else end.incident.iteration


def _describe(incident: Incident, diagnosis: Diagnosis | None) -> str:
    text = f"{incident.describe()}: a result was judged invalid"
    if diagnosis is not None and diagnosis.describe() not in text:
        text += f": {diagnosis.describe()}"
    return text


def _find_case(
    cases: Sequence[InvalidResultCase],
    incident: Incident,
    diagnosis: Diagnosis | None,
    load: Load | None,
    *,
    is_replay: bool,
) -> InvalidResultCase:
    """Return the open case of an invalid result, or a new one.

    Args:
        cases: The open ones.
        incident: The incident that ended the cycle.
        diagnosis: The workers' diagnosis.
        load: What the cycle had loaded.
        is_replay: The cycle was started to replay this result: it loaded the diagnostic save.
    """
    if diagnosis is None:
        new = InvalidResultCase(iteration=incident.iteration, device=incident.node, rank=incident.rank, load=load)
    else:
        rank = None if diagnosis.device else diagnosis.rank
        new = InvalidResultCase(
            iteration=diagnosis.iteration, device=diagnosis.device or diagnosis.node, rank=rank, load=load
        )
    known = next((case for case in cases if _key(case) == _key(new)), None)
    if known is None:
        return replace(new, load=None) if is_replay else new
    return known if is_replay else replace(known, load=load)


def _granted_here(case: InvalidResultCase) -> InvalidResultCase:
    return replace(case, same_device=case.same_device + 1)


def _key(case: InvalidResultCase) -> tuple[int | None, str, int | None]:
    return case.iteration, case.device, case.rank


def decide(state: RecoveryState, end: CycleEnd, limits: Limits) -> tuple[RecoveryState, Decision]:
    """Return what to do after a cycle's end, and the new state.

    A finished run is never restarted by its job; a preemption counts against no budget; every other end counts,
    whatever its kind.
    """
    if state.finished:
        return state, Decision(
            recovery_level=RecoveryLevel.STOP, reason="the run is finished", exit_code=ExitReason.FINISHED
        )
    before = state
    state = _take_note(state, end)
    found = find_remedy(state, end, limits) if end.is_invalid_result else None
    state, progressed = _note_progress(state, end, trusted=found is None or found.excluded is None)
    if end.finished:
        state = replace(state, finished=True)
        decision = Decision(
            recovery_level=RecoveryLevel.STOP, reason="the run is finished", exit_code=ExitReason.FINISHED
        )
    elif end.preempted or end.exit_code == ExitReason.PREEMPTED:
        decision = _leave(end, state)
    else:
        assert end.incident is not None
        faulty_node = end.incident.node if found is None else found.faulty_node
        if end.is_slow_rank:
            faulty_node = slow_node(end)
        ends_cycle = not end.recovered_in_process or spent_budget(state, limits) is not None
        is_free = _is_free(state, end, end.incident, limits)
        state = _count_failure(state, faulty_node, in_vain=ends_cycle and not progressed and not is_free)
        if is_free:
            state, decision = _judge_free_loss(state, end, end.incident, limits)
        elif found is not None:
            state, decision = _judge_invalid_result(state, limits, found)
        else:
            if end.is_slow_rank:
                decision = judge_slow_rank(state, end, limits)
            else:
                excluded = _exclude_copy(state, end, limits)
                decision = _judge(state, before, end, end.incident, limits, progressed=progressed, excluded=excluded)
                if excluded is not None and decision.recovery_level != RecoveryLevel.STOP:
                    state = replace(state, excluded=(*state.excluded, excluded)[-MAX_HISTORY:])
            if ends_cycle:
                state = drop_replay(state)
        if ends_cycle:
            state = replace(state, failure=_failure_of(end) if found is None else None)
        if decision.recovery_level != RecoveryLevel.STOP:
            state = replace(
                state,
                restarts_without_progress=state.restarts_without_progress + (not is_free),
                restarts_total=state.restarts_total + 1,
                restarts_by_level=_one_more(state.restarts_by_level, decision.recovery_level.name),
            )
    quarantined = tuple(dict.fromkeys((*state.quarantined, *decision.quarantine)))
    recent = {node: num for node, num in state.recent_faults.items() if node not in decision.quarantine}
    state = replace(state, quarantined=quarantined, recent_faults=recent)
    if decision.recovery_level == RecoveryLevel.STOP:
        state = replace(drop_replay(state), stopped_with=decision.exit_code)
    return _remember(state, end, decision), decision


def drop_replay(state: RecoveryState) -> RecoveryState:
    """Return the state without a pending replay: the next cycle trains as usual, on any node that is not quarantined.

    The grant still counts, so that an impossible replay is not requested forever.
    """
    return replace(state, replay=None, held_back=())


def _take_note(state: RecoveryState, end: CycleEnd) -> RecoveryState:
    """Record what the cycle had loaded, and what it settled by its commits.

    A commit closes the cases up to its iteration, and those whose iteration is not known.
    """
    committed = end.newest_iteration
    state = replace(
        state,
        loads=state.loads if end.load is None else (*state.loads, end.load)[-MAX_HISTORY:],
        excluded=state.excluded if end.is_invalid_result else settle(state.excluded, committed),
        cases=tuple(
            case
            for case in state.cases
            if committed is None or (case.iteration is not None and committed <= case.iteration)
        ),
        blamed=() if _is_beyond(committed, state.newest_iteration) else state.blamed,
        had_session=state.had_session or end.had_session,
    )
    if state.replay is not None and committed is not None and committed > state.replay.iteration:
        state = drop_replay(state)  # the result was valid this time, and training continued
    return state


def _note_progress(state: RecoveryState, end: CycleEnd, *, trusted: bool) -> tuple[RecoveryState, bool]:
    newest = end.newest_iteration
    known = state.progress_known or end.progress_known or newest is not None
    # A checkpoint saved on top of a bad copy is not progress.
    progressed = trusted and _is_beyond(newest, state.newest_iteration)
    if trusted and _is_beyond(end.durable_iteration, state.best_durable):
        state = replace(state, best_durable=end.durable_iteration)
    if progressed:
        state = replace(
            state,
            best_committed=newest,
            restarts_without_progress=0,
            cycles_without_progress=0,
            recent_faults={},
            free_losses=0,
        )
    return replace(state, progress_known=known), progressed


def _highest(*iterations: int | None) -> int | None:
    return max((one for one in iterations if one is not None), default=None)


def _is_beyond(newest: int | None, best: int | None) -> bool:
    return newest is not None and (best is None or newest > best)


def _count_failure(state: RecoveryState, faulty_node: str, *, in_vain: bool) -> RecoveryState:
    return replace(
        state,
        node_faults=_one_more(state.node_faults, faulty_node) if faulty_node else state.node_faults,
        recent_faults=_one_more(state.recent_faults, faulty_node),
        cycles_without_progress=state.cycles_without_progress + (state.progress_known and in_vain),
    )


def _one_more(counts: dict[str, int], name: str) -> dict[str, int]:
    return counts | {name: counts.get(name, 0) + 1}


def describe_saved(saved: bool, *, has_session: bool = True) -> str:
    """Return, as text, whether a job that was shut down has a checkpoint that survives it."""
    if saved:
        return "a saved checkpoint exists"
    return (
        "nothing was saved" if has_session else "whether the script has saved anything is unknown (no session reported)"
    )


def _leave(end: CycleEnd, state: RecoveryState) -> Decision:
    following = f"; {describe_next_job(state.newest_iteration, state.best_durable)}" if state.progress_known else ""
    if end.preempted_saved or not end.preempted:
        what, exit_code = describe_saved(True), ExitReason.PREEMPTED
    else:
        what, exit_code = describe_saved(False, has_session=state.had_session), ExitReason.FAILED
    reason = f"shutdown requested; {what}{following}"
    return Decision(recovery_level=RecoveryLevel.REQUEUE_JOB, reason=reason, exit_code=exit_code)


def _judge(
    state: RecoveryState,
    before: RecoveryState,
    end: CycleEnd,
    incident: Incident,
    limits: Limits,
    *,
    progressed: bool,
    excluded: Exclusion | None,
) -> Decision:
    what = incident.describe()
    if end.exit_code == ExitReason.NO_PROGRESS:
        reason = f"{what}: the worker itself gave up: another try would get no further"
        return Decision(recovery_level=RecoveryLevel.STOP, reason=reason, exit_code=ExitReason.NO_PROGRESS)
    if end.is_permanent:
        reason = f"{what}; every rank failed so before its first step; a restart cannot help: fix it and start again"
        return Decision(recovery_level=RecoveryLevel.STOP, reason=reason, exit_code=ExitReason.BAD_INPUT)
    if repeats_failure(state, end):
        reason = f"{what}; the same failure at the same place: a restart runs the script again from its start"
        if not end.has_trained:
            reason = f"{what}; the same failure at the same place: no rank has completed a step in this run"
        reason += " and cannot help; fix it" if end.has_trained else ", and another start fails in the same way; fix it"
        return Decision(recovery_level=RecoveryLevel.STOP, reason=reason, exit_code=ExitReason.NO_PROGRESS)
    if (spent := spent_budget(state, limits)) is not None:
        repeated = state.progress_known and not progressed and before.restarts_without_progress > 0
        repeated = repeated or state.cycles_without_progress >= limits.max_no_progress_cycles
        exit_code = ExitReason.NO_PROGRESS if repeated else ExitReason.FAILED
        source = describe_source(state) if end.num_nodes > 1 else None
        reason = "; ".join(filter(None, (what, spent, source)))
        return Decision(recovery_level=RecoveryLevel.STOP, reason=reason, exit_code=exit_code)
    recovery_level, action, quarantine = _remedy(state, end, incident, limits)
    delay_s, wait = 0.0, ""
    if recovery_level != RecoveryLevel.RESTART_IN_PROCESS:
        num, max_s = state.restarts_without_progress, limits.max_restart_delay_s
        delay_s = restart_delay_s(num, ran_s=end.ran_s, max_s=max_s)
        wait = f"; restarting in {delay_s:g} s" if delay_s else ""
    if excluded is not None:
        reason = (
            f"{what}; this is the same failure at the same iteration after the same copy was loaded: the node-local "
            f"copies of checkpoint {excluded.checkpoint} are excluded, {action}; the workers load another copy "
            f"({count_of_restart(state, limits)}){wait}"
        )
        return Decision(recovery_level=recovery_level, reason=reason, quarantine=quarantine, delay_s=delay_s)
    restores = state.progress_known and not end.recovered_in_process  # else the state may have been kept in memory
    where = f", resuming {resume_point(state)}" if restores else ""
    reason = f"{what}; {action}{where} ({count_of_restart(state, limits)}){wait}"
    return Decision(recovery_level=recovery_level, reason=reason, quarantine=quarantine, delay_s=delay_s)


def _failure_of(end: CycleEnd) -> FailedCycle | None:
    """Return how a cycle failed; ``None`` = not by a worker, or the worker's iteration is not known."""
    incident = end.incident
    kinds = (IncidentKind.WORKER_FAILED, IncidentKind.WORKER_DIED, IncidentKind.WORKER_HUNG)
    if incident is None or incident.kind not in kinds or incident.iteration is None:
        return None
    what = [incident.kind, str(incident.exit_code)]
    if end.cause is not None:
        what += [end.cause.type, end.cause.frame]
    return FailedCycle(
        what=" ".join(what), iteration=incident.iteration, load=end.load, committed_iteration=end.newest_iteration
    )


def _exclude_copy(state: RecoveryState, end: CycleEnd, limits: Limits) -> Exclusion | None:
    """Return the copy to exclude for the last restart that a budget leaves.

    The failure must be that of the cycle before, at the same iteration, and both cycles must have trained from the same
    copy: loaded it from a node-local tier, or saved it.
    """
    before, now, load = state.failure, _failure_of(end), end.load
    if before is None or now is None or load is None or end.recovered_in_process:
        return None
    if (before.what, before.iteration) != (now.what, now.iteration):
        return None
    if before.load is not None and before.load.attempt == load.attempt:
        is_same_copy = before.load.tier != _GLOBAL
    else:
        is_same_copy = before.committed_iteration == load.checkpoint
    if not is_same_copy or not is_last_restart(state, limits):
        return None
    return exclude_after_failure(load, now.iteration, known=state.excluded)


def repeats_failure(state: RecoveryState, end: CycleEnd) -> bool:
    """Return whether a cycle failed exactly as the one before, in a way that the next one would repeat.

    Either an error of the code of a script without a session, which starts from its beginning each time; or, in any run
    of which no rank has completed a step, an error that does not appear to come from a device, a network or a disk. If
    a spare waits for the node of such a failure, it is tried first.
    """
    failure = _repeatable_failure(end)
    if failure == "" or not state.history:
        return False
    last = state.history[-1]
    if (last.cycle, last.failure) != (end.cycle - 1, failure):
        return False
    if end.cause is not None and is_deterministic(end.cause) and not state.had_session and not state.progress_known:
        return True
    is_before_first_step = not end.has_trained and not any(step.has_trained for step in state.history)
    another_node_may_help = end.num_spares > 0 and end.num_nodes > 1
    return is_before_first_step and state.newest_iteration is None and not another_node_may_help


def _repeatable_failure(end: CycleEnd) -> str:
    """Return the exception that ended a cycle, and its line of code; empty = another start may not repeat it."""
    if end.recovered_in_process or (cause := end.cause) is None or not cause.frame:
        return ""
    is_again = is_deterministic(cause) or (not end.has_trained and is_of_code(cause))
    return cause.describe() if is_again else ""


def _is_free(state: RecoveryState, end: CycleEnd, incident: Incident, limits: Limits) -> bool:
    """Return whether a cycle's end counts against the lost node alone: no step was lost."""
    is_early = incident.kind == IncidentKind.NODE_LOST and bool(incident.node) and not end.has_trained
    return is_early and state.free_losses < limits.max_node_faults and spent_budget(state, limits) is None


def _judge_free_loss(
    state: RecoveryState, end: CycleEnd, incident: Incident, limits: Limits
) -> tuple[RecoveryState, Decision]:
    node, faults = incident.node, state.node_faults[incident.node]
    is_out = faults >= limits.max_node_faults and (end.num_spares > 0 or end.may_shrink)
    reason = f"{incident.describe()}; no rank had completed a step, fault {faults} of {limits.max_node_faults} of this "
    reason += "node, which counts against no restart budget"
    if is_out:
        reason += "; the node gets no slot any more"
    state = replace(drop_replay(state), free_losses=state.free_losses + 1)
    return state, Decision(
        recovery_level=RecoveryLevel.REPLACE_NODE, reason=reason, quarantine=(node,) if is_out else ()
    )


def _judge_invalid_result(state: RecoveryState, limits: Limits, found: Remedy) -> tuple[RecoveryState, Decision]:
    """Return the decision on an invalid result, and the state with the findings."""
    state = drop_replay(state)
    if found.excluded is not None:
        excluded = (*state.excluded, found.excluded)[-MAX_HISTORY:]
        state = replace(state, excluded=excluded)
    if found.stops:
        reason = f"{found.what}; {found.action}"
        return state, Decision(recovery_level=RecoveryLevel.STOP, reason=reason, exit_code=ExitReason.FAILED_VALIDATION)
    if (spent := spent_budget(state, limits)) is not None:
        reason = f"{found.what}; {spent}"
        return state, Decision(recovery_level=RecoveryLevel.STOP, reason=reason, exit_code=ExitReason.FAILED_VALIDATION)
    held_back = (found.hold_back,) if found.hold_back else ()
    cases = state.cases
    if (case := found.case) is not None:
        cases = (*(other for other in cases if _key(other) != _key(case)), case)[-MAX_HISTORY:]
    blamed = dict.fromkeys((*state.blamed, *([found.faulty_node] if found.is_device_fault else ())))
    state = replace(state, cases=cases, replay=found.replay, held_back=held_back, blamed=tuple(blamed))
    return state, Decision(
        recovery_level=found.recovery_level,
        reason=f"{found.what}; {found.action} ({count_of_restart(state, limits)})",
        quarantine=(found.quarantine,) if found.quarantine else (),
        hold_back=held_back,
        replay=None if found.replay is None else msgspec.to_builtins(found.replay),
    )


def _remedy(
    state: RecoveryState, end: CycleEnd, incident: Incident, limits: Limits
) -> tuple[RecoveryLevel, str, tuple[str, ...]]:
    """Return the recovery level, what is done, and the nodes to quarantine."""
    if end.recovered_in_process:
        return RecoveryLevel.RESTART_IN_PROCESS, "the ranks recovered in process", ()
    node, faults = incident.node, state.node_faults.get(incident.node, 0)
    worn_out = 0 < limits.max_node_faults <= faults and node not in state.quarantined
    spare = end.num_spares > 0
    source = describe_source(state) if limits.max_node_faults and node not in state.quarantined else None
    is_suspect = spare and source is not None and is_last_restart(state, limits)
    if incident.kind == IncidentKind.NODE_LOST:
        action = "a spare takes its slot" if spare else "no spare waits for its slot"
        return RecoveryLevel.REPLACE_NODE, action, (node,) if (worn_out or is_suspect) and spare else ()
    if incident.kind in (IncidentKind.CANNOT_START, IncidentKind.NODE_UNHEALTHY):
        if spare and node:
            return RecoveryLevel.REPLACE_NODE, f"a spare takes the slot of node {node}", (node,)
        if incident.evidence.get("computes_wrong"):
            return RecoveryLevel.REPLACE_NODE, f"node {node} gets no slot any more, and no spare waits for it", (node,)
        return RecoveryLevel.RESTART_WORKERS, "no spare waits for its slot, restarting the workers there", ()
    if worn_out:
        had = f"node {node} had {faults} faults (max_node_faults={limits.max_node_faults})"
        if spare:
            return RecoveryLevel.REPLACE_NODE, f"{had}, a spare takes its slot", (node,)
        return RecoveryLevel.RESTART_WORKERS, f"{had}, but no spare waits, restarting the workers there", ()
    if is_suspect:
        return RecoveryLevel.REPLACE_NODE, f"{source}, a spare takes its slot", (node,)
    return RecoveryLevel.RESTART_WORKERS, "restarting the workers", ()


def slow_node(end: CycleEnd) -> str:
    """Return the node of the slow rank because of which a cycle ended; empty = not reported."""
    diagnosis = end.diagnosis
    return diagnosis.node if diagnosis is not None and diagnosis.finding == Finding.SLOW else ""


def judge_slow_rank(state: RecoveryState, end: CycleEnd, limits: Limits) -> Decision:
    """Return what to do after a cycle that ended because of a slow rank; ``state`` includes this end."""
    assert end.is_slow_rank
    assert end.incident is not None
    what, node = end.incident.describe(), slow_node(end)
    quarantine, code = (node,) if node else (), ExitReason.STRAGGLER
    if (spent := spent_budget(state, limits)) is not None:
        why = spent
        if state.progress_known and state.cycles_without_progress >= limits.max_no_progress_cycles:
            code = ExitReason.NO_PROGRESS
    elif not node:
        why = "stopping, as it is not known which node to replace"
    elif end.num_spares == 0:
        why = f"stopping, as no spare waits for the slot of node {node}"
    else:
        where = f", resuming {resume_point(state)}" if state.progress_known else ""
        reason = f"{what}; a spare takes the slot of node {node}{where} ({count_of_restart(state, limits)})"
        return Decision(recovery_level=RecoveryLevel.REPLACE_NODE, reason=reason, quarantine=quarantine)
    return Decision(recovery_level=RecoveryLevel.STOP, reason=f"{what}; {why}", exit_code=code, quarantine=quarantine)


def spent_budget(state: RecoveryState, limits: Limits) -> str | None:
    """Return the message of the budget that leaves no restart; ``None`` = all allow one."""
    cycles, point = state.cycles_without_progress, resume_point(state).removeprefix("from ")
    if state.progress_known and cycles >= limits.max_no_progress_cycles:
        return (
            f"stopping: {count(cycles, 'cycle')} in a row got no further than {point} "
            f"(max_no_progress_cycles={limits.max_no_progress_cycles}); look at the incidents in the journal"
        )
    if state.restarts_without_progress >= limits.max_restarts:
        if limits.max_restarts == 0:
            return "stopping: no restart is allowed (--max-restarts=0)"
        since = f" since {point}" if state.progress_known else ""
        if limits.max_restarts == 1:
            return f"stopping: the only restart{since} is used (--max-restarts=1)"
        return f"stopping: all {limits.max_restarts} restarts{since} are used (--max-restarts)"
    if limits.max_restarts_total is not None and state.restarts_total >= limits.max_restarts_total:
        return f"stopping: {count(state.restarts_total, 'restart')} in this run (--max-restarts-total)"
    return None


def is_last_restart(state: RecoveryState, limits: Limits) -> bool:
    """Return whether the next restart is the last one that the budgets allow without progress."""
    cycles = state.progress_known and state.cycles_without_progress + 1 >= limits.max_no_progress_cycles
    total = limits.max_restarts_total is not None and state.restarts_total + 1 >= limits.max_restarts_total
    return cycles or total or state.restarts_without_progress + 1 >= limits.max_restarts


def describe_source(state: RecoveryState) -> str | None:
    """Return the node on which all faults since the last progress began, as text; ``None`` = several nodes, or a single
    fault."""
    (node, num), *others = state.recent_faults.items() or [("", 0)]
    return f"{num} of {num} failures on node {node}" if node and num > 1 and not others else None


def count_of_restart(state: RecoveryState, limits: Limits) -> str:
    which = f"restart {state.restarts_without_progress + 1} of {limits.max_restarts}"
    return f"{which} without progress" if state.progress_known else which


def resume_point(state: RecoveryState) -> str:
    newest = state.newest_iteration
    return "from the start" if newest is None else f"from iteration {newest}"


def describe_next_job(newest: int | None, durable: int | None) -> str:
    """Return from where the next job resumes, and what is lost with this one.

    Args:
        newest: The newest iteration that is committed in any tier; ``None`` = none.
        durable: The newest one that survives the end of the job; ``None`` = none.
    """
    following = "the next job resumes " + ("from the start" if durable is None else f"from iteration {durable}")
    if newest is None or newest <= (durable or 0):
        return following
    return f"{following}; iteration {newest} was in node-local tiers only and is lost"


def _remember(state: RecoveryState, end: CycleEnd, decision: Decision) -> RecoveryState:
    step = RecoveryStep(
        cycle=end.cycle,
        job=end.incident.job if end.incident is not None else "",
        incident=end.incident.describe() if end.incident is not None else "",
        recovery_level=decision.recovery_level,
        reason=decision.reason,
        durable_iteration=end.durable_iteration,
        committed_iteration=end.newest_iteration,
        failure=_repeatable_failure(end),
        has_trained=end.has_trained,
    )
    return replace(state, history=(*state.history, step)[-MAX_HISTORY:])
