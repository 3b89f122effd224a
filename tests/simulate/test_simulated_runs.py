"""One simulated run: the use of its time, and its decisions by the recovery policy of outlast."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.policy.recovery_policy import Limits
from outlast.simulate import (
    DrawnFault,
    FaultSchedule,
    RecoveryCosts,
    Scenario,
    SimulatedFault,
    draw_faults,
    simulate,
)
from outlast.simulate.run import TrainingPace, find_partners

FREE = RecoveryCosts(
    save_stall_s=0.0,
    save_s=0.0,
    global_save_stall_s=0.0,
    global_save_s=0.0,
    load_memory_s=0.0,
    load_local_s=0.0,
    load_replica_s=0.0,
    load_global_s=0.0,
    detection_s=0.0,
    hang_timeout_s=0.0,
    node_timeout_s=0.0,
    restart_s=0.0,
    rendezvous_s=0.0,
    start_up_s=0.0,
)
"""All costs are zero."""


def scenario(**values: Any) -> Scenario:
    """Return a small run: four nodes of two ranks in racks of two, 1 s a step, a save every 10 and every 100 steps."""
    small: dict[str, Any] = {
        "num_ranks": 8,
        "ranks_per_node": 2,
        "num_spares": 2,
        "duration_s": 3600.0,
        "step_s": 1.0,
        "failure_every_s": 300.0,
        "interval_iterations": 10,
        "global_interval_iterations": 100,
        "repair_s": 600.0,
        "costs": FREE,
    }
    return Scenario(**small).change(**values)


def make_faults(*faults: tuple[float, SimulatedFault, int], repair_s: float = 1e6) -> FaultSchedule:
    """Return a schedule of the given faults: time, kind and slot."""
    times, kinds, slots = zip(*faults, strict=True)
    return FaultSchedule(list(times), [int(kind) for kind in kinds], list(slots), [repair_s] * len(faults))


SHARES = st.sampled_from([(1.0, 0.0, 0.0, 0.0), (0.7, 0.05, 0.24, 0.01), (0.0, 0.2, 0.5, 0.3), (0.0, 0.0, 0.0, 1.0)])
COSTS = st.sampled_from([0.0, 0.3, 2.0, 45.0])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw runs of all kinds, extreme ones included."""
    process, hang, node, rack = draw(SHARES)
    names = [name for name in RecoveryCosts.__dataclass_fields__ if name != "rendezvous_node_s"]
    return Scenario(
        num_ranks=draw(st.sampled_from([4, 16, 64])),
        ranks_per_node=draw(st.sampled_from([1, 2])),
        nodes_per_rack=draw(st.sampled_from([1, 2, 3])),
        num_spares=draw(st.integers(0, 4)),
        duration_s=draw(st.sampled_from([50.0, 3600.0, 86400.0])),
        step_s=draw(st.sampled_from([0.01, 1.0, 7.3])),
        slow_share=draw(st.sampled_from([0.0, 0.1])),
        failure_every_s=draw(st.sampled_from([30.0, 400.0, 5000.0])),
        weibull_shape=draw(st.sampled_from([None, 0.7, 2.0])),
        process_share=process,
        hang_share=hang,
        node_share=node,
        rack_share=rack,
        preempt_every_s=draw(st.sampled_from([None, 1000.0])),
        restart_stopped_s=draw(st.sampled_from([None, 0.0, 600.0])),
        repair_s=draw(st.sampled_from([1.0, 900.0, 1e6])),
        interval_iterations=draw(st.sampled_from([None, 0, 1, 7, 100])),
        global_interval_iterations=draw(st.sampled_from([None, 0, 3, 50])),
        replication=draw(st.integers(1, 2)),
        use_memory=draw(st.booleans()),
        costs=RecoveryCosts(**{name: draw(COSTS) for name in names}),
        limits=Limits(max_restarts=draw(st.sampled_from([0, 3, 1000])), max_no_progress_cycles=draw(st.integers(1, 9))),
    )


@pytest.mark.extended
@given(scenarios(), st.integers(0, 1000))
@settings(max_examples=300)
def test_the_parts_add_up_to_the_wall_time(one: Scenario, seed: int) -> None:
    """In any run the parts of the time are not negative and add up to the wall time."""
    run = simulate(one, seed)
    assert all(seconds >= 0.0 for seconds in run.partition.values()), run.partition
    assert sum(run.partition.values()) == pytest.approx(one.duration_s, abs=1e-3)
    assert run.ettr == pytest.approx(run.partition["productive"] / one.duration_s)
    assert run.num_iterations * one.step_s <= run.partition["productive"] + 1e-3
    assert run.lost_iterations >= 0
    assert run == simulate(one, seed), "the same seed gives the same run"


