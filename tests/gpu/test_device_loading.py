"""Loads of a state onto the device: copied while it is verified, from memory, from disk, or through the host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from device_runs import needs_gpu

from outlast import env
from outlast.checkpoint import CheckpointManager, landing
from outlast.checkpoint.shard import CHUNK_BYTES
from outlast.checkpoint.writer_client import WriterProcess
from outlast.config import CheckpointConfig
from outlast.errors import CheckpointError
from outlast.runtime.device_copies import copies_of
from outlast.runtime.device_digest import find_digests

pytestmark = [pytest.mark.gpu, pytest.mark.process]

SIDE, NUM_LAYERS = 1024, 8
TIMEOUT_S = 100.0


class Training:
    """A model on the device and an optimizer with two moments; its values are known without the device."""

    def __init__(self, device: torch.device, *, has_stepped: bool = True) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(NUM_LAYERS))).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer}
        if has_stepped:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all large tensors, by name."""
        found = dict(self.model.state_dict())
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": values[name] for name in ("exp_avg", "exp_avg_sq")}
        return found

    def set(self, seed: int) -> dict[str, torch.Tensor]:
        """Set every tensor to new values; return the host's copy of the values."""
        generator = torch.Generator().manual_seed(seed)
        expected = {}
        for name, tensor in self.tensors().items():
            expected[name] = torch.randint(0, 256, tensor.shape, generator=generator).to(tensor.dtype)
            tensor.copy_(expected[name])
        return expected

    def content(self) -> dict[str, torch.Tensor]:
        """Return the values, on the host."""
        return {name: tensor.cpu() for name, tensor in self.tensors().items()}


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def manage(folder: Path) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(local_directory=os.fspath(folder / "saves")))


@pytest.fixture(params=["local", "memory"])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the tier of the load: files, or the memory of a writer that outlives the manager."""
    if request.param == "local":
        yield "local"
        return
    writer = WriterProcess()
    monkeypatch.setenv(env.WRITER, writer.address)
    yield "memory"
    writer.close()


def save(device: torch.device, folder: Path) -> dict[str, torch.Tensor]:
    """Save a state; return its values."""
    training, manager = Training(device), manage(folder)
    expected = training.set(5)
    manager.load_latest(training.state)
    manager.save(training.state, 7).wait(TIMEOUT_S)
    manager.close()
    return expected


@pytest.fixture
def device_counts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return how many tensors of each shard are copied to the device during the read, and how many chunks are digested
    there."""
    found: list[tuple[int, int]] = []
    finish = landing.Landing.finish

    def count(this: landing.Landing) -> Mapping[int, str]:
        digested = finish(this)
        found.append((len(this.tensors), len(digested)))
        return digested

    monkeypatch.setattr(landing.Landing, "finish", count)
    return found


