"""Staging: the image of a shard, copied by training into shared memory, and written from there by the writer.

Shared memory (``memfd``) that the writer owns has no name, so nothing is left behind by any death. Fresh pages cost
several times the copy, so an arena is kept, and touched ahead.

What lies on a device is copied by the device, in a stream of its own (:class:`outlast.runtime.device.DeviceCopies`),
straight into the arena's pages, which are pinned once.

The copy of some tensors may overlap training: :mod:`outlast.checkpoint.copy_guard`. A state that changes during its
copy is not saved: see :class:`_Versions`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import math
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

from outlast import clock
from outlast.checkpoint.manifest import TensorEntry
from outlast.checkpoint.protocol import Done, Take
from outlast.checkpoint.shard import DTYPE_NAMES, Identity, ShardLayout, TensorSpan
from outlast.checkpoint.state import FlatState, NamedTensor, without_collection
from outlast.checkpoint.writer_client import WriterClient, WriterSilent
from outlast.errors import CheckpointError
from outlast.runtime.device import Copied, DeviceCopies, copies_of, start_driver_thread

log = logging.getLogger(__name__)
PIECE_BYTES = 8 << 20
SMALL_BYTES = 256 << 10
"""Tensors up to this are put together before they are copied: one by one, each costs more than its bytes."""
RUN_BYTES = 1 << 20
"""What is put together at once; it stays in the cache."""
TOUCH_BYTES = 64 << 20
NUM_TOUCH_THREADS = 4
"""At most; one on a machine of few cores."""
DEVICE_LIMIT_S = 600.0
"""Unless another limit is given: a device that does not finish a copy in this time hangs."""
PIN_BYTES = 256 << 20
SETTLE_S = 10.0
"""Seconds that copies get to end when what they are for is given up."""
PATIENCE_S = 10.0
"""Longest time that training waits for an earlier save to be committed to the first tier; the save is skipped then."""
SILENT_S = 1.0
"""Longest wait for a writer that did not respond to the request before."""
_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2
_libc = ctypes.CDLL(None, use_errno=True)
Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
_Piece: TypeAlias = tuple[slice, Bytes | list[torch.Tensor]]
"""Where bytes go in the image, and where they come from."""
_SHORT = {getattr(torch, name.removeprefix("torch.")): short for name, short in DTYPE_NAMES.items()}
"""torch's element types to safetensors' names."""


class Arena:
    """One piece of shared memory, mapped here.

    Args:
        fd: Its descriptor, from now on the arena's.
    """

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.fd, self.num_bytes = fd, found.st_size
        self.inode = found.st_ino
        """Tells it from all others, in any process."""
        self.is_lost = False
        """A device may still write to it, for nobody knows how long: it gets no other use."""
        self._pinning = threading.Lock()
        self._num_tried = 0
        """Parts that are pinned, or could not be."""
        self._pinned: list[tuple[DeviceCopies, int]] = []
        try:
            with contextlib.suppress(PermissionError):  # see memory_file: one that cannot be sealed
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)  # no process that maps it can lose a page
            self.array: Bytes = np.frombuffer(mmap.mmap(fd, self.num_bytes), dtype=np.uint8)
        except OSError:
            os.close(fd)
            raise

    def touch(self, stop: threading.Event) -> None:
        """Have the kernel provide the pages, until done or stopped. Thread: any; others run meanwhile.

        By several threads where there are cores for it: one gets some 2 GB/s of a virtual machine's memory.
        """
        pages = self.array  # keeps the mapping while we work
        starts = iter(range(0, len(pages), TOUCH_BYTES))
        lock, refused = threading.Lock(), threading.Event()

        def next_start() -> int | None:
            with lock:
                return None if stop.is_set() or refused.is_set() else next(starts, None)

        def work() -> None:
            while (start := next_start()) is not None:
                length = ctypes.c_size_t(min(TOUCH_BYTES, len(pages) - start))
                if _libc.madvise(ctypes.c_void_p(pages.ctypes.data + start), length, _MADV_POPULATE_WRITE):
                    refused.set()  # a kernel before 5.14: the first copy is slow, that is all

        num_others = min(NUM_TOUCH_THREADS, len(os.sched_getaffinity(0)) // 4) - 1
        others = [threading.Thread(target=work, name="outlast-pages", daemon=True) for _ in range(num_others)]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()

    def pin(self, copies: DeviceCopies, stop: threading.Event | None = None) -> None:
        """Have devices copy straight into its pages, from now on, until done or stopped. Idempotent.

        Part by part: while the driver registers one, other threads' calls may have to wait for it. Where it refuses
        one, the rest is left as it is.

        Blocks: while the pages are registered. Thread: any; several do it together.
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
        """Return its first bytes, to be read while the arena is not given back."""
        return memoryview(self.array)[:num_bytes]  # type: ignore[arg-type]

    def close(self) -> None:
        """Unmap the memory; its pages are freed once the writer has released it, too. Idempotent.

        What is pinned is released before, by a thread of its own: a restart in process does not wait for it. What is
        lost stays mapped until the process ends.

        Blocks: while another thread pins a part of it.
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
            # The mapping goes with the last array that looks into it.
            self.array = np.empty(0, dtype=np.uint8)


_lost: list[Bytes] = []
"""What devices may still write to."""


def _unpin(_pages: Bytes, parts: list[tuple[DeviceCopies, int]], stop: threading.Event) -> None:
    """Release pinned pages, which are kept mapped until then; what is left when the process ends, the driver does."""
    for copies, address in parts:
        if stop.is_set():
            return
        copies.unpin(address)


class _Versions:
    """Detects changes to tensors during their copy.

    Every in-place operation increments the version of a tensor. An optimizer's step is not a change during the copy,
    because it waits for the copy: the versions are compared before the step, or at the end of the copy if that is
    earlier. Replays of CUDA graphs and operations on ``tensor.data`` do not increment versions: see
    :mod:`outlast.checkpoint.copy_guard` for the former; the latter are not detected.

    Thread: any.
    """

    def __init__(self, tensors: Iterable[NamedTensor]) -> None:
        self._lock = threading.Lock()
        self._saved = [(one.name, one.tensor, one.tensor._version) for one in tensors if not one.tensor.is_inference()]
        self.changed: str | None = None
        """Name of a tensor that changed during its copy."""

    def compare(self) -> str | None:
        """Return the name of a tensor that has changed; from the second call on, the result of the first."""
        with self._lock:
            for name, tensor, version in self._saved:
                if tensor._version != version:
                    self.changed = name
                    break
            self._saved = []
            return self.changed


@dataclass(frozen=True, slots=True)
class Staged:
    """A shard's image, which may still be filled."""

    arena: Arena
    num_bytes: int
    tensors: tuple[TensorEntry, ...]
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
            limit_s: Longest time that a device may take from now on; ``None`` = the stager's.

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
        """Wait until everything is copied, and check that nothing changed meanwhile.

        Raises:
            CheckpointError: A device hangs, and the arena is lost; or a tensor changed during its copy.

        Thread: any. Blocks: up to the rest of one memory copy.
        """
        self.wait()
        if (name := self._versions.compare()) is not None:
            raise CheckpointError(
                f"{name!r} was changed outside optimizer.step() while a save copied it; overlap_staging requires that "
                "only step() changes parameters and optimizer states; this save is discarded, and from now on they "
                "are copied before save() returns"
            )

    def hold_back(self) -> bool:
        """Have nothing that is done from now on change what is still copied: devices by order of their streams.

        Returns:
            Whether everything is copied; otherwise what is computed in another stream must be held back, too.

        Raises:
            CheckpointError: A device hangs.

        Thread: training's. Blocks: while the host's memory is copied; for a device's until its copies are queued.
        """
        self._versions.compare()
        wait(self._copies)
        are_queued = not wait(self._queued, self._limit_s).not_done
        copies = [queued.result() for queued in self._queued if queued.done() and queued.exception() is None]
        if not are_queued or not all(copied.hold_back(self._limit_s) for copied in copies):
            raise _hanging(self._limit_s)
        return all(
            copied.wait(0.0) for copied in copies
        )  # one that failed has failed its save: it is no reason to wait


