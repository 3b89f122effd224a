"""Saves of a state on the device: pinned buffers, a separate copy stream, held-back optimizer steps, consistent
copies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runs import needs_gpu

from lagging_device import await_release
from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig
from outlast.errors import CheckpointError
from outlast.runtime.device_copies import copies_of

pytestmark = [pytest.mark.gpu, pytest.mark.process]

SIDE, NUM_LAYERS = 1024, 6
TIMEOUT_S = 100.0
SLEEP_CYCLES = 400_000_000
"""About 0.2 s on a GPU."""
ENDS_AT_ONCE = """
import os, threading, torch
from outlast.checkpoint.arena import Arena
from outlast.runtime.device_copies import copies_of
fd = os.memfd_create("arena")
os.ftruncate(fd, 2 << 30)
arena = Arena(fd)
arena.touch(threading.Event())
arena.pin(copies_of(torch.device("cuda", 0)))
arena.close()
"""


class Training:
    """A model on the device, and its optimizer; its values are known without the device."""

    def __init__(self, device: torch.device) -> None:
        layers = [torch.nn.Linear(SIDE, SIDE) for _ in range(NUM_LAYERS)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.model.register_buffer("running", torch.zeros(SIDE, SIDE, device=device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.odd = torch.zeros(3, 5, dtype=torch.bfloat16, device=device)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer, "odd": self.odd, "note": "as saved"}
        self.set(0)

    def expected(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the host's copy of the values that :meth:`set` sets."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randint(-128, 128, tensor.shape, generator=generator).to(tensor.dtype)
            for name, tensor in {**self.model.state_dict(), "odd": self.odd}.items()
        }

    def set(self, seed: int) -> dict[str, torch.Tensor]:
        """Set every tensor to new values, in the current stream; return the host's copy of the values."""
        expected = self.expected(seed)
        live = {**self.model.state_dict(), "odd": self.odd}
        for name, tensor in expected.items():
            live[name].copy_(tensor)
        return expected

    def content(self) -> dict[str, torch.Tensor]:
        """Return the values, on the host."""
        return {name: tensor.cpu() for name, tensor in {**self.model.state_dict(), "odd": self.odd}.items()}


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def manage(folder: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(local_directory=os.fspath(folder), **settings))


def begin_overlapped(device: torch.device, folder: Path) -> tuple[Training, CheckpointManager]:
    """Return a training whose optimizer has stepped since its second save, so that the third save is copied late."""
    training, manager = Training(device), manage(folder, overlap_staging=True)
    manager.load_latest(training.state)
    for iteration in (1, 2):
        training.optimizer.step()
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    training.optimizer.step()
    return training, manager


def load(folder: Path, device: torch.device) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the newest checkpoint of a folder, loaded into another training."""
    other, manager = Training(device), manage(folder)
    other.set(999)
    restored = manager.load_latest(other.state)
    manager.close()
    assert restored is not None
    assert other.state["note"] == "as saved"
    return restored.iteration, other.content()


@pytest.mark.parametrize("overlap", [False, True], ids=["at_once", "beside_training"])
def test_every_save_has_the_state_of_its_call(device: torch.device, tmp_path: Path, overlap: bool) -> None:
    """Whatever work follows a save, the loaded state is bit-identical to the state at the call, also if save() returns
    before the copy while the optimizer's step is held back on the device."""
    training, manager = Training(device), manage(tmp_path / "saves", overlap_staging=overlap)
    manager.load_latest(training.state)
    expected = {}
    for iteration in range(1, 5):
        expected[iteration] = training.set(iteration)
        training.optimizer.step()
        manager.save(training.state, iteration)
        training.optimizer.step()  # changes no value, but makes later work of the stream follow the copy
        training.set(-iteration)
        manager.wait(TIMEOUT_S)
    manager.close()
    iteration, found = load(tmp_path / "saves", device)
    assert iteration == 4
    assert is_same(found, expected[4])


