"""The account of incidents, made from events as a run writes them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from written_events import written

from outlast.demo import outcome
from outlast.demo.outcome import Account, read_ledger
from outlast.demo.plan import Deed
from outlast.incidents import Event, EventKind, Incident, IncidentKind, Rung
from outlast.policy.rerun import Diagnosis, Finding

RANKS = (0, 1, 2, 3)


def account_for(events: list[Event]) -> tuple[Account, ...]:
    return outcome.account_for(read_ledger(events), events)


def unnoticed(events: list[Event]) -> tuple[str, ...]:
    return outcome.unnoticed(read_ledger(events), events)


def count_cycles(events: list[Event]) -> int:
    return outcome.count_cycles(read_ledger(events))


def event(kind: EventKind, at_s: float, cycle: int, proc: str = "agent", **data: Any) -> Event:
    return written(kind, at_s, cycle=cycle, proc=proc, **data)


def incident(kind: IncidentKind, node: str, **facts: Any) -> dict[str, Any]:
    """Return an incident as it is read back from JSON."""
    return msgspec.to_builtins(Incident(kind=kind, node=node, **facts))


def verdict(at_s: float, cycle: int, cause: dict[str, Any], rung: Rung = Rung.RESTART_WORKERS) -> Event:
    decided = {"rung": int(rung), "reason": "because"}
    return event(EventKind.VERDICT, at_s, cycle, "coordinator", verdict=decided, incident=cause)


def strike(at_s: float, cycle: int, kind: IncidentKind, node: str, *, rank: int | None, iteration: int) -> Event:
    data = {"fault": "a fault", "target": "somebody", "expected": str(kind)}
    made = event(EventKind.FAULT_SIMULATED, at_s, cycle, "demo", rank=rank, iteration=iteration, **data)
    made.data["node"] = node
    return made


def started(at_s: float, cycle: int) -> list[Event]:
    kind = EventKind.CYCLE_STARTED
    return [event(kind, at_s, cycle, ranks=list(pair), world_size=4) for pair in ((0, 1), (2, 3))]


def went_on(at_s: float, cycle: int, iteration: int, more: int = 20) -> list[Event]:
    """Return a restore and each rank's first finished iteration, the last rank 0.3 s after the first."""
    read = {"tier": "memory", "bytes_read": {"memory": 100}}
    restored = [event(EventKind.RESTORED, at_s, cycle, f"rank-{r}", rank=r, iteration=iteration, **read) for r in RANKS]
    first = [
        event(EventKind.PROGRESS, at_s + 0.1 * r, cycle, f"rank-{r}", rank=r, iteration=iteration + 1) for r in RANKS
    ]
    later = [event(EventKind.PROGRESS, at_s + 5, cycle, f"rank-{r}", rank=r, iteration=iteration + more) for r in RANKS]
    return restored + first + later


KILLED = incident(IncidentKind.WORKER_DIED, "node-1", rank=3, exit_code=-9, section="step")


def test_a_killed_rank_is_accounted_for() -> None:
    """From strike to detection, to the last rank's first iteration, and from the iteration reached to that restored."""
    events = [
        *started(0, 0),
        *went_on(1, 0, 0),
        strike(10, 0, IncidentKind.WORKER_DIED, "node-1", rank=3, iteration=31),
        event(EventKind.INCIDENT, 10.02, 0, incident=KILLED),
        event(EventKind.CYCLE_ENDED, 10.03, 0, iterations={"0": 32, "1": 32}),
        event(EventKind.CYCLE_ENDED, 10.03, 0, on="node-1", iterations={"2": 31, "3": 31}),
        verdict(10.05, 0, KILLED),
        *started(10.1, 1),
        *went_on(10.5, 1, 25),
    ]
    (row,) = account_for(events)
    assert (row.kind, row.node, row.rank, row.cycle) == (IncidentKind.WORKER_DIED, "node-1", 3, 0)
    assert row.detected_after_s == pytest.approx(0.02)
    assert row.recovered_after_s == pytest.approx(0.8)
    assert (row.iteration, row.restored_iteration, row.redone_iterations) == (32, 25, 7)
    assert row.evidence == "its process ended with status -9, in section 'step'"
    assert (row.action, row.verdict, row.fault) == ("restart_workers", "because", "a fault")
    assert (row.victims, row.copies_spoiled, row.newest_global) == ((3,), None, None)
    assert row.sources is not None
    assert row.sources.num_ranks == {"memory": 4}
    assert unnoticed(events) == ()
    assert count_cycles(events) == 2


