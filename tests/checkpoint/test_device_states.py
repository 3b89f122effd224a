"""A state on a device: copied into pinned pages, waited for by the next step, and verified while it is loaded.

The device is a test double (:mod:`lagging_device`) that copies late; ``tests/gpu`` has the same tests on a real one.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lagging_device import LaggingCopies, await_release, lagging_device
from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.arena import SMALL_BYTES, Arena, Staged, Stager
from outlast.checkpoint.copy_guard import changed_only_by_step
from outlast.checkpoint.landing import Landing
from outlast.checkpoint.shard import CHUNK_BYTES, Identity
from outlast.checkpoint.state import capture, flatten
from outlast.config import CheckpointConfig
from outlast.errors import CheckpointError
from outlast.runtime.device import start_driver_thread

SIDE = 700
TIMEOUT_S = 300.0
IDENTITY = Identity(run="run", topology="t", rank=0, world_size=1, iteration=7, attempt="7-a")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaggingCopies]:
    yield from lagging_device(monkeypatch)


class Training:
    """A model of three large matrices, small vectors and a large buffer, with its optimizer."""

    def __init__(self, seed: int = 0, steps: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(3)))
        self.model.register_buffer("running", torch.randn(SIDE, SIDE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer, "note": "as saved"}
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, SIDE)).square().sum().backward()
        self.optimizer.step()

    def content(self) -> dict[str, torch.Tensor]:
        return {one.name: one.tensor.detach().clone() for one in flatten({"state": capture(self.state)}).tensors}


def is_identical(num_remaining: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return num_remaining.keys() == right.keys() and all(
        torch.equal(num_remaining[name], right[name]) for name in num_remaining
    )


def manage(folder: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(local_directory=os.fspath(folder), **settings))


def provide(num_bytes: int) -> Arena:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return Arena(fd)


def run_in_thread(work: Callable[[], object], done: threading.Event) -> threading.Thread:
    """Run ``work`` in a thread, and set ``done`` when it has returned."""
    thread = threading.Thread(target=lambda: (work(), done.set()), daemon=True)
    thread.start()
    return thread


def close_gate_after_first_copy(device: LaggingCopies) -> tuple[list[int], threading.Event]:
    """Let the device make its first copy only; return the bytes of each copy and an event that is set at the second."""
    original_queue, num_given_bytes, has_second = device.queue, list[int](), threading.Event()

    def queue_then_close(pairs: Any, *behind: Any) -> Any:
        chosen = list(pairs)
        num_given_bytes.append(sum(source.numel() for source, _ in chosen))
        copied = original_queue(chosen, *behind)
        if len(num_given_bytes) == 1:
            assert copied.done.wait(TIMEOUT_S)
            device.gate.clear()
        else:
            has_second.set()
        return copied

    device.queue = queue_then_close  # type: ignore[method-assign]
    return num_given_bytes, has_second


@pytest.mark.process
@pytest.mark.parametrize("overlap", [False, True], ids=["copied at once", "copied beside training"])
def test_each_save_has_the_state_of_its_call(device: LaggingCopies, tmp_path: Path, overlap: bool) -> None:
    """Each of several saves has the state of its call bit by bit, whatever training changes right after it."""
    training, manager = Training(), manage(tmp_path / "saves", overlap_staging=overlap)
    manager.load_latest(training.state)
    expected = {}
    for iteration in range(1, 5):
        training.step()
        expected[iteration] = training.content()
        manager.save(training.state, iteration)
        training.step()
    manager.wait(TIMEOUT_S)
    manager.close()
    loaded_training, second_manager = Training(seed=1), manage(tmp_path / "saves")
    restored = second_manager.load_latest(loaded_training.state)
    assert restored is not None
    assert is_identical(loaded_training.content(), expected[restored.iteration])
    assert restored.iteration == 4
    second_manager.close()


@pytest.mark.process
def test_save_without_overlap_returns_after_the_device_copy(device: LaggingCopies, tmp_path: Path) -> None:
    """Without ``overlap_staging``, ``save()`` returns after the device has copied the whole state."""
    training, manager = Training(), manage(tmp_path / "saves")
    manager.load_latest(training.state)
    device.gate.clear()
    returned = threading.Event()
    saving = run_in_thread(partial(manager.save, training.state, 1), returned)
    assert not returned.wait(0.2)
    device.gate.set()
    assert returned.wait(TIMEOUT_S)
    saving.join()
    assert "hold_back" not in device.calls
    manager.wait(TIMEOUT_S)
    manager.close()


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("tier", ["local_directory", "directory"])
def test_a_state_changed_during_its_copy_is_not_committed(
    device: LaggingCopies, tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: str
) -> None:
    """A parameter changed between an overlapped save and the next step fails that save with one line of instructions.

    The next save copies everything before it returns, and is committed.
    """
    settings: dict[str, Any] = {tier: os.fspath(tmp_path / "saves")}
    training, manager = Training(), CheckpointManager(CheckpointConfig(**settings, overlap_staging=True))
    manager.load_latest(training.state)
    training.step()
    manager.save(training.state, 1).wait(TIMEOUT_S)
    training.step()
    _, has_second = close_gate_after_first_copy(device)
    handle = manager.save(training.state, 2)
    assert has_second.wait(TIMEOUT_S)
    with torch.no_grad():
        training.model[1].weight.mul_(2.0)
    device.gate.set()
    with pytest.raises(CheckpointError, match=r"1\.weight' was changed outside optimizer\.step"):
        handle.wait(TIMEOUT_S)
    manager.finish_staging()  # the save failed, not the script
    training.step()
    expected = training.content()
    handle = manager.save(training.state, 3)
    with torch.no_grad():
        training.model[1].weight.mul_(2.0)
    handle.wait(TIMEOUT_S)
    manager.close()
    assert sum("was changed outside optimizer.step()" in record.message for record in caplog.records) == 1
    loaded_training, second_manager = Training(seed=1), CheckpointManager(CheckpointConfig(**settings))
    assert second_manager.load_latest(loaded_training.state).iteration == 3  # type: ignore[union-attr]
    assert is_identical(loaded_training.content(), expected)
    second_manager.close()


@pytest.mark.process
def test_a_step_waits_for_deferred_device_copies(device: LaggingCopies, tmp_path: Path) -> None:
    """With ``overlap_staging`` the next forward and backward run during the copy, and the optimizer step waits for it.

    Buffers are copied before ``save()`` returns, parameters after it.
    """
    training, manager = Training(), manage(tmp_path / "saves", overlap_staging=True)
    manager.load_latest(training.state)
    training.step()
    manager.save(training.state, 1)
    manager.wait(TIMEOUT_S)
    training.step()
    expected = training.content()
    num_given_bytes, has_second = close_gate_after_first_copy(device)
    handle = manager.save(training.state, 2)
    assert has_second.wait(TIMEOUT_S)
    assert num_given_bytes[1] == 9 * SIDE * SIDE * 4, "the matrices and their two moments each"
    assert not handle.done
    training.optimizer.zero_grad()
    training.model(torch.randn(4, SIDE)).sum().backward()
    stepped = threading.Event()
    stepping = run_in_thread(training.optimizer.step, stepped)
    assert not stepped.wait(0.2)
    weight = training.model[0].weight
    assert torch.equal(weight, expected["state.model.0.weight"])
    device.gate.set()
    assert stepped.wait(TIMEOUT_S)
    stepping.join()
    assert not torch.equal(weight, expected["state.model.0.weight"])
    handle.wait(TIMEOUT_S)
    manager.close()
    loaded_training, second_manager = Training(seed=1), manage(tmp_path / "saves")
    assert second_manager.load_latest(loaded_training.state).iteration == 2  # type: ignore[union-attr]
    assert is_identical(loaded_training.content(), expected)
    second_manager.close()


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("part_bytes", [256 << 20, 1 << 20], ids=["whole", "in parts"])
def test_arenas_are_pinned_once_and_released(
    device: LaggingCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Each page of an arena is pinned once, however many saves there are, and unpinned on close.

    No copy crosses the end of a pinned part, and the saved state is correct.
    """
    monkeypatch.setattr("outlast.checkpoint.arena.PIN_BYTES", part_bytes)
    arenas: list[Arena] = []
    monkeypatch.setattr("outlast.checkpoint.arena_pool.Arena", lambda fd: arenas.append(Arena(fd)) or arenas[-1])
    training, manager = Training(), manage(tmp_path / "saves")
    manager.load_latest(training.state)
    for iteration in range(1, 6):
        training.step()
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    assert 1 <= len(arenas) <= 2
    assert sum(device.pinned_at.values()) == sum(arena.num_bytes for arena in arenas)
    assert max(device.pinned_at.values()) <= part_bytes
    manager.close()
    await_release()
    assert device.pinned_at == {}
    assert device.calls.count("unpin") == device.calls.count("pin")
    loaded_training, second_manager = Training(seed=1), manage(tmp_path / "saves")
    second_manager.load_latest(loaded_training.state)
    assert is_identical(loaded_training.content(), training.content())
    second_manager.close()


