"""The ladder: from the incident that ended a cycle to the cheapest remedy that can still help.

:func:`decide` is the only place where restarts are granted. It is a pure function of what is remembered
(:class:`LadderState`, kept in ``ladder.json`` across jobs), what just happened (:class:`CycleEnd`) and what
is allowed (:class:`Limits`).

Budgets reset on progress, never on time; progress is a durable generation at a higher iteration than before.

* ``restarts_without_progress`` counts restarts since the last progress; ``max_restarts`` bounds it.
* ``cycles_without_progress`` counts ended cycles that made none; ``max_no_progress_cycles`` bounds it. It
  grows only where progress can be known, and outlives the job, so that re-queueing cannot continue forever.
* ``restarts_total`` counts all of a run's restarts; ``max_restarts_total`` bounds it, progress or not.

A script that does not save through outlast reports no progress. Unknown is not none: its restarts are bounded
by ``max_restarts`` alone (and the total), which then means exactly what torchrun means by it.

A restart inside the processes is a restart like any other: it is granted from the same budgets, so that no sequence of
rungs continues forever. It has happened by the time it is judged; one that is not granted ends the job. One that is
granted ends no cycle, and so does not count as a cycle without progress.

What follows a result that a worker judged invalid (exit codes 16 and 17) is decided by
:mod:`outlast.policy.invalid_results`: another copy, another device, another try, or the end; within the same budgets.

After a slow rank (exit code 18) its node gives its slot to a spare and gets none any more. Without a spare the run
stops: the same workers on the same nodes would be as slow, and the verdict names the node to leave out of the next job.

The exit code of a stop shows a scheduler whether trying again can help: 93 when the same thing was tried
again and got no further; 1 when nothing was tried (``max_restarts=0``), when the progress is unknown, or when
the last cycle did get further and only the total is spent.
"""

from __future__ import annotations

import msgspec

from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind, Rung, Verdict
from outlast.policy.invalid_results import Remedy, file_case, find_remedy, open_cases
from outlast.policy.ladder_state import MAX_HISTORY, CycleEnd, LadderState, LadderStep, Limits, begin_job, begin_run
from outlast.policy.quarantine import settle
from outlast.policy.rerun import Finding
from outlast.wording import count

__all__ = [
    "CycleEnd",
    "LadderState",
    "LadderStep",
    "Limits",
    "begin_job",
    "begin_run",
    "count_of_restart",
    "decide",
    "drop_replay",
    "judge_slow_rank",
    "resume_point",
    "slow_node",
    "spent_budget",
]

_NOT_OVER = "every worker ended with 0; none had a session, so the same run can be started again"


def decide(state: LadderState, end: CycleEnd, limits: Limits) -> tuple[LadderState, Verdict]:
    """Return what to do after a cycle's end, and what to remember.

    A finished run is never restarted by its job, nor by a later one if any worker had a session (:func:`begin_job`); a
    preempted one is charged nothing; every other end is charged to the budgets, whatever its kind.
    """
    if state.finished:
        return state, Verdict(rung=Rung.STOP, reason="the run is finished", exit_code=ExitReason.FINISHED)
    before = state
    state = _take_note(state, end)
    found = find_remedy(state, end, limits) if end.is_invalid_result else None
    state, progressed = _note_progress(state, end, trusted=found is None or found.distrusted is None)
    if end.finished:
        state = msgspec.structs.replace(state, finished=True)
        reason = "the run is finished" if state.is_over else _NOT_OVER
        verdict = Verdict(rung=Rung.STOP, reason=reason, exit_code=ExitReason.FINISHED)
    elif end.preempted or end.exit_code == ExitReason.PREEMPTED:
        verdict = _leave(end, state)
    else:
        assert end.incident is not None
        faulty_node = end.incident.node if found is None else found.faulty_node
        if end.is_slow_rank:
            faulty_node = slow_node(end)
        ends_cycle = not end.recovered_in_process or spent_budget(state, limits) is not None
        state = _count_failure(state, faulty_node, in_vain=ends_cycle and not progressed)
        if found is not None:
            state, verdict = _judge_invalid_result(state, limits, found)
        else:
            if end.is_slow_rank:
                verdict = judge_slow_rank(state, end, limits)
            else:
                verdict = _judge(state, before, end, end.incident, limits, progressed=progressed)
            if ends_cycle:
                state = drop_replay(state)
        if verdict.rung != Rung.STOP:
            state = msgspec.structs.replace(
                state,
                restarts_without_progress=state.restarts_without_progress + 1,
                restarts_total=state.restarts_total + 1,
            )
    quarantined = tuple(dict.fromkeys((*state.quarantined, *verdict.quarantine)))
    state = msgspec.structs.replace(state, quarantined=quarantined)
    if verdict.rung == Rung.STOP:
        state = msgspec.structs.replace(drop_replay(state), stopped_with=verdict.exit_code)
    return _remember(state, end, verdict), verdict


