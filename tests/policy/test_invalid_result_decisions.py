"""Decisions of the recovery policy about invalid results: exit codes 16 and 17 with a diagnosis."""

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
    default = {"rank": 1, "node": "a", "device": "a/cpu-1", "iteration": 127, "what": "loss", "first": "nan"}
    return Diagnosis(finding=finding, **{**default, **facts})


def end(code: int, found: Diagnosis | None = None, **facts: Any) -> CycleEnd:
    """Return the end of a cycle in which rank 1 exited with a code."""
    iteration = found.iteration if found is not None else 127
    incident = Incident(kind=IncidentKind.WORKER_FAILED, node="a", rank=1, exit_code=code, iteration=iteration)
    return CycleEnd(cycle=0, incident=incident, diagnosis=found, progress_known=True, **facts)


def load(checkpoint: int, tier: TierName, *, window: int = 20) -> Load:
    return Load(
        cycle="job-1", checkpoint=checkpoint, attempt=f"job-0-aa.{checkpoint}", tier=tier, suspect_window=window
    )


def decide_all(*ends: CycleEnd, state: RecoveryState | None = None) -> tuple[RecoveryState, list[Decision]]:
    decisions = []
    state = state or RecoveryState()
    for one in ends:
        state, decision = decide(state, one, ROOMY)
        decisions.append(decision)
    return state, decisions


REPRODUCED = end(16, diagnosis())


def test_exit_16_without_diagnosis_excludes_a_local_copy() -> None:
    """A script's own exit code 16 soon after a load from a node-local tier excludes that copy."""
    state, (decision,) = decide_all(end(16, load=load(120, "local")))
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS
    assert [one.checkpoint for one in state.excluded] == [120]


def test_spare_replays_the_result_on_its_device() -> None:
    """A spare replaces the node that saw the result, which is held back but not quarantined. The next cycle replays
    that validation, and the reason contains finding, rank, node, device and iteration."""
    state, (decision,) = decide_all(end(16, diagnosis(call=2), num_spares=1))
    assert (decision.recovery_level, decision.hold_back, decision.quarantine) == (
        RecoveryLevel.REPLACE_NODE,
        ("a",),
        (),
    )
    replays = Replay(iteration=127, device="a/cpu-1", node="a", rank=1, call=2, what="loss", first="nan")
    assert state.replay == replays
    assert msgspec.convert(decision.replay, Replay) == replays
    assert state.barred == ("a",)
    assert state.node_faults == {}
    for fact in ("rank 1", "node a", "device a/cpu-1", "iteration 127", "reproduced", "restart 1 of 20"):
        assert fact in decision.reason


def test_persistent_fault_quarantines_the_first_node() -> None:
    """A result that differs on the spare quarantines the node that was held back; the fault is attributed to that node,
    and the others continue unchanged."""
    found = diagnosis(Finding.PERSISTENT, second=2.5, replayed_on="s/cpu-1")
    blamed_on_spare = msgspec.structs.replace(REPRODUCED.incident, node="s", exit_code=17)  # type: ignore[type-var]
    persistent = CycleEnd(cycle=1, incident=blamed_on_spare, diagnosis=found, progress_known=True)
    state, decisions = decide_all(end(16, diagnosis(), num_spares=1), persistent)
    assert decisions[1].recovery_level == RecoveryLevel.RESTART_WORKERS
    assert decisions[1].quarantine == ("a",)
    assert (state.quarantined, state.held_back, state.replay) == (("a",), (), None)
    assert state.node_faults == {"a": 1}
    assert "s/cpu-1" in decisions[1].reason


@pytest.mark.parametrize("window", [0, 20])
def test_reproduced_result_on_another_device_stops(window: int) -> None:
    """An equal result on another device stops the run with 17 and the diagnosis, whatever was loaded and whatever
    budget is left."""
    found = diagnosis(Finding.CORRECT, batch="5f3a", second="nan", replayed_on="s/cpu-1")
    state, decisions = decide_all(
        end(16, diagnosis(), num_spares=1), end(17, found, num_spares=3, load=load(120, "global", window=window))
    )
    assert (decisions[1].recovery_level, decisions[1].exit_code) == (RecoveryLevel.STOP, ExitReason.FAILED_VALIDATION)
    assert "batch 5f3a" in decisions[1].reason
    assert (state.excluded, state.quarantined, state.held_back, state.replay) == ((), (), (), None)


