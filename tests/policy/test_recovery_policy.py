"""Decisions of the recovery policy, case by case."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import ExitReason
from outlast.incidents import Cause, Decision, Incident, IncidentKind, RecoveryLevel
from outlast.policy.recovery_point import NONE_DURABLE, Exclusion, Load, TierName
from outlast.policy.recovery_policy import (
    CycleEnd,
    Limits,
    RecoveryState,
    begin_job,
    decide,
    find_later_outcome,
    find_outcome,
    known_durable,
    merge,
)


def died(node: str = "a", **changes: Any) -> Incident:
    facts = {"kind": IncidentKind.WORKER_DIED, "node": node, "rank": 1, "pid": 4711, "exit_code": -9}
    return Incident(**{**facts, **changes})


def failed(exit_code: int, iteration: int | None = None) -> Incident:
    return Incident(kind=IncidentKind.WORKER_FAILED, node="a", rank=0, exit_code=exit_code, iteration=iteration)


def invalid(cycle: int, iteration: int, checkpoint: int, tier: TierName, *, durable: int | None = None) -> CycleEnd:
    """Return the end of a cycle that loaded a checkpoint and got an invalid result."""
    attempt = f"job-0-aa.{checkpoint}"
    load = Load(cycle=f"job-{cycle}", checkpoint=checkpoint, attempt=attempt, tier=tier, suspect_window=20)
    return CycleEnd(
        cycle=cycle,
        incident=failed(ExitReason.FAILED_VALIDATION, iteration),
        load=load,
        durable_iteration=durable if durable is not None else checkpoint,
        progress_known=True,
    )


def decide_until_stop(
    state: RecoveryState, limits: Limits, *ends: CycleEnd, max_cycles: int = 50
) -> tuple[RecoveryState, list[Decision]]:
    """Decide cycle after cycle; the last end repeats until the recovery policy stops."""
    decisions: list[Decision] = []
    for number in range(max_cycles):
        state, decision = decide(state, ends[min(number, len(ends) - 1)], limits)
        decisions.append(decision)
        if decision.recovery_level >= RecoveryLevel.REQUEUE_JOB:
            break
    return state, decisions


def test_unknown_progress_uses_the_torchrun_budget() -> None:
    """If progress is unknown, max_restarts=3 gives exactly 4 starts, then exit code 1 as with torchrun."""
    end = CycleEnd(cycle=0, incident=died())
    _, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts=3), end)
    assert [v.recovery_level for v in decisions] == [RecoveryLevel.RESTART_WORKERS] * 3 + [RecoveryLevel.STOP]
    assert decisions[-1].exit_code == ExitReason.FAILED
    assert "all 3 restarts are used" in decisions[-1].reason


@pytest.mark.parametrize("durable", [None, 40])
def test_durable_iteration_is_known_after_a_cycle_end(durable: int | None) -> None:
    """Before the first cycle ends, and in the job after one that was cut off, more may have been committed than was
    recorded; a job that ended in order has recorded everything."""

    def begin(state: RecoveryState, job: str) -> RecoveryState:
        return msgspec.structs.replace(begin_job(state), job=job)

    known = NONE_DURABLE if durable is None else durable
    state = RecoveryState(job="first")
    assert known_durable(state) is None
    end = CycleEnd(cycle=0, incident=died(job="first"), durable_iteration=durable, progress_known=True)
    state, decision = decide(state, end, Limits(max_restarts=1))
    assert (decision.recovery_level, known_durable(state)) == (RecoveryLevel.RESTART_WORKERS, known)
    assert known_durable(begin(state, "second")) is None
    ends = [dataclasses.replace(end, cycle=number) for number in range(1, 9)]
    state, decisions = decide_until_stop(state, Limits(max_restarts=1, max_no_progress_cycles=2), *ends)
    assert decisions[-1].recovery_level == RecoveryLevel.STOP
    assert known_durable(begin(state, "second")) == known


def test_three_cycles_without_progress_stop_with_93() -> None:
    """A script with a session that crashes in every cycle before its next save runs exactly 3 cycles."""
    end = CycleEnd(cycle=0, incident=died(), progress_known=True)
    _, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts=10), end)
    assert len(decisions) == 3
    assert decisions[-1].recovery_level == RecoveryLevel.STOP
    assert decisions[-1].exit_code == ExitReason.NO_PROGRESS
    assert "3 cycles in a row got no further than the start" in decisions[-1].reason


def test_repeated_checkpoint_is_not_progress() -> None:
    """A cycle that only reaches the durable iteration of before counts as a cycle without progress."""
    end = CycleEnd(cycle=0, incident=died(), progress_known=True, durable_iteration=50)
    _, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts=10), end)
    assert len(decisions) == 4  # the first one committed the checkpoint, three more did not
    assert "no further than iteration 50" in decisions[-1].reason


def test_progress_in_every_cycle_continues_the_run() -> None:
    """A script that crashes in every cycle after a save is restarted without limit."""
    ends = [CycleEnd(cycle=n, incident=died(), progress_known=True, durable_iteration=n * 10) for n in range(200)]
    state, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts=1), *ends, max_cycles=200)
    assert {v.recovery_level for v in decisions} == {RecoveryLevel.RESTART_WORKERS}
    assert state.restarts_total == 200
    state, decision = decide(state, CycleEnd(cycle=200, incident=None, finished=True), Limits())
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.FINISHED)


def test_max_restarts_total_bounds_restarts_with_progress() -> None:
    """max_restarts_total ends a run with progress in each cycle, and the reason does not report missing progress."""
    ends = [CycleEnd(cycle=n, incident=died(), progress_known=True, durable_iteration=n) for n in range(10)]
    state, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts_total=5), *ends)
    assert state.restarts_total == 5
    assert decisions[-1].exit_code == ExitReason.FAILED
    assert "--max-restarts-total" in decisions[-1].reason


def test_preemption_counts_against_no_budget() -> None:
    """A preempted job that saved is requeued with 75; no budget and no node is charged."""
    before = RecoveryState(restarts_without_progress=2, restarts_total=7, cycles_without_progress=2)
    end = CycleEnd(cycle=1, incident=None, preempted=True, preempted_saved=True, progress_known=True)
    state, decision = decide(before, end, Limits())
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.REQUEUE_JOB, ExitReason.PREEMPTED)
    assert (state.restarts_without_progress, state.restarts_total, state.cycles_without_progress) == (2, 7, 2)
    assert state.node_faults == {}


def test_preemption_without_a_checkpoint_does_not_exit_75() -> None:
    """Exit code 75 means that a checkpoint exists to resume from; a job without one does not exit with it."""
    end = CycleEnd(cycle=0, incident=None, preempted=True, had_session=True)
    state, decision = decide(RecoveryState(), end, Limits())
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.REQUEUE_JOB, ExitReason.FAILED)
    assert "nothing was saved" in decision.reason
    assert state.restarts_total == 0


def test_saves_of_a_script_without_a_session_are_unknown() -> None:
    """A script without a session may have saved by itself, so a shutdown does not report that nothing was saved."""
    _, decision = decide(RecoveryState(), CycleEnd(cycle=0, incident=None, preempted=True), Limits())
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.REQUEUE_JOB, ExitReason.FAILED)
    assert "nothing was saved" not in decision.reason
    assert "unknown (no session reported)" in decision.reason


def test_worker_exit_75_means_preemption() -> None:
    """A worker's exit code 75 means that it saved and exited: the job is requeued, and no budget is charged."""
    state, decision = decide(RecoveryState(), CycleEnd(cycle=0, incident=failed(75)), Limits(max_restarts=0))
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.REQUEUE_JOB, ExitReason.PREEMPTED)
    assert state.restarts_total == 0