def drop_replay(state: LadderState) -> LadderState:
    """Return the state without a replay to come: the next cycle trains as usual, on any node that is not quarantined.

    That it was granted still counts, so that one that cannot be done is not asked for without end.
    """
    return msgspec.structs.replace(state, replay=None, held_back=())


def _take_note(state: LadderState, end: CycleEnd) -> LadderState:
    """Remember what the cycle had loaded, and what it settled by what it committed."""
    loads = state.loads if end.load is None else (*state.loads, end.load)[-MAX_HISTORY:]
    distrusted = state.distrusted
    if distrusted and not end.is_invalid_result:
        distrusted = settle(distrusted, end.durable_iteration)
    durable = end.durable_iteration
    blamed = () if _is_beyond(durable, state.best_durable) else state.blamed
    cases = open_cases(state.cases, durable) if state.cases else ()
    state = msgspec.structs.replace(
        state,
        loads=loads,
        distrusted=distrusted,
        cases=cases,
        blamed=blamed,
        had_session=state.had_session or end.had_session,
    )
    if state.replay is not None and durable is not None and durable > state.replay.iteration:
        state = drop_replay(state)  # the result was a valid one this time, and training continued
    return state


def _note_progress(state: LadderState, end: CycleEnd, *, trusted: bool) -> tuple[LadderState, bool]:
    known = state.progress_known or end.progress_known or end.durable_iteration is not None
    # What was saved on top of a copy that proved bad is no progress.
    progressed = trusted and _is_beyond(end.durable_iteration, state.best_durable)
    if progressed:
        state = msgspec.structs.replace(
            state, best_durable=end.durable_iteration, restarts_without_progress=0, cycles_without_progress=0
        )
    return msgspec.structs.replace(state, progress_known=known), progressed


def _is_beyond(durable: int | None, best: int | None) -> bool:
    return durable is not None and (best is None or durable > best)


def _count_failure(state: LadderState, faulty_node: str, *, in_vain: bool) -> LadderState:
    faults = {**state.node_faults}
    if faulty_node:
        faults[faulty_node] = faults.get(faulty_node, 0) + 1
    counts = state.progress_known and in_vain
    return msgspec.structs.replace(
        state, node_faults=faults, cycles_without_progress=state.cycles_without_progress + counts
    )


def _leave(end: CycleEnd, state: LadderState) -> Verdict:
    following = f"; the next job resumes {resume_point(state)}" if state.progress_known else ""
    if end.preempted_saved or not end.preempted:
        reason, exit_code = f"shutdown requested; a saved generation exists{following}", ExitReason.PREEMPTED
    else:
        reason, exit_code = f"shutdown requested, and nothing was saved{following}", ExitReason.FAILED
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
    if end.exit_code == ExitReason.NO_PROGRESS:
        reason = f"{what}: the worker itself gave up: another try would get no further"
        return Verdict(rung=Rung.STOP, reason=reason, exit_code=ExitReason.NO_PROGRESS)
    if end.is_permanent:
        reason = f"{what}; every rank failed so before its first step; a restart cannot help: fix it and start again"
        return Verdict(rung=Rung.STOP, reason=reason, exit_code=ExitReason.BAD_INPUT)
    if (spent := spent_budget(state, limits)) is not None:
        repeated = state.progress_known and not progressed and before.restarts_without_progress > 0
        repeated = repeated or state.cycles_without_progress >= limits.max_no_progress_cycles
        exit_code = ExitReason.NO_PROGRESS if repeated else ExitReason.FAILED
        return Verdict(rung=Rung.STOP, reason=f"{what}; {spent}", exit_code=exit_code)
    rung, action, quarantine = _remedy(state, end, incident, limits)
    restores = state.progress_known and not end.recovered_in_process  # else the state may have been kept in memory
    where = f", resuming {resume_point(state)}" if restores else ""
    reason = f"{what}; {action}{where} ({count_of_restart(state, limits)})"
    return Verdict(rung=rung, reason=reason, quarantine=quarantine)


def _judge_invalid_result(state: LadderState, limits: Limits, found: Remedy) -> tuple[LadderState, Verdict]:
    """Return the verdict on an invalid result, and the state with what was found out about it."""
    state = drop_replay(state)
    if found.distrusted is not None:
        distrusted = (*state.distrusted, found.distrusted)[-MAX_HISTORY:]
        state = msgspec.structs.replace(state, distrusted=distrusted)
    if found.stops:
        reason = f"{found.what}; {found.action}"
        return state, Verdict(rung=Rung.STOP, reason=reason, exit_code=ExitReason.FAILED_VALIDATION)
    if (spent := spent_budget(state, limits)) is not None:
        reason = f"{found.what}; {spent}"
        return state, Verdict(rung=Rung.STOP, reason=reason, exit_code=ExitReason.FAILED_VALIDATION)
    held_back = (found.hold_back,) if found.hold_back else ()
    cases = state.cases if found.case is None else file_case(state.cases, found.case)[-MAX_HISTORY:]
    blamed = dict.fromkeys((*state.blamed, *([found.faulty_node] if found.is_device_fault else ())))
    state = msgspec.structs.replace(state, cases=cases, replay=found.replay, held_back=held_back, blamed=tuple(blamed))
    return state, Verdict(
        rung=found.rung,
        reason=f"{found.what}; {found.action} ({count_of_restart(state, limits)})",
        quarantine=(found.quarantine,) if found.quarantine else (),
        hold_back=held_back,
        replay=None if found.replay is None else msgspec.to_builtins(found.replay),
    )


