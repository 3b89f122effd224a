"""Checkpoints saved by one number of ranks and loaded by another, with real ranks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from outlast.checkpoint.dcp.reader import VerifiedReader
from outlast.testing import RankProcesses

pytestmark = [pytest.mark.process, pytest.mark.timeout(400), pytest.mark.extended]
SCRIPT = Path(__file__).parent / "sharded_ranks.py"
PATIENCE_S = 120.0


def _run(folder: Path, world: int, to_load: int, to_save: int) -> list[dict[str, Any]]:
    with RankProcesses(SCRIPT, str(folder), str(to_load), str(to_save), world_size=world) as ranks:
        codes = ranks.wait(PATIENCE_S)
        outputs = [ranks.output(rank) for rank in range(world)]
    assert codes == [0] * world, "\n".join(outputs)
    return [json.loads(next(line for line in output.splitlines() if line.startswith("{"))) for output in outputs]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Four ranks train and save, two load and save, four load."""
    folder = tmp_path_factory.mktemp("global")
    return folder, [_run(folder, 4, -1, 10), _run(folder, 2, 10, 20), _run(folder, 4, 20, -1)]


@pytest.mark.slow
def test_4_to_2_to_4_ranks_keep_every_bit(told: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Sharded (`fully_shard`) and replicated (DDP) models and their Adam states are the same after both loads, on every
    rank, shards of unequal size and empty ones included."""
    _, (first, second, third) = told
    assert first[0]["content"]["epoch"] == "3"
    assert len(first[0]["content"]) > 30
    for one in [*first, *second, *third]:
        assert one["content"] == first[0]["content"]


def test_ranks_that_loaded_train_on_alike(told: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """The replicated model, which sees the same batches whatever the number of ranks, comes to the same numbers."""
    _, (first, second, third) = told
    expected = {name: value for name, value in first[0]["after"].items() if name.startswith("ddp.")}
    assert expected != {name: value for name, value in first[0]["content"].items() if name.startswith("ddp.")}
    for one in [*second, *third]:
        assert {name: value for name, value in one["after"].items() if name.startswith("ddp.")} == expected


@pytest.mark.slow
def test_each_of_as_many_ranks_gets_its_own_state_back(told: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Read by as many ranks as saved, the distributed tensors come back in their layout, its own numbers too."""
    _, (first, second, _) = told
    for ranks in (first, second):
        for rank, one in enumerate(ranks):
            assert one["again"] == one["content"]
            assert one["rank"] == rank


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("verified", [False, True])
def test_one_process_without_a_group_reads_the_shards(
    told: tuple[Path, list[list[dict[str, Any]]]], verified: bool
) -> None:
    """Stock `dcp.load`, with its own reader and with ours, puts whole tensors together from what four ranks wrote."""
    folder, (first, _, _) = told
    state = {"fsdp": {"0.weight": torch.zeros(7, 5), "2.bias": torch.zeros(3)}}
    if verified:
        dcp.load(state, storage_reader=VerifiedReader(folder / "step-10"))
    else:
        dcp.load(state, checkpoint_id=folder / "step-10")
    for name, tensor in state["fsdp"].items():
        digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        assert digest == first[0]["content"][f"fsdp.{name}"]