def test_a_hang_is_noticed_by_another_rank_and_named_by_the_verdict() -> None:
    """The first report counts for the time, the culprit for the row."""
    reported = incident(IncidentKind.WORKER_HUNG, "node-0", rank=1, detected_after_s=3.0)
    evidence = {"summary": "rank 2 is stopped at line 41", "stack_line": "line 41", "process_state": "T"}
    culprit = incident(IncidentKind.WORKER_HUNG, "node-1", rank=2, evidence=evidence)
    events = [
        *started(0, 4),
        strike(10, 4, IncidentKind.WORKER_HUNG, "node-1", rank=2, iteration=31),
        event(EventKind.INCIDENT, 13.1, 4, incident=reported),
        event(EventKind.INCIDENT, 13.2, 4, incident=reported),
        verdict(13.3, 4, culprit),
    ]
    (row,) = account_for(events)
    assert (row.node, row.rank) == ("node-1", 2)
    assert row.detected_after_s == pytest.approx(3.1)
    assert row.evidence == "rank 2 is stopped at line 41, process state T"
    assert (row.recovered_after_s, row.restored_iteration, row.redone_iterations) == (None, None, None)
    assert row.sources is None
    assert row.iteration == 31


def test_a_node_lost_with_the_coordinator_counts_from_the_heirs_verdict() -> None:
    """No event names the loss before the verdict: a peer's failure is only its effect."""
    lost = incident(IncidentKind.NODE_LOST, "node-2", evidence={"summary": "it went down"})
    effect = incident(IncidentKind.WORKER_FAILED, "node-1", rank=1, exit_code=1)
    events = [
        *started(0, 0),
        strike(10, 0, IncidentKind.NODE_LOST, "node-2", rank=None, iteration=40),
        event(EventKind.INCIDENT, 10.2, 0, incident=effect),
        verdict(11.5, 0, lost, Rung.REPLACE_NODE),
        *started(11.6, 1),
        *went_on(12.0, 1, 40),
    ]
    (row,) = account_for(events)
    assert (row.kind, row.rank, row.action) == (IncidentKind.NODE_LOST, None, "replace_node")
    assert row.detected_after_s == pytest.approx(1.5)
    assert row.redone_iterations == 0
    assert unnoticed(events) == ()


def test_a_lost_nodes_victims_are_the_ranks_it_had() -> None:
    """With the copies that were spoiled and what the global tier held when it was struck."""
    lost = incident(IncidentKind.NODE_LOST, "node-1")
    struck = strike(10, 0, IncidentKind.NODE_LOST, "node-1", rank=None, iteration=40)
    struck.data["copies_spoiled"] = 4
    ranks = started(0, 0)
    ranks = [ranks[0], msgspec.structs.replace(ranks[1], node="node-1")]
    saved = [
        event(EventKind.SAVE_COMMITTED, at_s, 0, "rank-0", rank=0, iteration=iteration, tiers=["global"])
        for at_s, iteration in ((8, 30), (11, 40))
    ]
    (row,) = account_for([*ranks, *saved, struck, verdict(11.5, 0, lost, Rung.REPLACE_NODE)])
    assert (row.victims, row.copies_spoiled, row.newest_global) == ((2, 3), 4, 30)


def of_plan(at_s: float, cycle: int, deed: Deed, *, rank: int, iteration: int, tensor: str) -> Event:
    """Return what the session writes as a fault of its plan strikes."""
    data = {"fault": str(deed), "target": "weight", "tensor": tensor, "element": 5, "fault_id": "0-x"}
    return event(EventKind.FAULT_SIMULATED, at_s, cycle, f"rank-{rank}", rank=rank, iteration=iteration, **data)


def invalid(rank: int, iteration: int, finding: Finding, **more: Any) -> dict[str, Any]:
    diagnosis = Diagnosis(finding=finding, rank=rank, node="node-0", iteration=iteration, **more)
    evidence = {"summary": diagnosis.describe(), "diagnosis": msgspec.to_builtins(diagnosis)}
    return incident(IncidentKind.INVALID_RESULT, "node-0", rank=rank, iteration=iteration, evidence=evidence)


def test_a_transient_nan_is_a_row_without_a_restart() -> None:
    """Its verdict is in the worker's own event; a rank killed later in the same cycle is another row."""
    found = invalid(2, 20, Finding.TRANSIENT, what="loss", message="not finite", first="nan", second=2.5)
    again = {"rung": int(Rung.RERUN_STEP), "reason": "run again"}
    events = [
        *started(0, 0),
        of_plan(5, 0, Deed.NAN, rank=2, iteration=20, tensor="model.a"),
        event(EventKind.INCIDENT, 5.2, 0, "rank-2", rank=2, iteration=20, incident=found, verdict=again),
        strike(10, 0, IncidentKind.WORKER_DIED, "node-1", rank=3, iteration=31),
        event(EventKind.INCIDENT, 10.02, 0, incident=KILLED),
        verdict(10.05, 0, KILLED),
    ]
    nan, killed = account_for(events)
    assert (nan.kind, nan.fault, nan.rank, nan.iteration) == (IncidentKind.INVALID_RESULT, Deed.NAN, 2, 20)
    assert (nan.restarts, nan.action, nan.redone_iterations, nan.sources) == (
        0,
        "rerun_step",
        None,
        None,
    )  # this journal has no session
    assert (nan.finding, nan.named, nan.struck) == ("transient", "loss", "model.a")
    assert nan.detected_after_s == nan.recovered_after_s == pytest.approx(0.2)
    assert nan.evidence == "loss was nan (not finite), run again 2.5000: transient"
    assert (killed.rank, killed.restarts, killed.fault) == (3, 1, "a fault")
    assert unnoticed(events) == ()


