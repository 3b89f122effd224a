"""Staging memory: the image of a shard, copied here by training and written from here by the writer.

An arena is anonymous shared memory (``memfd``) that the writer gets as a descriptor: it has no name, so nothing
is left behind by any death. Fresh pages cost several times the copy, so an arena is kept and touched ahead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from outlast.checkpoint.shard import DTYPE_NAMES, TREE, Identity, Span, lay_out
from outlast.checkpoint.state import FlatState

__all__ = ["Arena", "Stager"]

PIECE_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """One buffer of shared memory.

    Args:
        num_bytes: Its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("outlast-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_bytes)
        self._map = mmap.mmap(self.fd, num_bytes)
        self.array: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.frombuffer(self._map, dtype=np.uint8)

    def touch(self, stop: threading.Event) -> None:
        """Have the kernel provide the pages, until done or stopped. Thread: any; the others go on meanwhile."""
        pages = self.array  # keeps the mapping while we work
        address = pages.ctypes.data
        for start in range(0, self.num_bytes, 16 * PIECE_BYTES):
            length = min(16 * PIECE_BYTES, self.num_bytes - start)
            if stop.is_set() or _libc.madvise(
                ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
            ):
                return  # stopped, or a kernel before 5.14: the first copy is slow, that is all

    def close(self) -> None:
        """Let go of the memory; pages go when the writer lets go, too. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            # The mapping goes with the last array that looks into it.
            self.array = np.empty(0, dtype=np.uint8)


class Stager:
    """Copy states into arenas, with two threads."""

    def __init__(self) -> None:
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="outlast-stage")

    def size_of(self, flat: FlatState, identity: Identity) -> int:
        """Return the bytes that the state's shard takes."""
        return self._lay_out(flat, identity)[2]

    def stage(
        self, flat: FlatState, identity: Identity, provide: Callable[[int], Arena]
    ) -> tuple[Arena, int, list[Span]]:
        """Copy a state as the image of its shard.

        Args:
            flat: The state.
            identity: Whose it is.
            provide: Returns an arena of at least that many bytes.

        Returns:
            The arena, the shard's size in bytes, and the tensors' places in it.

        Blocks: while the bytes are copied.
        """
        head, spans, size = self._lay_out(flat, identity)
        arena = provide(size)
        target = arena.array
        target[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        tensors = {named.name: named.tensor for named in flat.tensors}
        pieces: list[tuple[slice, np.ndarray[tuple[int], np.dtype[np.uint8]]]] = []
        for span in spans:
            is_tree = span.name == TREE
            source = np.frombuffer(flat.tree, dtype=np.uint8) if is_tree else _bytes_of(tensors[span.name])
            for start in range(0, span.num_bytes, PIECE_BYTES):
                end = min(start + PIECE_BYTES, span.num_bytes)
                pieces.append((slice(span.offset + start, span.offset + end), source[start:end]))
        if size >= 4 * PIECE_BYTES:
            other = self._helper.submit(_copy, target, pieces[1::2])
            _copy(target, pieces[::2])
            other.result()
        else:
            _copy(target, pieces)
        return arena, size, spans

    def close(self) -> None:
        """End the helper thread."""
        self._helper.shutdown(wait=False, cancel_futures=True)

    def _lay_out(self, flat: FlatState, identity: Identity) -> tuple[bytes, list[Span], int]:
        tensors = [
            (
                named.name,
                DTYPE_NAMES[str(named.tensor.dtype)],
                tuple(named.tensor.shape),
                named.tensor.numel() * named.tensor.element_size(),
                named.tensor.element_size(),
            )
            for named in flat.tensors
        ]
        tensors.append((TREE, "U8", (len(flat.tree),), len(flat.tree), 1))
        return lay_out(tensors, identity)


def _copy(
    target: np.ndarray[tuple[int], np.dtype[np.uint8]],
    pieces: list[tuple[slice, np.ndarray[tuple[int], np.dtype[np.uint8]]]],
) -> None:
    for where, source in pieces:
        np.copyto(target[where], source)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # From a device this is already the copy; it waits for the kernels queued before it.
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