@given(st.integers(0, 500), st.integers(0, 20), st.integers(0, 20), COSTS, COSTS, st.floats(0, 5000))
def test_closed_form_equals_counting_step_by_step(
    start: int, near: int, far: int, stall: float, far_stall: float, time_s: float
) -> None:
    """The arithmetic for the steps and saves between two failures gives the result of counting step by step."""
    pace = TrainingPace(2.5, near, far, stall, far_stall)
    now_s, num, steps_s, stalls_s = 0.0, 0, 0.0, 0.0
    while True:
        if now_s + pace.step_s > time_s:
            steps_s += time_s - now_s
            break
        now_s, num, steps_s = now_s + pace.step_s, num + 1, steps_s + pace.step_s
        at = start + num
        wait_s = far_stall if far and at % far == 0 else stall if near and at % near == 0 else 0.0
        stalls_s += min(wait_s, time_s - now_s)
        now_s += wait_s
        if now_s > time_s:
            break
    found = pace.split(start, time_s)
    # A time that equals the end of a step to the last bit may be counted on either side.
    assert abs(found[0] - num) <= (1 if abs(now_s - time_s) < 1e-6 or abs(now_s + 2.5 - time_s) < 1e-6 else 0)
    assert found[1] == pytest.approx(steps_s, abs=1e-6)
    assert found[2] == pytest.approx(stalls_s, abs=1e-6)


@pytest.mark.parametrize(("interval", "stall"), [(10, 0.5), (1, 2.0), (600, 30.0)])
def test_without_failures_only_saves_cost(interval: int, stall: float) -> None:
    """Without failures the ETTR is tau / (tau + C)."""
    one = scenario(
        rank_mttf_hours=math.inf,
        failure_every_s=None,
        interval_iterations=interval,
        global_interval_iterations=0,
        save_stall_s=stall,
        duration_s=30 * 86400.0,
    )
    run = simulate(one, 1)
    assert run.num_failures == 0
    assert run.ettr == pytest.approx(interval / (interval + stall), abs=1e-3)


@pytest.mark.extended
@given(st.integers(0, 10_000), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=40)
def test_more_spares_never_lower_the_goodput(seed: int, spares: int, more: int) -> None:
    """With the same faults a run with more spares is as good, except for the iterations that one failure loses."""
    one = scenario(
        process_share=0.5, hang_share=0.0, node_share=0.4, rack_share=0.1, num_spares=spares, duration_s=86400.0
    )
    few, many = (simulate(other, seed) for other in (one, one.change(num_spares=spares + more)))
    assert many.partition["idle"] <= few.partition["idle"] + 1e-6
    # A waiting run loses no steps to a failure: with more spares more failures hit a run that trains.
    lost_s = many.partition["redone"] + many.partition["save_stall"] + many.partition["queued"]
    assert many.partition["productive"] >= few.partition["productive"] - lost_s - 1e-6


def test_more_spares_raise_the_mean_goodput() -> None:
    """Over many seeds one more spare is a gain as long as the run waits for nodes."""
    one = scenario(node_share=1.0, process_share=0.0, hang_share=0.0, rack_share=0.0, failure_every_s=900.0)
    means = [sum(simulate(one.change(num_spares=num), seed).ettr for seed in range(40)) / 40 for num in (0, 1, 2, 6)]
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.1


# -- what a fault costs ------------------------------------------------------------------------------------------------


def test_a_dead_worker_costs_one_recovery() -> None:
    """A worker that dies costs its detection, the restart, the rendezvous, the start-up, a load from memory, and the
    steps since the last save, each once."""
    one = scenario(
        detection_s=2.0, restart_s=3.0, rendezvous_s=4.0, start_up_s=50.0, load_memory_s=6.0, duration_s=1000.0
    )
    run = simulate(one, faults=make_faults((54.0 + 127.5, SimulatedFault.PROCESS, 1)))
    parts = run.partition
    assert (parts["detection"], parts["restart"], parts["load"], parts["idle"]) == (2.0, 3.0, 6.0, 0.0)
    assert (parts["rendezvous"], parts["start_up"]) == (8.0, 100.0), "the first start and the restart"
    assert parts["redone"] == 7.5
    assert run.lost_iterations == 7
    assert run.loads == {"memory": 1}
    assert run.decisions == {"restart_workers": 1}


def test_a_hang_costs_its_timeout() -> None:
    """A hang costs its timeout, after which it is detected."""
    run = simulate(scenario(hang_timeout_s=300.0), faults=make_faults((100.0, SimulatedFault.HANG, 0)))
    assert run.partition["detection"] == 300.0


