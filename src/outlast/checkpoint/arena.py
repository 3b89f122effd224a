"""Staging: copy a rank's state into shared memory, from which the writer process writes the shard.

The writer owns the memory (a nameless ``memfd``), so no death of a process leaks it. Arenas are reused and pre-faulted,
since fresh pages cost several times the copy. Devices copy in a separate stream, straight into the arena's pinned
pages (:class:`outlast.runtime.device_copies.DeviceCopies`). The copy of some tensors may overlap training, see
:mod:`outlast.checkpoint.copy_guard`; a state that changes during its copy is not saved, see :class:`_Versions`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from outlast.checkpoint.shard import Identity, ShardLayout, TensorSpan
from outlast.checkpoint.state import SHORT_NAMES, FlatState, NamedTensor, without_collection
from outlast.errors import CheckpointError
from outlast.runtime.device import start_driver_thread
from outlast.runtime.device_copies import Copied, DeviceCopies, as_bytes, copies_of

log = logging.getLogger(__name__)
PIECE_BYTES = 8 << 20
SMALL_BYTES = 256 << 10
"""Tensors up to this size are joined before they are copied: a call per tensor costs more than its bytes."""
RUN_BYTES = 1 << 20
"""Bytes joined at a time; they stay in the CPU cache."""
TOUCH_BYTES = 64 << 20
NUM_TOUCH_THREADS = 4
"""Upper limit; one thread on a machine with few cores."""
DEVICE_LIMIT_S = 600.0
"""Default time limit of a device copy; a slower device counts as hanging."""
PIN_BYTES = 256 << 20
SETTLE_S = 10.0
"""Seconds that copies of an abandoned save get to end."""
_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2
_libc = ctypes.CDLL(None, use_errno=True)
Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
_Piece: TypeAlias = tuple[slice, Bytes | list[torch.Tensor]]
"""Target range in the image, and the source bytes."""


class Arena:
    """One piece of shared memory, mapped into this process.

    Args:
        fd: Its descriptor, which the arena takes over.
    """

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.fd, self.num_bytes = fd, found.st_size
        self.inode = found.st_ino
        """Identifies the memory in all processes."""
        self.is_lost = False
        """A hanging device may still write to it, so it is never reused."""
        self._pinning = threading.Lock()
        self._num_tried = 0
        self._pinned: list[tuple[DeviceCopies, int]] = []
        try:
            with contextlib.suppress(PermissionError):  # see memory_file: some kernels cannot seal it
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)  # no process that maps it can lose a page
            self.array: Bytes = np.frombuffer(mmap.mmap(fd, self.num_bytes), dtype=np.uint8)
        except OSError:
            os.close(fd)
            raise

    def touch(self, stop: threading.Event) -> None:
        """Pre-fault the pages until done or stopped. Thread: any; other threads run meanwhile.

        Several threads share the work: one provides some 2 GB/s in a virtual machine.
        """
        pages = self.array  # keeps the mapping during the work
        starts = iter(range(0, len(pages), TOUCH_BYTES))
        lock, refused = threading.Lock(), threading.Event()

        def next_start() -> int | None:
            with lock:
                return None if stop.is_set() or refused.is_set() else next(starts, None)

        def work() -> None:
            while (start := next_start()) is not None:
                length = ctypes.c_size_t(min(TOUCH_BYTES, len(pages) - start))
                if _libc.madvise(ctypes.c_void_p(pages.ctypes.data + start), length, _MADV_POPULATE_WRITE):
                    refused.set()  # a kernel before 5.14; only the first copy is slower

        num_others = min(NUM_TOUCH_THREADS, len(os.sched_getaffinity(0)) // 4) - 1
        others = [threading.Thread(target=work, name="outlast-pages", daemon=True) for _ in range(num_others)]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()

    def pin(self, copies: DeviceCopies, stop: threading.Event | None = None) -> None:
        """Pin the pages for copies by devices, until done or stopped. Idempotent.

        Pins part by part, since the driver may block other threads' calls meanwhile. Stops at a part that the driver
        refuses.

        Blocks: while pages are registered. Thread: any; several may share the work.
        """
        num_parts = -(-self.num_bytes // PIN_BYTES)
        while self._num_tried < num_parts and not (stop is not None and stop.is_set()):
            with self._pinning:
                start = self._num_tried * PIN_BYTES
                if self.fd < 0 or start >= self.num_bytes:
                    return
                address = self.array.ctypes.data + start
                if copies.pin(address, min(PIN_BYTES, self.num_bytes - start)):
                    self._pinned.append((copies, address))
                    self._num_tried += 1
                else:
                    self._num_tried = num_parts

    def view(self, num_bytes: int) -> memoryview:
        """Return the first bytes, valid until the arena is given back."""
        return memoryview(self.array)[:num_bytes]  # type: ignore[arg-type]

    def close(self) -> None:
        """Unmap the memory; its pages are freed once the writer has released it, too. Idempotent.

        A separate thread unpins the pages, so that an in-process restart does not wait for it. A lost arena stays
        mapped until the process ends.

        Blocks: while another thread pins a part.
        """
        if self.fd >= 0:
            with self._pinning:
                os.close(self.fd)
                self.fd = -1
            if self.is_lost:
                _lost.append(self.array)
            elif self._pinned:
                stop = threading.Event()
                start_driver_thread(partial(_unpin, self.array, self._pinned, stop), "outlast-unpin", stop)
            # The mapping ends with the last array that views it.
            self.array = np.empty(0, dtype=np.uint8)


_lost: list[Bytes] = []


def _unpin(_pages: Bytes, parts: list[tuple[DeviceCopies, int]], stop: threading.Event) -> None:
    """Unpin pages, keeping them mapped until then; the driver releases the rest when the process ends."""
    for copies, address in parts:
        if stop.is_set():
            return
        copies.unpin(address)


class _Versions:
    """Detects changes to tensors during their copy, by the version that every in-place operation increments.

    Versions are compared before an optimizer's step (which waits for the copy) or at the end of the copy, whichever is
    earlier. Not detected: replays of CUDA graphs (see :mod:`outlast.checkpoint.copy_guard`) and operations on
    ``tensor.data``.

    Thread: any.
    """

    def __init__(self, tensors: Iterable[NamedTensor]) -> None:
        self._lock = threading.Lock()
        self._saved = [(one.name, one.tensor, one.tensor._version) for one in tensors if not one.tensor.is_inference()]
        self.changed: str | None = None

    def compare(self) -> str | None:
        with self._lock:
            for name, tensor, version in self._saved:
                if tensor._version != version:
                    self.changed = name
                    break
            self._saved = []
            return self.changed


@dataclass(frozen=True, slots=True)
class Staged:
    """A shard's image, whose copy may still be under way."""

    arena: Arena
    num_bytes: int
    tensors: tuple[TensorSpan, ...]
    _copies: tuple[Future[None], ...] = ()
    _queued: tuple[Future[Copied], ...] = ()
    _limit_s: float = DEVICE_LIMIT_S
    _versions: _Versions = field(default_factory=lambda: _Versions(()))

    @property
    def changed(self) -> str | None:
        """Name of a tensor that changed during its copy; ``None`` = no change was detected so far."""
        return self._versions.changed

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until everything is copied.

        Args:
            limit_s: Longest time that a device may take from now on; ``None`` = the stager's limit.

        Raises:
            CheckpointError: A device hangs; the arena is lost.

        Thread: any. Blocks: up to the rest of one memory copy.
        """
        wait(self._copies)
        for copy in self._copies:
            copy.result()
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            are_done = all(queued.result(limit_s).wait(limit_s) for queued in self._queued)
        except TimeoutError:
            are_done = False
        except Exception as error:
            self.arena.is_lost = True  # some copies may be under way
            raise CheckpointError(f"the device cannot copy the state: {error}") from error
        if not are_done:
            self.arena.is_lost = True
            raise _hanging(limit_s)
        self._versions.compare()

    def finish(self) -> None:
        """Wait until everything is copied, and check that nothing changed. Thread: any. Blocks: as :meth:`wait`.

        Raises: CheckpointError, when a device hangs (the arena is lost), or a tensor changed during its copy.
        """
        self.wait()
        if (name := self._versions.compare()) is not None:
            raise CheckpointError(
                f"{name!r} was changed outside optimizer.step() while a save copied it; overlap_staging requires that "
                "only step() changes parameters and optimizer states; this save is discarded, and from now on they "
                "are copied before save() returns"
            )

    def hold_back(self) -> bool:
        """Protect the tensors still being copied from later operations of this thread; on devices by stream order.

        Returns:
            Whether everything is copied; otherwise work in other streams must be held back, too.

        Raises:
            CheckpointError: A device hangs.

        Thread: training's. Blocks: until host memory is copied and device copies are queued.
        """
        self._versions.compare()
        wait(self._copies)
        are_queued = not wait(self._queued, self._limit_s).not_done
        copies = [queued.result() for queued in self._queued if queued.done() and queued.exception() is None]
        if not are_queued or not all(copied.hold_back(self._limit_s) for copied in copies):
            raise _hanging(self._limit_s)
        return all(copied.wait(0.0) for copied in copies)  # a failed copy has failed its save: do not wait


def _hanging(limit_s: float) -> CheckpointError:
    return CheckpointError(f"the device has not copied the state within {limit_s:g} s; it hangs")


@dataclass(slots=True)
class _CopyRun:
    """Adjacent small tensors of one type and device, or one large tensor."""

    begin: int
    """Offset from the start of the shard's data."""
    end: int
    indices: list[int]
    name: str | None
    """Name of the large tensor; ``None`` = small tensors."""


