"""What the ladder decides about invalid results, case by case: exit codes 16 and 17 with a diagnosis."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind, Rung, Verdict
from outlast.policy.ladder import CycleEnd, LadderState, Limits, begin_job, decide
from outlast.policy.recovery_point import Load, TierName
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


def load(generation: int, tier: TierName, *, window: int = 20) -> Load:
    return Load(
        cycle="job-1", generation=generation, attempt=f"job-0-aa.{generation}", tier=tier, suspect_window=window
    )


def climb(*ends: CycleEnd, state: LadderState | None = None) -> tuple[LadderState, list[Verdict]]:
    verdicts = []
    state = state or LadderState()
    for one in ends:
        state, verdict = decide(state, one, ROOMY)
        verdicts.append(verdict)
    return state, verdicts


REPRODUCED = end(16, diagnosis())


def test_the_replica_nan_loop_ends_in_two_cycles() -> None:
    """NaN 7 iterations after a replica was loaded, reproduced: that copy is distrusted, even where a spare waits and a
    replay could be done; the next cycle loads the global generation and finishes."""
    bad = end(16, diagnosis(), load=load(120, "replica"), durable_iteration=125, num_spares=1)
    good = CycleEnd(cycle=1, incident=None, finished=True, load=load(100, "global"), durable_iteration=200)
    state, verdicts = climb(bad, good, state=LadderState(best_durable=120))
    assert [verdict.rung for verdict in verdicts] == [Rung.RESTART_WORKERS, Rung.STOP]
    assert verdicts[0].replay is None
    assert verdicts[0].hold_back == ()
    assert "checkpoint 120 (replica tier" in verdicts[0].reason
    assert verdicts[1].exit_code == ExitReason.FINISHED
    assert [(one.generation, one.tier) for one in state.distrusted] == [(120, "replica")]


def test_exit_16_without_a_diagnosis_distrusts_a_near_copy_too() -> None:
    """A script's own exit 16 soon after a near load points at the copy as well."""
    state, (verdict,) = climb(end(16, load=load(120, "local")))
    assert verdict.rung == Rung.RESTART_WORKERS
    assert [one.generation for one in state.distrusted] == [120]


def test_a_spare_replays_on_its_own_device() -> None:
    """With a spare, the node that saw the result is held back and not quarantined; the next cycle replays the very
    validation, and the reason names finding, rank, node, device and iteration."""
    state, (verdict,) = climb(end(16, diagnosis(call=2), num_spares=1))
    assert (verdict.rung, verdict.hold_back, verdict.quarantine) == (Rung.REPLACE_NODE, ("a",), ())
    asked = Replay(iteration=127, device="a/cpu-1", node="a", rank=1, call=2, what="loss", first="nan")
    assert state.replay == asked
    assert msgspec.convert(verdict.replay, Replay) == asked
    assert state.barred == ("a",)
    assert state.node_faults == {}
    for fact in ("rank 1", "node a", "device a/cpu-1", "iteration 127", "reproduced", "restart 1 of 20"):
        assert fact in verdict.reason


def test_persistent_fault_quarantines_the_first_node() -> None:
    """Differs on the spare: the node that was held back is quarantined, the others go on as they are, and what is held
    against it is a fault of its own, not of the spare that found it."""
    found = diagnosis(Finding.PERSISTENT, second=2.5, replayed_on="s/cpu-1")
    blamed_on_spare = msgspec.structs.replace(REPRODUCED.incident, node="s", exit_code=17)  # type: ignore[type-var]
    persistent = CycleEnd(cycle=1, incident=blamed_on_spare, diagnosis=found, progress_known=True)
    state, verdicts = climb(end(16, diagnosis(), num_spares=1), persistent)
    assert verdicts[1].rung == Rung.RESTART_WORKERS
    assert verdicts[1].quarantine == ("a",)
    assert (state.quarantined, state.held_back, state.replay) == (("a",), (), None)
    assert state.node_faults == {"a": 1}
    assert "s/cpu-1" in verdicts[1].reason


@pytest.mark.parametrize("window", [0, 20])
def test_a_correct_result_stops_at_once(window: int) -> None:
    """Equal on another device: 17 with the diagnosis, whatever was loaded, whatever waits, whatever budget is left."""
    found = diagnosis(Finding.CORRECT, batch="5f3a", second="nan", replayed_on="s/cpu-1")
    state, verdicts = climb(
        end(16, diagnosis(), num_spares=1), end(17, found, num_spares=3, load=load(120, "global", window=window))
    )
    assert (verdicts[1].rung, verdicts[1].exit_code) == (Rung.STOP, ExitReason.FAILED_VALIDATION)
    assert "batch 5f3a" in verdicts[1].reason
    assert (state.distrusted, state.quarantined, state.held_back, state.replay) == ((), (), (), None)


