"""What ``outlast bench save`` measures beside ours: other libraries, and what no save can beat by much.

What goes to a file is synchronised with the disk by all of them: for those that do not do it themselves it is done.
"""

from __future__ import annotations

import errno
import importlib
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from outlast import clock
from outlast.bench.checkpoint_state import TENSOR_BYTES, CheckpointState, Found
from outlast.bench.measuring import timed

__all__ = ["Dcp", "Floors", "MetaCheckpointing", "save_safetensors", "save_torch"]

_CHUNK_BYTES = 8 << 20


class Dcp:
    """``torch.distributed.checkpoint``.

    Args:
        saved: The state.
        folder: Where; removed after every save.
    """

    def __init__(self, saved: CheckpointState, folder: Path) -> None:
        self._saved, self._folder = saved, folder
        self._stager = _stager(beside=False)
        self._late_stager = _stager(beside=True)

    def save(self) -> Found:
        """``dcp.save``."""
        seconds, _ = timed(lambda: dcp.save(self._saved.state_dict(), checkpoint_id=self._folder, no_dist=True))
        shutil.rmtree(self._folder)
        return {"dcp_save": seconds}

    def save_in_thread(self) -> Found:
        """``dcp.async_save`` as it is: stages into memory that it allocates, writes in a thread."""
        begin_ns = clock.now_ns()
        stall_s, written = timed(self.begin_save)
        written.result()
        total_s = (clock.now_ns() - begin_ns) / 1e9
        shutil.rmtree(self._folder)
        return {"dcp_async": stall_s, "dcp_async_durable": total_s}

    def save_with_stager(self) -> Found:
        """``dcp.async_save`` with a stager that is kept, and with it the memory."""
        stall_s, written = timed(lambda: self.begin_save(async_stager=self._stager))
        written.result()
        shutil.rmtree(self._folder)
        return {"dcp_reused_stager": stall_s}

    def save_staging_beside(self) -> Found:
        """``dcp.async_save`` with asynchronous staging: the copy continues after the return."""
        stall_s, response = timed(lambda: self.begin_save(async_stager=self._late_stager))
        guard_s, _ = timed(response.staging_completion.result)
        response.upload_completion.result()
        shutil.rmtree(self._folder)
        return {"dcp_staging": stall_s, "dcp_staging_guard": guard_s}

    def begin_save(self, **options: Any) -> Any:
        """Begin a save; return what it is awaited with."""
        return dcp.async_save(self._saved.state_dict(), checkpoint_id=self._folder, no_dist=True, **options)

    def remove(self) -> None:
        """Remove what was saved."""
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Give back the stagers' memory."""
        self._stager.close()
        self._late_stager.close()


def _stager(*, beside: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=beside, use_non_blocking_copy=False
        )
    )


class MetaCheckpointing:
    """``torch_checkpointing``, where it is installed: stages beside training, writes in a process of its own.

    Args:
        module: The library.
        saved: The state.
        folder: Where; removed after every save.
    """

    def __init__(self, module: Any, saved: CheckpointState, folder: Path) -> None:
        # Its direct writes are not aligned, which some disks refuse (EINVAL) in the middle of a save.
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        buffered = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = module.CheckpointManager(module.CheckpointManager.Config(storage_config=buffered))
        self._saved, self._folder = saved, folder

    @classmethod
    def find(cls, saved: CheckpointState, folder: Path) -> MetaCheckpointing | None:
        """Return it; ``None``: it is not installed."""
        try:
            module = importlib.import_module("torch_checkpointing")
        except ImportError:
            return None
        return cls(module, saved, folder)

    def save(self) -> Found:
        """Save; the guard is its lock, which it has one take around the optimizer's step."""
        begin_ns = clock.now_ns()
        stall_s, written = timed(lambda: self._manager.save(str(self._folder), self._saved.state_dict()))
        guard_s, _ = timed(self._pass_lock)
        written.result()
        total_s = (clock.now_ns() - begin_ns) / 1e9
        shutil.rmtree(self._folder)
        return {"meta": stall_s, "meta_guard": guard_s, "meta_total": total_s}

    def save_only(self) -> None:
        """Save, and keep what is saved. Blocks: until it is written."""
        self._manager.save(str(self._folder), self._saved.state_dict()).result()

    def load(self, into: dict[str, Any]) -> Any:
        """Load what was saved into tensors; return it."""
        return self._manager.load(str(self._folder), into)

    def close(self) -> None:
        """End its process."""
        self._manager.close()

    def _pass_lock(self) -> None:
        with self._manager.lock():
            pass


def save_torch(saved: CheckpointState, path: Path) -> float:
    """Return the seconds of ``torch.save`` into a file, and of an fsync."""
    seconds, _ = timed(lambda: _synchronised(path, lambda: torch.save(saved.state_dict(), path)))
    path.unlink()
    return seconds


def save_safetensors(saved: CheckpointState, path: Path) -> float:
    """Return the seconds of safetensors' ``save_file``, and of an fsync."""
    from safetensors.torch import save_file

    seconds, _ = timed(lambda: _synchronised(path, lambda: save_file(saved.tensors(), path)))
    path.unlink()
    return seconds


def _synchronised(path: Path, save: Callable[[], object]) -> None:
    save()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Floors:
    """Copy and write with two threads, from and into memory that is warm.

    Args:
        saved: What is copied, and as much of it is written.
        folder: Where.
    """

    def __init__(self, saved: CheckpointState, folder: Path) -> None:
        self._path = folder / "bare"
        self._memory = mmap.mmap(-1, saved.num_bytes)
        self._target = np.frombuffer(self._memory, dtype=np.uint8)
        self._sources = [tensor.numpy().reshape(-1).view(np.uint8) for tensor in saved.tensors().values()]
        self._other = ThreadPoolExecutor(1)
        self.copy()

    def copy(self) -> float:
        """Return the seconds of a copy."""

        def half(first: int) -> None:
            for number in range(first, len(self._sources), 2):
                start = number * TENSOR_BYTES
                np.copyto(self._target[start : start + TENSOR_BYTES], self._sources[number])

        return timed(lambda: self._twice(half))[0]

    def write(self) -> float:
        """Return the seconds of bare writes past the page cache, and of an fsync."""
        seconds, _ = timed(self._write)
        self._path.unlink()
        return seconds

    def close(self) -> None:
        """End the thread."""
        self._other.shutdown()

    def _write(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._path.unlink(missing_ok=True)
            fd = os.open(self._path, flags)
        size = len(self._memory)

        def half(first: int) -> None:
            with memoryview(self._memory) as view:
                for start in range(first * _CHUNK_BYTES, size, 2 * _CHUNK_BYTES):
                    with view[start : start + _CHUNK_BYTES] as chunk:
                        written = 0
                        while written < len(chunk):
                            with chunk[written:] as rest:
                                written += os.pwrite(fd, rest, start + written)

        try:
            os.posix_fallocate(fd, 0, size)
            self._twice(half)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _twice(self, half: Callable[[int], None]) -> None:
        beside = self._other.submit(half, 1)
        half(0)
        beside.result()
