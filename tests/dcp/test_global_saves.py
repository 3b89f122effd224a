"""Checkpoints of the global tier are restored by outlast and by PyTorch's own readers."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lanes import Lanes, flat_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from outlast.checkpoint.dcp.reader import VerifiedReader, read_rank
from outlast.checkpoint.dcp.reshard import load_resharded
from outlast.checkpoint.state import capture, decode
from outlast.checkpoint.verification import VerifiedFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _train(seed: int = 0) -> dict[str, object]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 8))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optim.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optim.step()
    return {"model": model, "optim": optim, "losses": [1.5, 2.5], "array": np.arange(5), "pair": (torch.ones(3), 4)}


def _fresh() -> dict[str, object]:
    torch.manual_seed(99)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 8))
    return {
        "model": model,
        "optim": torch.optim.AdamW(model.parameters(), lr=0.5),
        "losses": [],
        "array": np.zeros(5),
        "pair": None,
    }


def _flat_tensors(state: dict[str, object]) -> dict[str, torch.Tensor]:
    captured = capture(state)
    found = {f"model.{name}": value for name, value in captured["model"].items()}
    for index, moments in captured["optim"]["state"].items():
        found |= {f"optim.{index}.{name}": value for name, value in moments.items()}
    return found


def _assert_same(first: dict[str, object], second: dict[str, object]) -> None:
    own, other = _flat_tensors(first), _flat_tensors(second)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) and own[name].dtype == other[name].dtype for name in own)
    assert first["losses"] == second["losses"]
    assert first["optim"].param_groups[0]["lr"] == second["optim"].param_groups[0]["lr"]
    assert np.array_equal(first["array"], second["array"])


def test_a_rank_restores_exactly_its_own_state(tmp_path: Path) -> None:
    """Of ranks with equal parameters, each restores its own random numbers, plain values and differing tensors."""
    states = [_train() for _ in range(3)]
    for rank, state in enumerate(states):
        state["losses"] = [float(rank)]
        state["model"][1].running_mean.fill_(rank)
    flats = [
        flat_state(capture(state), {"torch": torch.full((7,), rank, dtype=torch.uint8), "seed": rank})
        for rank, state in enumerate(states)
    ]

    with Lanes(str(tmp_path / "g"), 3) as lanes:
        assert lanes.save(flats, 12) == [None, None, None]
        manifest = lanes.directory.manifest(12)
        for rank, state in enumerate(states):
            found = read_rank(VerifiedFiles(lanes.directory, manifest), rank)
            saved = decode(found.tree, found.tensors.__getitem__)
            expected = decode(flats[rank].tree, {named.name: named.tensor for named in flats[rank].tensors}.__getitem__)
            assert saved["random"]["seed"] == rank
            assert torch.equal(saved["random"]["torch"], expected["random"]["torch"])
            assert saved["state"]["losses"] == [float(rank)]
            assert saved["state"]["pair"][1] == 4
            assert torch.equal(saved["state"]["model"]["1.running_mean"], torch.full((24,), float(rank)))
            for name, tensor in capture(state)["model"].items():
                assert torch.equal(saved["state"]["model"][name], tensor)
            assert isinstance(saved["state"]["model"], collections.OrderedDict)
            assert saved["state"]["model"]._metadata == capture(state)["model"]._metadata


def test_equal_tensors_are_written_once_by_all_ranks(tmp_path: Path) -> None:
    """Tensors that are equal on all ranks are stored once, and each rank writes a share of them."""
    tensors = {f"t{index}": torch.randn(100, 100) for index in range(8)}
    with Lanes(str(tmp_path), 4) as lanes:
        assert lanes.save([flat_state(tensors)] * 4, 1) == [None] * 4
        manifest = lanes.directory.manifest(1)
    sizes = [file.num_bytes for file in manifest.files]
    assert len(sizes) == 4
    assert max(sizes) < 1.05 * min(sizes)
    assert sum(sizes) < 1.1 * 8 * 40_000
    assert all(len(item.pieces) == 1 for item in manifest.items)


def test_dcp_load_restores_a_checkpoint(tmp_path: Path) -> None:
    """`dcp.load` by path fills model, optimizer and plain values, without a process group."""
    state = _train()
    with Lanes(str(tmp_path), 1) as lanes:
        assert lanes.save([flat_state(capture(state))], 3) == [None]

    for reader in (None, VerifiedReader(tmp_path / "step-3")):
        fresh = _fresh()
        optim = fresh["optim"]
        fresh["model"](torch.randn(4, 16)).square().mean().backward()
        optim.step()
        target = capture(fresh)
        if reader is None:
            dcp.load(target, checkpoint_id=tmp_path / "step-3")
        else:
            dcp.load(target, storage_reader=reader)
        fresh["model"].load_state_dict(target["model"])
        optim.load_state_dict(target["optim"])
        fresh["losses"], fresh["array"] = target["losses"], target["array"]
        _assert_same(fresh, state)
        assert target["pair"][1] == 4
        assert torch.equal(target["pair"][0], torch.ones(3))


def test_dcp_load_restores_stateful_objects_in_place(tmp_path: Path) -> None:
    """`dcp.load({"model": model})` loads a checkpoint of outlast into a live model."""
    state = _train()
    with Lanes(str(tmp_path), 1) as lanes:
        assert lanes.save([flat_state(capture(state))], 3) == [None]
    fresh = _fresh()
    dcp.load({"model": fresh["model"]}, checkpoint_id=str(tmp_path / "step-3"))
    for name, value in capture(state)["model"].items():
        assert torch.equal(fresh["model"].state_dict()[name], value)


def test_dcp_to_torch_save_converts_a_checkpoint(tmp_path: Path) -> None:
    """`dcp_to_torch_save` makes a file that is nested as the state was, without objects of outlast."""
    state = _train()
    with Lanes(str(tmp_path / "g"), 2) as lanes:
        assert lanes.save([flat_state(capture(state))] * 2, 3) == [None, None]
    dcp_to_torch_save(tmp_path / "g" / "step-3", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    assert found.keys() == capture(state).keys()
    for name, value in capture(state)["model"].items():
        saved_model = found["model"]
        for key in [name]:
            saved_model = saved_model[key]
        assert torch.equal(saved_model, value)
    assert found["losses"] == [1.5, 2.5]
    assert found["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)


def test_another_world_size_loads_into_untouched_objects(tmp_path: Path) -> None:
    """One rank loads the checkpoint of two ranks: model, an optimizer that took no step, plain values; nothing
    changes before `apply`."""
    state = _train()
    with Lanes(str(tmp_path), 2) as lanes:
        assert lanes.save([flat_state(capture(state))] * 2, 3) == [None, None]
        fresh, untouched = _fresh(), _fresh()
        loaded = load_resharded(VerifiedFiles(lanes.directory, lanes.directory.manifest(3)), fresh)
        for name, value in untouched["model"].state_dict().items():
            assert torch.equal(fresh["model"].state_dict()[name], value)
        assert fresh["optim"].state_dict()["state"] == {}
        assert loaded.num_bytes_read > 0
        loaded.apply()
    _assert_same(fresh, state)
    assert fresh["pair"][1] == 4