def test_no_other_device_tries_twice_then_stops() -> None:
    """Without a spare the same device replays twice, never more; then the run stops with the diagnosis."""
    _, verdicts = climb(REPRODUCED, end(16, diagnosis(tries=1)), end(16, diagnosis(tries=2)))
    assert [verdict.rung for verdict in verdicts] == [Rung.RESTART_WORKERS, Rung.RESTART_WORKERS, Rung.STOP]
    assert [verdict.replay and verdict.replay.get("tries", 0) for verdict in verdicts] == [0, 1, None]
    assert verdicts[-1].exit_code == ExitReason.FAILED_VALIDATION
    assert "try 2 of 2" in verdicts[1].reason
    assert "a/cpu-1" in verdicts[-1].reason


def test_a_spare_that_comes_later_is_used() -> None:
    """A spare that comes while the same device tries decides at once; it is asked once only."""
    undecided = diagnosis(Finding.UNREACHED, tries=1, replayed_on="s/cpu-1")
    _, verdicts = climb(REPRODUCED, end(16, diagnosis(tries=1), num_spares=1), end(16, undecided, num_spares=1))
    assert [verdict.rung for verdict in verdicts] == [Rung.RESTART_WORKERS, Rung.REPLACE_NODE, Rung.STOP]


def test_after_the_tries_the_global_generation_is_distrusted_then_the_run_stops() -> None:
    """Global tier, in the suspect window: two replays, then an older generation, from which no replay of the same
    result is tried again; then 17. The replay's own load, a diagnostic save, is not what is judged."""
    first = end(16, diagnosis(), load=load(120, "global"))
    again = end(16, diagnosis(tries=1), load=load(127, "local"))
    older = end(16, diagnosis(), load=load(110, "global"))
    state, verdicts = climb(first, again, again, older)
    rungs = [verdict.rung for verdict in verdicts]
    assert rungs == [Rung.RESTART_WORKERS, Rung.RESTART_WORKERS, Rung.RESTART_WORKERS, Rung.STOP]
    assert [verdict.replay is not None for verdict in verdicts] == [True, True, False, False]
    assert [(one.generation, one.tier) for one in state.distrusted] == [(120, "global")]
    assert verdicts[-1].exit_code == ExitReason.FAILED_VALIDATION


@pytest.mark.parametrize("finding", [Finding.REPRODUCED, Finding.UNDECIDED, Finding.UNREACHED])
def test_a_last_replay_that_could_not_tell_leads_to_the_older_generation(finding: Finding) -> None:
    """A replay leaves with 17 and no verdict: what the cycle had loaded that saw the result first is distrusted, not
    the diagnostic save; where it is beyond the suspect window the run stops."""
    last = end(17, diagnosis(finding, tries=2, replayed_on="a/cpu-1"), load=load(127, "local"))
    for generation, rung in ((120, Rung.RESTART_WORKERS), (100, Rung.STOP)):
        state, verdicts = climb(end(16, diagnosis(), load=load(generation, "global")), last)
        assert [verdict.rung for verdict in verdicts] == [Rung.RESTART_WORKERS, rung]
        assert [one.generation for one in state.distrusted] == [120] * (generation == 120)
        assert state.node_faults == {}


def test_progress_beyond_a_result_forgets_it() -> None:
    """A replay that found a valid result goes on training; what it commits beyond closes the case, and nobody is held
    back for it any more. The same step invalid again later is a new case."""
    state, _ = climb(end(16, diagnosis(), num_spares=1))
    died = Incident(kind=IncidentKind.WORKER_DIED, node="b", exit_code=-9)
    state, _ = climb(CycleEnd(cycle=1, incident=died, durable_iteration=130, progress_known=True), state=state)
    assert (state.cases, state.replay, state.held_back) == ((), None, ())
    _, (verdict,) = climb(end(16, diagnosis(), num_spares=1), state=state)
    assert verdict.rung == Rung.REPLACE_NODE


def test_a_replay_that_a_fault_ended_is_dropped_and_counts() -> None:
    """A crash in the replay's cycle is answered like any other; nobody stays held back, and the try is not given
    again."""
    died = Incident(kind=IncidentKind.WORKER_DIED, node="b", exit_code=-9)
    state, _ = climb(REPRODUCED, CycleEnd(cycle=1, incident=died, progress_known=True))
    assert (state.replay, state.held_back) == (None, ())
    _, verdicts = climb(REPRODUCED, REPRODUCED, state=state)
    assert [verdict.rung for verdict in verdicts] == [Rung.RESTART_WORKERS, Rung.STOP]


