"""Properties of the recovery policy over arbitrary histories of incidents."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind, RecoveryLevel
from outlast.policy.recovery_point import Load, TierName
from outlast.policy.recovery_policy import CycleEnd, Limits, RecoveryState, begin_job, decide
from outlast.policy.rerun import Diagnosis, Finding

KINDS = (
    IncidentKind.WORKER_DIED,
    IncidentKind.WORKER_FAILED,
    IncidentKind.WORKER_HUNG,
    IncidentKind.NODE_LOST,
    IncidentKind.CANNOT_START,
)

limits_strategy = st.builds(
    Limits,
    max_restarts=st.integers(0, 6),
    max_restarts_total=st.none() | st.integers(0, 20),
    max_no_progress_cycles=st.integers(1, 6),
    max_node_faults=st.integers(0, 4),
)
incidents = st.builds(
    Incident,
    kind=st.sampled_from(KINDS),
    node=st.sampled_from(["a", "b", "c", ""]),
    rank=st.none() | st.integers(0, 7),
    iteration=st.none() | st.integers(0, 100),
    exit_code=st.sampled_from([1, 2, 16, 17, 18, 75, 93, -9, -11]),
)
recovered_incidents = st.builds(
    Incident,
    kind=st.sampled_from(KINDS[:3]),
    node=st.sampled_from(["a", "b", "c", ""]),
    rank=st.none() | st.integers(0, 7),
    exit_code=st.sampled_from([None, 1, -9]),
)
loads = st.none() | st.builds(
    Load,
    cycle=st.sampled_from(["job-0", "job-1", "next-0"]),
    checkpoint=st.integers(0, 100),
    attempt=st.sampled_from(["job-0-aa.0", "job-0-aa.1", "job-1-bb.0", "next-0-cc.0"]),
    tier=st.sampled_from(["memory", "local", "replica", "global"]),
    suspect_window=st.integers(0, 20),
)
durables = st.none() | st.integers(0, 100)
diagnoses = st.none() | st.builds(
    Diagnosis,
    finding=st.sampled_from(Finding),
    rank=st.integers(0, 3),
    node=st.sampled_from(["a", "b", "c", ""]),
    device=st.sampled_from(["a/0", "b/0", "gpu", ""]),
    iteration=st.integers(0, 3) | st.integers(0, 100),
    first=st.sampled_from(["nan", "inf", 3.5]),
    tries=st.integers(0, 3),
    replayed_on=st.sampled_from(["", "a/0", "b/0"]),
)


def ends(*, durable: st.SearchStrategy[int | None] = durables) -> st.SearchStrategy[CycleEnd]:
    return st.builds(
        CycleEnd,
        cycle=st.integers(0, 1000),
        incident=incidents,
        finished=st.just(False),
        preempted=st.just(False),
        durable_iteration=durable,
        progress_known=st.booleans(),
        had_session=st.booleans(),
        num_spares=st.integers(0, 3),
        may_shrink=st.booleans(),
        load=loads,
        diagnosis=diagnoses,
    ) | st.builds(
        CycleEnd,
        cycle=st.integers(0, 1000),
        incident=recovered_incidents,
        recovered_in_process=st.just(True),
        durable_iteration=durable,
        progress_known=st.booleans(),
        had_session=st.booleans(),
    )


any_end = st.one_of(
    ends(),
    st.builds(
        CycleEnd,
        cycle=st.integers(0, 1000),
        incident=st.none() | incidents,
        finished=st.booleans(),
        preempted=st.just(True),
        preempted_saved=st.booleans(),
        durable_iteration=durables,
        progress_known=st.booleans(),
        had_session=st.booleans(),
        num_spares=st.integers(0, 3),
    ),
)
histories = st.lists(any_end, max_size=40)


def replay_history(history: list[CycleEnd], limits: Limits) -> RecoveryState:
    """Return the state after a history of cycles, over any number of jobs."""
    state = RecoveryState()
    for end in history:
        state, decision = decide(state, end, limits)
        if decision.recovery_level >= RecoveryLevel.REQUEUE_JOB:
            state = begin_job(state)
    return state


def is_restart(recovery_level: RecoveryLevel) -> bool:
    return recovery_level in (
        RecoveryLevel.RESTART_IN_PROCESS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.REPLACE_NODE,
    )


@given(histories, st.lists(ends(durable=st.just(None)), min_size=1, max_size=60), limits_strategy)
def test_restarts_without_progress_are_bounded(past: list[CycleEnd], stuck: list[CycleEnd], limits: Limits) -> None:
    """Without progress a job is granted at most max_restarts restarts, whatever happens in whatever order."""
    state, restarts = begin_job(replay_history(past, limits)), 0
    for end in stuck:
        state, decision = decide(state, end, limits)
        if not is_restart(decision.recovery_level):
            break
        restarts += 1
    assert restarts <= limits.max_restarts


@given(st.lists(ends(durable=st.just(None)), min_size=1, max_size=60), limits_strategy)
def test_cycles_without_progress_are_bounded_over_jobs(stuck: list[CycleEnd], limits: Limits) -> None:
    """If progress is known, at most max_no_progress_cycles cycles run without any, over all jobs."""
    state, cycles, known = RecoveryState(), 0, False
    for end in stuck:
        known = known or end.progress_known
        state, decision = decide(state, end, limits)
        if decision.recovery_level == RecoveryLevel.REQUEUE_JOB:  # a worker's 75 counts against no budget
            continue
        cycles += known and decision.recovery_level != RecoveryLevel.RESTART_IN_PROCESS
        if decision.exit_code in (ExitReason.NO_PROGRESS, ExitReason.FAILED_VALIDATION):
            break
        if decision.recovery_level == RecoveryLevel.STOP:
            state = begin_job(state)
    assert cycles <= limits.max_no_progress_cycles


@given(st.lists(ends(), min_size=1, max_size=60), limits_strategy)
def test_max_restarts_total_bounds_every_history(history: list[CycleEnd], limits: Limits) -> None:
    """No history is granted more than max_restarts_total restarts, with or without progress."""
    state, restarts = RecoveryState(), 0
    for end in history:
        state, decision = decide(state, end, limits)
        if not is_restart(decision.recovery_level):
            break
        restarts += 1
    assert limits.max_restarts_total is None or restarts <= limits.max_restarts_total
    assert state.restarts_total == restarts


@given(histories, any_end, limits_strategy)
def test_finished_job_is_never_restarted(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """After a finished cycle every decision of the job is to stop with 0."""
    finish = CycleEnd(cycle=0, incident=None, finished=True, had_session=True)
    state, decision = decide(replay_history(past, limits), finish, limits)
    assert (decision.recovery_level, decision.exit_code, state.finished) == (RecoveryLevel.STOP, 0, True)
    after, decision = decide(state, end, limits)
    assert (decision.recovery_level, decision.exit_code, after) == (RecoveryLevel.STOP, 0, state)


@given(histories, st.booleans(), limits_strategy)
def test_job_after_a_finished_run_has_full_budgets(past: list[CycleEnd], seen: bool, limits: Limits) -> None:
    """The next job of a finished run is not finished and has full budgets. Excluded copies and the durable iteration
    stay, and only a higher iteration is progress."""
    before = replay_history(past, limits)
    state, _ = decide(before, CycleEnd(cycle=0, incident=None, finished=True, had_session=seen), limits)
    after = begin_job(state)
    assert (after.finished, after.stopped_with) == (False, None)
    assert (after.restarts_total, after.cycles_without_progress, after.quarantined) == (0, 0, ())
    assert (after.excluded, after.loads, after.history) == (state.excluded, state.loads, state.history)
    assert (after.best_durable, after.best_committed) == (state.best_durable, state.best_durable)
    assert (after.progress_known, after.had_session) == (state.progress_known, state.had_session)


@given(histories, any_end, limits_strategy)
def test_detected_session_stays_recorded(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """A later cycle or job without a session does not clear the record of a session."""
    before = replay_history(past, limits)
    state, _ = decide(before, end, limits)
    assert state.had_session or not before.had_session
    assert begin_job(state).had_session == state.had_session


@given(histories, durables, st.booleans(), limits_strategy)
def test_preemption_counts_against_no_budget(
    past: list[CycleEnd], durable: int | None, saved: bool, limits: Limits
) -> None:
    """A preemption raises no counter and stops no run, even with every budget spent."""
    before = replay_history(past, limits)
    end = CycleEnd(cycle=0, incident=None, preempted=True, preempted_saved=saved, durable_iteration=durable)
    state, decision = decide(before, end, limits)
    if before.finished:
        assert decision.exit_code == ExitReason.FINISHED
        return
    assert decision.recovery_level == RecoveryLevel.REQUEUE_JOB
    assert (decision.exit_code == ExitReason.PREEMPTED) == saved
    assert state.restarts_total == before.restarts_total
    assert state.restarts_without_progress <= before.restarts_without_progress
    assert state.cycles_without_progress <= before.cycles_without_progress
    assert state.node_faults == before.node_faults


@given(histories, ends(), limits_strategy)
def test_progress_resets_the_budgets(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """A higher durable iteration than any before resets all budgets but for at most the current restart."""
    before = replay_history(past, limits)
    if before.finished:
        return
    best = -1 if before.best_durable is None else before.best_durable
    further = CycleEnd(cycle=0, incident=end.incident, durable_iteration=best + 1)
    state, decision = decide(before, further, limits)
    assert state.cycles_without_progress == 0
    assert state.restarts_without_progress == is_restart(decision.recovery_level)
    assert decision.exit_code != ExitReason.NO_PROGRESS or further.incident.exit_code == 93  # type: ignore[union-attr]


@given(histories, any_end, limits_strategy)
def test_best_durable_iteration_never_decreases(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """The highest durable iteration stays recorded even if a later cycle resumes from an older one."""
    before = replay_history(past, limits)
    state, _ = decide(before, end, limits)
    assert (state.best_durable or 0) >= (before.best_durable or 0)
    assert before.best_durable is None or state.best_durable is not None


@given(histories, any_end, limits_strategy)
def test_only_the_identified_node_is_quarantined(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """Only the node where the incident began, or that the diagnosis or its replay identifies, loses its slot; only if
    the world can continue without it, and only once."""
    before = replay_history(past, limits)
    state, decision = decide(before, end, limits)
    if decision.quarantine:
        assert end.incident is not None
        named = {end.incident.node}
        if end.is_invalid_result:
            assert end.diagnosis is not None
            named = {end.diagnosis.node, before.replay.node if before.replay is not None else ""}
        if end.is_slow_rank:
            assert end.diagnosis is not None
            named = {end.diagnosis.node}
        assert set(decision.quarantine) <= named
        assert (
            end.num_spares > 0
            or (end.is_invalid_result and (end.may_shrink or before.held_back))
            or (end.is_slow_rank and decision.recovery_level == RecoveryLevel.STOP)  # the next job excludes it
        )
    assert len(set(state.quarantined)) == len(state.quarantined)
    assert not set(decision.hold_back) & set(decision.quarantine)
    if decision.hold_back:
        assert end.num_spares > 0


@given(
    histories,
    st.lists(incidents.filter(lambda one: one.exit_code in (1, -9)), min_size=1, max_size=8),
    st.booleans(),
    limits_strategy,
)
def test_a_spare_is_tried_before_the_job_stops(
    past: list[CycleEnd], stuck: list[Incident], progress_known: bool, limits: Limits
) -> None:
    """A job whose failures all began on one node does not stop while a spare waits, unless fewer than two restarts were
    granted."""
    state = begin_job(replay_history(past, limits))
    if state.finished or not limits.max_node_faults:
        return
    for restarts, incident in enumerate(stuck):
        incident = msgspec.structs.replace(incident, node="a")
        end = CycleEnd(cycle=0, incident=incident, num_spares=1, num_nodes=2, progress_known=progress_known)
        state, decision = decide(state, end, limits)
        if decision.recovery_level == RecoveryLevel.STOP:
            assert restarts < 2 or "a" in state.quarantined
            return


early_losses = st.builds(
    CycleEnd,
    cycle=st.integers(0, 1000),
    incident=st.builds(Incident, kind=st.just(IncidentKind.NODE_LOST), node=st.sampled_from(["a", "b", "c", ""])),
    has_trained=st.just(False),
    progress_known=st.booleans(),
    num_spares=st.integers(0, 3),
    may_shrink=st.booleans(),
)


@given(histories, st.lists(ends(durable=st.just(None)) | early_losses, max_size=60), limits_strategy)
def test_early_losses_are_bounded(past: list[CycleEnd], stuck: list[CycleEnd], limits: Limits) -> None:
    """Without progress at most max_node_faults losses of nodes before their cycle began do not count against a budget;
    the loss of an excluded node always counts."""
    state, restarts, free = begin_job(replay_history(past, limits)), 0, 0
    for end in stuck:
        before = state
        state, decision = decide(state, end, limits)
        if not is_restart(decision.recovery_level):
            break
        restarts += 1
        if state.restarts_without_progress == before.restarts_without_progress:
            free += 1
            assert not end.has_trained
            assert state.cycles_without_progress == before.cycles_without_progress
    assert free <= limits.max_node_faults
    assert restarts <= limits.max_restarts + free


@given(histories, any_end, limits_strategy)
def test_state_survives_the_job(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """A state read from ladder.json equals the written one, and gives the same decisions."""
    state = replay_history(past, limits)
    read = msgspec.json.decode(msgspec.json.encode(state), type=RecoveryState)
    assert read == state
    assert decide(read, end, limits) == decide(state, end, limits)


@given(histories, any_end, limits_strategy)
def test_decisions_have_one_line_and_a_code_if_they_stop(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """Every decision has a one-line reason, and an exit code exactly if it ends the job."""
    _, decision = decide(replay_history(past, limits), end, limits)
    assert decision.reason
    assert "\n" not in decision.reason
    assert (decision.exit_code is not None) == (decision.recovery_level >= RecoveryLevel.REQUEUE_JOB)


ROOMY = Limits(max_restarts=50, max_restarts_total=None, max_no_progress_cycles=50)
invalid_ends = ends(durable=st.just(None)).filter(lambda end: end.is_invalid_result)
few_diagnosed = st.builds(
    CycleEnd,
    cycle=st.integers(0, 9),
    incident=st.builds(
        Incident,
        kind=st.just(IncidentKind.WORKER_FAILED),
        node=st.sampled_from(["a", "b"]),
        rank=st.integers(0, 1),
        iteration=st.just(5),
        exit_code=st.sampled_from([1, 16, 16, 16, 17]),
    ),
    num_spares=st.integers(0, 1),
    progress_known=st.booleans(),
    load=loads,
    diagnosis=st.builds(
        Diagnosis,
        finding=st.sampled_from(Finding),
        rank=st.integers(0, 1),
        node=st.sampled_from(["a", "b"]),
        device=st.sampled_from(["a/0", "b/0"]),
        iteration=st.just(5),
        tries=st.just(0),
        replayed_on=st.sampled_from(["", "a/0", "b/0"]),
    ),
)


@pytest.mark.extended
@given(histories, st.lists(st.one_of(few_diagnosed, invalid_ends), max_size=40))
def test_replays_of_one_result_are_bounded(past: list[CycleEnd], stuck: list[CycleEnd]) -> None:
    """Without progress at most two replays on the same device and one elsewhere are granted for a result of one step
    and device, over all jobs until a user restarts a stopped run."""
    state = replay_history(past, ROOMY)
    here, elsewhere = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for end in stuck:
        state, decision = decide(state, end, ROOMY)
        if decision.replay is not None:
            assert end.diagnosis is not None
            (elsewhere if decision.hold_back else here)[(end.diagnosis.iteration, end.diagnosis.device)] += 1
        if decision.recovery_level >= RecoveryLevel.REQUEUE_JOB:
            if decision.exit_code in (ExitReason.FAILED_VALIDATION, ExitReason.NO_PROGRESS):
                break
            state = begin_job(state)
    # A rank that does not know its device is identified by node and rank.
    assert all(count <= 2 for (_, device), count in here.items() if device)
    assert all(count <= 1 for (_, device), count in elsewhere.items() if device)


@given(histories, few_diagnosed.filter(lambda end: end.is_invalid_result) | invalid_ends)
def test_repeated_invalid_result_stops_with_17(past: list[CycleEnd], end: CycleEnd) -> None:
    """For the same invalid result, every copy is excluded once, every node quarantined once, one replay done elsewhere
    and two on the same device; then the run stops with 17, even with ample budgets."""
    state, done = replay_history(past, ROOMY), Counter[tuple[bool, bool]]()
    for _ in range(12):
        excluded = len(state.excluded)
        state, decision = decide(state, end, ROOMY)
        if decision.recovery_level >= RecoveryLevel.REQUEUE_JOB:
            break
        is_new = len(state.excluded) > excluded
        done[(bool(decision.quarantine or decision.hold_back or is_new), decision.replay is not None)] += 1
    assert decision.recovery_level == RecoveryLevel.STOP
    assert decision.exit_code in (ExitReason.FAILED_VALIDATION, ExitReason.FINISHED)
    assert done[(False, False)] <= 2, "restarts that change nothing"
    assert done[(False, True)] <= 2, "replays on the same device"
    assert done[(True, True)] <= 1, "replays elsewhere"
    assert done[(True, False)] <= 2, "one node, one copy"


@given(histories, ends(), limits_strategy)
def test_confirmed_result_always_stops(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """A result confirmed by another device ends the run with 17: no restart, exclusion or quarantine."""
    before = replay_history(past, limits)
    if before.finished:
        return
    found = Diagnosis(finding=Finding.CORRECT, rank=1, node="a", device="a/0", iteration=5, replayed_on="b/0")
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="b", rank=1, exit_code=17)
    state, decision = decide(before, dataclasses.replace(end, incident=incident, diagnosis=found), limits)
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.FAILED_VALIDATION)
    assert (decision.quarantine, decision.hold_back, decision.replay) == ((), (), None)
    assert len(state.excluded) == len(before.excluded)
    assert (state.replay, state.held_back) == (None, ())


@given(histories, any_end, limits_strategy)
def test_replay_is_requested_for_the_next_cycle_only(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """The requested replay is that of the newest decision, or waits for the next job; no node is held back without a
    replay."""
    state, decision = decide(replay_history(past, limits), end, limits)
    if decision.recovery_level == RecoveryLevel.STOP:
        assert state.replay is None
    elif decision.recovery_level != RecoveryLevel.REQUEUE_JOB:
        assert msgspec.to_builtins(state.replay) == decision.replay
    assert state.replay is not None or not state.held_back
    assert begin_job(state).held_back == ()


@given(st.integers(100, 120), st.integers(0, 20), st.sampled_from(["memory", "local", "replica"]), st.integers(0, 3))
def test_corrupt_local_copy_is_excluded_in_one_restart(
    checkpoint: int, since: int, tier: TierName, spares: int
) -> None:
    """A reproducible NaN within the suspect window of any node-local copy leads to another copy, and the second cycle
    finishes."""
    load = Load(cycle="job-1", checkpoint=checkpoint, attempt="job-0-a.1", tier=tier, suspect_window=20)
    found = Diagnosis(finding=Finding.REPRODUCED, rank=0, node="a", device="a/0", iteration=checkpoint + since)
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="a", rank=0, exit_code=16)
    end = CycleEnd(cycle=1, incident=incident, diagnosis=found, load=load, num_spares=spares, progress_known=True)
    state, decision = decide(RecoveryState(best_durable=checkpoint), end, Limits())
    assert (decision.recovery_level, decision.replay) == (RecoveryLevel.RESTART_WORKERS, None)
    assert decision.hold_back == ()
    assert f"checkpoint {checkpoint} ({tier} tier" in decision.reason
    assert [(one.checkpoint, one.attempt, one.tier) for one in state.excluded] == [(checkpoint, "job-0-a.1", tier)]
    _, decision = decide(state, CycleEnd(cycle=2, incident=None, finished=True), Limits())
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.FINISHED)
