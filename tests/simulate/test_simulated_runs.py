"""One simulated run: where its time goes, and that the shipped policy decides."""

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
"""Nothing costs anything."""


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


def struck(*faults: tuple[float, SimulatedFault, int], repair_s: float = 1e6) -> FaultSchedule:
    """Return given faults: when, what, which slot."""
    times, kinds, slots = zip(*faults, strict=True)
    return FaultSchedule(list(times), [int(kind) for kind in kinds], list(slots), [repair_s] * len(faults))


SHARES = st.sampled_from([(1.0, 0.0, 0.0, 0.0), (0.7, 0.05, 0.24, 0.01), (0.0, 0.2, 0.5, 0.3), (0.0, 0.0, 0.0, 1.0)])
COSTS = st.sampled_from([0.0, 0.3, 2.0, 45.0])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw runs of all kinds, absurd ones among them."""
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


@given(scenarios(), st.integers(0, 1000))
@settings(max_examples=300)
def test_the_parts_add_up(one: Scenario, seed: int) -> None:
    """Whatever happens, the parts of the time are not negative, and add up to the wall time of the run."""
    run = simulate(one, seed)
    assert all(seconds >= 0.0 for seconds in run.partition.values()), run.partition
    assert sum(run.partition.values()) == pytest.approx(one.duration_s, abs=1e-3)
    assert run.ettr == pytest.approx(run.partition["productive"] / one.duration_s)
    assert run.num_iterations * one.step_s <= run.partition["productive"] + 1e-3
    assert run.lost_iterations >= 0
    assert run == simulate(one, seed), "the same seed gives the same run"


@given(st.integers(0, 500), st.integers(0, 20), st.integers(0, 20), COSTS, COSTS, st.floats(0, 5000))
def test_steps_and_saves_in_a_time(
    start: int, near: int, far: int, stall: float, far_stall: float, time_s: float
) -> None:
    """The arithmetic between two failures gives what counting step by step gives."""
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
    # A time that is a step's end to the last bit may be counted on either side of it.
    assert abs(found[0] - num) <= (1 if abs(now_s - time_s) < 1e-6 or abs(now_s + 2.5 - time_s) < 1e-6 else 0)
    assert found[1] == pytest.approx(steps_s, abs=1e-6)
    assert found[2] == pytest.approx(stalls_s, abs=1e-6)


@pytest.mark.parametrize(("interval", "stall"), [(10, 0.5), (1, 2.0), (600, 30.0)])
def test_without_failures_saves_alone_cost(interval: int, stall: float) -> None:
    """Where nothing fails the ETTR is tau / (tau + C)."""
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


@given(st.integers(0, 10_000), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=40)
def test_more_spares_do_not_hurt(seed: int, spares: int, more: int) -> None:
    """With the same faults a run with more spares is as good, but for the iterations that one failure loses."""
    one = scenario(
        process_share=0.5, hang_share=0.0, node_share=0.4, rack_share=0.1, num_spares=spares, duration_s=86400.0
    )
    few, many = (simulate(other, seed) for other in (one, one.change(num_spares=spares + more)))
    assert many.partition["idle"] <= few.partition["idle"] + 1e-6
    # Who waits is not struck meanwhile: with more spares more failures meet a run that trains, and each loses steps.
    lost_s = many.partition["redone"] + many.partition["save_stall"] + many.partition["queued"]
    assert many.partition["productive"] >= few.partition["productive"] - lost_s - 1e-6


def test_more_spares_help_on_average() -> None:
    """Over many seeds a spare more is a gain, as long as nodes are waited for."""
    one = scenario(node_share=1.0, process_share=0.0, hang_share=0.0, rack_share=0.0, failure_every_s=900.0)
    means = [sum(simulate(one.change(num_spares=num), seed).ettr for seed in range(40)) / 40 for num in (0, 1, 2, 6)]
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.1


# -- what a fault costs ------------------------------------------------------------------------------------------------


def test_a_dead_worker_costs_the_way_back() -> None:
    """A worker that dies costs its notice, the restart, the rendezvous, the start-up, a load from memory, and the steps
    since the last save; all of it, once."""
    one = scenario(
        detection_s=2.0, restart_s=3.0, rendezvous_s=4.0, start_up_s=50.0, load_memory_s=6.0, duration_s=1000.0
    )
    run = simulate(one, faults=struck((54.0 + 127.5, SimulatedFault.PROCESS, 1)))
    parts = run.partition
    assert (parts["detection"], parts["restart"], parts["load"], parts["idle"]) == (2.0, 3.0, 6.0, 0.0)
    assert (parts["rendezvous"], parts["start_up"]) == (8.0, 100.0), "the first start and the restart"
    assert parts["redone"] == 7.5
    assert run.lost_iterations == 7
    assert run.loads == {"memory": 1}
    assert run.decisions == {"restart_workers": 1}


def test_a_hang_costs_its_timeout() -> None:
    """A hang is noticed after its timeout, and costs that."""
    run = simulate(scenario(hang_timeout_s=300.0), faults=struck((100.0, SimulatedFault.HANG, 0)))
    assert run.partition["detection"] == 300.0


@pytest.mark.parametrize(("save_s", "kept"), [(0.0, 120), (5.0, 120), (9.0, 110)])
def test_what_is_not_committed_is_lost(save_s: float, kept: int) -> None:
    """A checkpoint counts once it is committed: a failure before that goes back to the one before it."""
    run = simulate(scenario(save_s=save_s), faults=struck((127.0, SimulatedFault.PROCESS, 0)))
    assert run.lost_iterations == 127 - kept


def test_a_lost_node_loads_from_its_partner() -> None:
    """A node's copies are lost with it; its ranks load those that another node holds."""
    run = simulate(scenario(), faults=struck((127.0, SimulatedFault.NODE, 1)))
    assert run.loads == {"replica": 1}
    assert run.lost_iterations == 7
    assert run.decisions == {"replace_node": 1}


