"""Actors move away from a node that Ray drains before its end, with their state, and none is started there again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray_machines import leaked
from ray_trainer import Trainer, batch_of, plan_fault, weights_after

from outlast import CheckpointConfig, clock
from outlast.errors import ActorFailed
from outlast.incidents import EventKind
from outlast.journal import read
from outlast.ray import ActorGroup, RecoveryConfig
from outlast.ray.watch import LossKind

pytestmark = [pytest.mark.process, pytest.mark.slow]
PATIENT = {"examine_timeout": 3.0, "ping_timeout": 15.0, "abort_timeout": 20.0}
LIMIT_S = 120.0


@contextmanager
def nodes_with_room(cluster: Cluster, *sizes: int) -> Iterator[list[Any]]:
    """Add nodes with room for the given numbers of test actors; remove those that remain."""
    added = [
        cluster.add_node(num_cpus=size, num_gpus=0, resources={"spot": size}, object_store_memory=100 << 20)
        for size in sizes
    ]
    cluster.wait_for_nodes()
    try:
        yield added
    finally:
        for node in added:
            if node in cluster.worker_nodes:
                cluster.remove_node(node, allow_graceful=False)


def drain(cluster: Cluster, node_id: str, within_s: float) -> None:
    """Drain a node as an autoscaler does for a reclaimed spot node, or as ``ray drain-node`` does; infinite = no
    deadline."""
    deadline_ms = 0 if math.isinf(within_s) else (time.time_ns() // 1_000_000) + int(within_s * 1000)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = ray._raylet.GcsClient(address=cluster.address)
    is_accepted, why = client.drain_node(node_id, reason, "a test takes it", deadline_ms)
    assert is_accepted, why


def wait_until(check: Callable[[], bool], what: str) -> None:
    deadline_s = clock.now_s() + LIMIT_S
    while not check():
        assert clock.now_s() < deadline_s, what
        time.sleep(0.05)


def train(group: ActorGroup, num_steps: int) -> None:
    for _ in range(num_steps):
        iteration = (group.iteration or 0) + 1
        assert group.run("train_step", batch_of(iteration), iteration) == [
            float(shard.sum()) for shard in batch_of(iteration).chunk(2)
        ]


def assert_undisturbed(group: ActorGroup) -> None:
    (expected,) = weights_after(group.iteration or 0, tp=1)
    assert all(torch.equal(one, expected) for one in group.run("weights", dispatch="pass_through"))


def make_group(folder: Path, checkpoint: CheckpointConfig, **recovery: Any) -> ActorGroup:
    return ActorGroup(
        Trainer,
        {"dp": 2},
        args=(str(folder),),
        resources={"spot": 1},
        placement="SPREAD",
        checkpoint=checkpoint,
        recovery=RecoveryConfig(**PATIENT, **recovery),
        run_dir=str(folder / "run"),
    )


@pytest.mark.campaign
def test_actors_leave_a_drained_node_before_its_end(ray_cluster: Cluster, tmp_path: Path) -> None:
    """A spot node is drained while the group waits for calls: without a spare, a new actor is started elsewhere and
    takes the rank with its current state, and the node's end causes no recovery."""
    checkpoint = CheckpointConfig(local_directory=str(tmp_path / "local"), save_interval=100)
    with nodes_with_room(ray_cluster, 1, 3) as (spot, other), make_group(tmp_path, checkpoint) as group:
        train(group, 3)  # none of these steps is saved
        before = group.pids
        (rank,) = (rank for rank, node in group.nodes.items() if node == spot.node_id)
        drain(ray_cluster, spot.node_id, 600.0)
        wait_until(lambda: bool(group.recoveries), "no actor moves away from the drained node")
        (report,) = group.recoveries
        assert [(one.rank, one.kind) for one in report.lost] == [(rank, LossKind.DRAINED)]
        assert "its node is drained, and goes in" in report.lost[0].evidence
        assert report.kept == {1 - rank: before[1 - rank]}
        assert (report.loaded, report.checkpoint, report.iteration) == ((rank,), 3, 3)
        assert set(group.nodes.values()) == {other.node_id}
        train(group, 1)
        ray_cluster.remove_node(spot, allow_graceful=False)
        wait_until(lambda: not psutil.pid_exists(before[rank]), "the actor that left lives")
        train(group, 2)
        assert_undisturbed(group)
        assert len(group.recoveries) == 1
        events = list(read(tmp_path / "run"))
        (notice,) = [event for event in events if event.kind == EventKind.NOTICE]
        assert notice.data["ray_node"] == spot.node_id
        assert 0 < notice.data["deadline_s"] <= 600
        assert not [event for event in events if event.kind == EventKind.INCIDENT]
    assert not leaked()