@pytest.fixture(params=[True, False], ids=["digested on the device", "on the host"])
def digests(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the device digests the loaded data: all of a small state, once its kernel is compiled."""
    is_on_device = request.param and device.type != "cpu"
    if is_on_device:
        assert find_digests(device, CHUNK_BYTES) is not None, "NVRTC comes with torch"
    monkeypatch.setattr(landing, "MIN_DIGESTED_CHUNKS", 1 if is_on_device else 1 << 40)
    return is_on_device


@pytest.mark.parametrize("has_stepped", [True, False], ids=["stepped", "fresh"])
def test_a_load_restores_the_saved_state(
    device: torch.device,
    tmp_path: Path,
    tier: str,
    device_counts: list[tuple[int, int]],
    has_stepped: bool,
    digests: bool,
) -> None:
    """Model and optimizer are bit-identical to the saved state, also where the optimizer has no state yet; the tensors
    are on the device, and all large ones were copied to it during verification, by the device where it can."""
    expected = save(device, tmp_path)
    other, manager = Training(device, has_stepped=has_stepped), manage(tmp_path)
    restored = manager.load_latest(other.state)
    manager.close()
    assert restored is not None
    assert (restored.iteration, restored.tier) == (7, tier)
    assert is_same(other.content(), expected)
    assert {tensor.device for tensor in other.tensors().values()} == {device}
    if device.type != "cpu":
        num_tensors, num_digested = device_counts[0]
        assert num_tensors == 3 * NUM_LAYERS, "weights and two moments; biases are small"
        assert (num_digested > 0) == digests


@needs_gpu("there is no memory of a device")
def test_a_load_returns_its_device_memory_to_the_driver(device: torch.device, tmp_path: Path) -> None:
    """Device memory that the load used in addition to the live state is returned to the driver, not only to the
    allocator's cache."""
    save(device, tmp_path)
    other, manager = Training(device), manage(tmp_path)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    manager.load_latest(other.state)
    manager.close()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    assert allocated <= before[0] + (1 << 20)
    assert reserved <= before[1] + (64 << 20)


def test_a_full_device_is_loaded_through_the_host(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device has no spare memory, the state is loaded through host memory, and is correct."""
    expected = save(device, tmp_path)
    monkeypatch.setattr("outlast.runtime.device_copies.DeviceCopies.make_room", lambda *_, **__: [])
    other, manager = Training(device), manage(tmp_path)
    manager.load_latest(other.state)
    manager.close()
    assert is_same(other.content(), expected)


@pytest.mark.usefixtures("digests")
def test_a_damaged_copy_never_reaches_the_live_state(device: torch.device, tmp_path: Path) -> None:
    """One flipped bit is detected before the live state is changed: the copy is rejected, and the device keeps its
    values."""
    save(device, tmp_path)
    path = max((tmp_path / "saves").rglob("step-7/*"), key=lambda one: one.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    other, manager = Training(device), manage(tmp_path)
    before = other.set(6)
    with pytest.raises(CheckpointError, match="differs from its digest"):
        manager.load_latest(other.state)
    manager.close()
    assert is_same(other.content(), before)


@needs_gpu("its kernel is CUDA's")
def test_device_and_host_digests_of_chunks_are_equal(device: torch.device) -> None:
    """Random chunks in any order have the digests that the host computes; one changed bit changes the digest of its
    chunk alone, and the data that is copied at the same time is correct."""
    digests, number = find_digests(device, CHUNK_BYTES), 40
    assert digests is not None
    generator = torch.Generator().manual_seed(3)
    host = torch.randint(0, 256, (number, CHUNK_BYTES), dtype=torch.uint8, generator=generator)
    there = host.to(device)
    order = torch.randperm(number, generator=generator).tolist()
    found = torch.zeros(number, dtype=torch.int64, device=device)
    target = torch.zeros(1000, dtype=torch.uint8, device=device)

    def compute() -> list[int]:
        pairs = [(there[3, 500:1500], target)]
        copies = copies_of(device)
        assert digests is not None
        assert copies is not None
        behind = copies.queue((), copies.note_work())
        assert digests.queue([there[chunk] for chunk in order], found, behind, pairs).wait(TIMEOUT_S)
        return [value % (1 << 64) for value in found.tolist()]

    before = compute()
    assert before == [xxhash.xxh3_64_intdigest(host[chunk].numpy().data) for chunk in order]
    assert torch.equal(target.cpu(), host[3, 500:1500])
    for byte in (
        0,
        7,
        1023,
        1024,
        CHUNK_BYTES // 2 + 13,
        CHUNK_BYTES - 65,
        CHUNK_BYTES - 64,
        CHUNK_BYTES - 1,
    ):
        there[order[5], byte] ^= 16
        after = compute()
        assert [place for place in range(number) if after[place] != before[place]] == [5]
        assert after[5] == xxhash.xxh3_64_intdigest(there[order[5]].cpu().numpy().data)
        there[order[5], byte] ^= 16
