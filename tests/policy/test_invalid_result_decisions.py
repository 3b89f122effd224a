"""What the recovery policy decides about invalid results, case by case: exit codes 16 and 17 with a diagnosis."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outlast.errors import ExitReason
from outlast.incidents import Decision, Incident, IncidentKind, RecoveryLevel
from outlast.policy.recovery_point import Load, TierName
from outlast.policy.recovery_policy import CycleEnd, Limits, RecoveryState, begin_job, decide
from outlast.policy.rerun import Diagnosis, Finding, Replay

ROOMY = Limits(max_restarts=20, max_no_progress_cycles=20)


def diagnosis(finding: Finding = Finding.REPRODUCED, **facts: Any) -> Diagnosis:
    usual = {"rank": 1, "node": "a", "device": "a/cpu-1", "iteration": 127, "what": "loss", "first": "nan"}
    return Diagnosis(finding=finding, **{**usual, **facts})


def end(code: int, found: Diagnosis | None = None, **facts: Any) -> CycleEnd:
    """Return the end of a cycle that rank 1 left with an exit code."""
    iteration = found.iteration if found is not None else 127
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="a", rank=1, exit_code=code, iteration=iteration)
    return CycleEnd(cycle=0, incident=incident, diagnosis=found, progress_known=True, **facts)


def load(checkpoint: int, tier: TierName, *, window: int = 20) -> Load:
    return Load(
        cycle="job-1", checkpoint=checkpoint, attempt=f"job-0-aa.{checkpoint}", tier=tier, suspect_window=window
    )


def climb(*ends: CycleEnd, state: RecoveryState | None = None) -> tuple[RecoveryState, list[Decision]]:
    decisions = []
    state = state or RecoveryState()
    for one in ends:
        state, decision = decide(state, one, ROOMY)
        decisions.append(decision)
    return state, decisions


REPRODUCED = end(16, diagnosis())


def test_the_replica_nan_loop_ends_in_two_cycles() -> None:
    """NaN 7 iterations after a replica was loaded, reproduced: that copy is excluded, even where a spare waits and a
    replay could be done; the next cycle loads the global checkpoint and finishes."""
    bad = end(16, diagnosis(), load=load(120, "replica"), durable_iteration=125, num_spares=1)
    good = CycleEnd(cycle=1, incident=None, finished=True, load=load(100, "global"), durable_iteration=200)
    state, decisions = climb(bad, good, state=RecoveryState(best_durable=120))
    assert [decision.recovery_level for decision in decisions] == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]
    assert decisions[0].replay is None
    assert decisions[0].hold_back == ()
    assert "checkpoint 120 (replica tier" in decisions[0].reason
    assert decisions[1].exit_code == ExitReason.FINISHED
    assert [(one.checkpoint, one.tier) for one in state.excluded] == [(120, "replica")]


def test_exit_16_without_a_diagnosis_distrusts_a_near_copy_too() -> None:
    """A script's own exit 16 soon after a near load points at the copy as well."""
    state, (decision,) = climb(end(16, load=load(120, "local")))
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS
    assert [one.checkpoint for one in state.excluded] == [120]


def test_a_spare_replays_on_its_own_device() -> None:
    """With a spare, the node that saw the result is held back and not quarantined; the next cycle replays the very
    validation, and the reason names finding, rank, node, device and iteration."""
    state, (decision,) = climb(end(16, diagnosis(call=2), num_spares=1))
    assert (decision.recovery_level, decision.hold_back, decision.quarantine) == (
        RecoveryLevel.REPLACE_NODE,
        ("a",),
        (),
    )
    asked = Replay(iteration=127, device="a/cpu-1", node="a", rank=1, call=2, what="loss", first="nan")
    assert state.replay == asked
    assert msgspec.convert(decision.replay, Replay) == asked
    assert state.barred == ("a",)
    assert state.node_faults == {}
    for fact in ("rank 1", "node a", "device a/cpu-1", "iteration 127", "reproduced", "restart 1 of 20"):
        assert fact in decision.reason


def test_persistent_fault_quarantines_the_first_node() -> None:
    """Differs on the spare: the node that was held back is quarantined, the others go on as they are, and what is held
    against it is a fault of its own, not of the spare that found it."""
    found = diagnosis(Finding.PERSISTENT, second=2.5, replayed_on="s/cpu-1")
    blamed_on_spare = msgspec.structs.replace(REPRODUCED.incident, node="s", exit_code=17)  # type: ignore[type-var]
    persistent = CycleEnd(cycle=1, incident=blamed_on_spare, diagnosis=found, progress_known=True)
    state, decisions = climb(end(16, diagnosis(), num_spares=1), persistent)
    assert decisions[1].recovery_level == RecoveryLevel.RESTART_WORKERS
    assert decisions[1].quarantine == ("a",)
    assert (state.quarantined, state.held_back, state.replay) == (("a",), (), None)
    assert state.node_faults == {"a": 1}
    assert "s/cpu-1" in decisions[1].reason