@pytest.mark.parametrize("code", [ExitReason.FAILED_VALIDATION, ExitReason.NO_PROGRESS])
def test_worker_exit_17_and_93_stop_the_job(code: ExitReason) -> None:
    """A worker's exit codes 17 and 93 stop the job with the same code, whatever the budget."""
    _, decision = decide(RecoveryState(), CycleEnd(cycle=0, incident=failed(code)), Limits())
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, code)


def test_invalid_result_soon_after_a_load_excludes_the_copy() -> None:
    """Exit code 17 within the suspect window of a node-local load restarts from another copy. Saves in between are not
    progress, and the reason and ladder.json contain checkpoint, attempt and tier."""
    before = RecoveryState(best_durable=120)
    state, decision = decide(before, invalid(1, 127, 120, "replica", durable=125), Limits())
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS
    assert "7 iterations after it was loaded, checkpoint 120 (replica tier, attempt job-0-aa.120)" in decision.reason
    assert "another copy (restart 1 of 3 without progress)" in decision.reason
    (one,) = state.excluded
    assert (one.checkpoint, one.attempt, one.tier, one.cycle) == (120, "job-0-aa.120", "replica", "job-1")
    assert "iteration 127" in one.why
    assert state.best_durable == 120


def test_invalid_result_beyond_the_window_stops() -> None:
    """After the suspect window, exit code 17 is not attributed to the copy: the run stops with 17."""
    state, decision = decide(RecoveryState(), invalid(1, 141, 120, "local"), Limits())
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.FAILED_VALIDATION)
    assert "beyond the suspect window" in decision.reason
    assert state.excluded == ()


