"""The summary of faults, and the state that an injector reads from a journal while the journal grows."""

from __future__ import annotations

from typing import Any

from outlast.chaos import Fault, FaultPlan
from outlast.chaos.plan import planned_faults
from outlast.chaos.reckoning import by_kind, reckon
from outlast.chaos.sight import Sight
from outlast.incidents import Event, EventKind, IncidentKind

PLAN = FaultPlan(
    faults=[
        Fault(kind="kill_agent", at_s=1),
        Fault(kind="kill", rank=1, at_s=2),
        Fault(kind="corrupt_copy", tier="local", at_s=3),
        Fault(kind="slow", rank=0, factor=2, at_s=4),
    ]
)
IDS = [one.fault_id for one in planned_faults(PLAN)]


def event(kind: EventKind, at_s: float, cycle: int = 0, **fields: Any) -> Event:
    envelope = {name: fields.pop(name) for name in ("rank", "iteration", "node") if name in fields}
    node, time_ns = envelope.pop("node", "node-0"), int(at_s * 1e9)
    return Event(
        kind=kind, wall_ns=time_ns, mono_ns=time_ns, run_id="run", job="job", node=node, proc="agent", cycle=cycle,
        data=fields, **envelope,
    )  # fmt: skip


def cycle_of(number: int, at_s: float, *, restored: int) -> list[Event]:
    """Return the start of two ranks, and their first iterations a second later."""
    found = [event(EventKind.CYCLE_STARTED, at_s, number, ranks=[0, 1], world_size=2)]
    for rank in range(2):
        found.append(event(EventKind.RESTORED, at_s + 0.5, number, rank=rank, iteration=restored))
        found.append(event(EventKind.PROGRESS, at_s + 1 + rank, number, rank=rank, iteration=restored + 1))
    return found


def lost(at_s: float, cycle: int, kind: IncidentKind, **about: Any) -> Event:
    return event(EventKind.INCIDENT, at_s, cycle, incident={"kind": kind, **about})


def injected(index: int, at_s: float, cycle: int, iteration: int, *, rank: int | None = None, **facts: Any) -> Event:
    found = event(EventKind.FAULT_SIMULATED, at_s, cycle, iteration=iteration, rank=rank, fault_id=IDS[index])
    found.data.update(facts)
    return found


EVENTS = [
    *cycle_of(0, 0, restored=0),
    injected(0, 10, 0, 20, fault_kind="kill_agent", node="node-1", target="agent"),
    lost(10.2, 0, IncidentKind.NODE_LOST, node="node-2"),
    lost(10.5, 0, IncidentKind.NODE_LOST, node="node-1"),
    event(EventKind.CYCLE_ENDED, 10.6, 0, iterations={"0": 22, "1": 21}),
    *cycle_of(1, 11, restored=15),
    injected(1, 20, 1, 30, rank=1, target="rank 1"),
    lost(20.1, 1, IncidentKind.WORKER_DIED, rank=1, node="node-0"),
    *cycle_of(2, 21, restored=30),
    injected(2, 30, 2, 40, tier="local", target="a copy"),
]


def test_each_fault_has_a_detection_and_a_recovery() -> None:
    """The first incident about the affected rank is the detection; recovery is when the last rank trains again."""
    first, second, third, fourth = reckon(PLAN, EVENTS)
    assert (first.detected_as, first.detected_after_s, first.recovered_after_s) == ("node_lost", 0.5, 3.0)
    assert first.lost_iterations == 22 - 15
    assert (second.detected_as, second.recovered_after_s, second.lost_iterations) == ("worker_died", 3.0, 0)
    assert (third.fired, third.detected_as, third.recovered_after_s) == (True, None, None)
    assert (fourth.fired, fourth.iteration) == (False, None)


def test_faults_are_summarised_by_kind() -> None:
    """Each kind has a row: planned, injected, which incident detected it, and medians of the known times."""
    rows = {row.kind: row for row in by_kind(reckon(PLAN, EVENTS))}
    assert list(rows) == ["kill", "slow", "kill_agent", "corrupt_copy"]
    assert (rows["kill_agent"].detected_as, rows["kill_agent"].detected_median_s) == ({"node_lost": 1}, 0.5)
    assert (rows["slow"].planned, rows["slow"].fired, rows["slow"].recovered_median_s) == (1, 0, None)


def test_a_run_trains_from_its_last_start_to_a_decision() -> None:
    """An injector does not count a run as training while ranks start, nor after a decision."""
    sight, seen = Sight(), []
    for one in [*EVENTS[:5], event(EventKind.DECISION, 10, 0, verdict={}), *cycle_of(1, 11, restored=15)]:
        sight.take(one)
        seen.append(sight.is_training)
    assert seen == [False, False, False, False, True, False, False, False, False, False, True]
    assert (sight.cycle, sight.iteration, sight.own_ranks("node-0")) == (1, 16, {0, 1})