@needs_gpu("a CPU does not run behind")
def test_a_save_includes_work_queued_before_it(device: torch.device, tmp_path: Path) -> None:
    """A save that is called while the device is far behind has the results of all work queued before the call, and of
    no work queued after it."""
    training, manager = begin_overlapped(device, tmp_path / "saves")
    torch.cuda._sleep(SLEEP_CYCLES)
    training.optimizer.step()
    expected = training.set(3)
    manager.save(training.state, 3)
    torch.cuda._sleep(SLEEP_CYCLES)
    training.optimizer.step()
    training.set(-3)
    manager.wait(TIMEOUT_S)
    manager.close()
    iteration, found = load(tmp_path / "saves", device)
    assert iteration == 3
    assert is_same(found, expected)


@needs_gpu("a CPU does not run behind")
def test_a_step_waits_on_the_device_not_on_the_host(device: torch.device, tmp_path: Path) -> None:
    """With overlap_staging neither save() nor the optimizer's step makes the host wait for large tensors: torch raises
    on a synchronisation, except for the small tensors that save() copies at once."""
    training, manager = begin_overlapped(device, tmp_path / "saves")
    handle = manager.save(training.state, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    handle.wait(TIMEOUT_S)
    manager.close()


@needs_gpu("the CPU's allocator counts nothing")
def test_saves_allocate_no_memory_after_the_first_two(device: torch.device, tmp_path: Path) -> None:
    """Once both buffers have been used, a save allocates neither device memory from the driver nor pinned host
    memory."""
    training, manager = Training(device), manage(tmp_path / "saves")
    manager.load_latest(training.state)

    def num_allocations() -> tuple[int, int]:
        host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
        return torch.cuda.memory_stats(device)["num_device_alloc"], host.get("num_host_alloc", 0)

    for iteration in range(1, 4):
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    before = num_allocations()
    for iteration in range(4, 8):
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    assert num_allocations() == before
    manager.close()


def record_pins(patch: pytest.MonkeyPatch, device: torch.device) -> dict[str, list[Any]]:
    """Record which memory is pinned and released; return the records."""
    copies = copies_of(device)
    assert copies is not None
    calls: dict[str, list[Any]] = {"pin": [], "unpin": []}
    for name in calls:
        call: Callable[..., Any] = getattr(copies, name)

        def record(*arguments: Any, name: str = name, call: Callable[..., Any] = call) -> Any:
            found = call(*arguments)
            calls[name].append((arguments[0], found))
            return found

        patch.setattr(copies, name, record)
    return calls


@needs_gpu("there is nothing to pin for")
def test_buffers_are_pinned_once_and_released(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver registers each buffer of the writer once, and torch treats it as pinned. Closing unregisters it, after
    which the same addresses can be registered again."""
    calls = record_pins(monkeypatch, device)
    training, manager = Training(device), manage(tmp_path / "saves")
    manager.load_latest(training.state)
    for iteration in range(1, 6):
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    arenas = list(manager._arenas._known.values())
    pinned = [torch.from_numpy(arena.array).is_pinned() for arena in arenas]
    manager.close()
    await_release()
    assert 1 <= len(calls["pin"]) <= 2
    assert all(is_pinned for _, is_pinned in calls["pin"]), "this machine's driver pins no shared memory"
    assert all(pinned)
    assert sorted(address for address, _ in calls["unpin"]) == sorted(address for address, _ in calls["pin"])


@needs_gpu("there is nothing to pin for")
def test_a_rejected_pin_leaves_no_error_behind(device: torch.device) -> None:
    """The driver rejects a second registration of an address; the next kernel does not report that error as its own."""
    copies = copies_of(device)
    assert copies is not None
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert copies.pin(memory.data_ptr(), memory.numel())
    assert not copies.pin(memory.data_ptr(), memory.numel())
    assert float((torch.ones(8, device=device) + 1).sum()) == 16.0
    copies.unpin(memory.data_ptr())
    copies.unpin(memory.data_ptr())
    assert float((torch.ones(8, device=device) + 1).sum()) == 16.0


@needs_gpu("there is nothing to pin for")
def test_a_process_can_exit_while_memory_is_released() -> None:
    """A process that exits right after it has closed its buffers is not aborted: no thread is interrupted in the
    driver."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE], timeout=TIMEOUT_S, check=False, text=True, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@needs_gpu("graphs are the GPU's")
def test_a_graph_can_be_captured_during_a_save(device: torch.device, tmp_path: Path) -> None:
    """Neither the threads that wait for a copy nor the optimizer's hook end a capture; a captured optimizer is held
    back on the host, and its tensors are copied at once from then on."""
    training, manager = begin_overlapped(device, tmp_path / "saves")
    expected = training.set(3)
    numbers = torch.ones(1024, device=device)
    torch.cuda._sleep(SLEEP_CYCLES)
    handle = manager.save(training.state, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            numbers.mul_(1.0)
        training.optimizer.step()
    graph.replay()
    handle.wait(TIMEOUT_S)
    assert manager._guard.stepping(training.state, 4) == []
    manager.close()
    iteration, found = load(tmp_path / "saves", device)
    assert iteration == 3
    assert is_same(found, expected)


def delay_late_copies(patch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Make the device begin copies about 0.2 s late, except for the first ones, for which a save waits."""
    copies = copies_of(device)
    assert copies is not None
    queue, num_queued = copies.queue, 0

    def lag(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            torch.cuda._sleep(SLEEP_CYCLES)

    def queue_late(*arguments: Any) -> Any:
        nonlocal num_queued
        num_queued += 1
        return queue(*arguments, launch=lag if num_queued > 1 else None)

    patch.setattr(copies, "queue", queue_late)


@needs_gpu("graphs are the GPU's")
@pytest.mark.parametrize("is_watched", [True, False], ids=["captured_after_the_load", "captured_before_it"])
def test_the_first_graph_replay_changes_no_save(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_watched: bool
) -> None:
    """A graph with the optimizer's step is captured early, steps run without it, and its first replay directly follows
    an overlapped save while the device is late with copies: the save has the state of its call."""
    training, manager = Training(device), manage(tmp_path / "saves", overlap_staging=True)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.125
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if is_watched:
        manager.load_latest(training.state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.optimizer.step()
    if not is_watched:
        manager.load_latest(training.state)
    for iteration in (1, 2):
        training.optimizer.step()
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    expected = training.set(3)
    training.optimizer.step()
    for name, parameter in training.model.named_parameters():
        expected[name] = expected[name] - 0.125
        assert torch.equal(parameter.cpu(), expected[name])
    delay_late_copies(monkeypatch, device)
    handle = manager.save(training.state, 3)
    graph.replay()
    handle.wait(TIMEOUT_S)
    assert not torch.equal(training.model[0].weight.cpu(), expected["0.weight"])
    manager.close()
    iteration, found = load(tmp_path / "saves", device)
    assert iteration == 3
    assert is_same(found, expected)


@needs_gpu("a CPU does not run behind")
def test_a_change_during_the_copy_fails_the_save(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter that changes between an overlapped save and the next step fails the save if the device has not copied
    the state yet; the next save is committed."""
    training, manager = begin_overlapped(device, tmp_path / "saves")
    delay_late_copies(monkeypatch, device)
    handle = manager.save(training.state, 3)
    with torch.no_grad():
        training.model[0].weight.add_(1.0)
    with pytest.raises(CheckpointError, match=r"weight' was changed outside optimizer\.step"):
        handle.wait(TIMEOUT_S)
    expected = training.set(4)
    training.optimizer.step()
    manager.save(training.state, 4).wait(TIMEOUT_S)
    manager.close()
    iteration, found = load(tmp_path / "saves", device)
    assert iteration == 4
    assert is_same(found, expected)
