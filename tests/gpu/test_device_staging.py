"""Saves of a state that lies on the device: pinned once, copied in a stream of its own, held back for, and whole."""

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
"""Some 0.2 s of a GPU."""
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
    """A model on the device, and its optimizer; what it holds is known without the device."""

    def __init__(self, device: torch.device) -> None:
        layers = [torch.nn.Linear(SIDE, SIDE) for _ in range(NUM_LAYERS)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.model.register_buffer("running", torch.zeros(SIDE, SIDE, device=device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.odd = torch.zeros(3, 5, dtype=torch.bfloat16, device=device)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer, "odd": self.odd, "note": "as saved"}
        self.set(0)

    def expected(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the host's copy of what :meth:`set` gives."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randint(-128, 128, tensor.shape, generator=generator).to(tensor.dtype)
            for name, tensor in {**self.model.state_dict(), "odd": self.odd}.items()
        }

    def set(self, seed: int) -> dict[str, torch.Tensor]:
        """Give every tensor new values, in the current stream; return the host's copy of them."""
        expected = self.expected(seed)
        live = {**self.model.state_dict(), "odd": self.odd}
        for name, tensor in expected.items():
            live[name].copy_(tensor)
        return expected

    def content(self) -> dict[str, torch.Tensor]:
        """Return what it holds, on the host."""
        return {name: tensor.cpu() for name, tensor in {**self.model.state_dict(), "odd": self.odd}.items()}


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def manage(folder: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(local_directory=os.fspath(folder), **settings))


def begin_overlapped(device: torch.device, folder: Path) -> tuple[Training, CheckpointManager]:
    """Return a training whose optimizer has stepped since its second save, so that the third is copied late."""
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
def test_every_save_is_the_state_of_its_call(device: torch.device, tmp_path: Path, overlap: bool) -> None:
    """Whatever the device is given right after each save, what is loaded is what was at the call, to the bit: also if
    save() has returned before it was copied, as the optimizer's step is held back on the device."""
    training, manager = Training(device), manage(tmp_path / "saves", overlap_staging=overlap)
    manager.load_latest(training.state)
    expected = {}
    for iteration in range(1, 5):
        expected[iteration] = training.set(iteration)
        training.optimizer.step()
        manager.save(training.state, iteration)
        training.optimizer.step()  # does nothing, but what follows it in the stream comes after the copy
        training.set(-iteration)
        manager.wait(TIMEOUT_S)
    manager.close()
    iteration, found = load(tmp_path / "saves", device)
    assert iteration == 4
    assert is_same(found, expected[4])


@needs_gpu("a CPU does not run behind")
def test_a_save_takes_what_the_device_is_yet_to_compute(device: torch.device, tmp_path: Path) -> None:
    """A save that is called while the device is far behind has the values that the work given before it will have
    made, and nothing of the work that is given after it."""
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
def test_a_step_waits_on_the_device_and_not_on_the_host(device: torch.device, tmp_path: Path) -> None:
    """With overlap_staging neither save() nor the optimizer's step has the host wait for the device, for the large
    tensors: torch raises where it is asked to synchronise, but for the small ones that save() copies at once."""
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
def test_nothing_is_allocated_after_the_first_saves(device: torch.device, tmp_path: Path) -> None:
    """Once both buffers have been used, a save takes no new memory of the device from the driver, and none that is
    pinned on the host."""
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


def spied(patch: pytest.MonkeyPatch, device: torch.device) -> dict[str, list[Any]]:
    """Note what is pinned and released; return the notes."""
    copies = copies_of(device)
    assert copies is not None
    notes: dict[str, list[Any]] = {"pin": [], "unpin": []}
    for name in notes:
        call: Callable[..., Any] = getattr(copies, name)

        def note(*arguments: Any, name: str = name, call: Callable[..., Any] = call) -> Any:
            found = call(*arguments)
            notes[name].append((arguments[0], found))
            return found

        patch.setattr(copies, name, note)
    return notes


@needs_gpu("there is nothing to pin for")
def test_the_buffers_are_pinned_once_and_released(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver registers the memory that the writer owns, each buffer once; torch then takes it for pinned. Closing
    undoes it, after which the same addresses can be registered again."""
    notes = spied(monkeypatch, device)
    training, manager = Training(device), manage(tmp_path / "saves")
    manager.load_latest(training.state)
    for iteration in range(1, 6):
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    arenas = list(manager._arenas._known.values())
    pinned = [torch.from_numpy(arena.array).is_pinned() for arena in arenas]
    manager.close()
    await_release()
    assert 1 <= len(notes["pin"]) <= 2
    assert all(is_pinned for _, is_pinned in notes["pin"]), "this machine's driver pins no shared memory"
    assert all(pinned)
    assert sorted(address for address, _ in notes["unpin"]) == sorted(address for address, _ in notes["pin"])


@needs_gpu("there is nothing to pin for")
def test_a_refused_pin_leaves_no_error_behind(device: torch.device) -> None:
    """The driver refuses to register an address twice; the next kernel does not report that as its own failure."""
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
def test_a_process_ends_well_while_its_memory_is_released() -> None:
    """A process that ends right after it has closed its buffers is not aborted: no thread is cut off in the driver."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE], timeout=TIMEOUT_S, check=False, text=True, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@needs_gpu("graphs are the GPU's")
def test_a_graph_can_be_captured_while_a_save_is_copied(device: torch.device, tmp_path: Path) -> None:
    """Neither the threads that wait for a copy nor the optimizer's hook end a capture; an optimizer that is captured is
    held back on the host, and its tensors are copied at once from then on."""
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
    """Make the device begin with copies some 0.2 s late, except for the first ones, for which a save waits."""
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
def test_the_first_replay_of_a_graph_changes_no_save(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_watched: bool
) -> None:
    """A graph that contains the optimizer's step is captured early, steps run without it, and its first replay follows
    an overlapped save at once, while the device is late with copies: the save holds the state of its call."""
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
    """A parameter that changes between an overlapped save and the next step fails the save, if the device has not
    copied the state by then; the next save is committed."""
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