@pytest.mark.campaign
def test_a_hanging_call_is_interrupted_before_the_deadline(ray_cluster: Cluster, tmp_path: Path) -> None:
    """A step hangs when the node is drained: shortly before the deadline it is interrupted, the actors move, and the
    step is repeated. An actor that is lost afterwards is not replaced on the drained node, which still runs."""
    checkpoint = CheckpointConfig(directory=str(tmp_path / "global"), save_interval=1, async_save=False)
    with (
        nodes_with_room(ray_cluster, 2, 3) as (spot, other),
        make_group(tmp_path, checkpoint, drain_margin=3.0, spare_wait=300.0) as group,
    ):
        train(group, 2)
        (rank,) = (rank for rank, node in group.nodes.items() if node == spot.node_id)
        plan_fault(tmp_path, "begin", 3, rank, "sleep")
        pending = group.submit("train_step", batch_of(3), 3)
        drain(ray_cluster, spot.node_id, 30.0)
        assert pending.result(LIMIT_S) == [float(shard.sum()) for shard in batch_of(3).chunk(2)]
        (report,) = group.recoveries
        assert [(one.rank, one.kind) for one in report.lost] == [(rank, LossKind.DRAINED)]
        assert (report.method, report.repeated, report.iteration) == ("train_step", True, 2)
        plan_fault(tmp_path, "begin", 4, rank, "kill")
        train(group, 2)
        assert set(group.nodes.values()) == {other.node_id}
        assert_undisturbed(group)
    assert not leaked()


@pytest.mark.campaign
def test_two_nodes_drained_at_once_lose_no_state(ray_cluster: Cluster, tmp_path: Path) -> None:
    """Both nodes of the group are drained together: the group leaves one node after the other, a step apart, with all
    of its state, although each node has the other's copies."""
    checkpoint = CheckpointConfig(local_directory=str(tmp_path / "local"), save_interval=100)
    with nodes_with_room(ray_cluster, 1, 1) as (first, second), make_group(tmp_path, checkpoint) as group:
        train(group, 3)
        with nodes_with_room(ray_cluster, 1, 1) as others:
            for node in (first, second):
                drain(ray_cluster, node.node_id, math.inf)
            wait_until(lambda: len(group.recoveries) == 1, "the first drained node is not left")
            train(group, 1)  # its copies are stored on nodes that stay
            wait_until(lambda: len(group.recoveries) == 2, "the second drained node is not left")
            assert [report.iteration for report in group.recoveries] == [3, 4]
            assert set(group.nodes.values()) == {node.node_id for node in others}
            for node in (first, second):
                ray_cluster.remove_node(node, allow_graceful=False)
            train(group, 2)
            assert_undisturbed(group)
            assert len(group.recoveries) == 2
            group.close()
    assert not leaked()


@pytest.mark.campaign
def test_an_actor_whose_state_cannot_move_stays_to_the_end(ray_cluster: Cluster, tmp_path: Path) -> None:
    """Where no other node can receive the state, the actor works until its node ends, which is then an ordinary
    loss."""
    checkpoint = CheckpointConfig(local_directory=str(tmp_path / "local"), save_interval=1, replication=False)
    with nodes_with_room(ray_cluster, 1, 3) as (spot, _), make_group(tmp_path, checkpoint) as group:
        train(group, 2)
        drain(ray_cluster, spot.node_id, 600.0)
        wait_until(
            lambda: any(event.kind == EventKind.NOTICE for event in read(tmp_path / "run")), "the notice is not noted"
        )
        train(group, 2)
        assert not group.recoveries
        assert spot.node_id in group.nodes.values()
        ray_cluster.remove_node(spot, allow_graceful=False)
        with pytest.raises(ActorFailed, match="none that all ranks can load"):
            group.run("train_step", batch_of(5), 5)
    assert not leaked()