def test_excluded_copy_is_recorded_without_restarts() -> None:
    """With --max-restarts=0 exit code 17 ends the job, and the next job does not load the copy."""
    state, decision = decide(RecoveryState(), invalid(0, 121, 120, "memory"), Limits(max_restarts=0))
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.FAILED_VALIDATION)
    assert [one.checkpoint for one in begin_job(state).excluded] == [120]


def test_second_invalid_global_checkpoint_stops_with_17() -> None:
    """After a node-local copy, the global copy and an older global checkpoint, the third consecutive invalid result
    ends the run with 17."""
    ends = [invalid(1, 125, 120, "memory"), invalid(2, 125, 120, "global"), invalid(3, 110, 100, "global")]
    state, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts=9, max_no_progress_cycles=9), *ends)
    assert [v.recovery_level for v in decisions] == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.STOP,
    ]
    assert decisions[-1].exit_code == ExitReason.FAILED_VALIDATION
    assert "second" in decisions[-1].reason
    assert [(one.checkpoint, one.tier) for one in state.excluded] == [(120, "memory"), (120, "global")]
    state = begin_job(state)
    _, decision = decide(state, invalid(4, 110, 100, "global"), Limits())
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS, "a restart by a user after 17 starts a new case"


def test_exit_16_restarts_within_the_budget() -> None:
    """Exit code 16 restarts the workers within the same budgets as any other failure."""
    _, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts=2), CycleEnd(cycle=0, incident=failed(16)))
    assert [v.recovery_level for v in decisions] == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.STOP,
    ]


def test_lost_node_moves_its_slot() -> None:
    """A lost node immediately leads to recovery level 3, and is charged like a restart."""
    lost = Incident(kind=IncidentKind.NODE_LOST, node="b")
    state, decision = decide(RecoveryState(), CycleEnd(cycle=0, incident=lost, num_spares=1), Limits())
    assert decision.recovery_level == RecoveryLevel.REPLACE_NODE
    assert "a spare takes its slot" in decision.reason
    assert decision.quarantine == ()  # it may rejoin as a spare
    assert (state.restarts_without_progress, state.restarts_total) == (1, 1)


@pytest.mark.parametrize(
    ("num_spares", "recovery_level", "quarantine"),
    [(1, RecoveryLevel.REPLACE_NODE, ("b",)), (0, RecoveryLevel.RESTART_WORKERS, ())],
)
def test_node_that_cannot_start_is_replaced_by_a_spare(
    num_spares: int, recovery_level: RecoveryLevel, quarantine: tuple[str, ...]
) -> None:
    """A node that cannot start its workers loses its slot if a spare waits; otherwise it tries again."""
    cannot = Incident(kind=IncidentKind.CANNOT_START, node="b")
    state, decision = decide(RecoveryState(), CycleEnd(cycle=0, incident=cannot, num_spares=num_spares), Limits())
    assert (decision.recovery_level, decision.quarantine) == (recovery_level, quarantine)
    assert state.quarantined == quarantine


def test_faulty_node_is_quarantined() -> None:
    """The node on which max_node_faults faults began loses its slot to a spare; its peers are not charged."""
    limits = Limits(max_restarts=10, max_node_faults=3)
    ends = [CycleEnd(cycle=n, incident=died("b"), num_spares=1, durable_iteration=n) for n in range(3)]
    state, decisions = decide_until_stop(RecoveryState(), limits, *ends, max_cycles=3)
    assert [v.quarantine for v in decisions] == [(), (), ("b",)]
    assert decisions[-1].recovery_level == RecoveryLevel.REPLACE_NODE
    assert state.quarantined == ("b",)
    assert state.node_faults == {"b": 3}
    _, decision = decide(state, CycleEnd(cycle=3, incident=died("c"), num_spares=0), limits)
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS


