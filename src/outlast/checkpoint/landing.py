"""Load a shard onto devices: read, digest and copy chunks concurrently, into memory separate from the live state.

Readers fill pinned memory with a chunk each, and one thread passes filled slots to the devices, which keeps the time
under the GIL short. A device receives a whole chunk, digests the received bytes, and copies them to their tensors. A
chunk that no device can digest (kernel not compiled yet, no memory, part of two devices) is digested by its reader.
"""

from __future__ import annotations

import bisect
import collections
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from outlast import clock
from outlast.checkpoint.dcp.items import TORCH_TYPES
from outlast.checkpoint.dcp.reader import bytes_of
from outlast.checkpoint.shard import CHUNK_BYTES, TensorSpan
from outlast.checkpoint.state import capture, flatten
from outlast.errors import CheckpointError
from outlast.runtime.device import start_driver_thread
from outlast.runtime.device_copies import Copied, DeviceCopies, copies_of
from outlast.runtime.device_digest import ChunkDigests, find_digests

log = logging.getLogger(__name__)
LANDED_BYTES = 256 << 10
"""Smaller tensors are read into host memory: a copy per tensor costs more than its bytes."""
NUM_LANDING_THREADS = 14
"""Upper limit. A core reads some 8 GB/s, or reads and digests half as much; a link to a device takes up to 55 GB/s."""
NUM_SPARE_SLOTS = 10
"""Slots that a device copies from while each reader fills one; more would not stay in the processor's cache."""
MIN_DIGESTED_CHUNKS = 64
"""Minimum number of chunks for which a device's kernel is compiled."""
NUM_ROWS = 32
"""Chunks that a device holds at most while it digests them."""
MIN_ROWS = 8
"""Chunks sent to a device at once, if there are as many: one takes as long as many."""
_POLL_S, _LOOK_S = 0.0003, 0.1
_GATHER_S = 0.0003
"""Seconds for which filled slots are collected into one batch, so that the sender needs the GIL less often."""
_DEVICE_LIMIT_S = 60.0
"""A device that does not take a chunk in this time hangs."""


class _PinnedSlot:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.view = memory, bytes_of(memory)


@dataclass(frozen=True, slots=True)
class _Filled:
    slot: _PinnedSlot
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Room:
    begin: int
    end: int
    bytes: torch.Tensor
    way: _Way


@dataclass(slots=True, eq=False)
class _Way:
    """Transfer state of one device. Owner: training's thread until the sender starts, then the sender."""

    copies: DeviceCopies
    rows: list[torch.Tensor] = field(default_factory=list)
    found: torch.Tensor | None = None
    sent: list[int] = field(default_factory=list)
    digests: ChunkDigests | None = None


@dataclass(frozen=True, slots=True)
class _UnderWay:
    since_s: float
    copied: Sequence[Copied]
    give_back: Callable[[], None]


