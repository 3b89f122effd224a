"""The ladder: from the incident that ended a cycle to the cheapest remedy that can still help.

:func:`decide` is the only place where restarts are granted. It is a pure function of what is remembered
(:class:`LadderState`, kept in ``ladder.json`` across jobs), what just happened (:class:`CycleEnd`) and what
is allowed (:class:`Limits`).

Budgets reset on progress, never on time; progress is a durable generation at a higher iteration than before.

* ``restarts_without_progress`` counts restarts since the last progress; ``max_restarts`` bounds it.
* ``cycles_without_progress`` counts ended cycles that made none; ``max_no_progress_cycles`` bounds it. It
  grows only where progress can be known, and outlives the job, so that re-queueing cannot go on for ever.
* ``restarts_total`` counts all of a run's restarts; ``max_restarts_total`` bounds it, progress or not.

A script that saves through nothing of ours reports no progress. Unknown is not none: its restarts are bounded
by ``max_restarts`` alone (and the total), which then means exactly what torchrun means by it.

A result that a worker judged invalid (exit code 17) stops the run, unless what the cycle had loaded may be at fault:
:mod:`outlast.policy.quarantine` then distrusts that copy, and the run is restarted, within the same budgets.

The exit code of a stop tells a scheduler whether trying again can help: 93 when the same thing was tried
again and got no further; 1 when nothing was tried (``max_restarts=0``), when the progress is unknown, or when
the last cycle did get further and only the total is spent.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind, Rung, Verdict
from outlast.policy.quarantine import Distrusted, Judgement, Load, judge, settle

__all__ = ["CycleEnd", "LadderState", "Limits", "Step", "begin_job", "decide"]

_MAX_HISTORY = 64


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleEnd:
    """How a cycle ended, as far as all nodes together know."""

    cycle: int
    incident: Incident | None
    """The cause, not what it did to others; ``None`` only when the cycle finished or was preempted."""

    finished: bool = False
    """Every worker ended with exit code 0."""

    preempted: bool = False
    """The job was told to leave."""

    preempted_saved: bool = False
    """The workers saved what they had before they left."""

    durable_iteration: int | None = None
    """Highest iteration that any rank knows to be committed; ``None`` = none yet."""

    progress_known: bool = False
    """A worker reports its saves to us, so that no new one means no progress."""

    num_spares: int = 0
    """Nodes that wait for a slot and are not quarantined."""

    load: Load | None = None
    """What the workers had loaded; ``None`` = nothing, or it is not known."""

    def __post_init__(self) -> None:
        assert self.incident is not None or self.finished or self.preempted, "a failed cycle needs its incident"


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One remembered decision."""

    cycle: int
    job: str = ""
    incident: str = ""
    rung: Rung
    reason: str
    durable_iteration: int | None = None


class LadderState(msgspec.Struct, frozen=True, kw_only=True):
    """What the ladder remembers from cycle to cycle and from job to job."""

    restarts_without_progress: int = 0
    restarts_total: int = 0
    cycles_without_progress: int = 0
    best_durable: int | None = None
    """Highest durable iteration ever seen; never falls."""
    progress_known: bool = False
    """Some cycle of this run reported its saves; one that reports nothing has then made no progress."""
    node_faults: dict[str, int] = {}
    """Faults that began on each node in this job; what they did to peers is not counted."""
    quarantined: tuple[str, ...] = ()
    """Nodes that get no slot any more in this job."""
    loads: tuple[Load, ...] = ()
    """What the newest cycles of the run loaded, oldest first."""
    distrusted: tuple[Distrusted, ...] = ()
    """Copies that led to invalid results: these, and what descends from them, are not loaded again. Take an entry out
    of ``ladder.json`` to trust its copy again."""
    finished: bool = False
    stopped_with: int | None = None
    """Exit code of the stop that ended the last job; ``None`` while one runs or when it was re-queued."""
    history: tuple[Step, ...] = ()
    """The newest decisions, oldest first."""


def begin_job(state: LadderState) -> LadderState:
    """Return the state with which a new job of the run starts.

    ``--max-restarts``, node faults and quarantine are a job's own. The cycles without progress go on counting
    from job to job, unless the ladder itself had ended the run for good (exit codes 17 and 93): nothing of
    ours re-queues such a run, so whoever starts it again has looked at it, and gets all budgets afresh.
    """
    state = msgspec.structs.replace(state, restarts_without_progress=0, node_faults={}, quarantined=())
    if state.stopped_with in (ExitReason.NO_PROGRESS, ExitReason.FAILED_VALIDATION):
        distrusted = tuple(msgspec.structs.replace(one, settled=True) for one in state.distrusted)
        state = msgspec.structs.replace(state, cycles_without_progress=0, restarts_total=0, distrusted=distrusted)
    return msgspec.structs.replace(state, stopped_with=None)