def test_faulty_node_without_a_spare_is_reported() -> None:
    """Without a spare a faulty node keeps its slot (recovery level 2), and the reason contains the node."""
    state = RecoveryState(node_faults={"b": 2})
    state, decision = decide(state, CycleEnd(cycle=0, incident=died("b"), num_spares=0), Limits())
    assert (decision.recovery_level, decision.quarantine) == (RecoveryLevel.RESTART_WORKERS, ())
    assert "node b had 3 faults" in decision.reason
    assert "no spare" in decision.reason


@pytest.mark.parametrize("limits", [Limits(), Limits(max_restarts=2), Limits(max_restarts_total=2)])
def test_failing_node_is_replaced_within_the_budget(limits: Limits) -> None:
    """With default budgets a node on which every failure began loses its slot to a spare while a restart is left."""
    state = RecoveryState()
    for cycle in range(2):
        end = CycleEnd(cycle=cycle, incident=died("c"), num_spares=1, num_nodes=2, progress_known=True)
        state, decision = decide(state, end, limits)
    assert (decision.recovery_level, decision.quarantine) == (RecoveryLevel.REPLACE_NODE, ("c",))
    assert "2 of 2 failures on node c" in decision.reason


def test_flapping_node_is_replaced_without_spending_budget() -> None:
    """A node that is lost three times before its cycle began loses its slot, and the budgets stay unchanged."""
    lost = Incident(kind=IncidentKind.NODE_LOST, node="c")
    state = RecoveryState(progress_known=True)
    quarantines = []
    for cycle in range(3):
        state, decision = decide(state, CycleEnd(cycle=cycle, incident=lost, num_spares=1, has_trained=False), Limits())
        quarantines.append(decision.quarantine)
    assert quarantines == [(), (), ("c",)]
    assert (state.restarts_without_progress, state.cycles_without_progress) == (0, 0)
    _, decision = decide(state, CycleEnd(cycle=3, incident=died("b"), num_nodes=2), Limits())
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS
    assert "restart 1 of 3" in decision.reason


@pytest.mark.parametrize(("number", "restarts"), [(3, 1), (4, 2), (5, 2)])
def test_a_takeover_continues_from_the_later_state(number: int, restarts: int) -> None:
    """The later one of the coordinator's and the agent's state counts, the agent's if they have the same number; copies
    that either of them excludes are not loaded."""
    one, other = (Exclusion(checkpoint=1, attempt=attempt, tier="local") for attempt in "ab")
    own = RecoveryState(job="job", number=4, restarts_without_progress=1, excluded=(one,))
    kept = RecoveryState(job="job", number=number, restarts_without_progress=2, excluded=(one, other))
    merged = merge(own, kept)
    assert (merged.restarts_without_progress, merged.number) == (restarts, max(number, 4))
    assert {copy.attempt for copy in merged.excluded} == {"a", "b"}
    assert merge(merged, kept) == merged


def test_failures_on_several_nodes_quarantine_none() -> None:
    """If failures began on different nodes, no node is the root cause and the spare keeps waiting."""
    state = RecoveryState()
    for node in ("c", "b"):
        end = CycleEnd(cycle=0, incident=died(node), num_spares=1, num_nodes=2, progress_known=True)
        state, decision = decide(state, end, Limits())
    assert (decision.recovery_level, decision.quarantine) == (RecoveryLevel.RESTART_WORKERS, ())


@pytest.mark.parametrize(("num_nodes", "is_named"), [(2, True), (1, False)])
def test_stop_reports_the_node_of_every_failure(num_nodes: int, is_named: bool) -> None:
    """A run that stops after failures that all began on one of several nodes reports that node."""
    state = RecoveryState()
    for cycle in range(3):
        end = CycleEnd(cycle=cycle, incident=died("c"), num_nodes=num_nodes, progress_known=True)
        state, decision = decide(state, end, Limits())
    assert decision.exit_code == ExitReason.NO_PROGRESS
    assert decision.reason.endswith("; 3 of 3 failures on node c") == is_named


