"""Saves of other libraries, as ``outlast bench save`` measures them: each returns seconds by name.

What goes to a file is synchronised with the disk by all of them: those that do not do it themselves are helped.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from outlast import clock
from outlast.bench.checkpoint_state import CheckpointState
from outlast.bench.measuring import timed

__all__ = ["Dcp", "MetaCheckpointing", "save_safetensors", "save_torch"]

Found = dict[str, float]


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
        with self._place() as folder:
            seconds, _ = timed(lambda: dcp.save(self._saved.state_dict(), checkpoint_id=folder, no_dist=True))
        return {"dcp_save": seconds}

    def save_in_thread(self) -> Found:
        """``dcp.async_save`` as it is: stages into memory that it allocates, writes in a thread."""
        with self._place() as folder:
            begin_ns = clock.now_ns()
            written: Any
            stall_s, written = timed(
                lambda: dcp.async_save(self._saved.state_dict(), checkpoint_id=folder, no_dist=True)
            )
            written.result()
            total_s = (clock.now_ns() - begin_ns) / 1e9
        return {"dcp_async": stall_s, "dcp_async_durable": total_s}

    def save_with_stager(self) -> Found:
        """``dcp.async_save`` with a stager that is kept, and with it the memory."""
        with self._place() as folder:
            stall_s, written = timed(lambda: self._async_save(folder, self._stager))
            written.result()
        return {"dcp_reused_stager": stall_s}

    def save_staging_beside(self) -> Found:
        """``dcp.async_save`` with asynchronous staging: the copy goes on after the return."""
        with self._place() as folder:
            stall_s, response = timed(lambda: self._async_save(folder, self._late_stager))
            guard_s, _ = timed(response.staging_completion.result)
            response.upload_completion.result()
        return {"dcp_staging": stall_s, "dcp_staging_guard": guard_s}

    def close(self) -> None:
        """Give back the stagers' memory."""
        self._stager.close()
        self._late_stager.close()

    def _async_save(self, folder: Path, stager: DefaultStager) -> Any:
        return dcp.async_save(self._saved.state_dict(), checkpoint_id=folder, async_stager=stager, no_dist=True)

    @contextlib.contextmanager
    def _place(self) -> Iterator[Path]:
        yield self._folder
        shutil.rmtree(self._folder)


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


def _synchronised(path: Path, save: Any) -> None:
    save()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