def test_a_save_pins_the_pages_that_preparation_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the preparing thread is stopped between two parts, a save pins the remaining parts once each."""
    monkeypatch.setattr("outlast.checkpoint.arena.PIN_BYTES", 4096)
    copies, stop = LaggingCopies(), threading.Event()
    arena = provide(5 * 4096 + 100)
    pin = copies.pin

    def pin_and_stop(address: int, num_bytes: int) -> bool:
        if len(copies.pinned_at) == 1:
            stop.set()
        return pin(address, num_bytes)

    copies.pin = pin_and_stop  # type: ignore[method-assign]
    arena.pin(copies, stop)  # type: ignore[arg-type]
    assert len(copies.pinned_at) == 2
    threads = [threading.Thread(target=arena.pin, args=(copies,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(copies.pinned_at.values()) == [100, *[4096] * 5]
    arena.close()
    await_release()
    assert copies.pinned_at == {}
    copies.close()


ENDS_WHILE_RELEASING = """
import os, threading
from outlast.checkpoint import arena
from outlast.runtime import device

class SlowDriver:
    def pin(self, address, num_bytes):
        return True

    def unpin(self, address):
        os.write(1, b"begin\\n")
        begun.set()
        assert device._driver_threads[threading.current_thread()].wait(200)  # until the interpreter ends
        os.write(1, b"end\\n")

