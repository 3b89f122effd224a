"""A group of actors that lacks actors shrinks, starts others, or stops with a reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util import placement_group, remove_placement_group
from ray_machines import leaked
from ray_trainer import Counter, Trainer, Unable, batch_of, plan_fault, weights_after

from outlast import CheckpointConfig, clock
from outlast.errors import ActorFailed, ConfigError, OutlastError, RolledBack, SparesExhausted
from outlast.ray import ActorGroup, RecoveryConfig

pytestmark = [pytest.mark.process, pytest.mark.extended]
PATIENT = {"examine_timeout": 3.0, "ping_timeout": 15.0, "abort_timeout": 20.0}
DRIVER = """
import json, sys, ray
from ray_trainer import Counter
from outlast.ray import ActorGroup
ray.init(address=sys.argv[1], log_to_driver=False)
group = ActorGroup(Counter, {"dp": 1}, num_spares=1)
while not group.spares:
    group.run("count_all")
print(json.dumps([*group.pids.values(), *group.spares]), flush=True)
sys.stdin.read()
"""


@pytest.mark.extended
@pytest.mark.slow
def test_a_group_without_spares_shrinks(ray_cluster: Cluster, tmp_path: Path) -> None:
    """Without a replacement for a lost actor the data axis gets shorter, and an actor that is available later becomes a
    spare."""
    recovery = RecoveryConfig(spare_wait=0.0, allow_shrink=True, **PATIENT)
    checkpoint = CheckpointConfig(directory=str(tmp_path / "global"), save_interval=1, async_save=False)
    with ActorGroup(Trainer, {"dp": 2}, args=(str(tmp_path),), checkpoint=checkpoint, recovery=recovery) as group:
        for iteration in (1, 2):
            group.run("train_step", batch_of(iteration), iteration)
        plan_fault(tmp_path, "begin", 3, 0, "kill")
        kept = group.pids[1]
        assert group.run("train_step", batch_of(3), 3) == [float(batch_of(3).sum())]
        assert group.mesh.dp == 1
        assert group.pids == {0: kept}
        report = group.recoveries[-1]
        assert (report.mesh_before["dp"], report.mesh_after["dp"]) == (2, 1)
        assert (report.loaded, report.checkpoint, report.iteration) == ((0,), 2, 2)
        weights = group.run("weights", dispatch="pass_through")
        torch.testing.assert_close(weights, weights_after(3, dp=1, tp=1), rtol=0, atol=1e-12)
        deadline = clock.now_s() + 60
        while not group.spares:
            assert clock.now_s() < deadline, "the lost actor's resources did not become a spare"
            group.run("calls")
        plan_fault(tmp_path, "begin", 4, 0, "kill")
        group.run("train_step", batch_of(4), 4)
        assert kept not in group.pids.values()
        pending = group.submit("linger", 600.0)
    with pytest.raises(OutlastError, match="closed during 'linger'"):
        pending.result()
    assert not leaked()
    with pytest.raises(OutlastError, match="closed"):
        group.run("calls")
    group.close()


@pytest.mark.campaign
def test_a_group_without_spares_starts_another_actor(ray_cluster: Cluster, tmp_path: Path) -> None:
    """Each save is committed without an idle spare; a lost actor's successor is started, and resumes from the newest
    save."""
    checkpoint = CheckpointConfig(local_directory=str(tmp_path), save_interval=1, async_save=False)
    recovery = RecoveryConfig(spare_wait=300.0, **PATIENT)
    with ActorGroup(Trainer, {"dp": 2}, args=(str(tmp_path),), checkpoint=checkpoint, recovery=recovery) as group:
        for iteration in (1, 2):
            group.run("train_step", batch_of(iteration), iteration)
        plan_fault(tmp_path, "begin", 3, 1, "kill")
        kept = group.pids[0]
        group.run("train_step", batch_of(3), 3)
        report = group.recoveries[-1]
        assert (report.kept, report.loaded, report.checkpoint, report.repeated) == ({0: kept}, (1,), 2, True)
        weights = group.run("weights", dispatch="pass_through")
        assert all(torch.equal(one, weights_after(3, dp=2, tp=1)[0]) for one in weights)
    assert not leaked()


@pytest.mark.campaign
def test_a_group_without_room_stops_with_an_error(ray_cluster: Cluster, tmp_path: Path) -> None:
    """When a node is lost and no actor can be started elsewhere, the caller receives the error, and no process is
    left."""
    node = ray_cluster.add_node(num_cpus=2, num_gpus=0, resources={"extra": 2}, object_store_memory=100 << 20)
    recovery = RecoveryConfig(spare_wait=1.0, ping_timeout=15.0, abort_timeout=20.0)
    with ActorGroup(Counter, {"dp": 2}, resources={"extra": 1}, recovery=recovery) as group:
        assert group.run("count_all") == [2, 2]
        assert set(group.nodes.values()) == {node.node_id}
        ray_cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(SparesExhausted, match=r"ranks \[0, 1\].*num_spares"):
            group.run("count_all")
        with pytest.raises(SparesExhausted):
            group.run("count_all")
    assert not leaked()
    wait_for_death(node.node_id)
    with pytest.raises(SparesExhausted, match="no room for 2 actors"):
        ActorGroup(Counter, {"dp": 2}, resources={"extra": 1}, recovery=RecoveryConfig(start_timeout=1.0))
    assert not leaked()


def wait_for_death(node_id: str) -> None:
    """Wait until Ray has declared a node dead, and places no actor there."""
    deadline = clock.now_s() + 60
    while any(one["NodeID"] == node_id and one["Alive"] for one in ray.nodes()):
        assert clock.now_s() < deadline
        time.sleep(0.1)


@pytest.mark.campaign
def test_actors_of_a_lost_node_start_elsewhere(ray_cluster: Cluster, tmp_path: Path) -> None:
    """When a node dies with half the actors and a spare, others start where there is room; actors elsewhere are
    kept."""
    taken = placement_group([{"CPU": 14}])  # only the first node has so many CPUs; the rest has room for two actors
    assert taken.wait(60)
    node = ray_cluster.add_node(num_cpus=3, num_gpus=0, object_store_memory=100 << 20)  # for 3 of 5 actors
    checkpoint = CheckpointConfig(directory=str(tmp_path / "global"), save_interval=1, async_save=False)
    with ActorGroup(
        Trainer,
        {"dp": 2, "tp": 2},
        args=(str(tmp_path),),
        num_spares=1,
        placement="SPREAD",
        checkpoint=checkpoint,
        recovery=RecoveryConfig(**PATIENT),
    ) as group:
        for iteration in (1, 2, 3):
            group.run("train_step", batch_of(iteration), iteration)
        before, there = group.pids, {rank for rank, name in group.nodes.items() if name == node.node_id}
        assert len(there) in (2, 3)  # the spare may be on either node
        by_node = [name == node.node_id for _, name in sorted(group.nodes.items())]
        assert by_node in (sorted(by_node), sorted(by_node, reverse=True))  # the ranks of a node are consecutive
        remove_placement_group(taken)
        ray_cluster.remove_node(node, allow_graceful=False)
        group.run("train_step", batch_of(4), 4)
        report = group.recoveries[-1]
        assert {rank for rank, pid in before.items() if group.pids[rank] == pid} == set(before) - there
        assert {one.rank for one in report.lost} == there
        assert report.iteration == 3
        expected = weights_after(4)
        for rank, weights in enumerate(group.run("weights", dispatch="pass_through")):
            assert torch.equal(weights, expected[rank % 2])
    assert not leaked()


def take_turns(group: ActorGroup, method: str) -> None:
    """Call a method in each turn up to iteration 5."""
    for step in group.steps(total=5):
        with step:
            group.run(method)


@pytest.mark.extended
@pytest.mark.slow
def test_steps_continue_after_a_rollback(ray_cluster: Cluster, tmp_path: Path) -> None:
    """A loop over ``steps()`` catches no exception: after the loss of an actor without saved state the turn ends, and
    the next turn begins at the iteration to which the group rolled back. Other errors pass through, and so does a turn
    without progress."""
    checkpoint = CheckpointConfig(local_directory=str(tmp_path / "kept"), save_interval=100)
    recovery = RecoveryConfig(**PATIENT)
    with ActorGroup(
        Trainer, {"dp": 2}, args=(str(tmp_path),), num_spares=1, checkpoint=checkpoint, recovery=recovery
    ) as group:
        plan_fault(tmp_path, "begin", 3, 0, "kill")
        begun, went_back = [], []
        for step in group.steps(total=4):
            with step as iteration:
                begun.append(iteration)
                group.run("train_step", batch_of(iteration + 1), iteration + 1)
            went_back.append(None if step.rolled_back is None else step.rolled_back.iteration)
        assert (begun, group.iteration) == ([0, 1, 2, 0, 1, 2, 3], 4)
        assert went_back == [None, None, 0, None, None, None, None]
        weights = group.run("weights", dispatch="pass_through")
        torch.testing.assert_close(weights, weights_after(4, dp=2, tp=1) * 2, rtol=0, atol=1e-12)
        assert list(group.steps(total=4)) == []
        with pytest.raises(ConfigError, match="no method"):
            take_turns(group, "nothing")
        with pytest.raises(OutlastError, match=r"still at iteration 4 after a turn of steps\(\)"):
            take_turns(group, "calls")


@pytest.mark.campaign
def test_a_plain_class_starts_over_after_a_loss(ray_cluster: Cluster) -> None:
    """A user's class without state uses the default group; after a loss all actors start at 0, which is logged."""
    recovery = RecoveryConfig(max_recoveries=2, **PATIENT)
    with ActorGroup(Counter, {"dp": 2}, num_spares=1, recovery=recovery) as group:
        assert group.run("count_all") == [2, 2]
        assert group.run("count_all") == [4, 4]
        kept = group.pids[1]
        os.kill(group.pids[0], signal.SIGKILL)
        first, second = group.submit("count_all"), group.submit("count_all")
        with pytest.raises(RolledBack) as raised:
            first.result()
        with pytest.raises(RolledBack):  # it was submitted before the first one failed
            second.result()
        assert raised.value.iteration == group.iteration == 0
        assert group.run("count_all") == [2, 2]
        assert group.pids[1] == kept
        with pytest.raises(RolledBack):
            group.run("die")
        with pytest.raises(ActorFailed, match="no progress"):
            group.run("die")
        with pytest.raises(ActorFailed, match="no progress"):
            group.run("count_all")
    assert not leaked()


