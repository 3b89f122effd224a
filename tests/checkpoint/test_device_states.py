"""A state on a device: copied by the device into pinned pages, held back for, and loaded while it is verified.

The device is a stand-in (:mod:`lagging_device`) that copies late; ``tests/gpu`` has the same on a real one.
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
    """A model of three large matrices, small vectors and a large buffer, and its optimizer."""

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


def is_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def manage(folder: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(local_directory=os.fspath(folder), **settings))


def provide(num_bytes: int) -> Arena:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return Arena(fd)


def in_thread(work: Callable[[], object], done: threading.Event) -> threading.Thread:
    """Have a thread do some work, and then say so."""
    thread = threading.Thread(target=lambda: (work(), done.set()), daemon=True)
    thread.start()
    return thread


def close_behind_the_first(device: LaggingCopies) -> tuple[list[int], threading.Event]:
    """Let the device copy what it is given first, and nothing after it; return the bytes of each, as they come, and an
    event that is set once there are two."""
    give, given, has_second = device._give, list[int](), threading.Event()

    def give_and_close(pairs: Any) -> Any:
        chosen = list(pairs)
        given.append(sum(source.numel() for source, _ in chosen))
        copied = give(chosen)
        if len(given) == 1:
            assert copied.done.wait(TIMEOUT_S)
            device.gate.clear()
        else:
            has_second.set()
        return copied

    device._give = give_and_close  # type: ignore[method-assign]
    return given, has_second


@pytest.mark.process
@pytest.mark.parametrize("overlap", [False, True], ids=["copied at once", "copied beside training"])
def test_every_save_is_the_state_of_its_call(device: LaggingCopies, tmp_path: Path, overlap: bool) -> None:
    """Whatever training does right after each of several saves, what is loaded is what was at the call, to the bit."""
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
    other, again = Training(seed=1), manage(tmp_path / "saves")
    restored = again.load_latest(other.state)
    assert restored is not None
    assert is_same(other.content(), expected[restored.iteration])
    assert restored.iteration == 4
    again.close()


@pytest.mark.process
def test_save_returns_once_the_device_has_copied(device: LaggingCopies, tmp_path: Path) -> None:
    """Without overlap_staging nothing of the state is still being copied when save() returns."""
    training, manager = Training(), manage(tmp_path / "saves")
    manager.load_latest(training.state)
    device.gate.clear()
    returned = threading.Event()
    saving = in_thread(partial(manager.save, training.state, 1), returned)
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
def test_a_state_that_changes_during_its_copy_is_not_committed(
    device: LaggingCopies, tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: str
) -> None:
    """With overlap_staging a parameter that the script changes between a save and the next step fails that save, with
    one line that says what to do. The next save copies everything before it returns, and is committed."""
    settings: dict[str, Any] = {tier: os.fspath(tmp_path / "saves")}
    training, manager = Training(), CheckpointManager(CheckpointConfig(**settings, overlap_staging=True))
    manager.load_latest(training.state)
    training.step()
    manager.save(training.state, 1).wait(TIMEOUT_S)
    training.step()
    _, has_second = close_behind_the_first(device)
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
    other, again = Training(seed=1), CheckpointManager(CheckpointConfig(**settings))
    assert again.load_latest(other.state).iteration == 3  # type: ignore[union-attr]
    assert is_same(other.content(), expected)
    again.close()


@pytest.mark.process
def test_a_step_is_held_back_for_what_the_device_still_copies(device: LaggingCopies, tmp_path: Path) -> None:
    """With overlap_staging save() returns while the device is behind; buffers are copied by then, parameters are not;
    the next forward and backward go on, the optimizer's step comes after the copy."""
    training, manager = Training(), manage(tmp_path / "saves", overlap_staging=True)
    manager.load_latest(training.state)
    training.step()
    manager.save(training.state, 1)
    manager.wait(TIMEOUT_S)
    training.step()
    expected = training.content()
    given, has_second = close_behind_the_first(device)
    handle = manager.save(training.state, 2)
    assert has_second.wait(TIMEOUT_S)
    assert given[1] == 9 * SIDE * SIDE * 4, "the matrices and their two moments each"
    assert not handle.done
    training.optimizer.zero_grad()
    training.model(torch.randn(4, SIDE)).sum().backward()
    stepped = threading.Event()
    stepping = in_thread(training.optimizer.step, stepped)
    assert not stepped.wait(0.2)
    weight = training.model[0].weight
    assert torch.equal(weight, expected["state.model.0.weight"])
    device.gate.set()
    assert stepped.wait(TIMEOUT_S)
    stepping.join()
    assert not torch.equal(weight, expected["state.model.0.weight"])
    handle.wait(TIMEOUT_S)
    manager.close()
    other, again = Training(seed=1), manage(tmp_path / "saves")
    assert again.load_latest(other.state).iteration == 2  # type: ignore[union-attr]
    assert is_same(other.content(), expected)
    again.close()


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("part_bytes", [256 << 20, 1 << 20], ids=["whole", "in parts"])
def test_arenas_are_pinned_once_and_released(
    device: LaggingCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """However many saves there are, each arena's pages are registered once, all of them, and no copy goes over the end
    of a part; closing undoes it, beside whatever comes next. What is saved is right."""
    monkeypatch.setattr("outlast.checkpoint.arena.PIN_BYTES", part_bytes)
    training, manager = Training(), manage(tmp_path / "saves")
    manager.load_latest(training.state)
    for iteration in range(1, 6):
        training.step()
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    arenas = list(manager._arenas._known.values())
    assert 1 <= len(arenas) <= 2
    assert sum(device.pinned_at.values()) == sum(arena.num_bytes for arena in arenas)
    assert max(device.pinned_at.values()) <= part_bytes
    manager.close()
    await_release()
    assert device.pinned_at == {}
    assert device.calls.count("unpin") == device.calls.count("pin")
    other, again = Training(seed=1), manage(tmp_path / "saves")
    again.load_latest(other.state)
    assert is_same(other.content(), training.content())
    again.close()


def test_pages_are_pinned_by_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that prepares an arena can be stopped between two parts; a save registers the rest, once each."""
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
def test_no_thread_is_cut_off_in_the_driver_when_a_process_ends() -> None:
    """A process that ends while pinned memory is released waits for the part that is under way, and for no other."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_RELEASING], timeout=TIMEOUT_S, check=False, text=True, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["begin", "end"]


@pytest.mark.process
def test_memory_that_cannot_be_pinned_is_used_all_the_same(device: LaggingCopies, tmp_path: Path) -> None:
    """Where the driver refuses, saves are slower and right, and it is not asked again for the same memory."""
    device.may_pin = False
    training, manager = Training(), manage(tmp_path / "saves")
    manager.load_latest(training.state)
    for iteration in range(1, 4):
        manager.save(training.state, iteration).wait(TIMEOUT_S)
    assert device.calls.count("pin") <= 2
    manager.close()
    assert "unpin" not in device.calls
    other, again = Training(seed=1), manage(tmp_path / "saves")
    again.load_latest(other.state)
    assert is_same(other.content(), training.content())
    again.close()


def test_a_device_that_hangs_fails_the_save_and_loses_the_arena(device: LaggingCopies) -> None:
    """It is reported after the limit, and the memory that it may still write to gets no other use."""
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


def test_what_is_late_and_hangs_fails_its_save_alone(device: LaggingCopies) -> None:
    """What was to be copied beside training is awaited by the save, which then fails; the arena is lost."""
    training = Training()
    flat = flatten({"state": capture(training.state)})
    late = changed_only_by_step([training.optimizer], flat)
    stager = Stager(0.05)
    close_behind_the_first(device)
    staged: Staged = stager.stage(flat, IDENTITY, provide, deferred=late)
    with pytest.raises(CheckpointError, match="it hangs"):
        staged.wait()
    assert staged.arena.is_lost
    device.gate.set()
    stager.close()


@pytest.mark.process
def test_an_interrupted_save_waits_for_the_device(device: LaggingCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal in the middle of a copy leaves only once the device writes to the arena no more: it is used again."""
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


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Save a trained state, and return it."""
    training, manager = Training(), manage(folder)
    manager.load_latest(training.state)
    manager.save(training.state, 3).wait(TIMEOUT_S)
    manager.close()
    return training.content()


@pytest.fixture
def known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it known whether a device digests before the first chunk is read, and not some tenths of a second later."""

    def start(work: Callable[[], object], name: str) -> threading.Thread:
        thread = start_driver_thread(work, name)
        if name == "outlast-digests":
            thread.join()
        return thread

    monkeypatch.setattr("outlast.checkpoint.landing.start_driver_thread", start)
    monkeypatch.setattr("outlast.checkpoint.landing.MIN_DIGESTED_CHUNKS", 1)


def refuse(folder: Path, match: str) -> Training:
    """Have what was saved refused, in these words; return the state that it was for, which is as it was."""
    other, manager = Training(seed=1), manage(folder)
    before = other.content()
    with pytest.raises(CheckpointError, match=match):
        manager.load_latest(other.state)
    assert is_same(other.content(), before)
    manager.close()
    return other


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.usefixtures("known_at_once")
@pytest.mark.parametrize("steps", [0, 1], ids=["a fresh optimizer", "one that has stepped"])
@pytest.mark.parametrize("digests", [True, False], ids=["a device that digests", "one that cannot"])
def test_a_state_is_loaded_through_the_device(device: LaggingCopies, tmp_path: Path, steps: int, digests: bool) -> None:
    """Every large tensor is copied by the device while it is verified, also what a fresh optimizer has not made yet;
    what is loaded is the saved state to the bit. A device that can digests all whole chunks; nothing is copied twice
    from the host."""
    expected = saved(tmp_path / "saves")
    device.num_copied_bytes, found = 0, device.digests
    assert found is not None
    if not digests:
        device.digests = None
    other, manager = Training(seed=1, steps=steps), manage(tmp_path / "saves")
    assert manager.load_latest(other.state).iteration == 3  # type: ignore[union-attr]
    assert is_same(other.content(), expected)
    large = sum(one.numel() * 4 for one in expected.values() if one.numel() * 4 >= SMALL_BYTES)
    assert large > 2 * CHUNK_BYTES
    assert found.num_digested == (2 if digests else 0)
    # Small tensors within a chunk that is taken whole come along, and two digests go back.
    assert large <= device.num_copied_bytes <= large + (1 << 20)
    assert digests or device.num_copied_bytes == large
    manager.close()


@pytest.mark.process
@pytest.mark.usefixtures("known_at_once")
def test_short_reads_are_gone_on_with(device: LaggingCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may give less than it is asked for, within a slot or at its end: the rest is read then."""
    expected = saved(tmp_path / "saves")
    read, limits = os.preadv, itertools.cycle((CHUNK_BYTES + 4096, CHUNK_BYTES, 3 << 20, 1))

    def read_less(fd: int, buffers: Sequence[Any], offset: int) -> int:
        chosen, left = [], next(limits)
        for buffer in buffers:
            chosen.append(memoryview(buffer)[:left])
            left = max(0, left - len(chosen[-1]))
        return read(fd, chosen, offset)

    monkeypatch.setattr(os, "preadv", read_less)
    other, manager = Training(seed=1), manage(tmp_path / "saves")
    assert manager.load_latest(other.state).iteration == 3  # type: ignore[union-attr]
    assert is_same(other.content(), expected)
    assert device.digests is not None
    assert device.digests.num_digested == 2
    manager.close()


@pytest.mark.process
@pytest.mark.usefixtures("known_at_once")
def test_a_device_that_loses_a_bit_is_found_out(device: LaggingCopies, tmp_path: Path) -> None:
    """What arrived is compared, not what was sent: memory of a device that loses a bit is named, nothing live is
    touched, and what is stored is still good: it is loaded next."""
    expected = saved(tmp_path / "saves")
    assert device.digests is not None
    device.digests.flips_bit_of = 1
    other = refuse(tmp_path / "saves", r"a device does not hold what was copied to it \(chunk [01]\)")
    manager = manage(tmp_path / "saves")
    assert manager.load_latest(other.state).iteration == 3  # type: ignore[union-attr]
    assert is_same(other.content(), expected)
    manager.close()


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_what_a_device_has_no_room_for_is_loaded_through_the_host(
    device: LaggingCopies, tmp_path: Path, share: float
) -> None:
    """A device that is full, or nearly so, takes what it can; the rest goes through host memory, and all is right."""
    expected = saved(tmp_path / "saves")
    device.room_bytes, device.num_copied_bytes = int(share * sum(one.numel() * 4 for one in expected.values())), 0
    other, manager = Training(seed=1), manage(tmp_path / "saves")
    manager.load_latest(other.state)
    assert is_same(other.content(), expected)
    assert (device.num_copied_bytes > 0) == (share > 0)
    manager.close()


@pytest.mark.process
@pytest.mark.usefixtures("known_at_once", "device")
def test_a_digest_that_is_missing_is_not_a_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keeps a device's digests from coming back: chunks that the host has not digested count as unproven."""
    saved(tmp_path / "saves")
    monkeypatch.setattr(Landing, "_read_digests", lambda *_: None)
    refuse(tmp_path / "saves", "a device does not hold what was copied to it")


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.usefixtures("known_at_once")
@pytest.mark.parametrize("digests", [True, False], ids=["found by the device", "found by the host"])
def test_nothing_live_is_touched_by_a_copy_that_is_damaged(
    device: LaggingCopies, tmp_path: Path, digests: bool
) -> None:
    """One flipped bit, in a part that the device takes: the checkpoint is refused, and the live state is as it was."""
    saved(tmp_path / "saves")
    found = device.digests
    assert found is not None
    if not digests:
        device.digests = None
    path = max((tmp_path / "saves").rglob("step-3/*"), key=lambda one: one.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(2 << 20)
        byte = file.read(1)[0]
        file.seek(2 << 20)
        file.write(bytes([byte ^ 1]))
    refuse(tmp_path / "saves", r"chunk 0, bytes 0 to \d+ \(.+\), differs from its digest")
    assert found.num_digested == (2 if digests else 0)


def test_a_device_that_takes_nothing_ends_the_load(
    device: LaggingCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that hangs while a shard is read is reported after the limit; its memory is not used again."""
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