arena.PIN_BYTES, begun = 1 << 20, threading.Event()
fd = os.memfd_create("arena")
os.ftruncate(fd, 64 << 20)
memory = arena.Arena(fd)
memory.pin(SlowDriver())
memory.close()
begun.wait()
"""


@pytest.mark.process
def test_process_exit_waits_for_the_current_unpin() -> None:
    """A process that exits while pinned memory is released waits for the current part only."""
    finished = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_RELEASING], timeout=TIMEOUT_S, check=False, text=True, capture_output=True
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.split() == ["begin", "end"]


@pytest.mark.process
def test_memory_that_cannot_be_pinned_is_used(device: LaggingCopies, tmp_path: Path) -> None:
    """If the driver rejects pinning, saves are correct, and the same memory is not pinned again."""
    device.may_pin = False
    training, manager = Training(), manage(tmp_path / "saves")
    manager.load_latest(training.state)
    for iteration in range(1, 4):
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    assert device.calls.count("pin") <= 2
    manager.close()
    assert "unpin" not in device.calls
    loaded_training, second_manager = Training(seed=1), manage(tmp_path / "saves")
    second_manager.load_latest(loaded_training.state)
    assert is_identical(loaded_training.content(), training.content())
    second_manager.close()


def test_a_hung_device_fails_the_save_and_loses_the_arena(device: LaggingCopies) -> None:
    """A hung device is reported after the limit, and the memory that it may still write to is never reused."""
    arenas: list[Arena] = []
    flat = flatten({"state": {"w": torch.zeros(SIDE, SIDE)}})
    stager = Stager(0.05)
    device.gate.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outlast.checkpoint.arena.SETTLE_S", 0.05)
        with pytest.raises(CheckpointError, match="it hangs"):
            stager.stage(flat, IDENTITY, lambda size: arenas.append(provide(size)) or arenas[0])
    assert arenas[0].is_lost
    arenas[0].close()
    assert device.calls == ["pin"], "memory that a device may write to stays mapped and registered"
    device.gate.set()
    stager.close()


def test_a_hung_deferred_copy_fails_its_save_only(device: LaggingCopies) -> None:
    """A deferred copy that hangs fails the save that waits for it, and its arena is lost."""
    training = Training()
    flat = flatten({"state": capture(training.state)})
    deferred_tensors = changed_only_by_step([training.optimizer], flat)
    stager = Stager(0.05)
    close_gate_after_first_copy(device)
    staged: Staged = stager.stage(flat, IDENTITY, provide, deferred=deferred_tensors)
    with pytest.raises(CheckpointError, match="it hangs"):
        staged.wait()
    assert staged.arena.is_lost
    device.gate.set()
    stager.close()


@pytest.mark.process
def test_an_interrupted_save_waits_for_the_device_copy(device: LaggingCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during a copy is raised after the device has stopped writing, so that the arena can be reused."""
    flat = flatten({"state": {"w": torch.randn(SIDE, SIDE)}})
    arenas: list[Arena] = []
    stager = Stager()
    device.gate.clear()
    with pytest.MonkeyPatch.context() as patch:

        def interrupt(_: Any, __: float = 0.0) -> bool:
            patch.undo()
            device.gate.set()
            raise KeyboardInterrupt

        patch.setattr("lagging_device.LaggingCopied.wait", interrupt)
        monkeypatch.setattr("outlast.checkpoint.arena.SETTLE_S", TIMEOUT_S)
        with pytest.raises(KeyboardInterrupt):
            stager.stage(flat, IDENTITY, lambda size: arenas.append(provide(size)) or arenas[0])
    assert not arenas[0].is_lost
    assert device.num_copied_bytes == SIDE * SIDE * 4
    arenas[0].close()
    stager.close()