def test_zero_node_faults_never_quarantines() -> None:
    """max_node_faults=0 never takes a slot from a node, however often it fails."""
    state = RecoveryState(node_faults={"a": 99})
    _, decision = decide(state, CycleEnd(cycle=0, incident=died("a"), num_spares=2), Limits(max_node_faults=0))
    assert (decision.recovery_level, decision.quarantine) == (RecoveryLevel.RESTART_WORKERS, ())


def test_outcome_is_known_after_the_job_ended() -> None:
    """The state of an ended job reports finished, stopped or requeued; that of a running job does not."""
    restarted, _ = decide(RecoveryState(), CycleEnd(cycle=0, incident=died("a")), Limits())
    finished, _ = decide(restarted, CycleEnd(cycle=1, incident=None, finished=True), Limits())
    stopped, decision = decide(RecoveryState(), CycleEnd(cycle=0, incident=died("a")), Limits(max_restarts=0))
    left, _ = decide(RecoveryState(), CycleEnd(cycle=0, incident=None, preempted=True, preempted_saved=True), Limits())
    assert find_outcome(RecoveryState()) is find_outcome(restarted) is find_outcome(begin_job(stopped)) is None
    assert (find_outcome(finished) or ())[0] == ExitReason.FINISHED
    assert find_outcome(stopped) == (ExitReason.FAILED, decision.reason)
    assert (find_outcome(left) or ())[0] == ExitReason.PREEMPTED
    for state in (finished, stopped, left):
        assert find_later_outcome(state, None) == find_later_outcome(state, state) == find_outcome(state)
    assert find_later_outcome(finished, restarted) == find_outcome(finished)
    for state in (stopped, left):
        assert find_later_outcome(state, restarted) is None, "the agent knows a decision that this state lacks"


def test_missing_progress_counts_over_requeued_jobs() -> None:
    """Cycles without progress are counted over requeued jobs; --max-restarts is counted per job."""
    end = CycleEnd(cycle=0, incident=died(), progress_known=True)
    state, limits = RecoveryState(), Limits(max_restarts=0)
    codes = []
    for _ in range(3):
        state, decision = decide(begin_job(state), end, limits)
        codes.append(decision.exit_code)
    assert codes == [ExitReason.FAILED, ExitReason.FAILED, ExitReason.NO_PROGRESS]


def test_new_job_after_93_has_full_budgets() -> None:
    """A run that stopped with 93 is never requeued automatically, so a new job has full budgets."""
    end = CycleEnd(cycle=0, incident=died(), progress_known=True, durable_iteration=50)
    state, _ = decide_until_stop(RecoveryState(best_durable=50), Limits(), end)
    assert state.stopped_with == ExitReason.NO_PROGRESS
    state = begin_job(state)
    assert (state.cycles_without_progress, state.best_durable) == (0, 50)
    assert state.history
    _, decisions = decide_until_stop(state, Limits(), end)
    assert len(decisions) == 3


def test_reason_contains_failure_action_and_budget() -> None:
    """A reason is one line with the failure, the action, the checkpoint and the remaining budget."""
    end = CycleEnd(cycle=2, incident=died(iteration=57), progress_known=True, durable_iteration=50)
    _, decision = decide(RecoveryState(best_durable=50), end, Limits())
    assert decision.reason == (
        "rank 1 on node a (pid 4711) was ended by SIGKILL at iteration 57; restarting the workers, "
        "resuming from iteration 50 (restart 1 of 3 without progress)"
    )


def test_history_is_bounded() -> None:
    """The list of recorded decisions has a bounded length."""
    ends = [CycleEnd(cycle=n, incident=died(), durable_iteration=n) for n in range(100)]
    state, _ = decide_until_stop(RecoveryState(), Limits(), *ends, max_cycles=100)
    assert len(state.history) == 64
    assert state.history[-1].cycle == 99


def test_in_process_restarts_share_the_restart_budget() -> None:
    """In-process restarts and worker restarts share one budget; exceeding it ends the job."""
    recovered_end = CycleEnd(cycle=0, incident=died(), recovered_in_process=True)
    _, decisions = decide_until_stop(
        RecoveryState(), Limits(max_restarts=3), recovered_end, CycleEnd(cycle=0, incident=died()), recovered_end
    )
    assert [v.recovery_level for v in decisions] == [
        RecoveryLevel.RESTART_IN_PROCESS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_IN_PROCESS,
        RecoveryLevel.STOP,
    ]
    assert decisions[-1].exit_code == ExitReason.FAILED