def decide(state: LadderState, end: CycleEnd, limits: Limits) -> tuple[LadderState, Verdict]:
    """Return what to do after a cycle's end, and what to remember.

    A finished run is never restarted; a preempted one is charged nothing; every other end is charged to the
    budgets, whatever its kind.
    """
    if state.finished:
        return state, Verdict(rung=Rung.STOP, reason="the run is finished", exit_code=ExitReason.FINISHED)
    before = state
    state, judgement = _judge_load(state, end)
    state, progressed = _note_progress(state, end, trusted=judgement is None or judgement.distrusted is None)
    if end.finished:
        state = msgspec.structs.replace(state, finished=True)
        verdict = Verdict(rung=Rung.STOP, reason="the run is finished", exit_code=ExitReason.FINISHED)
    elif end.preempted or _exit_code(end.incident) == ExitReason.PREEMPTED:
        verdict = _leave(end, state)
    else:
        assert end.incident is not None
        state = _count_failure(state, end.incident, progressed=progressed)
        if judgement is not None:
            verdict = _judge_invalid_result(state, end.incident, limits, judgement)
        else:
            verdict = _judge(state, before, end, end.incident, limits, progressed=progressed)
        if verdict.rung != Rung.STOP:
            state = msgspec.structs.replace(
                state,
                restarts_without_progress=state.restarts_without_progress + 1,
                restarts_total=state.restarts_total + 1,
                quarantined=tuple(dict.fromkeys((*state.quarantined, *verdict.quarantine))),
            )
    if verdict.rung == Rung.STOP:
        state = msgspec.structs.replace(state, stopped_with=verdict.exit_code)
    return _remember(state, end, verdict), verdict


def _judge_load(state: LadderState, end: CycleEnd) -> tuple[LadderState, Judgement | None]:
    """Remember what the cycle had loaded; judge it, if the cycle ended on an invalid result."""
    if end.load is not None:
        state = msgspec.structs.replace(state, loads=(*state.loads, end.load)[-_MAX_HISTORY:])
    if end.finished or end.preempted or _exit_code(end.incident) != ExitReason.FAILED_VALIDATION:
        return msgspec.structs.replace(state, distrusted=settle(state.distrusted, end.durable_iteration)), None
    assert end.incident is not None
    judgement = judge(end.load, end.incident.iteration, known=state.distrusted, loads=state.loads)
    if judgement.distrusted is not None:
        distrusted = (*state.distrusted, judgement.distrusted)[-_MAX_HISTORY:]
        state = msgspec.structs.replace(state, distrusted=distrusted)
    return state, judgement


def _note_progress(state: LadderState, end: CycleEnd, *, trusted: bool) -> tuple[LadderState, bool]:
    known = state.progress_known or end.progress_known or end.durable_iteration is not None
    best, durable = state.best_durable, end.durable_iteration
    # What was saved on top of a copy that proved bad is no progress.
    progressed = trusted and durable is not None and (best is None or durable > best)
    if progressed:
        state = msgspec.structs.replace(
            state, best_durable=durable, restarts_without_progress=0, cycles_without_progress=0
        )
    return msgspec.structs.replace(state, progress_known=known), progressed


def _count_failure(state: LadderState, incident: Incident, *, progressed: bool) -> LadderState:
    faults = {**state.node_faults}
    if incident.node:
        faults[incident.node] = faults.get(incident.node, 0) + 1
    counts = state.progress_known and not progressed
    return msgspec.structs.replace(
        state, node_faults=faults, cycles_without_progress=state.cycles_without_progress + counts
    )


def _leave(end: CycleEnd, state: LadderState) -> Verdict:
    following = f"; the next job goes on {_resume_point(state)}" if state.progress_known else ""
    if end.preempted_saved or not end.preempted:
        reason, exit_code = f"told to leave, and saved{following}", ExitReason.PREEMPTED
    else:
        reason, exit_code = f"told to leave, and nothing was saved in time{following}", ExitReason.FAILED
    return Verdict(rung=Rung.REQUEUE_JOB, reason=reason, exit_code=exit_code)