@pytest.mark.parametrize("window", [0, 20])
def test_a_correct_result_stops_at_once(window: int) -> None:
    """Equal on another device: 17 with the diagnosis, whatever was loaded, whatever waits, whatever budget is left."""
    found = diagnosis(Finding.CORRECT, batch="5f3a", second="nan", replayed_on="s/cpu-1")
    state, decisions = climb(
        end(16, diagnosis(), num_spares=1), end(17, found, num_spares=3, load=load(120, "global", window=window))
    )
    assert (decisions[1].recovery_level, decisions[1].exit_code) == (RecoveryLevel.STOP, ExitReason.FAILED_VALIDATION)
    assert "batch 5f3a" in decisions[1].reason
    assert (state.excluded, state.quarantined, state.held_back, state.replay) == ((), (), (), None)


def test_no_other_device_tries_twice_then_stops() -> None:
    """Without a spare the same device replays twice, never more; then the run stops with the diagnosis."""
    _, decisions = climb(REPRODUCED, end(16, diagnosis(tries=1)), end(16, diagnosis(tries=2)))
    assert [decision.recovery_level for decision in decisions] == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.STOP,
    ]
    assert [decision.replay and decision.replay.get("tries", 0) for decision in decisions] == [0, 1, None]
    assert decisions[-1].exit_code == ExitReason.FAILED_VALIDATION
    assert "try 2 of 2" in decisions[1].reason
    assert "a/cpu-1" in decisions[-1].reason


def test_a_spare_that_comes_later_is_used() -> None:
    """A spare that comes while the same device tries decides at once; it is asked once only."""
    undecided = diagnosis(Finding.UNREACHED, tries=1, replayed_on="s/cpu-1")
    _, decisions = climb(REPRODUCED, end(16, diagnosis(tries=1), num_spares=1), end(16, undecided, num_spares=1))
    assert [decision.recovery_level for decision in decisions] == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.REPLACE_NODE,
        RecoveryLevel.STOP,
    ]


def test_after_the_tries_the_global_checkpoint_is_excluded_then_the_run_stops() -> None:
    """Global tier, in the suspect window: two replays, then an older checkpoint, from which no replay of the same
    result is tried again; then 17. The replay's own load, a diagnostic save, is not what is judged."""
    first = end(16, diagnosis(), load=load(120, "global"))
    again = end(16, diagnosis(tries=1), load=load(127, "local"))
    older = end(16, diagnosis(), load=load(110, "global"))
    state, decisions = climb(first, again, again, older)
    level = [decision.recovery_level for decision in decisions]
    assert level == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.STOP,
    ]
    assert [decision.replay is not None for decision in decisions] == [True, True, False, False]
    assert [(one.checkpoint, one.tier) for one in state.excluded] == [(120, "global")]
    assert decisions[-1].exit_code == ExitReason.FAILED_VALIDATION


@pytest.mark.parametrize("finding", [Finding.REPRODUCED, Finding.UNDECIDED, Finding.UNREACHED])
def test_a_last_replay_that_could_not_tell_leads_to_the_older_checkpoint(finding: Finding) -> None:
    """A replay leaves with 17 and no decision: what the cycle had loaded that saw the result first is excluded, not
    the diagnostic save; where it is beyond the suspect window the run stops."""
    last = end(17, diagnosis(finding, tries=2, replayed_on="a/cpu-1"), load=load(127, "local"))
    for checkpoint, recovery_level in ((120, RecoveryLevel.RESTART_WORKERS), (100, RecoveryLevel.STOP)):
        state, decisions = climb(end(16, diagnosis(), load=load(checkpoint, "global")), last)
        assert [decision.recovery_level for decision in decisions] == [RecoveryLevel.RESTART_WORKERS, recovery_level]
        assert [one.checkpoint for one in state.excluded] == [120] * (checkpoint == 120)
        assert state.node_faults == {}


def test_progress_beyond_a_result_forgets_it() -> None:
    """A replay that found a valid result goes on training; what it commits beyond closes the case, and nobody is held
    back for it any more. The same step invalid again later is a new case."""
    state, _ = climb(end(16, diagnosis(), num_spares=1))
    died = Incident(kind=IncidentKind.WORKER_DIED, node="b", exit_code=-9)
    state, _ = climb(CycleEnd(cycle=1, incident=died, durable_iteration=130, progress_known=True), state=state)
    assert (state.cases, state.replay, state.held_back) == ((), None, ())
    _, (decision,) = climb(end(16, diagnosis(), num_spares=1), state=state)
    assert decision.recovery_level == RecoveryLevel.REPLACE_NODE


def test_a_replay_that_a_fault_ended_is_dropped_and_counts() -> None:
    """A crash in the replay's cycle is answered like any other; nobody stays held back, and the try is not given
    again."""
    died = Incident(kind=IncidentKind.WORKER_DIED, node="b", exit_code=-9)
    state, _ = climb(REPRODUCED, CycleEnd(cycle=1, incident=died, progress_known=True))
    assert (state.replay, state.held_back) == (None, ())
    _, decisions = climb(REPRODUCED, REPRODUCED, state=state)
    assert [decision.recovery_level for decision in decisions] == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]