def test_a_flipped_bit_is_named_by_the_diagnosis_of_the_worker_that_failed() -> None:
    """The verdict names a worker that failed with a diagnosis; its node's ranks are the victims."""
    tensor, told = "model.w", "replicas differ at iteration 22: from the majority rank 1"
    seen = invalid(1, 22, Finding.PERSISTENT, what=tensor, message=told)
    failed = {**seen, "kind": str(IncidentKind.WORKER_FAILED), "exit_code": 17}
    decided = {"rung": int(Rung.REPLACE_NODE), "reason": "because", "quarantine": ["node-0"]}
    starting = started(0, 0)
    events = [
        starting[0],
        msgspec.structs.replace(starting[1], node="node-1"),
        of_plan(5, 0, Deed.FLIP, rank=1, iteration=21, tensor=tensor),
        event(EventKind.INCIDENT, 5.4, 0, "rank-1", rank=1, iteration=22, incident=seen),
        event(EventKind.VERDICT, 5.6, 0, "coordinator", verdict=decided, incident=failed),
        *started(5.7, 1),
        *went_on(6, 1, 20),
    ]
    (row,) = account_for(events)
    assert (row.kind, row.fault, row.rank, row.victims) == (IncidentKind.INVALID_RESULT, Deed.FLIP, 1, (0, 1))
    assert (row.finding, row.named, row.struck, row.quarantined) == ("persistent", tensor, tensor, ("node-0",))
    assert row.detected_after_s == pytest.approx(0.4)
    assert (row.restored_iteration, row.restarts, row.evidence) == (20, 1, told)
    assert unnoticed(events) == ()


def test_a_number_that_was_struck_and_taken_for_something_else_is_told() -> None:
    """A NaN that came again is none that comes once; a flip that nobody saw is told by its tensor."""
    seen = invalid(2, 20, Finding.REPRODUCED, what="loss", first="nan", second="nan")
    events = [
        of_plan(5, 0, Deed.NAN, rank=2, iteration=20, tensor="model.a"),
        verdict(5.5, 0, seen),
        of_plan(9, 1, Deed.FLIP, rank=1, iteration=31, tensor="model.w"),
    ]
    nan, flip = unnoticed(events)
    assert (
        nan == "NaN in an activation, rank 2, model.a, element 5, in cycle 0, was not noticed as invalid_result but "
        "taken for: because"
    )
    assert flip.startswith("bit flip in a weight, rank 1, model.w, element 5, in cycle 1")


def test_a_cycle_that_fails_before_its_first_iteration_is_no_recovery() -> None:
    """The next one in which every rank trains again is; what a start from scratch redoes is the second incident's."""
    events = [
        *started(0, 0),
        strike(10, 0, IncidentKind.WORKER_DIED, "node-1", rank=3, iteration=31),
        verdict(10.1, 0, KILLED),
        *started(10.2, 1),
        event(EventKind.PROGRESS, 10.9, 1, "rank-0", rank=0, iteration=26),
        verdict(11, 1, incident(IncidentKind.CANNOT_START, "node-1")),
        *started(11.1, 2),
        *(event(EventKind.PROGRESS, 12.0, 2, f"rank-{r}", rank=r, iteration=1) for r in RANKS),
    ]
    first, second = account_for(events)
    assert first.recovered_after_s == pytest.approx(2.0)
    assert (first.restored_iteration, first.redone_iterations) == (0, 6), "cycle 1 was back at 25"
    assert second.redone_iterations == 26
    assert (second.fault, second.detected_after_s) == (None, None)
    assert second.recovered_after_s == pytest.approx(1.0)


def test_a_fault_taken_for_another_is_told() -> None:
    """Another rank, another kind or no verdict at all: each is unnoticed, with what it was taken for."""
    other = incident(IncidentKind.WORKER_DIED, "node-1", rank=2, exit_code=-9)
    events = [
        strike(10, 0, IncidentKind.WORKER_DIED, "node-1", rank=3, iteration=31),
        verdict(10.1, 0, other),
        strike(20, 1, IncidentKind.NODE_LOST, "node-0", rank=None, iteration=51),
    ]
    (row,) = account_for(events)
    assert row.fault is None
    wrong, missing = unnoticed(events)
    assert "worker_died but taken for: because" in wrong
    assert "node_lost but taken for: nothing" in missing
