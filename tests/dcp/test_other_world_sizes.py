"""Checkpoints that one number of ranks saves and another number of ranks loads, with real ranks."""

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
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Four ranks train and save; two ranks load and save; four ranks load."""
    folder = tmp_path_factory.mktemp("global")
    return folder, [_run(folder, 4, -1, 10), _run(folder, 2, 10, 20), _run(folder, 4, 20, -1)]


@pytest.mark.slow
def test_resharding_4_to_2_to_4_ranks_keeps_every_bit(results: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Sharded (`fully_shard`) and replicated (DDP) models and their Adam states are identical on every rank after
    both loads, including shards of unequal size and empty shards."""
    _, (first, second, third) = results
    assert first[0]["content"]["epoch"] == "3"
    assert len(first[0]["content"]) > 30
    for result in [*first, *second, *third]:
        assert result["content"] == first[0]["content"]


def test_resharded_ranks_train_identically(results: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """The replicated model, which gets the same batches with any number of ranks, has the same weights after more
    training."""
    _, (first, second, third) = results
    expected = {name: value for name, value in first[0]["after"].items() if name.startswith("ddp.")}
    assert expected != {name: value for name, value in first[0]["content"].items() if name.startswith("ddp.")}
    for result in [*second, *third]:
        assert {name: value for name, value in result["after"].items() if name.startswith("ddp.")} == expected


@pytest.mark.slow
def test_each_rank_of_the_same_world_size_gets_its_own_state(results: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """As many ranks as saved restore distributed tensors in their layout, and each rank its own plain values."""
    _, (first, second, _) = results
    for ranks in (first, second):
        for rank, result in enumerate(ranks):
            assert result["again"] == result["content"]
            assert result["rank"] == rank


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("verified", [False, True])
def test_one_process_without_a_group_reads_the_shards(
    results: tuple[Path, list[list[dict[str, Any]]]], verified: bool
) -> None:
    """`dcp.load`, with its own reader and with VerifiedReader, assembles full tensors from the files of four ranks."""
    folder, (first, _, _) = results
    state = {"fsdp": {"0.weight": torch.zeros(7, 5), "2.bias": torch.zeros(3)}}
    if verified:
        dcp.load(state, storage_reader=VerifiedReader(folder / "step-10"))
    else:
        dcp.load(state, checkpoint_id=folder / "step-10")
    for name, tensor in state["fsdp"].items():
        digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        assert digest == first[0]["content"][f"fsdp.{name}"]