def test_a_replay_outlives_a_preempted_job() -> None:
    """Told to leave before the replay was over: the next job's first cycle replays, on whatever nodes there are."""
    state, _ = climb(end(16, diagnosis(), num_spares=1))
    leaving = CycleEnd(cycle=1, incident=None, preempted=True, progress_known=True)
    state, _ = climb(leaving, state=state)
    state = begin_job(msgspec.json.decode(msgspec.json.encode(state), type=RecoveryState))
    assert state.replay is not None
    assert state.held_back == ()
    saved_beyond = CycleEnd(cycle=0, incident=None, preempted=True, preempted_saved=True, durable_iteration=128)
    state, _ = climb(saved_beyond, state=state)
    assert begin_job(state).replay is None


def test_a_replay_that_may_have_ended_the_job_is_dropped() -> None:
    """The whole job was gone without a word while it replayed: the next one trains as usual, and the try counts."""
    state, _ = climb(end(16, diagnosis(), num_spares=1))
    state = begin_job(state)
    assert (state.replay, state.held_back) == (None, ())
    _, (decision,) = climb(end(16, diagnosis(), num_spares=1), state=state)
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS, "another device was asked already"


def test_a_stop_leaves_no_replay_behind() -> None:
    """With no budget left the replay is not granted: 17 with the diagnosis, and the next job trains as usual."""
    state, decision = decide(RecoveryState(), end(16, diagnosis(), num_spares=1), Limits(max_restarts=0))
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.FAILED_VALIDATION)
    assert (state.replay, state.held_back, state.cases) == (None, (), ())
    assert "loss of rank 1" in decision.reason


def test_own_exit_16_is_restarted_a_bounded_number_of_times() -> None:
    """Exit code 16 without a diagnosis: the same devices twice, then 17, whatever --max-restarts allows."""
    _, decisions = climb(end(16), end(16), end(16))
    assert [decision.recovery_level for decision in decisions] == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.STOP,
    ]
    assert {decision.replay is None for decision in decisions} == {True}
    assert decisions[-1].exit_code == ExitReason.FAILED_VALIDATION


SPLIT = diagnosis(
    Finding.SPLIT, rank=0, node="", device="", what="model.w", first=None, message="replicas differ at iteration 127"
)


def test_replicas_without_a_majority_blame_nobody() -> None:
    """Two replicas differ: no node is held back, quarantined or charged, nothing is replayed even where a spare waits;
    the decision says what was found, and the tries are bounded."""
    state, decisions = climb(*[end(16, SPLIT, num_spares=1)] * 3)
    assert [decision.recovery_level for decision in decisions] == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.STOP,
    ]
    for decision in decisions[:2]:
        assert (decision.replay, decision.hold_back, decision.quarantine) == (None, (), ())
        assert "replicas differ at iteration 127: root cause unknown" in decision.reason
        assert "no diagnosis" not in decision.reason
    assert state.node_faults == {}


VOTED = diagnosis(Finding.PERSISTENT, node="b", device="b/cpu-0", what="replicas")


def test_outvoted_replica_without_a_spare_gets_one_chance() -> None:
    """A node named without a replay restarts there once; a second time without progress the run stops, and says why;
    after progress it has its chance again."""
    state, decisions = climb(end(17, VOTED), end(17, VOTED))
    assert [decision.recovery_level for decision in decisions] == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]
    assert "node b had its chance" in decisions[-1].reason
    assert state.node_faults == {"b": 2}
    state, _ = climb(end(17, VOTED))
    state, (decision,) = climb(end(17, VOTED, durable_iteration=150), state=state)
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS


@pytest.mark.parametrize("room", [{"num_spares": 1}, {"may_shrink": True}])
def test_outvoted_replica_loses_its_slot_where_it_can(room: dict[str, Any]) -> None:
    """With a spare, or where the world may shrink, the named node is quarantined."""
    state, (decision,) = climb(end(17, VOTED, **room))
    assert (decision.recovery_level, decision.quarantine) == (RecoveryLevel.REPLACE_NODE, ("b",))
    assert state.quarantined == ("b",)


def test_second_outvoted_replica_soon_after_a_load_points_at_the_copy() -> None:
    """A poisoned copy makes a replica differ wherever it is loaded: the second decision without progress, on whatever
    node, distrusts the copy and takes no other node out."""
    first = end(17, VOTED, load=load(120, "local"), num_spares=2)
    again = end(17, msgspec.structs.replace(VOTED, node="s"), load=load(120, "replica"), num_spares=1)
    state, decisions = climb(first, again)
    assert [decision.quarantine for decision in decisions] == [("b",), ()]
    assert [one.checkpoint for one in state.excluded] == [120]