@pytest.mark.parametrize(("save_s", "kept"), [(0.0, 120), (5.0, 120), (9.0, 110)])
def test_an_uncommitted_checkpoint_is_lost(save_s: float, kept: int) -> None:
    """A failure before the commit of a checkpoint returns the run to the previous checkpoint."""
    run = simulate(scenario(save_s=save_s), faults=make_faults((127.0, SimulatedFault.PROCESS, 0)))
    assert run.lost_iterations == 127 - kept


def test_a_lost_node_loads_from_its_partner() -> None:
    """The copies on a node are lost with the node; its ranks load the copies on another node."""
    run = simulate(scenario(), faults=make_faults((127.0, SimulatedFault.NODE, 1)))
    assert run.loads == {"replica": 1}
    assert run.lost_iterations == 7
    assert run.decisions == {"replace_node": 1}


def test_without_replicas_a_lost_node_loads_from_the_global_tier() -> None:
    """Where no other node has copies, all ranks load from the global tier."""
    run = simulate(scenario(replication=1), faults=make_faults((127.0, SimulatedFault.NODE, 1)))
    assert run.loads == {"global": 1}
    assert run.lost_iterations == 27


@pytest.mark.parametrize(("jump", "tier"), [(None, "global"), (4, "replica")])
def test_a_lost_rack_loses_copies_on_its_own_nodes(jump: int | None, tier: str) -> None:
    """A rack loses a shard and its copy where both are in the rack; a jump beyond the rack keeps the copy."""
    run = simulate(scenario(replication_jump=jump, num_spares=4), faults=make_faults((127.0, SimulatedFault.RACK, 1)))
    assert run.loads == {tier: 1}


def test_losing_both_partners_loses_the_node_local_tiers() -> None:
    """A spare has no copies of other nodes until the next save: the loss of its partner before then loses the
    node-local tiers."""
    faults = ((127.0, SimulatedFault.NODE, 1), (129.0, SimulatedFault.NODE, 0))
    assert simulate(scenario(), faults=make_faults(*faults)).loads == {"replica": 1, "global": 1}
    later = (faults[0], (145.0, SimulatedFault.NODE, 0))
    assert simulate(scenario(), faults=make_faults(*later)).loads == {"replica": 2}