def test_without_replicas_a_lost_node_loads_from_the_global_tier() -> None:
    """Where no other node holds copies, all ranks go back to the global tier."""
    run = simulate(scenario(replication=1), faults=struck((127.0, SimulatedFault.NODE, 1)))
    assert run.loads == {"global": 1}
    assert run.lost_iterations == 27


@pytest.mark.parametrize(("jump", "tier"), [(None, "global"), (4, "replica")])
def test_partners_in_the_same_rack_go_with_it(jump: int | None, tier: str) -> None:
    """A rack takes a shard and its copy along where both lie in it; a jump that leaves the rack keeps the copy."""
    run = simulate(scenario(replication_jump=jump, num_spares=4), faults=struck((127.0, SimulatedFault.RACK, 1)))
    assert run.loads == {tier: 1}


def test_two_partners_in_short_succession() -> None:
    """A spare holds no copies of others until the next save: if its partner is lost before that, the node-local
    tiers are."""
    faults = ((127.0, SimulatedFault.NODE, 1), (129.0, SimulatedFault.NODE, 0))
    assert simulate(scenario(), faults=struck(*faults)).loads == {"replica": 1, "global": 1}
    later = (faults[0], (145.0, SimulatedFault.NODE, 0))
    assert simulate(scenario(), faults=struck(*later)).loads == {"replica": 2}