def test_replays_on_the_same_device_stop_after_two() -> None:
    """Without a spare the same device replays twice; then the run stops with the diagnosis."""
    _, decisions = decide_all(REPRODUCED, end(16, diagnosis(tries=1)), end(16, diagnosis(tries=2)))
    assert [decision.recovery_level for decision in decisions] == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.STOP,
    ]
    assert [decision.replay and decision.replay.get("tries", 0) for decision in decisions] == [0, 1, None]
    assert decisions[-1].exit_code == ExitReason.FAILED_VALIDATION
    assert "try 2 of 2" in decisions[1].reason
    assert "a/cpu-1" in decisions[-1].reason


def test_late_spare_replays_once() -> None:
    """A spare that joins during replays on the same device decides the next one, and replays only once."""
    undecided = diagnosis(Finding.UNREACHED, tries=1, replayed_on="s/cpu-1")
    _, decisions = decide_all(REPRODUCED, end(16, diagnosis(tries=1), num_spares=1), end(16, undecided, num_spares=1))
    assert [decision.recovery_level for decision in decisions] == [
        RecoveryLevel.RESTART_WORKERS,
        RecoveryLevel.REPLACE_NODE,
        RecoveryLevel.STOP,
    ]


def test_failed_replays_exclude_the_global_checkpoint() -> None:
    """After two replays within the suspect window, a global checkpoint is excluded and an older one loaded, without
    further replays of the result; then the run stops with 17. The load of the replay's diagnostic save is not
    judged."""
    first = end(16, diagnosis(), load=load(120, "global"))
    again = end(16, diagnosis(tries=1), load=load(127, "local"))
    older = end(16, diagnosis(), load=load(110, "global"))
    state, decisions = decide_all(first, again, again, older)
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
def test_undecided_replay_excludes_the_original_load(finding: Finding) -> None:
    """A replay that exits with 17 undecided excludes the checkpoint of the cycle that first saw the result, not the
    diagnostic save; beyond the suspect window the run stops."""
    last = end(17, diagnosis(finding, tries=2, replayed_on="a/cpu-1"), load=load(127, "local"))
    for checkpoint, recovery_level in ((120, RecoveryLevel.RESTART_WORKERS), (100, RecoveryLevel.STOP)):
        state, decisions = decide_all(end(16, diagnosis(), load=load(checkpoint, "global")), last)
        assert [decision.recovery_level for decision in decisions] == [RecoveryLevel.RESTART_WORKERS, recovery_level]
        assert [one.checkpoint for one in state.excluded] == [120] * (checkpoint == 120)
        assert state.node_faults == {}


def test_progress_closes_an_invalid_result() -> None:
    """A commit beyond a result that was valid in a replay closes the case and releases the node. The same step invalid
    again later is a new case."""
    state, _ = decide_all(end(16, diagnosis(), num_spares=1))
    died = Incident(kind=IncidentKind.WORKER_DIED, node="b", exit_code=-9)
    state, _ = decide_all(CycleEnd(cycle=1, incident=died, durable_iteration=130, progress_known=True), state=state)
    assert (state.cases, state.replay, state.held_back) == ((), None, ())
    _, (decision,) = decide_all(end(16, diagnosis(), num_spares=1), state=state)
    assert decision.recovery_level == RecoveryLevel.REPLACE_NODE


def test_interrupted_replay_counts_and_is_dropped() -> None:
    """A crash in the replay's cycle is handled like any other; no node stays held back, and the attempt counts."""
    died = Incident(kind=IncidentKind.WORKER_DIED, node="b", exit_code=-9)
    state, _ = decide_all(REPRODUCED, CycleEnd(cycle=1, incident=died, progress_known=True))
    assert (state.replay, state.held_back) == (None, ())
    _, decisions = decide_all(REPRODUCED, REPRODUCED, state=state)
    assert [decision.recovery_level for decision in decisions] == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]