def _runs(flat: FlatState, layout: ShardLayout) -> dict[torch.device, list[_CopyRun]]:
    found: dict[torch.device, list[_CopyRun]] = {}
    last: _CopyRun | None = None
    kind: tuple[torch.dtype, torch.device] | None = None
    for index, offset in zip(layout.order, layout.offsets, strict=True):
        named = flat.tensors[index]
        before, kind = kind, (named.dtype, named.device)
        end = offset + named.tensor.nbytes
        name = named.name if end - offset > SMALL_BYTES else None
        if last and last.name is name is None and before == kind and last.end - last.begin < RUN_BYTES:
            last.indices.append(index)
            last.end = end
        else:
            last = _CopyRun(offset, end, [index], name)
            found.setdefault(named.device, []).append(last)
    return found


class Stager:
    """Copies states into arenas, with two threads and the devices' own copy engines. Thread: the training thread.

    Args:
        limit_s: Longest time that a device may take for a copy, including computations queued before.
    """

    def __init__(self, limit_s: float = DEVICE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="outlast-stage")
        self._key: list[tuple[object, ...]] = []
        self._layout = ShardLayout(())
        self._runs: dict[torch.device, list[_CopyRun]] = {}
        self._entries: tuple[int, list[TensorSpan]] = (-1, [])

    def size_of(self, flat: FlatState, identity: Identity) -> int:
        return self._place(flat, identity)[2]

    def stage(
        self,
        flat: FlatState,
        identity: Identity,
        provide: Callable[[int], Arena],
        *,
        deferred: Collection[str] = (),
    ) -> Staged:
        """Copy a state as the image of its shard.

        Args:
            provide: Returns an arena of at least that many bytes.
            deferred: Names of tensors that may be copied after the return; they must not change before
                :meth:`Staged.wait` returns.

        Raises:
            CheckpointError: A device hangs.

        Blocks: while the bytes that are not deferred are copied.
        """
        with without_collection():
            head, tree, size = self._place(flat, identity)
            entries = (*self._describe(flat, len(head)), tree)
        arena = provide(size)
        target = arena.array
        target[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        tensors = [named.tensor for named in flat.tensors]
        queue = _DeviceQueue(arena, tensors, len(head), self._helpers, self._limit_s)
        now, later = self._pieces(tensors, len(head), deferred, queue)
        now.append((slice(tree.offset, size), np.frombuffer(flat.tree, dtype=np.uint8)))
        copies: tuple[Future[None], ...] = ()
        try:
            queue.begin()
            copies = self._copy(target, now, later)
            queue.finish()
        except BaseException:  # also a signal's: the arena will be reused
            wait(copies)
            queue.settle()
            raise
        late = [named for named in flat.tensors if named.name in deferred]
        return Staged(arena, size, entries, copies, queue.late, self._limit_s, _Versions(late))

    def _copy(self, target: Bytes, now: list[_Piece], later: list[_Piece]) -> tuple[Future[None], ...]:
        if sum(where.stop - where.start for where, _ in now) >= 4 * PIECE_BYTES:
            other = self._helpers.submit(_copy, target, now[1::2])
            try:
                _copy(target, now[::2])
            finally:
                other.result()  # also when a signal ends this half
        else:
            _copy(target, now)
        return tuple(self._helpers.submit(_copy, target, later[half::2]) for half in (0, 1)) if later else ()

    def close(self) -> None:
        """End the helper threads. Blocks: up to the rest of one memory copy, since its arena will be reused."""
        self._helpers.shutdown(wait=True, cancel_futures=True)

    def _place(self, flat: FlatState, identity: Identity) -> tuple[bytes, TensorSpan, int]:
        key: list[tuple[object, ...]] = [
            (one.name, one.dtype, one.device, one.shape, one.global_shape, one.global_offset) for one in flat.tensors
        ]
        if key != self._key:
            self._key, self._entries = key, (-1, [])
            self._layout = ShardLayout(
                [
                    (named.name, SHORT_NAMES[named.dtype], named.shape, named.tensor.nbytes, named.dtype.itemsize)
                    for named in flat.tensors
                ]
            )
            self._runs = _runs(flat, self._layout)
        return self._layout.place(identity, len(flat.tree))

    def _pieces(
        self, tensors: list[torch.Tensor], start: int, deferred: Collection[str], queue: _DeviceQueue
    ) -> tuple[list[_Piece], list[_Piece]]:
        now, later = list[_Piece](), list[_Piece]()
        for device, runs in self._runs.items():
            if (copies := copies_of(device)) is not None:
                late = [run for run in runs if run.name in deferred]
                queue.runs.append((copies, [run for run in runs if run.name not in deferred], late))
                continue
            for run in runs:
                begin = run.begin + start
                if run.name is None:
                    small = [tensors[index] for index in run.indices]
                    now.append((slice(begin, run.end + start), small if device.type == "cpu" else _joined(small)))
                    continue
                whole, pieces = _bytes_of(tensors[run.indices[0]]), later if run.name in deferred else now
                for first in range(0, len(whole), PIECE_BYTES):
                    last = min(first + PIECE_BYTES, len(whole))
                    pieces.append((slice(begin + first, begin + last), whole[first:last]))
        return now, later

    def _describe(self, flat: FlatState, start: int) -> list[TensorSpan]:
        if self._entries[0] != start:
            entries = []
            for index, offset in zip(self._layout.order, self._layout.offsets, strict=True):
                named = flat.tensors[index]
                place = offset + start, named.tensor.nbytes
                entries.append(
                    TensorSpan(
                        named.name,
                        SHORT_NAMES[named.dtype],
                        tuple(named.shape),
                        *place,
                        tuple(named.global_shape),
                        named.global_offset,
                    )
                )
            self._entries = (start, entries)
        return self._entries[1]


def _copy(target: Bytes, pieces: list[_Piece]) -> None:
    for where, source in pieces:
        np.copyto(target[where], _joined(source) if isinstance(source, list) else source)


class _DeviceQueue:
    def __init__(
        self, arena: Arena, tensors: list[torch.Tensor], start: int, helpers: ThreadPoolExecutor, limit_s: float
    ) -> None:
        self._arena, self._tensors, self._start = arena, tensors, start
        self._helpers, self._limit_s = helpers, limit_s
        self.runs: list[tuple[DeviceCopies, list[_CopyRun], list[_CopyRun]]] = []
        """Immediate and deferred runs of each device."""
        self._num_begun = 0
        self._now: list[Copied] = []
        self.late: tuple[Future[Copied], ...] = ()
        """Deferred copies, queued by a helper thread, as queueing many takes a while."""

    def begin(self) -> None:
        for copies, now, _ in self.runs:
            self._arena.pin(copies)
            if now:
                self._num_begun += 1
                self._now.append(copies.queue(self._pairs_of(now), copies.note_work()))

    def finish(self) -> None:
        """Wait for the immediate copies, then have a helper queue the others (both need the GIL). Raises:
        CheckpointError.
        """
        if not all(copied.wait(self._limit_s) for copied in self._now):
            raise _hanging(self._limit_s)
        for copies, _, late in self.runs:
            if late:
                self._num_begun += 1
                self.late += (self._helpers.submit(copies.queue, self._pairs_of(late), copies.note_work()),)

    def settle(self) -> None:
        are_queued = len(self._now) + len(self.late) == self._num_begun and not wait(self.late, SETTLE_S).not_done
        are_known = are_queued and all(queued.exception() is None for queued in self.late)
        copies = [*self._now, *(queued.result() for queued in self.late)] if are_known else []
        self._arena.is_lost |= not (are_known and all(copied.wait(SETTLE_S) for copied in copies))

    def _pairs_of(self, runs: list[_CopyRun]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        image, tensors, start = torch.from_numpy(self._arena.array), self._tensors, self._start
        places = ((run.indices, slice(run.begin + start, run.end + start)) for run in runs)
        return (pair for some, where in places for pair in _pairs([tensors[index] for index in some], image, where))


def _pairs(
    tensors: list[torch.Tensor], image: torch.Tensor, where: slice
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield sources and targets of adjacent tensors, split at the ends of pinned parts."""
    source, begin = as_bytes(_as_one(tensors)), where.start
    while begin < where.stop:
        end = min(where.stop, (begin // PIN_BYTES + 1) * PIN_BYTES)
        yield source[begin - where.start : end - where.start], image[begin:end]
        begin = end


def _joined(tensors: list[torch.Tensor]) -> Bytes:
    with torch.no_grad():
        return _bytes_of(_as_one(tensors))


def _as_one(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    joined: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return joined


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    # For a device without DeviceCopies this is already the copy; it waits for the kernels queued before.
    return as_bytes(tensor.detach().cpu()).numpy()
