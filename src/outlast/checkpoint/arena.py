"""Staging: the image of a shard, copied by training into shared memory, and written from there by the writer.

Shared memory (``memfd``) that the writer owns has no name, so nothing is left behind by any death. Fresh pages cost
several times the copy, so an arena is kept, and touched ahead.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch

from outlast.checkpoint.manifest import TensorEntry
from outlast.checkpoint.shard import DTYPE_NAMES, TREE, Identity, Layout, Span
from outlast.checkpoint.state import FlatState, NamedTensor

__all__ = ["Arena", "Staged", "Stager"]

PIECE_BYTES = 8 << 20
TOUCH_BYTES = 128 << 20
_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2
_libc = ctypes.CDLL(None, use_errno=True)
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Arena:
    """One piece of shared memory, mapped here.

    Args:
        fd: Its descriptor, from now on the arena's.
        num_bytes: Its size.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd, self.num_bytes = fd, num_bytes
        self.inode = os.fstat(fd).st_ino
        """Tells it from all others, in any process."""
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)  # whoever maps it cannot lose a page under his hands
        self._map = mmap.mmap(fd, num_bytes)
        self.array: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def touch(self, stop: threading.Event) -> None:
        """Have the kernel provide the pages, until done or stopped. Thread: any; the others go on meanwhile."""
        pages = self.array  # keeps the mapping while we work
        for start in range(0, len(pages), TOUCH_BYTES):
            length = min(TOUCH_BYTES, len(pages) - start)
            address = ctypes.c_void_p(pages.ctypes.data + start)
            if stop.is_set() or _libc.madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                return  # stopped, or a kernel before 5.14: the first copy is slow, that is all

    def view(self, num_bytes: int) -> memoryview:
        """Return its first bytes, to be read while the arena is not given back."""
        return memoryview(self.array)[:num_bytes]  # type: ignore[arg-type]

    def close(self) -> None:
        """Let go of the memory; pages go when the writer lets go, too. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            # The mapping goes with the last array that looks into it.
            self.array = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Staged:
    """A shard's image, which may still be filled."""

    arena: Arena
    num_bytes: int
    tensors: tuple[TensorEntry, ...]
    _copies: tuple[Future[None], ...] = ()

    def wait(self) -> None:
        """Wait until everything is copied. Thread: any. Blocks: up to the rest of one memory copy."""
        wait(self._copies)
        for copy in self._copies:
            copy.result()


class Stager:
    """Copy states into arenas, with two threads. Thread: the training thread."""

    def __init__(self) -> None:
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="outlast-stage")
        self._key: tuple[object, ...] = ()
        self._layout = Layout(())
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

        Blocks: while the bytes that are not deferred are copied.
        """
        head, spans, size = self._place(flat, identity)
        arena = provide(size)
        target = arena.array
        target[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        tensors = {named.name: named for named in flat.tensors}
        now, later = list[tuple[slice, Bytes]](), list[tuple[slice, Bytes]]()
        for span in spans:
            source = np.frombuffer(flat.tree, dtype=np.uint8) if span.name == TREE else _bytes_of(tensors[span.name])
            pieces = later if span.name in deferred else now
            for start in range(0, span.num_bytes, PIECE_BYTES):
                end = min(start + PIECE_BYTES, span.num_bytes)
                pieces.append((slice(span.offset + start, span.offset + end), source[start:end]))
        if sum(len(source) for _, source in now) >= 4 * PIECE_BYTES:
            other = self._helpers.submit(_copy, target, now[1::2])
            try:
                _copy(target, now[::2])
            finally:
                other.result()  # also when a signal ends our half: the arena gets another use
        else:
            _copy(target, now)
        copies = tuple(self._helpers.submit(_copy, target, later[half::2]) for half in (0, 1)) if later else ()
        return Staged(arena, size, (*self._describe(tensors, spans, len(head)), _tree_entry(spans[-1])), copies)

    def close(self) -> None:
        """End the helper threads. Blocks: up to the rest of one memory copy, since its arena gets another use."""
        self._helpers.shutdown(wait=True, cancel_futures=True)

    def _place(self, flat: FlatState, identity: Identity) -> tuple[bytes, list[Span], int]:
        """Lay a state out; as the last one, if nothing but plain values changed."""
        key = tuple(
            (named.name, named.tensor.dtype, tuple(named.tensor.shape), named.global_shape, named.global_offset)
            for named in flat.tensors
        )
        if key != self._key:
            self._key, self._entries = key, (-1, [])
            self._layout = Layout(
                (
                    named.name,
                    DTYPE_NAMES[str(named.tensor.dtype)],
                    tuple(named.tensor.shape),
                    named.tensor.numel() * named.tensor.element_size(),
                    named.tensor.element_size(),
                )
                for named in flat.tensors
            )
        return self._layout.place(identity, len(flat.tree))

    def _describe(self, tensors: dict[str, NamedTensor], spans: list[Span], start: int) -> list[TensorEntry]:
        if self._entries[0] != start:
            entries = [
                TensorEntry(
                    name=span.name,
                    dtype=span.dtype,
                    shape=span.shape,
                    global_shape=tensors[span.name].global_shape,
                    global_offset=tensors[span.name].global_offset,
                    offset=span.offset,
                    num_bytes=span.num_bytes,
                )
                for span in spans[:-1]
            ]
            self._entries = (start, entries)
        return self._entries[1]


def _tree_entry(span: Span) -> TensorEntry:
    return TensorEntry(
        name=span.name,
        dtype=span.dtype,
        shape=span.shape,
        global_shape=span.shape,
        global_offset=(0,),
        offset=span.offset,
        num_bytes=span.num_bytes,
    )


def _copy(target: Bytes, pieces: list[tuple[slice, Bytes]]) -> None:
    for where, source in pieces:
        np.copyto(target[where], source)


def _bytes_of(named: NamedTensor) -> Bytes:
    tensor = named.tensor
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # From a device this is already the copy; it waits for the kernels queued before it.
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