def test_in_process_restarts_do_not_end_a_cycle() -> None:
    """A cycle with any number of in-process restarts counts once when it ends without progress."""
    recovered_end = CycleEnd(cycle=0, incident=died(), recovered_in_process=True, progress_known=True)
    state = RecoveryState()
    for _ in range(4):
        state, decision = decide(state, recovered_end, Limits(max_restarts=9))
        assert decision.recovery_level == RecoveryLevel.RESTART_IN_PROCESS
        assert "from the start" not in decision.reason
    assert (state.cycles_without_progress, state.restarts_without_progress) == (0, 4)
    state, _ = decide(state, CycleEnd(cycle=0, incident=died(), progress_known=True), Limits(max_restarts=9))
    assert (state.cycles_without_progress, state.restarts_without_progress) == (1, 5)


def test_progress_allows_endless_in_process_restarts() -> None:
    """A new durable checkpoint before each in-process restart allows any number of them."""
    ends = [CycleEnd(cycle=0, incident=died(), recovered_in_process=True, durable_iteration=10 * n) for n in range(20)]
    _, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts=1), *ends, max_cycles=20)
    assert [v.recovery_level for v in decisions] == [RecoveryLevel.RESTART_IN_PROCESS] * 20


def test_in_process_restarts_without_progress_stop_with_93() -> None:
    """If progress is known, repeated recoveries at the same iteration are not progress."""
    recovered_end = CycleEnd(cycle=0, incident=died(), recovered_in_process=True, progress_known=True)
    _, decisions = decide_until_stop(RecoveryState(), Limits(max_restarts=2), recovered_end)
    assert [v.exit_code for v in decisions] == [None, None, ExitReason.NO_PROGRESS]


def test_in_process_restarts_do_not_move_slots() -> None:
    """A node whose faults are all recovered in process keeps its slot until a cycle ends there."""
    recovered_end = CycleEnd(cycle=0, incident=died(), recovered_in_process=True, num_spares=1)
    state, limits = RecoveryState(), Limits(max_restarts=9, max_node_faults=2)
    for _ in range(4):
        state, decision = decide(state, recovered_end, limits)
        assert (decision.recovery_level, decision.quarantine) == (RecoveryLevel.RESTART_IN_PROCESS, ())
    _, decision = decide(state, CycleEnd(cycle=0, incident=died(), num_spares=1), limits)
    assert (decision.recovery_level, decision.quarantine) == (RecoveryLevel.REPLACE_NODE, ("a",))


def _fails_again(
    limits: Limits, *, loads: list[TierName | None], iteration: int = 23, types: tuple[str, ...] = ("ValueError",)
) -> list[tuple[RecoveryLevel, RecoveryState]]:
    """Return the decisions about cycles that all fail after iteration 20 was committed, each after a load from a
    tier."""
    state, steps = RecoveryState(), []
    for cycle, tier in enumerate(loads):
        load = None
        if tier is not None:
            load = Load(cycle=f"job-{cycle}", checkpoint=20, attempt="job-0-aa.0", tier=tier, suspect_window=0)
        cause = {"type": types[cycle % len(types)], "frame": "train.py:9 in step"}
        incident = Incident(
            kind=IncidentKind.WORKER_FAILED,
            job="job",
            cycle=cycle,
            node="a",
            rank=cycle % 2,
            iteration=iteration,
            exit_code=1,
            evidence={"cause": cause},
        )
        end = CycleEnd(cycle=cycle, incident=incident, durable_iteration=20, progress_known=True, load=load)
        state, decision = decide(state, end, limits)
        steps.append((decision.recovery_level, state))
    return steps


@pytest.mark.parametrize(
    ("limits", "at"),
    [(Limits(), 2), (Limits(max_restarts=2), 1), (Limits(max_restarts=9, max_no_progress_cycles=5), 4)],
    ids=["default", "two-restarts", "five-cycles"],
)
def test_last_restart_after_a_repeated_failure_excludes_copy(limits: Limits, at: int) -> None:
    """If the same exception at the same iteration follows each load of a node-local copy, only the last restart of the
    budget excludes that copy, with a reason, and no budget grows."""
    steps = _fails_again(limits, loads=[None, "memory", "replica", "local", "local", "global"])
    assert [len(state.excluded) for _, state in steps[: at + 1]] == [0] * at + [1]
    (excluded,) = steps[at][1].excluded
    assert (excluded.checkpoint, excluded.attempt, excluded.is_last_resort) == (20, "job-0-aa.0", True)
    reason = steps[at][1].history[-1].reason
    assert "the same failure at the same iteration after the same copy was loaded" in reason
    assert "node-local copies of checkpoint 20 are excluded" in reason
    assert [recovery_level for recovery_level, _ in steps[: at + 2]] == [RecoveryLevel.RESTART_WORKERS] * (at + 1) + [
        RecoveryLevel.STOP
    ]