def test_replay_survives_preemption() -> None:
    """If the job is preempted before the replay ends, the first cycle of the next job replays, on any nodes."""
    state, _ = decide_all(end(16, diagnosis(), num_spares=1))
    leaving = CycleEnd(cycle=1, incident=None, preempted=True, progress_known=True)
    state, _ = decide_all(leaving, state=state)
    state = begin_job(msgspec.json.decode(msgspec.json.encode(state), type=RecoveryState))
    assert state.replay is not None
    assert state.held_back == ()
    saved_beyond = CycleEnd(cycle=0, incident=None, preempted=True, preempted_saved=True, durable_iteration=128)
    state, _ = decide_all(saved_beyond, state=state)
    assert begin_job(state).replay is None


def test_replay_is_dropped_after_a_lost_job() -> None:
    """If the whole job was lost during a replay, the next job trains normally, and the attempt counts."""
    state, _ = decide_all(end(16, diagnosis(), num_spares=1))
    state = begin_job(state)
    assert (state.replay, state.held_back) == (None, ())
    _, (decision,) = decide_all(end(16, diagnosis(), num_spares=1), state=state)
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS, "another device has already replayed the result"


def test_stop_grants_no_replay() -> None:
    """Without budget the replay is not granted: the run stops with 17 and the diagnosis, and the next job trains
    normally."""
    state, decision = decide(RecoveryState(), end(16, diagnosis(), num_spares=1), Limits(max_restarts=0))
    assert (decision.recovery_level, decision.exit_code) == (RecoveryLevel.STOP, ExitReason.FAILED_VALIDATION)
    assert (state.replay, state.held_back, state.cases) == (None, (), ())
    assert "loss of rank 1" in decision.reason


def test_exit_16_without_diagnosis_restarts_twice() -> None:
    """Exit code 16 without a diagnosis restarts the same devices twice; then the run stops with 17, whatever
    --max-restarts allows."""
    _, decisions = decide_all(end(16), end(16), end(16))
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


def test_replicas_without_a_majority_identify_no_node() -> None:
    """If two replicas differ, no node is held back, quarantined or charged and nothing is replayed; the reason reports
    the finding, and restarts are bounded."""
    state, decisions = decide_all(*[end(16, SPLIT, num_spares=1)] * 3)
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


def test_outvoted_replica_without_a_spare_restarts_once() -> None:
    """A node identified without a replay restarts there once. A second time without progress stops the run with a
    reason; progress allows another restart."""
    state, decisions = decide_all(end(17, VOTED), end(17, VOTED))
    assert [decision.recovery_level for decision in decisions] == [RecoveryLevel.RESTART_WORKERS, RecoveryLevel.STOP]
    assert "node b had its chance" in decisions[-1].reason
    assert state.node_faults == {"b": 2}
    state, _ = decide_all(end(17, VOTED))
    state, (decision,) = decide_all(end(17, VOTED, durable_iteration=150), state=state)
    assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS


@pytest.mark.parametrize("room", [{"num_spares": 1}, {"may_shrink": True}])
def test_outvoted_replica_is_quarantined_if_replaceable(room: dict[str, Any]) -> None:
    """With a spare, or if the world may shrink, the identified node is quarantined."""
    state, (decision,) = decide_all(end(17, VOTED, **room))
    assert (decision.recovery_level, decision.quarantine) == (RecoveryLevel.REPLACE_NODE, ("b",))
    assert state.quarantined == ("b",)


def test_second_outvoted_replica_excludes_the_copy() -> None:
    """A second outvoted replica without progress, on any node, excludes the loaded copy and quarantines no further
    node."""
    first = end(17, VOTED, load=load(120, "local"), num_spares=2)
    again = end(17, msgspec.structs.replace(VOTED, node="s"), load=load(120, "replica"), num_spares=1)
    state, decisions = decide_all(first, again)
    assert [decision.quarantine for decision in decisions] == [("b",), ()]
    assert [one.checkpoint for one in state.excluded] == [120]