def test_partners_come_from_choose_partners() -> None:
    """One rank stands for its node: its partners are those that choose_partners gives to each rank of the node."""
    from outlast.policy.checkpoint_plan import choose_partners

    one = scenario(num_ranks=24, replication=3, replication_jump=4)
    all_ranks = choose_partners([f"n{rank // 2}" for rank in range(24)], factor=3, jump=4)
    for slot, partners in enumerate(find_partners(one)):
        for rank in (2 * slot, 2 * slot + 1):
            assert tuple(partner // 2 for partner in all_ranks[rank]) == tuple(partners)


# -- spares and repair -------------------------------------------------------------------------------------------------


def test_without_a_spare_the_run_waits_for_the_repair() -> None:
    """Without a spare the run is idle until the lost node is repaired, and no longer."""
    faults = make_faults((127.0, SimulatedFault.NODE, 1), repair_s=500.0)
    assert simulate(scenario(num_spares=1), faults=faults).partition["idle"] == 0.0
    assert simulate(scenario(num_spares=0), faults=faults).partition["idle"] == 500.0


def test_a_second_loss_while_waiting_needs_another_repair() -> None:
    """A run that waits also waits for a node that is lost meanwhile; a worker failure has no effect while it waits."""
    faults = make_faults(
        (127.0, SimulatedFault.NODE, 1),
        (227.0, SimulatedFault.PROCESS, 0),
        (327.0, SimulatedFault.NODE, 2),
        repair_s=500.0,
    )
    run = simulate(scenario(num_spares=0), faults=faults)
    assert run.partition["idle"] == 700.0
    assert run.num_by_kind == {"node": 2}


def test_a_repaired_node_becomes_a_spare() -> None:
    """A node whose slot a spare has taken waits as a spare once it is repaired."""
    faults = make_faults((100.0, SimulatedFault.NODE, 1), (700.0, SimulatedFault.NODE, 2), repair_s=500.0)
    assert simulate(scenario(num_spares=1), faults=faults).partition["idle"] == 0.0


def test_a_node_that_fails_too_often_loses_its_slot() -> None:
    """At the recovery policy's limit of node faults a spare takes the slot and loads from a partner."""
    faults = make_faults(*((200.0 * number, SimulatedFault.PROCESS, 1) for number in (1, 2, 3)))
    run = simulate(scenario(limits=Limits(max_node_faults=3)), faults=faults)
    assert run.decisions == {"replace_node": 1, "restart_workers": 2}
    assert run.loads == {"memory": 2, "replica": 1}


# -- the recovery policy -----------------------------------------------------------------------------------------------


def test_the_recovery_policy_stops_a_run_without_progress() -> None:
    """Where failures leave no time for a save, the run stops with the recovery policy's reason instead of restarting
    forever."""
    one = scenario(
        failure_every_s=20.0, start_up_s=60.0, process_share=1.0, hang_share=0.0, node_share=0.0, rack_share=0.0
    )
    run = simulate(one.change(restart_stopped_s=None), 3)
    (stop,) = run.stops
    assert stop.exit_code == 93
    assert "in a row got no further than" in stop.reason
    assert "max_no_progress_cycles=3" in stop.reason
    assert sum(run.decisions.values()) < 10
    assert run.partition["queued"] == pytest.approx(one.duration_s - stop.at_s)


def test_max_restarts_0_stops_at_the_first_failure() -> None:
    """With --max-restarts=0 the first failure ends the run; earlier saves still count."""
    one = scenario(max_restarts=0, restart_stopped_s=None)
    run = simulate(one, faults=make_faults((127.0, SimulatedFault.PROCESS, 0)))
    assert run.decisions == {"stop": 1}
    assert "--max-restarts=0" in run.stops[0].reason
    assert run.num_iterations == 120
    assert run.partition["queued"] == pytest.approx(3600.0 - 127.0)


def test_a_restarted_run_resumes_from_disk() -> None:
    """A stopped run that is started again loads its saves from the disks of the nodes."""
    one = scenario(max_restarts=0, restart_stopped_s=1000.0)
    run = simulate(one, faults=make_faults((127.0, SimulatedFault.PROCESS, 0), (500.0, SimulatedFault.NODE, 0)))
    assert run.partition["queued"] == 1000.0
    assert run.loads == {"local": 1}
    assert run.num_by_kind == {"process": 1}, "a job that waits has no nodes that could fail"
    assert run.num_iterations == 120 + (3600 - 1127)


def test_a_preempted_run_saves_and_waits_in_the_queue() -> None:
    """A preemption notice loses no finished step: the job saves, waits in the queue, and resumes from that save."""
    one = scenario(global_save_s=30.0, queue_s=400.0)
    run = simulate(one, faults=make_faults((127.0, SimulatedFault.PREEMPTION, 0)))
    assert run.decisions == {"requeue_job": 1}
    assert run.lost_iterations == 0
    assert run.partition["queued"] == 400.0
    assert run.partition["save_stall"] == 30.0
    assert run.loads == {"global": 1}


# -- faults ------------------------------------------------------------------------------------------------------------


def test_scenario_changes_keep_the_drawn_faults() -> None:
    """Spares, intervals and replication have no influence on the drawn faults."""
    one = scenario(weibull_shape=0.8)
    for change in ({"num_spares": 9}, {"interval_s": 77.0}, {"replication": 3}, {"start_up_s": 9.0}):
        assert draw_faults(one.change(**change), 4) == draw_faults(one, 4)
    assert draw_faults(one, 5) != draw_faults(one, 4)


@pytest.mark.parametrize("shape", [None, 1.0, 0.7, 2.0])
def test_the_failure_rate_matches_the_setting(shape: float | None) -> None:
    """The number of failures follows from the mean time between failures, for any distribution."""
    one = scenario(weibull_shape=shape, num_ranks=64, failure_every_s=3600.0, duration_s=3600.0 * 64 * 30)
    expected = one.duration_s / 3600.0
    mean = sum(len(draw_faults(one, seed).times) for seed in range(20)) / 20
    assert mean == pytest.approx(expected, rel=0.04)


def test_failure_kinds_have_their_shares() -> None:
    """The fraction of each kind of failure is its configured share."""
    kinds = draw_faults(scenario(duration_s=300.0 * 20_000), 0).kinds
    for kind, share in {0: 0.70, 1: 0.05, 2: 0.24, 3: 0.01}.items():
        assert kinds.count(kind) / len(kinds) == pytest.approx(share, abs=0.01)


def test_a_trace_is_repeated() -> None:
    """The first seed plays a trace from its begin and repeats it; other seeds begin within the trace."""
    trace = (DrawnFault(100.0, SimulatedFault.PROCESS, 1), DrawnFault(200.0, SimulatedFault.NODE))
    one = scenario(trace=trace, duration_s=700.0, failure_every_s=None)
    first, other = draw_faults(one, 0), draw_faults(one, 1)
    assert first.times == [100.0, 200.0, 400.0, 500.0]
    assert first.kinds == [0, 2, 0, 2]
    assert first.slots[0] == first.slots[2] == 1
    assert other.times != first.times
    assert one.failures_per_s == pytest.approx(2 / 300)
    at_once = one.change(trace=(DrawnFault(0.0, SimulatedFault.NODE),))
    assert draw_faults(at_once, 0).times == draw_faults(at_once, 3).times == [0.0]