def test_other_failures_exclude_no_copy() -> None:
    """Alternating exceptions, a load from the global tier, and no load leave every copy loadable."""
    assert not _fails_again(Limits(), loads=[None, *["memory"] * 3], types=("ValueError", "OSError"))[-1][1].excluded
    assert not _fails_again(Limits(), loads=[None, *["global"] * 3])[-1][1].excluded
    assert not _fails_again(Limits(), loads=[None] * 4)[-1][1].excluded


def test_new_job_after_93_loads_unverified_exclusions() -> None:
    """A copy that was excluded without evidence is loaded again by a new job after the stop."""
    state = _fails_again(Limits(), loads=[None, *["memory"] * 3])[-1][1]
    assert state.stopped_with == ExitReason.NO_PROGRESS
    assert state.excluded
    assert not begin_job(state).excluded


CAUSES = [
    Cause(type="ValueError", text="token 50257 out of range", frame="data.py:29 in next_batch"),
    Cause(type="ValueError", text="token 50258 out of range", frame="data.py:29 in next_batch"),
    Cause(type="KeyError", text="'labels'", bases=("LookupError",), frame="train.py:7"),
    Cause(type="RuntimeError", text="CUDA error: unspecified launch failure", frame="train.py:9 in step"),
    Cause(type="torch.distributed.DistBackendError", bases=("RuntimeError",), text="NCCL", frame="train.py:9 in step"),
    Cause(type="ValueError", text="of a library"),
]


@given(
    causes=st.lists(st.sampled_from([None, *CAUSES]), min_size=1, max_size=6),
    had_session=st.booleans(),
    max_restarts=st.integers(min_value=0, max_value=5),
)
def test_repeated_failure_without_session_stops_with_93(
    causes: list[Cause | None], had_session: bool, max_restarts: int
) -> None:
    """A script without a session that fails in two consecutive cycles with the same error of its own code stops with
    93. With a session, another error, or an error of a device or network, the budget stays unchanged."""
    state, last = RecoveryState(), None
    for cycle, cause in enumerate(causes):
        evidence = {} if cause is None else {"cause": msgspec.to_builtins(cause)}
        incident = Incident(kind=IncidentKind.WORKER_FAILED, node="a", rank=cycle, exit_code=1, evidence=evidence)
        end = CycleEnd(cycle=cycle, incident=incident, had_session=had_session)
        state, decision = decide(state, end, Limits(max_restarts=max_restarts, max_node_faults=0))
        if not had_session and cause is not None and cause == last and cause in CAUSES[:3]:
            assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.NO_PROGRESS)
            assert "same failure at the same place" in decision.reason
        elif cycle >= max_restarts:
            assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.FAILED)
        else:
            assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS
        if decision.recovery_level == RecoveryLevel.STOP:
            break
        last = cause


def test_memory_commits_are_progress_within_the_job_only() -> None:
    """Restarts resume from memory, the next job from durable checkpoints, and progress counts from the respective
    iteration."""
    first = CycleEnd(cycle=0, incident=died(), durable_iteration=40, committed_iteration=165, progress_known=True)
    state, decision = decide(RecoveryState(), first, Limits())
    assert "resuming from iteration 165" in decision.reason
    assert (state.best_durable, state.newest_iteration, state.cycles_without_progress) == (40, 165, 0)
    leaving = CycleEnd(
        cycle=1,
        incident=None,
        preempted=True,
        preempted_saved=True,
        durable_iteration=40,
        committed_iteration=166,
        progress_known=True,
    )
    state, decision = decide(state, leaving, Limits())
    assert "the next job resumes from iteration 40; iteration 166 was in node-local tiers only" in decision.reason
    state = begin_job(state)
    assert (state.best_durable, state.newest_iteration) == (40, 40)
    again = CycleEnd(cycle=0, incident=died(), durable_iteration=40, committed_iteration=60, progress_known=True)
    state, decision = decide(state, again, Limits())
    assert "resuming from iteration 60" in decision.reason
    state, decision = decide(state, again, Limits())
    assert state.cycles_without_progress == 1