def _hanging(limit_s: float) -> CheckpointError:
    return CheckpointError(f"the device has not copied the state within {limit_s:g} s; it hangs")


@dataclass(slots=True)
class _CopyRun:
    """Small tensors of one type and device that lie side by side; or a large one."""

    begin: int
    """In the shard, from where the data begins."""
    end: int
    indices: list[int]
    name: str | None
    """Of the large one; ``None``: they are small."""


def _runs(flat: FlatState, layout: ShardLayout) -> dict[torch.device, list[_CopyRun]]:
    """Return what is copied at a time, by where it lies."""
    found: dict[torch.device, list[_CopyRun]] = {}
    last: _CopyRun | None = None
    kind: tuple[torch.dtype, torch.device] | None = None
    for index, offset in zip(layout.order, layout.offsets, strict=True):
        named = flat.tensors[index]
        before, kind = kind, (named.dtype, named.device)
        end = offset + _num_bytes(named)
        name = named.name if end - offset > SMALL_BYTES else None
        if last and last.name is name is None and before == kind and last.end - last.begin < RUN_BYTES:
            last.indices.append(index)
            last.end = end
        else:
            last = _CopyRun(offset, end, [index], name)
            found.setdefault(named.device, []).append(last)
    return found


def _num_bytes(named: NamedTensor) -> int:
    return math.prod(named.shape) * named.dtype.itemsize


