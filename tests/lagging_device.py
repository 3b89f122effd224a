"""A test double for a GPU's copies on machines without a GPU: host memory plays the device.

A thread makes the copies in the order in which they were queued, and only while the gate is open: late, like a device
that is behind. All other parts of a save or a load are real.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import pytest
import torch
import xxhash

TIMEOUT_S = 300.0


def await_release() -> None:
    """Wait until the pinned memory of closed managers is released."""
    for thread in threading.enumerate():
        if thread.name == "outlast-unpin":
            thread.join(TIMEOUT_S)


class LaggingCopied:
    """Test double of :class:`outlast.runtime.device_copies.Copied`."""

    def __init__(self, calls: list[str]) -> None:
        self.done, self._calls = threading.Event(), calls

    def wait(self, timeout_s: float) -> bool:
        return self.done.wait(timeout_s)

    def hold_back(self, timeout_s: float) -> bool:
        """Wait, because the caller does the next work of this device at once."""
        self._calls.append("hold_back")
        return self.done.wait(TIMEOUT_S)


class LaggingCopies:
    """Test double of :class:`outlast.runtime.device_copies.DeviceCopies`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.pinned_at: dict[int, int] = {}
        """Address to bytes of pinned memory."""
        self.may_pin = True
        self.room_bytes = 1 << 40
        """Free memory of the device for :meth:`make_room`."""
        self.num_copied_bytes = 0
        self.digests: LaggingDigests | None = LaggingDigests(self)
        """``None``: this device cannot digest."""
        self._queue = queue.SimpleQueue[tuple[Callable[[], None], LaggingCopied] | None]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def pin(self, address: int, num_bytes: int) -> bool:
        assert address not in self.pinned_at, "pinned twice"
        self.calls.append("pin")
        if self.may_pin:
            self.pinned_at[address] = num_bytes
        return self.may_pin

    def unpin(self, address: int) -> None:
        self.calls.append("unpin")
        del self.pinned_at[address]

    def note_work(self) -> None:
        """All work that was given to this device is done."""

    def queue(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], behind: None = None) -> LaggingCopied:
        """Queue copies; like a driver, reject those that cross the end of pinned memory."""
        chosen = list(pairs)
        for _, target in chosen:
            begin, end = target.data_ptr(), target.data_ptr() + target.numel()
            for address, num_bytes in list(self.pinned_at.items()):
                assert end <= address or begin >= address + num_bytes or address <= begin <= end <= address + num_bytes
        return self._give(chosen)

    def make_room(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], *, together: bool = False
    ) -> list[torch.Tensor]:
        found = []
        for shape, dtype in shapes:
            self.room_bytes -= torch.Size(shape).numel() * dtype.itemsize
            if self.room_bytes < 0:
                break
            found.append(torch.full(shape, 77, dtype=dtype))
        return found

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        self.gate.set()
        self._queue.put(None)
        self._thread.join()

    def _give(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> LaggingCopied:
        return self.give(partial(self._copy, pairs))

    def give(self, work: Callable[[], None]) -> LaggingCopied:
        """Queue work after all earlier work of the device."""
        copied = LaggingCopied(self.calls)
        self._queue.put((work, copied))
        return copied

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for source, target in pairs:
            assert self.gate.wait(TIMEOUT_S)
            target.copy_(source)
            self.num_copied_bytes += source.numel()

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            work, copied = given
            work()
            copied.done.set()


class LaggingDigests:
    """Test double of :class:`outlast.runtime.device_digest.ChunkDigests`."""

    def __init__(self, copies: LaggingCopies) -> None:
        self._copies = copies
        self.num_digested = 0
        self.flips_bit_of: int | None = None
        """Number, from 0, of the chunk in which this device's memory flips a bit."""

    def queue(
        self,
        chunks: Sequence[torch.Tensor],
        into: torch.Tensor,
        behind: LaggingCopied,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> LaggingCopied:
        chosen = list(pairs)

        def work() -> None:
            for number, chunk in enumerate(chunks):
                if self.num_digested == self.flips_bit_of:
                    chunk[1000] ^= 4
                self.num_digested += 1
                found = xxhash.xxh3_64_intdigest(chunk.numpy().data)
                into[number] = found - (1 << 64) if found >> 63 else found
            for source, target in chosen:
                target.copy_(source)

        return self._copies.give(work)


def lagging_device(patch: pytest.MonkeyPatch) -> Iterator[LaggingCopies]:
    """Make the memory of all tensors count as a device's. The generator of a fixture."""
    copies = LaggingCopies()
    for module in ("arena", "arena_pool", "copy_guard", "landing"):
        patch.setattr(f"outlast.checkpoint.{module}.copies_of", lambda _: copies)
    patch.setattr("outlast.checkpoint.landing.find_digests", lambda *_: copies.digests)
    patch.setattr("outlast.checkpoint.manager.device_of", lambda _: torch.device("cpu"))
    yield copies
    copies.close()
