"""Copies of the arguments of an asynchronous call, so that training may change the originals.

The arguments are pickled and unpickled in this process, except for tensors, functions and handles. A tensor is copied
once, as memory: tensors that share memory share the copy, and only the used range of their memory is copied. Handles
(files, sockets, locks, queues, threads, process groups) stay the same objects. Any other object that cannot be pickled
is an error.

Rejected: ``copy.deepcopy``, which copies the whole memory behind a view, fails on tensors of a graph, and cannot pass a
lock on.
"""

from __future__ import annotations

import concurrent.futures
import io
import logging
import mmap
import multiprocessing.connection
import multiprocessing.managers
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.shared_memory
import multiprocessing.synchronize
import pickle
import queue
import socket
import subprocess
import tempfile
import threading
import types
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from outlast.errors import OutlastError

_ALIGNMENT = 16
"""Bytes; the size of the largest element."""

_CODE = (types.ModuleType, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.CodeType)
_HANDLES = (
    *(io.IOBase, tempfile._TemporaryFileWrapper, socket.socket, mmap.mmap, subprocess.Popen),
    *(threading.Thread, threading.Event, threading.Condition, threading.Semaphore, threading.Barrier, threading.local),
    *(type(threading.Lock()), type(threading.RLock()), queue.Queue, queue.SimpleQueue),
    *(concurrent.futures.Future, concurrent.futures.Executor, logging.Logger, logging.Handler),
    *(multiprocessing.process.BaseProcess, multiprocessing.managers.BaseProxy, multiprocessing.managers.BaseManager),
    *(multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue, multiprocessing.shared_memory.SharedMemory),
    *(multiprocessing.synchronize.SemLock, multiprocessing.synchronize.Event, multiprocessing.synchronize.Condition),
    *(multiprocessing.connection.Connection, multiprocessing.connection.Listener),
    *(dist.ProcessGroup, dist.distributed_c10d.Store, torch.Stream, torch.Event),
)
"""Types whose objects are passed on as they are, except for :data:`_IN_MEMORY`."""
_IN_MEMORY = (io.BytesIO, io.StringIO)


def copy_arguments(values: Mapping[str, Any], *, keeps_device_tensors: bool = False) -> dict[str, Any]:
    """Return copies of some values; objects that the values share stay shared.

    Args:
        values: By the name to use in an error.
        keeps_device_tensors: Do not copy tensors on an accelerator, for a function that copies them at once.

    Raises:
        OutlastError: An object cannot be copied; the error names the value and the object's type.

    Blocks: while tensors on an accelerator are copied there.
    """
    stream = io.BytesIO()
    buffers: list[bytearray] = []
    pickler = _Pickler(stream, buffers, keeps_device_tensors=keeps_device_tensors)
    for name, value in values.items():
        try:
            pickler.dump(value)
        except Exception as error:  # objects may raise anything
            kind = type(pickler.last)
            raise OutlastError(
                f"{name} cannot be copied for the asynchronous call: {kind.__module__}.{kind.__qualname__}: {error}; "
                "pass plain values and tensors, or let a function hold the object, which is not copied"
            ) from error
    pickler.copy_tensors()
    stream.seek(0)
    unpickler = _Unpickler(stream, buffers, pickler.kept)
    return {name: unpickler.load() for name in values}


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, buffers: list[bytearray], *, keeps_device_tensors: bool) -> None:
        super().__init__(stream, protocol=5, buffer_callback=lambda buffer: buffers.append(bytearray(buffer.raw())))
        self.kept: list[Any] = []
        """Replacements of the objects that are not pickled."""
        self.last: Any = None
        """The last visited object, for an error."""
        self._keeps_device_tensors = keeps_device_tensors
        self._places: dict[int, int] = {}
        self._objects: list[Any] = []
        self._memory: dict[tuple[torch.device, int], list[int]] = {}
        """Tensors to copy, as indices in ``kept``, by their memory."""

    def persistent_id(self, obj: Any) -> int | None:
        self.last = obj
        is_tensor = isinstance(obj, torch.Tensor)
        is_shared = isinstance(obj, _CODE) or type(obj) is bytes
        if not (is_tensor or is_shared or (isinstance(obj, _HANDLES) and not isinstance(obj, _IN_MEMORY))):
            return None
        place = self._places.setdefault(id(obj), len(self.kept))
        if place == len(self.kept):
            self._objects.append(obj)  # kept alive, so that its id stays unique
            self.kept.append(self._begin_copy(obj, place) if is_tensor else obj)
        return place

    def _begin_copy(self, tensor: torch.Tensor, place: int) -> Any:
        if self._keeps_device_tensors and tensor.device.type != "cpu":
            return tensor
        has_plain_memory = (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device.type != "meta"
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )
        if not has_plain_memory or tensor.numel() == 0:
            return tensor.detach().clone()
        self._memory.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(place)
        return None

    @torch.no_grad()
    def copy_tensors(self) -> None:
        """Copy the visited tensors."""
        devices = set()
        for (device, _), places in self._memory.items():
            ranges = [_used_bytes(self._objects[place]) for place in places]
            first = min(start for start, _ in ranges) // _ALIGNMENT * _ALIGNMENT
            size = max(end for _, end in ranges) - first
            storage = self._objects[places[0]].untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, first, (size,), (1,)).clone()
            for place, (start, _) in zip(places, ranges, strict=True):
                self.kept[place] = _view(memory.untyped_storage(), start - first, self._objects[place])
            if device.type != "cpu":
                devices.add(device)
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()  # the thread of the call uses another stream


def _used_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the byte after its last one."""
    start = int(tensor.storage_offset())
    num = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    return start * tensor.itemsize, (start + num) * tensor.itemsize


def _view(memory: torch.UntypedStorage, start: int, like: torch.Tensor) -> torch.Tensor:
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    made = made.set_(cast(Any, memory), start // like.itemsize, like.size(), like.stride())
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=like.requires_grad)
    return made.requires_grad_(like.requires_grad and like.is_leaf)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: list[bytearray], kept: list[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        return self._kept[pid]