# -- loading -------------------------------------------------------------------------------------------------------


def save_trained_state(folder: Path) -> dict[str, torch.Tensor]:
    """Save a trained state, and return it."""
    training, manager = Training(), manage(folder)
    manager.load_latest(training.state)
    manager.save(training.state, 3).wait(TIMEOUT_S)
    manager.close()
    return training.content()


@pytest.fixture
def digests_known_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Determine whether a device can digest before the first chunk is read, instead of during the load."""

    def start(work: Callable[[], object], name: str) -> threading.Thread:
        thread = start_driver_thread(work, name)
        if name == "outlast-digests":
            thread.join()
        return thread

    monkeypatch.setattr("outlast.checkpoint.landing.start_driver_thread", start)
    monkeypatch.setattr("outlast.checkpoint.landing.MIN_DIGESTED_CHUNKS", 1)


def load_rejected(folder: Path, match: str) -> Training:
    """Check that a load is rejected with a message and changes nothing; return the unchanged state."""
    loaded_training, manager = Training(seed=1), manage(folder)
    before = loaded_training.content()
    with pytest.raises(CheckpointError, match=match):
        manager.load_latest(loaded_training.state)
    assert is_identical(loaded_training.content(), before)
    manager.close()
    return loaded_training


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.usefixtures("digests_known_first")
@pytest.mark.parametrize("steps", [0, 1], ids=["a fresh optimizer", "one that has stepped"])
@pytest.mark.parametrize("digests", [True, False], ids=["a device that digests", "one that cannot"])
def test_a_state_is_loaded_through_the_device(device: LaggingCopies, tmp_path: Path, steps: int, digests: bool) -> None:
    """Each large tensor is loaded bit by bit through the device, also those that a fresh optimizer has not created.

    A device that can digest digests all whole chunks; no byte is copied twice from the host.
    """
    expected = save_trained_state(tmp_path / "saves")
    device.num_copied_bytes, device_digests = 0, device.digests
    assert device_digests is not None
    if not digests:
        device.digests = None
    loaded_training, manager = Training(seed=1, steps=steps), manage(tmp_path / "saves")
    assert manager.load_latest(loaded_training.state).iteration == 3  # type: ignore[union-attr]
    assert is_identical(loaded_training.content(), expected)
    large_bytes = sum(one.numel() * 4 for one in expected.values() if one.numel() * 4 >= SMALL_BYTES)
    assert large_bytes > 2 * CHUNK_BYTES
    assert device_digests.num_digested == (2 if digests else 0)
    # Small tensors in a chunk that is copied whole are included, and two digests are copied back.
    assert large_bytes <= device.num_copied_bytes <= large_bytes + (1 << 20)
    assert digests or device.num_copied_bytes == large_bytes
    manager.close()


@pytest.mark.process
@pytest.mark.usefixtures("digests_known_first")
def test_short_reads_are_continued(device: LaggingCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short read within a slot or at its end, the remaining bytes are read."""
    expected = save_trained_state(tmp_path / "saves")
    read, limits = os.preadv, itertools.cycle((CHUNK_BYTES + 4096, CHUNK_BYTES, 3 << 20, 1))

    def read_less(fd: int, buffers: Sequence[Any], offset: int) -> int:
        chosen, num_remaining = [], next(limits)
        for buffer in buffers:
            chosen.append(memoryview(buffer)[:num_remaining])
            num_remaining = max(0, num_remaining - len(chosen[-1]))
        return read(fd, chosen, offset)

    monkeypatch.setattr(os, "preadv", read_less)
    loaded_training, manager = Training(seed=1), manage(tmp_path / "saves")
    assert manager.load_latest(loaded_training.state).iteration == 3  # type: ignore[union-attr]
    assert is_identical(loaded_training.content(), expected)
    assert device.digests is not None
    assert device.digests.num_digested == 2
    manager.close()