class Stager:
    """Copy states into arenas, with two threads, and the devices themselves. Thread: the training thread.

    Args:
        limit_s: Longest time that a device may take for a copy, what it computes before included.
    """

    def __init__(self, limit_s: float = DEVICE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="outlast-stage")
        self._key: list[tuple[object, ...]] = []
        self._layout = ShardLayout(())
        self._runs: dict[torch.device, list[_CopyRun]] = {}
        self._entries: tuple[int, list[TensorEntry]] = (-1, [])

    def size_of(self, flat: FlatState, identity: Identity) -> int:
        """Return the bytes that the state's shard takes."""
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
            flat: The state.
            identity: Whose it is.
            provide: Returns an arena of at least that many bytes.
            deferred: Names of tensors that may be copied after the return; they must not change before
                :meth:`Staged.wait` has.

        Raises:
            CheckpointError: A device hangs.

        Blocks: while the bytes that are not deferred are copied.
        """
        with without_collection():
            head, tree, size = self._place(flat, identity)
            entries = (*self._describe(flat, len(head)), _tree_entry(tree))
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
        except BaseException:  # a signal's, too: the arena gets another use
            wait(copies)
            queue.settle()
            raise
        late = [named for named in flat.tensors if named.name in deferred]
        return Staged(arena, size, entries, copies, queue.late, self._limit_s, _Versions(late))

    def _copy(self, target: Bytes, now: list[_Piece], later: list[_Piece]) -> tuple[Future[None], ...]:
        """Copy what lies on the host, half of it in another thread; return what is copied later."""
        if sum(where.stop - where.start for where, _ in now) >= 4 * PIECE_BYTES:
            other = self._helpers.submit(_copy, target, now[1::2])
            try:
                _copy(target, now[::2])
            finally:
                other.result()  # also when a signal ends our half
        else:
            _copy(target, now)
        return tuple(self._helpers.submit(_copy, target, later[half::2]) for half in (0, 1)) if later else ()

    def close(self) -> None:
        """End the helper threads. Blocks: up to the rest of one memory copy, since its arena gets another use."""
        self._helpers.shutdown(wait=True, cancel_futures=True)

    def _place(self, flat: FlatState, identity: Identity) -> tuple[bytes, TensorSpan, int]:
        """Lay a state out; as the last one, if nothing but plain values changed."""
        key: list[tuple[object, ...]] = [
            (one.name, one.dtype, one.device, one.shape, one.global_shape, one.global_offset) for one in flat.tensors
        ]
        if key != self._key:
            self._key, self._entries = key, (-1, [])
            self._layout = ShardLayout(
                [
                    (named.name, _SHORT[named.dtype], named.shape, _num_bytes(named), named.dtype.itemsize)
                    for named in flat.tensors
                ]
            )
            self._runs = _runs(flat, self._layout)
        return self._layout.place(identity, len(flat.tree))

    def _pieces(
        self, tensors: list[torch.Tensor], start: int, deferred: Collection[str], queue: _DeviceQueue
    ) -> tuple[list[_Piece], list[_Piece]]:
        """Return what is copied where by the host, at once and later; what devices copy goes into their queue."""
        now, later = list[_Piece](), list[_Piece]()
        for device, runs in self._runs.items():
            if (copies := copies_of(device)) is not None:
                late = [run for run in runs if run.name in deferred]
                queue.add(copies, [run for run in runs if run.name not in deferred], late)
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

    def _describe(self, flat: FlatState, start: int) -> list[TensorEntry]:
        if self._entries[0] != start:
            entries = []
            for index, offset in zip(self._layout.order, self._layout.offsets, strict=True):
                named = flat.tensors[index]
                entries.append(
                    TensorEntry(
                        name=named.name,
                        dtype=_SHORT[named.dtype],
                        shape=tuple(named.shape),
                        global_shape=tuple(named.global_shape),
                        global_offset=named.global_offset,
                        offset=offset + start,
                        num_bytes=_num_bytes(named),
                    )
                )
            self._entries = (start, entries)
        return self._entries[1]


def _tree_entry(span: TensorSpan) -> TensorEntry:
    return TensorEntry(
        name=span.name,
        dtype=span.dtype,
        shape=span.shape,
        global_shape=span.shape,
        global_offset=(0,),
        offset=span.offset,
        num_bytes=span.num_bytes,
    )


def _copy(target: Bytes, pieces: list[_Piece]) -> None:
    for where, source in pieces:
        np.copyto(target[where], _joined(source) if isinstance(source, list) else source)


class _DeviceQueue:
    """What devices copy into one arena."""

    def __init__(
        self, arena: Arena, tensors: list[torch.Tensor], start: int, helpers: ThreadPoolExecutor, limit_s: float
    ) -> None:
        self._arena, self._tensors, self._start = arena, tensors, start
        self._helpers, self._limit_s = helpers, limit_s
        self._runs: list[tuple[DeviceCopies, list[_CopyRun], list[_CopyRun]]] = []
        self._num_begun = 0
        self._now: list[Copied] = []
        self.late: tuple[Future[Copied], ...] = ()
        """What is copied later; queueing many copies takes a while, too, and is left to a helper."""

    def add(self, copies: DeviceCopies, now: list[_CopyRun], late: list[_CopyRun]) -> None:
        """Add what lies on one device."""
        self._runs.append((copies, now, late))

    def begin(self) -> None:
        """Have the devices begin with what is awaited."""
        for copies, now, _ in self._runs:
            self._arena.pin(copies)
            if now:
                self._num_begun += 1
                self._now.append(copies.queue(self._pairs_of(now), copies.note_work()))

    def finish(self) -> None:
        """Wait for what is awaited, then have a helper begin with what is late: it needs Python's lock as we do.

        Raises:
            CheckpointError: A device hangs.
        """
        if not all(copied.wait(self._limit_s) for copied in self._now):
            raise _hanging(self._limit_s)
        for copies, _, late in self._runs:
            if late:
                self._num_begun += 1
                self.late += (self._helpers.submit(copies.queue, self._pairs_of(late), copies.note_work()),)

    def settle(self) -> None:
        """Wait for all that was begun; an arena that may still be written to is lost."""
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
    """Yield the bytes of tensors that lie side by side, and where each of them goes: not over a pinned part's end."""
    source, begin = _as_bytes(_as_one(tensors)), where.start
    while begin < where.stop:
        end = min(where.stop, (begin // PIN_BYTES + 1) * PIN_BYTES)
        yield source[begin - where.start : end - where.start], image[begin:end]
        begin = end


def _joined(tensors: list[torch.Tensor]) -> Bytes:
    """Return the bytes of tensors of one type and device, one behind the other, put together in one call."""
    with torch.no_grad():
        return _bytes_of(_as_one(tensors))


def _as_one(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    joined: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return joined


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    # From a device of another make this is already the copy; it waits for the kernels queued before it.
    return _as_bytes(tensor.detach().cpu()).numpy()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, where it lies."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class ArenaPool:
    """Arenas that the writer owns, taken by the training thread and given back once nobody reads them.

    Args:
        writer: Who owns the memory.
        rank: This rank.
        limit_s: Longest time that :meth:`take` waits for an arena to come back, if that is shorter than its own limit.
        answer_s: Longest time that the writer may take to respond. While it is silent, later saves are skipped after
            :data:`SILENT_S`.
        may_steal: Whether the memory of the newest committed generation may be taken when the other arena is in use.
    """

    def __init__(self, writer: WriterClient, rank: int, *, limit_s: float, answer_s: float, may_steal: bool) -> None:
        self._writer, self._rank, self._may_steal = writer, rank, may_steal
        self._limit_s, self._answer_s = limit_s, answer_s
        self._known: dict[int, Arena] = {}
        self._busy: set[int] = set()
        self._behind: set[int] = set()
        """Those of the busy ones that only tiers that are behind still need."""
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None
        self._is_given_up = False
        self._is_writer_silent = self._is_late = False

    def take(self, num_bytes: int) -> Arena:
        """Return an arena of at least that size.

        Raises:
            CheckpointError: None came back in time, there is no memory, or no writer; or it is given up.

        Blocks: while earlier saves are being committed to memory, up to :data:`PATIENCE_S`, or :data:`SILENT_S` if the
            save before was skipped, too; never for a tier that is behind.
        """
        limit_s = min(SILENT_S if self._is_late else PATIENCE_S, self._limit_s)
        end_ns = clock.now_ns() + int(limit_s * 1e9)
        with self._changed:
            while (arena := self._ask(num_bytes, self._may_steal)) is None:
                if self._behind and self._busy <= self._behind:
                    raise CheckpointError(
                        f"there is no memory for another {num_bytes} bytes while {len(self._behind)} earlier saves are "
                        "not in all of their tiers yet; this save is skipped"
                    )
                left_s = (end_ns - clock.now_ns()) / 1e9
                if self._is_given_up or left_s <= 0 or not self._changed.wait(left_s):
                    self._is_late = True
                    raise CheckpointError(
                        f"earlier saves have neither ended nor failed after {limit_s:g} s; this save is skipped"
                    )
            self._is_late = False
            return arena

    def give_back(self, arena: Arena) -> None:
        """Say that this process needs an arena no more. Idempotent; one that is lost stays in use. Thread: any."""
        with self._changed:
            self._behind.discard(arena.inode)
            if not arena.is_lost:
                self._busy.discard(arena.inode)
            self._changed.notify_all()

    def mark_behind(self, arena: Arena) -> None:
        """Note that only tiers that are behind still need an arena. Thread: any."""
        with self._changed:
            if arena.inode in self._busy:
                self._behind.add(arena.inode)
            self._changed.notify_all()

    def prepare(self, num_bytes: int, device: torch.device | None = None) -> None:
        """Have free arenas of that size touched in the background, so that the first save finds warm pages.

        Args:
            num_bytes: Of a save.
            device: Whose copies go there: the pages are pinned, too; ``None`` = the host's.

        Blocks: never. Thread: the training thread.
        """
        if self._toucher is not None and self._toucher.is_alive():
            return  # it is under way
        try:
            self._writer.start()
        except CheckpointError:
            return  # the save that needs it reports the error
        self._toucher = start_driver_thread(partial(self._prepare, num_bytes, device), "outlast-touch", self._stop)

    def stop(self) -> None:
        """Touch nothing more."""
        self._stop.set()

    def give_up(self) -> None:
        """Have :meth:`take` wait no more. Thread: any."""
        self._is_given_up = True
        if self._changed.acquire(blocking=False):  # else the writer is being asked; the next call comes through
            self._changed.notify_all()
            self._changed.release()

    def close(self) -> None:
        """Unmap all arenas; the writer keeps what it keeps."""
        self.stop()
        if self._toucher is not None:
            self._toucher.join(2.0)
        with self._changed:
            for arena in self._known.values():
                arena.close()
            self._known.clear()

    def _ask(self, num_bytes: int, may_steal: bool) -> Arena | None:
        request = Take(
            rank=self._rank,
            num_bytes=num_bytes,
            busy=tuple(self._busy),
            may_steal=may_steal,
            num_behind=len(self._behind),
        )
        limit_s = min(SILENT_S, self._answer_s) if self._is_writer_silent else self._answer_s
        try:
            _, fd = self._writer.ask(request, Done, timeout_s=limit_s)
        except CheckpointError as error:
            self._is_writer_silent = isinstance(error, WriterSilent)  # one that died is replaced at once: wait for that
            raise
        self._is_writer_silent = False
        if fd is None:
            return None
        inode = os.fstat(fd).st_ino
        if inode in self._known:
            os.close(fd)
        else:
            self._forget_dropped(inode)
            self._known[inode] = Arena(fd)
        self._busy.add(inode)
        return self._known[inode]

    def _forget_dropped(self, newest: int) -> None:
        """Unmap what the writer has replaced by larger memory: only what is in use and one more can still be its."""
        idle = [inode for inode in self._known if inode not in self._busy and inode != newest]
        for inode in idle[:-1]:
            self._known.pop(inode).close()

    def _prepare(self, num_bytes: int, device: torch.device | None) -> None:
        """Take all free arenas, give them back, and touch them. Thread: the toucher's."""
        arenas = []
        with self._changed:
            try:
                while (arena := self._ask(num_bytes, False)) is not None:
                    arenas.append(arena)
            except CheckpointError as error:
                log.debug("no memory is prepared for saves: %s", error)  # the save that needs it reports the error
        for arena in arenas:
            self.give_back(arena)
        copies = None if device is None else copies_of(device)
        for arena in arenas:
            arena.touch(self._stop)
            if copies is not None:
                arena.pin(copies, self._stop)
