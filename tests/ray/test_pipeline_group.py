"""Pipeline and context parallel actors recover from kills, with their own groups and with Megatron-Core's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray_pipeline
import torch
from docs_blocks import MEGATRON, block_of
from ray_pipeline import PipelineTrainer, owner_of, sequences_of, undisturbed
from ray_trainer import plan_fault

from outlast import CheckpointConfig, FaultToleranceConfig
from outlast.ray import ActorGroup, Mesh, MeshDispatch, RecoveryConfig
from outlast.ray.watch import LossKind

pytestmark = [
    pytest.mark.extended,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about each missing optional package
]
RECOVERY = RecoveryConfig(
    examine_timeout=3.0, ping_timeout=15.0, abort_timeout=20.0, spare_wait=300.0, max_recoveries=3
)
MESH = {"pp": 2, "cp": 2, "ep": 2}


def megatron_trainer() -> type[PipelineTrainer]:
    """Return the trainer that uses Megatron-Core's groups in every other step; constructed as the docs page shows."""
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(block_of("ray.md", MEGATRON), namespace)
    base = namespace["MegatronActor"]

    class MegatronTrainer(PipelineTrainer, base):  # type: ignore[misc, valid-type]
        def regroup(self) -> None:
            base.regroup(self)
            self.inject_fault("regroup", -1)

        def peers(self, axis: str, iteration: int) -> Any:
            from megatron.core import parallel_state

            if iteration % 2:
                return self.group(axis)
            if axis == "pp":
                return parallel_state.get_pipeline_model_parallel_group()
            return parallel_state.get_context_parallel_group()

        def view(self) -> dict[str, Any]:
            """Return Megatron-Core's view of this actor's position."""
            import torch.distributed as dist
            from megatron.core import parallel_state

            groups = {
                "pp": parallel_state.get_pipeline_model_parallel_group(),
                "dp": parallel_state.get_data_parallel_group(),
                "cp": parallel_state.get_context_parallel_group(),
                "tp": parallel_state.get_tensor_model_parallel_group(),
                "edp": parallel_state.get_expert_data_parallel_group(),
                "ep": parallel_state.get_expert_model_parallel_group(),
                "etp": parallel_state.get_expert_tensor_parallel_group(),
            }
            return {
                "groups": {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()},
                "ours": {axis: self.members(axis) for axis in groups},
                "has_last_stage": parallel_state.is_pipeline_last_stage(
                    ignore_virtual=False, vp_stage=ray_pipeline.CHUNKS - 1
                ),
                "gives_result": MeshDispatch().wants_result(self.place),
            }

    return MegatronTrainer


@contextmanager
def running_group(trainer: type[PipelineTrainer], folder: Path, mesh: dict[str, int]) -> Iterator[ActorGroup]:
    local = CheckpointConfig(local_directory=str(folder / "local"), non_persistent_save_interval=1, async_save=False)
    with ActorGroup(
        trainer,
        mesh=mesh,
        args=(str(folder),),
        num_spares=1,
        checkpoint=local,
        fault_tolerance=FaultToleranceConfig(rank_section_timeouts={"step": 6.0}, num_warmup_iterations=0),
        recovery=RECOVERY,
    ) as group:
        yield group


def train(group: ActorGroup, num_steps: int) -> None:
    """Make steps, and check that the loss of each is that of one process and comes from the last virtual stage."""
    for _ in range(num_steps):
        iteration = (group.iteration or 0) + 1
        _, losses = undisturbed(iteration)
        assert group.run("train_step", sequences_of(iteration), iteration) == losses[-1:]


def assert_undisturbed(group: ActorGroup) -> None:
    """Compare every stage's weights, bit by bit, with those of a run without failures."""
    expected, _ = undisturbed(group.iteration or 0)
    for rank, weights in enumerate(group.run("weights", dispatch="pass_through")):
        own = [stage for stage in range(len(expected)) if owner_of(stage, 2) == group.mesh.place(rank).pp]
        assert torch.equal(weights, torch.stack([expected[stage] for stage in own])), f"rank {rank}"


