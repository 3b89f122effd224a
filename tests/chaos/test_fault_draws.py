"""All ranks draw the same values for what a plan does not specify, without communication."""

from __future__ import annotations

import pytest
from fault_strategies import plans
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.chaos import Fault, FaultPlan
from outlast.chaos.plan import planned_faults
from outlast.env import WorkerEnv

WORLD = [WorkerEnv(global_rank=rank, world_size=4, local_rank=rank % 2, node=f"node-{rank // 2}") for rank in range(4)]
ITERATIONS = range(60)


def device(place: WorkerEnv) -> str:
    return f"{place.node}/cpu-{place.local_rank}"


def victims(plan: FaultPlan, iteration: int) -> list[list[int]]:
    """Return for each fault the ranks that find themselves selected at an iteration; each queries its own plan."""
    selected: list[list[int]] = [[] for _ in plan.faults]
    for place in WORLD:
        own = FaultPlan.from_mapping(plan.to_mapping())
        for planned in planned_faults(own):
            if planned.applies_to(place, device(place), iteration):
                selected[planned.index].append(place.global_rank)
                assert planned.can_apply_to(place, device(place)) or not planned.is_due(iteration)
    return selected


@pytest.mark.extended
@given(plan=plans(world_size=4), iteration=st.integers(min_value=0, max_value=1000))
def test_exactly_one_rank_is_selected(plan: FaultPlan, iteration: int) -> None:
    """Where neither node nor device is given, exactly one rank finds itself selected."""
    for fault, selected in zip(plan.faults, victims(plan, iteration), strict=True):
        if fault.node is None and fault.device is None:
            assert len(selected) == 1
            assert fault.rank is None or selected == [fault.rank]


def test_node_and_device_select_their_ranks() -> None:
    """A node selects all of its ranks, and a device the rank that computes on it, whatever the rank numbers."""
    plan = FaultPlan(
        faults=[Fault(kind="kill", node="node-1", iteration=0), Fault(kind="kill", device="node-0/cpu-1", iteration=0)]
    )
    assert victims(plan, 0) == [[2, 3], [1]]


@settings(max_examples=5)
@given(seed=st.integers(min_value=0, max_value=2**32))
def test_every_rank_can_be_drawn(seed: int) -> None:
    """Over the iterations of a rate the selected ranks differ."""
    plan = FaultPlan(seed=seed, faults=[Fault(kind="kill", rate=1)])
    assert len({victims(plan, iteration)[0][0] for iteration in ITERATIONS}) > 1


@given(
    rate=st.floats(min_value=0.01, max_value=1),
    seed=st.integers(),
    start=st.integers(min_value=0, max_value=59),
    horizon=st.integers(min_value=1, max_value=50),
)
def test_the_next_due_iteration_is_the_first_one(rate: float, seed: int, start: int, horizon: int) -> None:
    """From wherever a restarted run continues, no due iteration is skipped."""
    (planned,) = planned_faults(FaultPlan(seed=seed, faults=[Fault(kind="kill", rate=rate)]))
    found = planned.next_due(start, horizon=horizon)
    assert found is not None
    assert not any(planned.is_due(iteration) for iteration in range(start, found))
    assert planned.is_due(found) or found == start + horizon


def test_rate_is_the_expected_number_of_faults_per_step() -> None:
    """Of 20,000 steps at a rate of 0.1, between 1,800 and 2,200 have a fault."""
    (planned,) = planned_faults(FaultPlan(seed=1, faults=[Fault(kind="kill", rate=0.1)]))
    assert 1800 < sum(planned.is_due(iteration) for iteration in range(20_000)) < 2200


def test_an_edited_fault_has_a_new_identity() -> None:
    """Markers and the journal distinguish a fault from an earlier one in the same place of the plan."""
    faults = [Fault(kind="kill", iteration=3), Fault(kind="kill", iteration=4)]
    plans = [FaultPlan(faults=faults[:1]), FaultPlan(faults=faults[1:]), FaultPlan(seed=1, faults=faults[:1])]
    assert len({planned.fault_id for plan in plans for planned in planned_faults(plan)}) == 3