@pytest.mark.process
@pytest.mark.usefixtures("digests_known_first")
def test_a_device_that_flips_a_bit_is_detected(device: LaggingCopies, tmp_path: Path) -> None:
    """The digests are of the bytes on the device: a bit flipped there is reported, and the live state is unchanged.

    The stored checkpoint is still valid, and the next load succeeds.
    """
    expected = save_trained_state(tmp_path / "saves")
    assert device.digests is not None
    device.digests.flips_bit_of = 1
    loaded_training = load_rejected(tmp_path / "saves", r"a device does not hold what was copied to it \(chunk [01]\)")
    manager = manage(tmp_path / "saves")
    assert manager.load_latest(loaded_training.state).iteration == 3  # type: ignore[union-attr]
    assert is_identical(loaded_training.content(), expected)
    manager.close()


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_full_device_loads_through_host_memory(device: LaggingCopies, tmp_path: Path, share: float) -> None:
    """A device with little or no free memory takes what fits; the rest is loaded correctly through host memory."""
    expected = save_trained_state(tmp_path / "saves")
    device.room_bytes, device.num_copied_bytes = int(share * sum(one.numel() * 4 for one in expected.values())), 0
    loaded_training, manager = Training(seed=1), manage(tmp_path / "saves")
    manager.load_latest(loaded_training.state)
    assert is_identical(loaded_training.content(), expected)
    assert (device.num_copied_bytes > 0) == (share > 0)
    manager.close()


@pytest.mark.process
@pytest.mark.usefixtures("digests_known_first", "device")
def test_a_missing_device_digest_fails_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a device's digests are not returned, chunks without a host digest count as unverified."""
    save_trained_state(tmp_path / "saves")
    monkeypatch.setattr(Landing, "_read_digests", lambda *_: None)
    load_rejected(tmp_path / "saves", "a device does not hold what was copied to it")


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.usefixtures("digests_known_first")
@pytest.mark.parametrize("digests", [True, False], ids=["device_digests by the device", "device_digests by the host"])
def test_a_corrupt_copy_leaves_the_live_state_unchanged(device: LaggingCopies, tmp_path: Path, digests: bool) -> None:
    """A checkpoint with a flipped bit in a device part is rejected, and the live state is unchanged."""
    save_trained_state(tmp_path / "saves")
    device_digests = device.digests
    assert device_digests is not None
    if not digests:
        device.digests = None
    path = max((tmp_path / "saves").rglob("step-3/*"), key=lambda one: one.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(2 << 20)
        byte = file.read(1)[0]
        file.seek(2 << 20)
        file.write(bytes([byte ^ 1]))
    load_rejected(tmp_path / "saves", r"chunk 0, bytes 0 to \d+ \(.+\), differs from its digest")
    assert device_digests.num_digested == (2 if digests else 0)


def test_a_hung_device_fails_the_load(device: LaggingCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that hangs during a read is reported after the limit, and its memory is not reused."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(64 << 20))
    monkeypatch.setattr("outlast.checkpoint.landing._DEVICE_LIMIT_S", 0.05)

    class Span:
        offset, num_bytes, shape, dtype = 0, 64 << 20, (16 << 20,), "F32"

    with open(path, "rb") as file:
        landing = Landing(file.fileno(), {"state.w": Span()}, {"w": torch.zeros(16 << 20)})  # type: ignore[dict-item]
        device.gate.clear()

        def load() -> None:
            for begin in range(0, 64 << 20, CHUNK_BYTES):
                for _ in landing.read(begin, begin + CHUNK_BYTES, memoryview(b"")):
                    pass
            landing.finish()

        with pytest.raises(CheckpointError, match="it hangs"):
            load()
        landing.close()
    assert landing.tensors == {}
    device.gate.set()