def test_a_replay_outlives_a_preempted_job() -> None:
    """Told to leave before the replay was over: the next job's first cycle replays, on whatever nodes there are."""
    state, _ = climb(end(16, diagnosis(), num_spares=1))
    leaving = CycleEnd(cycle=1, incident=None, preempted=True, progress_known=True)
    state, _ = climb(leaving, state=state)
    state = begin_job(msgspec.json.decode(msgspec.json.encode(state), type=LadderState))
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
    _, (verdict,) = climb(end(16, diagnosis(), num_spares=1), state=state)
    assert verdict.rung == Rung.RESTART_WORKERS, "another device was asked already"


def test_a_stop_leaves_no_replay_behind() -> None:
    """With no budget left the replay is not granted: 17 with the diagnosis, and the next job trains as usual."""
    state, verdict = decide(LadderState(), end(16, diagnosis(), num_spares=1), Limits(max_restarts=0))
    assert (verdict.rung, verdict.exit_code) == (Rung.STOP, ExitReason.FAILED_VALIDATION)
    assert (state.replay, state.held_back, state.cases) == (None, (), ())
    assert "loss of rank 1" in verdict.reason


def test_own_exit_16_is_restarted_a_bounded_number_of_times() -> None:
    """Exit code 16 without a diagnosis: the same devices twice, then 17, whatever --max-restarts allows."""
    _, verdicts = climb(end(16), end(16), end(16))
    assert [verdict.rung for verdict in verdicts] == [Rung.RESTART_WORKERS, Rung.RESTART_WORKERS, Rung.STOP]
    assert {verdict.replay is None for verdict in verdicts} == {True}
    assert verdicts[-1].exit_code == ExitReason.FAILED_VALIDATION


SPLIT = diagnosis(
    Finding.SPLIT, rank=0, node="", device="", what="model.w", first=None, message="replicas differ at iteration 127"
)


def test_replicas_without_a_majority_blame_nobody() -> None:
    """Two replicas differ: no node is held back, quarantined or charged, nothing is replayed even where a spare waits;
    the verdict says what was found, and the tries are bounded."""
    state, verdicts = climb(*[end(16, SPLIT, num_spares=1)] * 3)
    assert [verdict.rung for verdict in verdicts] == [Rung.RESTART_WORKERS, Rung.RESTART_WORKERS, Rung.STOP]
    for verdict in verdicts[:2]:
        assert (verdict.replay, verdict.hold_back, verdict.quarantine) == (None, (), ())
        assert "replicas differ at iteration 127: root cause unknown" in verdict.reason
        assert "no diagnosis" not in verdict.reason
    assert state.node_faults == {}


VOTED = diagnosis(Finding.PERSISTENT, node="b", device="b/cpu-0", what="replicas")


def test_outvoted_replica_without_a_spare_gets_one_chance() -> None:
    """A node named without a replay restarts there once; a second time without progress the run stops, and says why;
    after progress it has its chance again."""
    state, verdicts = climb(end(17, VOTED), end(17, VOTED))
    assert [verdict.rung for verdict in verdicts] == [Rung.RESTART_WORKERS, Rung.STOP]
    assert "node b had its chance" in verdicts[-1].reason
    assert state.node_faults == {"b": 2}
    state, _ = climb(end(17, VOTED))
    state, (verdict,) = climb(end(17, VOTED, durable_iteration=150), state=state)
    assert verdict.rung == Rung.RESTART_WORKERS


@pytest.mark.parametrize("room", [{"num_spares": 1}, {"may_shrink": True}])
def test_outvoted_replica_loses_its_slot_where_it_can(room: dict[str, Any]) -> None:
    """With a spare, or where the world may shrink, the named node is quarantined."""
    state, (verdict,) = climb(end(17, VOTED, **room))
    assert (verdict.rung, verdict.quarantine) == (Rung.REPLACE_NODE, ("b",))
    assert state.quarantined == ("b",)


def test_second_outvoted_replica_soon_after_a_load_points_at_the_copy() -> None:
    """A poisoned copy makes a replica differ wherever it is loaded: the second verdict without progress, on whatever
    node, distrusts the copy and takes no other node out."""
    first = end(17, VOTED, load=load(120, "local"), num_spares=2)
    again = end(17, msgspec.structs.replace(VOTED, node="s"), load=load(120, "replica"), num_spares=1)
    state, verdicts = climb(first, again)
    assert [verdict.quarantine for verdict in verdicts] == [("b",), ()]
    assert [one.generation for one in state.distrusted] == [120]