class Landing:
    """Reads a shard and puts its large tensors on devices, as far as they have memory alongside the live state.

    Args:
        state: The live state, which determines each tensor's device; it is not changed.

    Thread: that of the training loop; :meth:`takes` and :meth:`read`: any, several at once.
    """

    def __init__(self, fd: int, spans: Mapping[str, TensorSpan], state: Mapping[str, Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Tensors that fit on a device, by name; valid after all was read and :meth:`finish` has returned."""
        self.num_threads = min(NUM_LANDING_THREADS, len(os.sched_getaffinity(0)))
        self._fd, self._rooms, self._slots, self._num_slots = fd, list[_Room](), list[_PinnedSlot](), 0
        self._ways = dict[DeviceCopies, _Way]()
        for (copies, is_copied), names in _places_on_devices(spans, state).items():
            shapes = [(spans[name].shape, TORCH_TYPES[spans[name].dtype]) for name in names]
            way = self._ways.setdefault(copies, _Way(copies))
            # Tensors that are only copied from are freed at once; the others become part of the state.
            for name, tensor in zip(names, copies.make_room(shapes, together=is_copied), strict=False):
                begin, end = spans[name].offset, spans[name].offset + spans[name].num_bytes
                self.tensors[name] = tensor
                self._rooms.append(_Room(begin, end, tensor.view(-1).view(torch.uint8), way))
        self._rooms.sort(key=lambda room: room.begin)
        self._ends = [room.end for room in self._rooms]
        self._lock, self._failure = threading.Lock(), list[BaseException]()
        self._free, self._filled = queue.SimpleQueue[_PinnedSlot](), queue.SimpleQueue[_Filled | None]()
        self._taken, self._digests = dict[int, _Way](), dict[int, str]()
        self._copying, self._digesting = collections.deque[_UnderWay](), collections.deque[_UnderWay]()
        self._sender: threading.Thread | None = None
        self._chunks = dict[int, _Way]()
        self._is_over = False
        if self.tensors:
            end = max(span.offset + span.num_bytes for span in spans.values())
            self._chunks = self._chunks_of_one_device(end // CHUNK_BYTES)
            for way in self._ways.values():
                self._open(way)
            self._sender = start_driver_thread(self._send_all, "outlast-landing")

    def takes(self, chunk: int) -> bool:
        way = self._chunks.get(chunk)
        if way is None or way.digests is None:
            return False
        self._taken[chunk] = way
        return True

    def read(self, start: int, end: int, _: memoryview) -> Iterator[memoryview]:
        """Implements :class:`outlast.checkpoint.verification.ShardReader`. Raises: CheckpointError, when a device
        hangs.
        """
        slot, position, count = self._take_slot(), start, 1
        while position < end and count:  # in one loop: readers would otherwise contend for the GIL
            count = os.preadv(self._fd, [slot.view[position - start : end - start]], position)
            position += count
        yield slot.view[: position - start]
        if position == end:  # otherwise the load has failed, and the slot is not needed
            self._filled.put(_Filled(slot, start, end))

    def finish(self) -> Mapping[int, str]:
        """Implements :class:`outlast.checkpoint.verification.ShardReader`. Raises: CheckpointError, when a device
        hangs.
        """
        if self._sender is not None:
            self._filled.put(None)
            self._sender.join(2 * _DEVICE_LIMIT_S)
            if self._sender.is_alive():  # blocked in a driver call
                self._failure.append(_hanging())
            self._sender = None
        if self._failure:
            raise self._failure[0]
        for way in self._ways.values():
            way.rows, way.found = [], None
        return {chunk: self._digests.get(chunk, "") for chunk in self._taken}  # a missing digest is not a match

    def close(self) -> None:
        """Release what was not used. Idempotent. Blocks: until all copies have ended."""
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - any error that kept the devices from copying
            log.warning("%s", error)
            _lost.append((self.tensors, self._slots, self._ways))  # their memory must not be used again
        self.tensors, self._rooms, self._slots, self._failure = {}, [], [], []

    def _chunks_of_one_device(self, num_whole: int) -> dict[int, _Way]:
        """Return the chunks, of the ``num_whole`` complete ones, that contain tensors of only one device."""
        found, shared = dict[int, _Way](), set[int]()
        for room in self._rooms:
            for chunk in range(room.begin // CHUNK_BYTES, (room.end - 1) // CHUNK_BYTES + 1):
                if found.setdefault(chunk, room.way) is not room.way:
                    shared.add(chunk)
        return {chunk: way for chunk, way in found.items() if chunk < num_whole and chunk not in shared}

    def _open(self, way: _Way) -> None:
        """Have a thread prepare digests on a device, if it has memory for them."""
        number = sum(one is way for one in self._chunks.values())
        if number < MIN_DIGESTED_CHUNKS:
            return
        rows = way.copies.make_room([((number,), torch.int64), ((min(number, NUM_ROWS), CHUNK_BYTES), torch.uint8)])
        if len(rows) < 2:
            return
        way.found, way.rows = rows[0], list(rows[1])

        def find() -> None:
            way.digests = find_digests(way.copies.device, CHUNK_BYTES)

        start_driver_thread(find, "outlast-digests")

    def _take_slot(self) -> _PinnedSlot:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            if is_new := self._num_slots < self.num_threads + NUM_SPARE_SLOTS:
                self._num_slots += 1
        if is_new:
            slot = _PinnedSlot(self._rooms[0].way.copies.pinned(CHUNK_BYTES))
            self._slots.append(slot)
            return slot
        end_s = clock.now_s() + 2 * _DEVICE_LIMIT_S
        while not self._failure:
            try:
                return self._free.get(timeout=_LOOK_S)
            except queue.Empty:
                if clock.now_s() >= end_s:
                    raise _hanging() from None
        raise self._failure[0]

    def _send_all(self) -> None:
        """Pass filled slots to the devices until :meth:`finish`. Thread: the sender, as for all methods below."""
        try:
            while (batch := self._next_batch()) is not None:
                if batch:
                    self._send(batch)
                self._collect()
            while self._copying or self._digesting:
                self._collect(_LOOK_S)
            for way in self._ways.values():
                self._read_digests(way)
        except BaseException as error:  # noqa: BLE001 - raised again by finish() and _take_slot()
            self._failure.append(error)

    def _next_batch(self) -> list[_Filled] | None:
        """Return the slots filled since the last call, after a short wait for the first; ``None`` = no more follow."""
        if self._is_over:
            return None
        batch = list[_Filled]()
        try:
            found = self._filled.get(timeout=_POLL_S if self._copying or self._digesting else None)
            time.sleep(_GATHER_S)
            while found is not None:
                batch.append(found)
                found = self._filled.get_nowait()
            self._is_over = True
        except queue.Empty:
            pass
        return batch

    def _send(self, batch: Iterable[_Filled]) -> None:
        whole, parts = dict[_Way, list[_Filled]](), dict[_Way, list[tuple[torch.Tensor, torch.Tensor]]]()
        slots = list[_PinnedSlot]()
        for filled in batch:
            if (way := self._taken.get(filled.begin // CHUNK_BYTES)) is not None:
                whole.setdefault(way, []).append(filled)
                continue
            slots.append(filled.slot)
            for room, source, target in self._parts(filled, filled.slot.memory):
                parts.setdefault(room.way, []).append((source, target))
        if parts:
            copied = [way.copies.queue(pairs) for way, pairs in parts.items()]
            self._copying.append(_UnderWay(clock.now_s(), copied, partial(self._give_back, slots)))
        else:
            self._give_back(slots)
        for way, some in whole.items():
            while some:
                while len(way.rows) < min(len(some), MIN_ROWS):
                    self._collect(_LOOK_S)
                number = len(way.rows)
                self._send_whole(way, some[:number])
                some = some[number:]

    def _send_whole(self, way: _Way, some: Sequence[_Filled]) -> None:
        assert way.digests is not None
        assert way.found is not None
        rows = [way.rows.pop() for _ in some]
        copied = way.copies.queue([(filled.slot.memory, row) for filled, row in zip(some, rows, strict=True)])
        into = way.found[len(way.sent) : len(way.sent) + len(some)]
        way.sent += [filled.begin // CHUNK_BYTES for filled in some]
        pairs = [
            (source, target)
            for filled, row in zip(some, rows, strict=True)
            for _, source, target in self._parts(filled, row)
        ]
        done = way.digests.queue(rows, into, copied, pairs)
        now_s, slots = clock.now_s(), [filled.slot for filled in some]
        self._copying.append(_UnderWay(now_s, [copied], partial(self._give_back, slots)))
        self._digesting.append(_UnderWay(now_s, [done], partial(way.rows.extend, rows)))

    def _parts(self, filled: _Filled, memory: torch.Tensor) -> Iterator[tuple[_Room, torch.Tensor, torch.Tensor]]:
        for number in range(bisect.bisect_right(self._ends, filled.begin), len(self._rooms)):
            room = self._rooms[number]
            if room.begin >= filled.end:
                return
            first, last = max(filled.begin, room.begin), min(filled.end, room.end)
            source = memory[first - filled.begin : last - filled.begin]
            yield room, source, room.bytes[first - room.begin : last - room.begin]

    def _give_back(self, slots: Iterable[_PinnedSlot]) -> None:
        for slot in slots:
            self._free.put(slot)

    def _collect(self, timeout_s: float = 0.0) -> None:
        """Free completed work. Raises: CheckpointError, when a device hangs. Blocks: for the oldest, up to
        ``timeout_s``.
        """
        if timeout_s and (oldest := self._digesting or self._copying):
            oldest[0].copied[0].wait(timeout_s)
        for under_way in (self._copying, self._digesting):
            while under_way and all(copied.wait(0.0) for copied in under_way[0].copied):
                under_way.popleft().give_back()
            if under_way and clock.now_s() >= under_way[0].since_s + _DEVICE_LIMIT_S:
                raise _hanging()

    def _read_digests(self, way: _Way) -> None:
        if not way.sent:
            return
        assert way.found is not None
        values = way.copies.pinned(8 * len(way.sent)).view(torch.int64)
        if not way.copies.queue([(way.found[: len(way.sent)], values)]).wait(_DEVICE_LIMIT_S):
            raise _hanging()
        self._digests |= {
            chunk: f"{value % (1 << 64):016x}" for chunk, value in zip(way.sent, values.tolist(), strict=True)
        }


def _hanging() -> CheckpointError:
    return CheckpointError(f"the device has not taken {CHUNK_BYTES} bytes within {_DEVICE_LIMIT_S:g} s; it hangs")


_lost: list[tuple[object, ...]] = []


def _places_on_devices(
    spans: Mapping[str, TensorSpan], state: Mapping[str, Any]
) -> dict[tuple[DeviceCopies, bool], list[str]]:
    """Return the large tensors of a shard by device, and whether they are copied into live tensors there.

    A tensor belongs on the device of the live tensor; optimizer state that does not exist yet belongs on its
    parameter's device. Only modules and bare tensors copy; other objects with ``load_state_dict`` may keep the tensor
    they get.
    """
    live = {named.name: named for named in flatten({"state": capture(state)}, is_live=True).tensors}
    parts = list(_parts("state", state))
    copying = [path for path, value in parts if isinstance(value, torch.nn.Module | torch.Tensor)]
    parameters = {
        (path, number): parameter
        for path, value in parts
        if isinstance(value, torch.optim.Optimizer)
        for number, parameter in enumerate(one for group in value.param_groups for one in group["params"])
    }
    found: dict[tuple[DeviceCopies, bool], list[str]] = {}
    for name, span in spans.items():
        if span.num_bytes < LANDED_BYTES:
            continue
        device = None
        if (named := live.get(name)) is not None:
            if tuple(named.shape) == span.shape and named.dtype == TORCH_TYPES[span.dtype]:
                device = named.device
        else:
            path, _, rest = name.rpartition(".state.")
            index = rest.partition(".")[0]
            if index.isdecimal() and (parameter := parameters.get((path, int(index)))) is not None:
                device = parameter.device
        if device is not None and (copies := copies_of(device)) is not None:
            is_copied = any(name == path or name.startswith(f"{path}.") for path in copying)
            found.setdefault((copies, is_copied), []).append(name)
    return found


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _parts(f"{path}.{name}", inner)
    else:
        yield path, value