def recover_from(group: ActorGroup, folder: Path, where: str, rank: int, kind: str, expected: LossKind) -> None:
    """Make a rank fail in the next step; check that only this rank is replaced and all others keep their state."""
    before, iteration, num_recoveries = group.pids, (group.iteration or 0) + 1, len(group.recoveries)
    plan_fault(folder, where, iteration, rank, kind)
    train(group, 1)
    (report,) = group.recoveries[num_recoveries:]
    assert [(one.rank, one.kind) for one in report.lost] == [(rank, expected)]
    assert report.kept == {other: pid for other, pid in before.items() if other != rank}
    assert (report.loaded, report.iteration, report.repeated) == ((rank,), iteration - 1, True)
    train(group, 2)
    assert_undisturbed(group)


def assert_views(group: ActorGroup) -> None:
    """Check that Megatron-Core's groups have the members of the mesh's groups, and that the actor with the last virtual
    stage returns the results."""
    for view in group.run("view", dispatch="pass_through"):
        assert view["groups"] == view["ours"]
        assert view["has_last_stage"] or not view["gives_result"]


@pytest.mark.campaign
def test_megatron_groups_are_rebuilt_after_faults(ray_cluster: object, tmp_path: Path) -> None:
    """With pp2 x cp2 and two virtual stages per actor, one actor of the last stage is killed while its peers receive,
    and one of the first stage while its peers send gradients. Megatron-Core's groups are rebuilt, and weights and
    losses are those of one process. Expert axes extend over cp, as in Megatron-Core."""
    with running_group(megatron_trainer(), tmp_path, MESH) as group:
        assert_views(group)
        train(group, 2)
        assert_undisturbed(group)
        recover_from(group, tmp_path, "middle", 3, "kill", LossKind.DIED)
        assert_views(group)
        recover_from(group, tmp_path, "begin", 0, "kill", LossKind.DIED)
        assert_views(group)
        batch = sequences_of(1)
        (loss,) = undisturbed(1)[1]
        assert group.run("evaluate", batch, "interleaved") == [loss]
        assert group.run("evaluate", batch, "folded", dispatch=MeshDispatch(result_stage=0)) == [loss]
        assert group.run("evaluate", batch, "folded") == [None]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("where", "rank", "kind"), [("middle", 2, "sleep"), ("update", 1, "kill"), ("begin", 1, "stop")]
)
def test_a_pipeline_recovers_from_hangs_and_torn_updates(
    ray_cluster: object, tmp_path: Path, where: str, rank: int, kind: str
) -> None:
    """An actor of the pipeline hangs between forward and backward, dies in its update, or is stopped."""
    with running_group(PipelineTrainer, tmp_path, {"pp": 2, "cp": 2}) as group:
        train(group, 2)
        before, num_recoveries = group.pids, len(group.recoveries)
        plan_fault(tmp_path, where, 3, rank, kind)
        train(group, 3)
        (report,) = group.recoveries[num_recoveries:]
        assert rank in {one.rank for one in report.lost}
        assert report.kept == {other: pid for other, pid in before.items() if other != rank}
        assert_undisturbed(group)


@pytest.mark.campaign
def test_groups_with_all_axes_survive_a_kill(ray_cluster: object, tmp_path: Path) -> None:
    """With every axis but the data axis of size 2, each group of Megatron-Core has the members of the mesh's group,
    before and after an actor is killed; its tensor parallel peers compute the same values."""
    mesh = {"pp": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 1}
    with running_group(megatron_trainer(), tmp_path, mesh) as group:
        assert_views(group)
        train(group, 2)
        plan_fault(tmp_path, "begin", 3, 5, "kill")
        train(group, 2)
        assert set(group.recoveries[-1].replaced) == {5}
        assert_views(group)
        assert_undisturbed(group)


def test_the_tested_mesh_has_two_experts_without_replicas() -> None:
    """Expert axes extend over the context slices of a stage: two actors with different experts, no replica."""
    assert Mesh.of(MESH).expert_sizes == (2, 1, 2, 1)
