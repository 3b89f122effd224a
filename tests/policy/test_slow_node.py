"""Decisions of the recovery policy about a slow rank for which all ranks exited."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from test_recovery_properties import ends, histories, is_restart, limits_strategy, replay_history

from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind, RecoveryLevel
from outlast.policy.causes import root_cause
from outlast.policy.recovery_policy import CycleEnd, Limits, RecoveryState, begin_job, decide
from outlast.policy.requeue import JobEnd, RequeueState, rule
from outlast.policy.rerun import Diagnosis, Finding

SLOW = Diagnosis(
    finding=Finding.SLOW,
    rank=1,
    node="b",
    device="b/gpu-0",
    iteration=40,
    what="forward",
    message="Rank=1 Node=b takes 2.00 times as long in 'forward' as the others",
)


def exited(rank: int = 1, node: str = "b", diagnosis: Diagnosis | None = SLOW) -> Incident:
    """Return the incident of a worker that exited because of a slow rank."""
    evidence = {} if diagnosis is None else {"summary": diagnosis.describe(), "diagnosis": {"rank": diagnosis.rank}}
    return Incident(
        kind=IncidentKind.WORKER_FAILED,
        node=node,
        rank=rank,
        exit_code=ExitReason.STRAGGLER,
        iteration=40,
        evidence=evidence,
    )


def end_of(cycle: int = 0, *, durable: int | None = 40, num_spares: int = 1, node: str = "b") -> CycleEnd:
    return CycleEnd(
        cycle=cycle,
        incident=exited(node=node),
        durable_iteration=durable,
        progress_known=durable is not None,
        num_spares=num_spares,
        diagnosis=Diagnosis(finding=Finding.SLOW, rank=1, node=node, iteration=40),
    )


def test_spare_replaces_the_slow_ranks_node() -> None:
    """The node is quarantined and charged, the run continues from its last iteration, and the reason contains all of
    it."""
    end = dataclasses.replace(end_of(), diagnosis=SLOW)
    state, decision = decide(RecoveryState(), end, Limits())
    assert (decision.recovery_level, decision.quarantine, decision.exit_code) == (
        RecoveryLevel.REPLACE_NODE,
        ("b",),
        None,
    )
    assert (state.quarantined, state.node_faults, state.best_durable) == (("b",), {"b": 1}, 40)
    for part in (
        "rank 1 on node b",
        "exit code 18",
        "in 'forward'",
        "a spare takes the slot of node b",
        "iteration 40",
    ):
        assert part in decision.reason


def test_slow_rank_without_a_spare_stops_with_18() -> None:
    """The exit code is unique, and the node is recorded for the next job."""
    state, decision = decide(RecoveryState(), end_of(num_spares=0), Limits())
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.STRAGGLER)
    assert "no spare waits for the slot of node b" in decision.reason
    assert state.stopped_with == ExitReason.STRAGGLER
    requeue = rule(
        RequeueState(),
        JobEnd(exit_code=decision.exit_code or 0, durable_iteration=40, quarantined=state.quarantined),
        num_job_retries_on_failure=2,
    )
    assert (requeue.requeue, requeue.state.excluded) == (True, ("b",))
    assert begin_job(state).quarantined == ()


def test_exit_18_without_a_diagnosis_identifies_no_node() -> None:
    """Every rank exits with the code, so it does not identify a node: the run stops, and no node is quarantined."""
    end = dataclasses.replace(end_of(), diagnosis=None)
    state, decision = decide(RecoveryState(), end, Limits())
    assert (decision.recovery_level, decision.exit_code, decision.quarantine) == (
        RecoveryLevel.STOP,
        ExitReason.STRAGGLER,
        (),
    )
    assert (state.quarantined, state.node_faults) == ((), {})


def test_slow_nodes_are_replaced_while_spares_last() -> None:
    """Each slow node is found after progress, which resets the restart budget; then the run stops with 18."""
    state = RecoveryState()
    for cycle, node in enumerate("abcde"):
        end = end_of(cycle, durable=100 * (cycle + 1), num_spares=4 - cycle, node=node)
        state, decision = decide(state, end, Limits(max_restarts=1))
    assert [step.recovery_level for step in state.history] == [RecoveryLevel.REPLACE_NODE] * 4 + [RecoveryLevel.STOP]
    assert (decision.exit_code, state.quarantined) == (ExitReason.STRAGGLER, ("a", "b", "c", "d", "e"))


def test_slow_rank_is_the_root_cause_of_all_exits() -> None:
    """All ranks exit with 18 in any order; the slow rank is the root cause, not a peer that fails in the meantime."""
    others = [exited(rank, "a") for rank in (0, 2, 3)]
    died = Incident(kind=IncidentKind.WORKER_DIED, node="a", rank=2, exit_code=-6)
    assert root_cause([died, *others, exited()]) == exited()


slow_ends = ends().map(
    lambda end: dataclasses.replace(
        end,
        recovered_in_process=False,
        incident=exited(),
        diagnosis=None if end.diagnosis is None else _slow(end.diagnosis),
    )
)


def _slow(diagnosis: Diagnosis) -> Diagnosis:
    """Return a diagnosis of the same rank and node as slow."""
    return Diagnosis(finding=Finding.SLOW, rank=diagnosis.rank, node=diagnosis.node, iteration=diagnosis.iteration)


@given(histories, slow_ends, limits_strategy)
def test_slow_rank_is_replaced_or_the_run_stops(past: list[CycleEnd], end: CycleEnd, limits: Limits) -> None:
    """For every history, a spare replaces the node, or the run stops with a code that is neither success nor an
    unspecific failure. No copy is excluded, and nothing is replayed."""
    before = replay_history(past, limits)
    if before.finished:
        return
    state, decision = decide(before, end, limits)
    node = end.diagnosis.node if end.diagnosis is not None else ""
    assert decision.quarantine == ((node,) if node else ())
    if decision.recovery_level == RecoveryLevel.REPLACE_NODE:
        assert end.num_spares > 0
        assert node
        assert state.restarts_total == before.restarts_total + 1
    else:
        assert decision.recovery_level == RecoveryLevel.STOP
        assert decision.exit_code in (ExitReason.STRAGGLER, ExitReason.NO_PROGRESS)
    assert len(state.excluded) == len(before.excluded)
    assert (state.replay, decision.replay, decision.hold_back) == (None, None, ())


@given(histories, st.lists(slow_ends, min_size=1, max_size=60), limits_strategy)
def test_restarts_for_slow_ranks_are_bounded(past: list[CycleEnd], ends: list[CycleEnd], limits: Limits) -> None:
    """Without progress, consecutive slow ranks are granted no more restarts than other failures."""
    state, restarts = begin_job(replay_history(past, limits)), 0
    for end in ends:
        state, decision = decide(state, dataclasses.replace(end, durable_iteration=None), limits)
        if not is_restart(decision.recovery_level):
            break
        restarts += 1
    assert restarts <= limits.max_restarts