@pytest.mark.extended
@pytest.mark.slow
def test_an_exception_in_a_constructor_is_raised(ray_cluster: Cluster) -> None:
    """A class whose constructor raises yields no group; its exception is the cause of the error, and no process is
    left."""
    with pytest.raises(ActorFailed, match="no data here"):
        ActorGroup(Unable, {"dp": 2})
    assert not leaked()


def test_invalid_settings_start_no_actor(ray_cluster: Cluster, tmp_path: Path) -> None:
    """Invalid settings of a group are rejected before an actor is started."""
    for settings, message in (
        ({"mesh": {"dq": 2}}, "unknown axis"),
        ({"mesh": {"dp": 2}, "num_spares": -1}, "num_spares"),
        ({"mesh": {"dp": 2}, "placement": "PACKED"}, "PACK"),
        ({"mesh": {"dp": 2}, "checkpoint": CheckpointConfig(directory=str(tmp_path))}, "TrainActor"),
    ):
        with pytest.raises(ConfigError, match=message):
            ActorGroup(Counter, **settings)
    with pytest.raises(ConfigError, match="plain class"):
        ActorGroup(ray.remote(Counter), {"dp": 2})
    assert not leaked()


@pytest.mark.campaign
@pytest.mark.slow
def test_actors_end_with_their_driver(ray_cluster: Cluster) -> None:
    """When the driver is killed no actor, spares included, outlives it."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, ray_cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        driver.kill()
        driver.communicate()
    assert not leaked(pids)