def test_partners_are_the_packages_own() -> None:
    """One rank stands for its node: the partners are those that choose_partners gives to each of its ranks."""
    from outlast.policy.checkpoint_plan import choose_partners

    one = scenario(num_ranks=24, replication=3, replication_jump=4)
    all_ranks = choose_partners([f"n{rank // 2}" for rank in range(24)], factor=3, jump=4)
    for slot, partners in enumerate(find_partners(one)):
        for rank in (2 * slot, 2 * slot + 1):
            assert tuple(partner // 2 for partner in all_ranks[rank]) == tuple(partners)


# -- spares and repair -------------------------------------------------------------------------------------------------


def test_without_a_spare_the_run_waits_for_the_repair() -> None:
    """Without a spare the run is idle until the lost node is repaired, and no longer."""
    faults = struck((127.0, SimulatedFault.NODE, 1), repair_s=500.0)
    assert simulate(scenario(num_spares=1), faults=faults).partition["idle"] == 0.0
    assert simulate(scenario(num_spares=0), faults=faults).partition["idle"] == 500.0


def test_a_second_loss_while_waiting_takes_one_more_node() -> None:
    """A node that is lost while the run waits is waited for, too; a dead worker strikes nothing then."""
    faults = struck(
        (127.0, SimulatedFault.NODE, 1),
        (227.0, SimulatedFault.PROCESS, 0),
        (327.0, SimulatedFault.NODE, 2),
        repair_s=500.0,
    )
    run = simulate(scenario(num_spares=0), faults=faults)
    assert run.partition["idle"] == 700.0
    assert run.num_by_kind == {"node": 2}


def test_a_repaired_node_is_a_spare() -> None:
    """A node that a spare stood in for waits as a spare once it is repaired."""
    faults = struck((100.0, SimulatedFault.NODE, 1), (700.0, SimulatedFault.NODE, 2), repair_s=500.0)
    assert simulate(scenario(num_spares=1), faults=faults).partition["idle"] == 0.0


def test_a_node_that_fails_too_often_gives_its_slot_away() -> None:
    """The recovery policy's bound of faults is obeyed: a spare takes the slot, which then loads from a partner."""
    faults = struck(*((200.0 * number, SimulatedFault.PROCESS, 1) for number in (1, 2, 3)))
    run = simulate(scenario(limits=Limits(max_node_faults=3)), faults=faults)
    assert run.decisions == {"replace_node": 1, "restart_workers": 2}
    assert run.loads == {"memory": 2, "replica": 1}


# -- the recovery policy -----------------------------------------------------------------------------------------------


def test_the_recovery_policy_stops_a_run_without_progress() -> None:
    """Where no failure leaves time for a save, the run stops with the recovery policy's reason, and does not
    restart forever."""
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


def test_no_restart_where_none_is_allowed() -> None:
    """With --max-restarts=0 the first failure ends the run; what was saved until then still counts."""
    one = scenario(max_restarts=0, restart_stopped_s=None)
    run = simulate(one, faults=struck((127.0, SimulatedFault.PROCESS, 0)))
    assert run.decisions == {"stop": 1}
    assert "--max-restarts=0" in run.stops[0].reason
    assert run.num_iterations == 120
    assert run.partition["queued"] == pytest.approx(3600.0 - 127.0)


def test_a_stopped_run_that_is_started_again_goes_on() -> None:
    """Somebody who starts a stopped run again finds its saves on the nodes' disks."""
    one = scenario(max_restarts=0, restart_stopped_s=1000.0)
    run = simulate(one, faults=struck((127.0, SimulatedFault.PROCESS, 0), (500.0, SimulatedFault.NODE, 0)))
    assert run.partition["queued"] == 1000.0
    assert run.loads == {"local": 1}
    assert run.num_by_kind == {"process": 1}, "a job that waits has no nodes that could fail"
    assert run.num_iterations == 120 + (3600 - 1127)


def test_a_preempted_run_saves_and_waits() -> None:
    """A request to leave loses nothing that was finished: the job saves, waits in the queue, and goes on from there."""
    one = scenario(global_save_s=30.0, queue_s=400.0)
    run = simulate(one, faults=struck((127.0, SimulatedFault.PREEMPTION, 0)))
    assert run.decisions == {"requeue_job": 1}
    assert run.lost_iterations == 0
    assert run.partition["queued"] == 400.0
    assert run.partition["save_stall"] == 30.0
    assert run.loads == {"global": 1}


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_change_sees_the_same_faults() -> None:
    """Spares, intervals and replication do not change when what fails."""
    one = scenario(weibull_shape=0.8)
    for change in ({"num_spares": 9}, {"interval_s": 77.0}, {"replication": 3}, {"start_up_s": 9.0}):
        assert draw_faults(one.change(**change), 4) == draw_faults(one, 4)
    assert draw_faults(one, 5) != draw_faults(one, 4)


@pytest.mark.parametrize("shape", [None, 1.0, 0.7, 2.0])
def test_failures_come_as_often_as_asked(shape: float | None) -> None:
    """The number of failures is that of the mean time between them, whatever their distribution."""
    one = scenario(weibull_shape=shape, num_ranks=64, failure_every_s=3600.0, duration_s=3600.0 * 64 * 30)
    expected = one.duration_s / 3600.0
    mean = sum(len(draw_faults(one, seed).times) for seed in range(20)) / 20
    assert mean == pytest.approx(expected, rel=0.04)


def test_kinds_come_in_their_shares() -> None:
    """Each kind of failure has its share."""
    kinds = draw_faults(scenario(duration_s=300.0 * 20_000), 0).kinds
    for kind, share in {0: 0.70, 1: 0.05, 2: 0.24, 3: 0.01}.items():
        assert kinds.count(kind) / len(kinds) == pytest.approx(share, abs=0.01)


def test_a_trace_is_played_over_and_over() -> None:
    """The first run plays a trace as it is, again from its begin when it is over; other seeds begin within it."""
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