def _remedy(state: LadderState, end: CycleEnd, incident: Incident, limits: Limits) -> tuple[Rung, str, tuple[str, ...]]:
    """Return the rung, what is done, and the nodes to quarantine."""
    if end.recovered_in_process:
        return Rung.RESTART_IN_PROCESS, "the ranks recovered in process", ()
    node, faults = incident.node, state.node_faults.get(incident.node, 0)
    worn_out = 0 < limits.max_node_faults <= faults and node not in state.quarantined
    spare = end.num_spares > 0
    if incident.kind == IncidentKind.NODE_LOST:
        heir = "a spare takes its slot" if spare else "no spare waits for its slot"
        return Rung.REPLACE_NODE, heir, (node,) if worn_out and spare else ()
    if incident.kind in (IncidentKind.CANNOT_START, IncidentKind.NODE_UNHEALTHY):
        if spare and node:
            return Rung.REPLACE_NODE, f"a spare takes the slot of node {node}", (node,)
        if incident.evidence.get("computes_wrong"):
            return Rung.REPLACE_NODE, f"node {node} gets no slot any more, and no spare waits for it", (node,)
        return Rung.RESTART_WORKERS, "no spare waits for its slot, restarting the workers there", ()
    if worn_out:
        had = f"node {node} had {faults} faults (max_node_faults={limits.max_node_faults})"
        if spare:
            return Rung.REPLACE_NODE, f"{had}, a spare takes its slot", (node,)
        return Rung.RESTART_WORKERS, f"{had}, but no spare waits, restarting the workers there", ()
    return Rung.RESTART_WORKERS, "restarting the workers", ()


def slow_node(end: CycleEnd) -> str:
    """Return the node of the slow rank because of which a cycle ended; empty where nobody said."""
    diagnosis = end.diagnosis
    return diagnosis.node if diagnosis is not None and diagnosis.finding == Finding.SLOW else ""


def judge_slow_rank(state: LadderState, end: CycleEnd, limits: Limits) -> Verdict:
    """Return what to do after a cycle that ended because of a slow rank.

    Args:
        state: What is remembered, this end included.
        end: How the cycle ended.
        limits: What is allowed.
    """
    assert end.is_slow_rank
    assert end.incident is not None
    what, node = end.incident.describe(), slow_node(end)
    quarantine, code = (node,) if node else (), ExitReason.STRAGGLER
    if (spent := spent_budget(state, limits)) is not None:
        why = spent
        if state.progress_known and state.cycles_without_progress >= limits.max_no_progress_cycles:
            code = ExitReason.NO_PROGRESS
    elif not node:
        why = "stopping, as nobody said which node is to be replaced"
    elif end.num_spares == 0:
        why = f"stopping, as no spare waits for the slot of node {node}"
    else:
        where = f", resuming {resume_point(state)}" if state.progress_known else ""
        reason = f"{what}; a spare takes the slot of node {node}{where} ({count_of_restart(state, limits)})"
        return Verdict(rung=Rung.REPLACE_NODE, reason=reason, quarantine=quarantine)
    return Verdict(rung=Rung.STOP, reason=f"{what}; {why}", exit_code=code, quarantine=quarantine)


def spent_budget(state: LadderState, limits: Limits) -> str | None:
    """Return which budget leaves no restart, for people; ``None`` when all allow one."""
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


def count_of_restart(state: LadderState, limits: Limits) -> str:
    """Return which restart the next one would be, for people."""
    which = f"restart {state.restarts_without_progress + 1} of {limits.max_restarts}"
    return f"{which} without progress" if state.progress_known else which


def resume_point(state: LadderState) -> str:
    """Return from where a restarted run resumes, for people."""
    return "from the start" if state.best_durable is None else f"from iteration {state.best_durable}"


def _remember(state: LadderState, end: CycleEnd, verdict: Verdict) -> LadderState:
    step = LadderStep(
        cycle=end.cycle,
        job=end.incident.job if end.incident is not None else "",
        incident=end.incident.describe() if end.incident is not None else "",
        rung=verdict.rung,
        reason=verdict.reason,
        durable_iteration=end.durable_iteration,
    )
    return msgspec.structs.replace(state, history=(*state.history, step)[-MAX_HISTORY:])