def _judge(
    state: LadderState,
    before: LadderState,
    end: CycleEnd,
    incident: Incident,
    limits: Limits,
    *,
    progressed: bool,
) -> Verdict:
    what = incident.describe()
    if _exit_code(incident) == ExitReason.NO_PROGRESS:
        reason = f"{what}: the worker itself gave up for want of progress"
        return Verdict(rung=Rung.STOP, reason=reason, exit_code=ExitReason.NO_PROGRESS)
    if (spent := _spent_budget(state, limits)) is not None:
        repeated = state.progress_known and not progressed and before.restarts_without_progress > 0
        repeated = repeated or state.cycles_without_progress >= limits.max_no_progress_cycles
        exit_code = ExitReason.NO_PROGRESS if repeated else ExitReason.FAILED
        return Verdict(rung=Rung.STOP, reason=f"{what}; {spent}", exit_code=exit_code)
    rung, action, quarantine = _remedy(state, end, incident, limits)
    where = f", going on {_resume_point(state)}" if state.progress_known else ""
    reason = f"{what}; {action}{where} ({_count(state, limits)})"
    return Verdict(rung=rung, reason=reason, quarantine=quarantine)


def _judge_invalid_result(state: LadderState, incident: Incident, limits: Limits, judgement: Judgement) -> Verdict:
    """Return the verdict on a result that a worker judged invalid: another copy of the state, or the end."""
    what = f"{incident.describe()}: a result was judged invalid; {judgement.reason}"
    if judgement.distrusted is None:
        reason = f"{what}; its diagnosis is in the journal"
        return Verdict(rung=Rung.STOP, reason=reason, exit_code=ExitReason.FAILED_VALIDATION)
    if (spent := _spent_budget(state, limits)) is not None:
        return Verdict(rung=Rung.STOP, reason=f"{what}; {spent}", exit_code=ExitReason.FAILED_VALIDATION)
    reason = f"{what}; restarting the workers, which load another copy ({_count(state, limits)})"
    return Verdict(rung=Rung.RESTART_WORKERS, reason=reason)


def _count(state: LadderState, limits: Limits) -> str:
    count = f"restart {state.restarts_without_progress + 1} of {limits.max_restarts}"
    return f"{count} without progress" if state.progress_known else count


def _spent_budget(state: LadderState, limits: Limits) -> str | None:
    """Return which budget leaves no restart, for people; ``None`` when all allow one."""
    cycles, point = state.cycles_without_progress, _resume_point(state).removeprefix("from ")
    if state.progress_known and cycles >= limits.max_no_progress_cycles:
        return (
            f"stopping: {cycles} cycles in a row got no further than {point} "
            f"(max_no_progress_cycles={limits.max_no_progress_cycles}); look at the incidents in the journal"
        )
    if state.restarts_without_progress >= limits.max_restarts:
        if limits.max_restarts == 0:
            return "stopping: no restart is allowed (--max-restarts=0)"
        since = f" since {point}" if state.progress_known else ""
        return f"stopping: all {limits.max_restarts} restarts{since} are used (--max-restarts)"
    if limits.max_restarts_total is not None and state.restarts_total >= limits.max_restarts_total:
        return f"stopping: {state.restarts_total} restarts in this run (--max-restarts-total)"
    return None


def _remedy(state: LadderState, end: CycleEnd, incident: Incident, limits: Limits) -> tuple[Rung, str, tuple[str, ...]]:
    """Return the rung, what is done, and the nodes to quarantine."""
    node, faults = incident.node, state.node_faults.get(incident.node, 0)
    worn_out = 0 < limits.max_node_faults <= faults and node not in state.quarantined
    spare = end.num_spares > 0
    if incident.kind == IncidentKind.NODE_LOST:
        heir = "a spare takes its slot" if spare else "no spare waits for its slot"
        return Rung.REPLACE_NODE, heir, (node,) if worn_out and spare else ()
    if incident.kind == IncidentKind.CANNOT_START:
        if spare and node:
            return Rung.REPLACE_NODE, f"a spare takes the slot of node {node}", (node,)
        return Rung.RESTART_WORKERS, "no spare waits for its slot, restarting the workers there", ()
    if worn_out:
        had = f"node {node} had {faults} faults (max_node_faults={limits.max_node_faults})"
        if spare:
            return Rung.REPLACE_NODE, f"{had}, a spare takes its slot", (node,)
        return Rung.RESTART_WORKERS, f"{had}, but no spare waits, restarting the workers there", ()
    return Rung.RESTART_WORKERS, "restarting the workers", ()


def _exit_code(incident: Incident | None) -> int | None:
    if incident is None or incident.kind != IncidentKind.WORKER_FAILED:
        return None
    return incident.exit_code


def _resume_point(state: LadderState) -> str:
    return "from the start" if state.best_durable is None else f"from iteration {state.best_durable}"


def _remember(state: LadderState, end: CycleEnd, verdict: Verdict) -> LadderState:
    step = Step(
        cycle=end.cycle,
        job=end.incident.job if end.incident is not None else "",
        incident=end.incident.describe() if end.incident is not None else "",
        rung=verdict.rung,
        reason=verdict.reason,
        durable_iteration=end.durable_iteration,
    )
    return msgspec.structs.replace(state, history=(*state.history, step)[-_MAX_HISTORY:])
