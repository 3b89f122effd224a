"""A group of actors keeps who lives, replaces who is lost, and comes to the weights of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ray_trainer import Trainer, batch_of, plan_fault, weights_after

from outlast import CheckpointConfig, FaultToleranceConfig
from outlast.ray import ActorGroup, RecoveryConfig
from outlast.ray.report import LossKind, RecoveryReport

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
RECOVERY = RecoveryConfig(examine_timeout=3.0, ping_timeout=15.0, abort_timeout=20.0, max_recoveries=8)
"""Patient enough for a busy machine; nobody who only has to wait is to be taken for lost."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="module")
def group(ray_cluster: object, folder: Path) -> Iterator[ActorGroup]:
    """Run dp2 x tp2 with two spares; each test goes on from where the one before left it."""
    with ActorGroup(
        Trainer,
        mesh={"dp": 2, "tp": 2},
        args=(str(folder),),
        num_spares=2,
        checkpoint=CheckpointConfig(
            local_directory=str(folder / "local"), non_persistent_save_interval=1, async_save=False
        ),
        fault_tolerance=FaultToleranceConfig(rank_section_timeouts={"step": 10.0}, num_warmup_iterations=0),
        recovery=RECOVERY,
        run_dir=str(folder / "run"),
    ) as group:
        yield group


def train(group: ActorGroup, num_steps: int) -> None:
    """Make steps, and see that their results come from the right shards, in order."""
    for _ in range(num_steps):
        iteration = (group.iteration or 0) + 1
        batch = batch_of(iteration)
        results = group.run("train_step", batch, iteration)
        assert results == [float(shard.sum()) for shard in batch.chunk(2)]
        assert group.iteration == iteration


def assert_undisturbed(group: ActorGroup) -> None:
    """Compare every rank's weights, bit by bit, with those of a run without failures."""
    expected = weights_after(group.iteration or 0)
    for rank, weights in enumerate(group.run("weights", dispatch="pass_through")):
        assert torch.equal(weights, expected[rank % 2]), f"rank {rank}"


def recover_from(group: ActorGroup, folder: Path, faults: dict[int, str], where: str = "middle") -> RecoveryReport:
    """Have ranks fail in the next step, see that only these are replaced, and return the report."""
    before, iteration = group.pids, (group.iteration or 0) + 1
    num_recoveries = len(group.recoveries)
    for rank, kind in faults.items():
        plan_fault(folder, where, iteration, rank, kind)
    train(group, 1)
    reports = group.recoveries[num_recoveries:]
    assert len(reports) == 1
    report = reports[0]
    replaced = {rank for rank, kind in faults.items() if kind != "exception"}
    assert {rank for rank, pid in group.pids.items() if pid != before[rank]} == replaced
    assert report.kept == {rank: pid for rank, pid in before.items() if rank not in replaced}
    assert set(report.replaced) == replaced
    assert {one.rank for one in report.lost} == set(faults)
    assert report.repeated
    assert report.iteration == report.begun_at == iteration - 1
    train(group, 2)
    assert_undisturbed(group)
    return report


def test_undisturbed_steps_give_the_weights_of_one_process(group: ActorGroup) -> None:
    """Four actors train to exactly the weights that one process computes."""
    train(group, 3)
    assert_undisturbed(group)
    assert not group.recoveries


def test_only_the_killed_actor_is_replaced(group: ActorGroup, folder: Path) -> None:
    """One is killed while its peers are in an all-reduce: they keep processes and state, and it alone is made anew."""
    report = recover_from(group, folder, {2: "kill"}, "begin")
    assert [one.kind for one in report.lost] == [LossKind.DIED]
    assert report.loaded == (2,)
    assert report.generation == report.iteration