OF_CODE = [
    Cause(type="RuntimeError", text="you must call `.launch()`", bases=("Exception",), frame="train.py:5"),
    Cause(type="RuntimeError", text="mat1 and mat2 shapes cannot be multiplied", frame="train.py:9 in step"),
    Cause(type="my.ModelError", text="no such head", bases=("Exception",), frame="model.py:3"),
]
OF_SURROUNDINGS = [
    Cause(type="RuntimeError", text="CUDA error: unspecified launch failure", frame="train.py:5"),
    Cause(type="torch.AcceleratorError", text="unknown", bases=("RuntimeError",), frame="train.py:5"),
    Cause(type="torch.OutOfMemoryError", text="tried to allocate 2 GiB", bases=("RuntimeError",), frame="train.py:5"),
    Cause(type="RuntimeError", text="DataLoader worker (pid 7) is killed by signal: Bus error", frame="train.py:5"),
    Cause(type="RuntimeError", text="Gloo connectFullMesh failed", frame="train.py:5"),
    Cause(type="OSError", text="[Errno 5] no luck", frame="train.py:5"),
    Cause(type="TimeoutError", text="no luck", bases=("OSError",), frame="train.py:5"),
    Cause(type="ConnectionResetError", text="no luck", bases=("ConnectionError", "OSError"), frame="train.py:5"),
    Cause(type="httpx.ReadError", text="no luck", bases=("TransportError", "RequestError"), frame="train.py:5"),
    Cause(type="botocore.exceptions.ClientError", text="SlowDown", bases=("Exception",), frame="train.py:5"),
    Cause(type="RuntimeError", text="503 Service Unavailable", frame="train.py:5"),
    Cause(type="json.decoder.JSONDecodeError", text="no luck", bases=("ValueError",), frame="train.py:5"),
    Cause(type="SystemExit", text="exit(1)", frame="train.py:5"),
    Cause(type="fatal signal", text="SIGSEGV", frame="train.py:5"),
    Cause(type="RuntimeError", text="of a library, at an unknown place"),
]


@given(
    failures=st.lists(
        st.tuples(st.sampled_from([None, *OF_CODE, *OF_SURROUNDINGS]), st.booleans()), min_size=1, max_size=6
    ),
    had_session=st.booleans(),
    durable=st.sampled_from([None, 10]),
    spares=st.integers(min_value=0, max_value=1),
    num_nodes=st.integers(min_value=1, max_value=2),
)
def test_repeated_failure_before_the_first_step_stops(
    failures: list[tuple[Cause | None, bool]], had_session: bool, durable: int | None, spares: int, num_nodes: int
) -> None:
    """Before the first completed step or checkpoint, the same error in two consecutive cycles ends the run with 93, on
    any ranks. Errors of devices, disks, networks and other processes, lost workers, and errors for which a spare may
    help keep the full budget, as does every failure after that."""
    limits = Limits(max_restarts=4, max_no_progress_cycles=99)
    state, has_trained, last = RecoveryState(), False, None
    for cycle, (cause, trained) in enumerate(failures):
        evidence = {} if cause is None else {"cause": msgspec.to_builtins(cause)}
        kind = IncidentKind.WORKER_DIED if cause is None else IncidentKind.WORKER_FAILED
        incident = Incident(kind=kind, node="a", rank=cycle, exit_code=1, evidence=evidence)
        end = CycleEnd(
            cycle=cycle,
            incident=incident,
            had_session=had_session,
            has_trained=trained,
            durable_iteration=durable,
            num_spares=spares,
            num_nodes=num_nodes,
        )
        state, decision = decide(state, end, limits)
        has_trained |= trained
        is_again = cause is not None and cause == last and cause in OF_CODE
        if is_again and not has_trained and durable is None and not (spares and num_nodes > 1):
            assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.NO_PROGRESS)
            assert "no rank has completed a step in this run" in decision.reason
            break
        assert (decision.recovery_level == RecoveryLevel.STOP) == (cycle >= limits.max_restarts)
        if decision.recovery_level == RecoveryLevel.STOP:
            break
        last = cause
