"""The processes of ``outlast bench load``: one saves and is killed, the other loads; it prints seconds by name.

Every measure begins with tensors that hold other values, in memory that is warm, and ends with a look at all values.
Every file is in the page cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from outlast.bench.checkpoint_state import CheckpointState, holds
from outlast.bench.measuring import timed
from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig
from outlast.env import read_worker

__all__ = ["SAVED", "main"]

SAVED = "saved"
"""What the process that saves says once everything is durable."""
_READ_BYTES = 8 << 20
Found = dict[str, float]


class _Files:
    """What is saved, each by its own library."""

    def __init__(self, folder: Path) -> None:
        self.ours = folder / "ours"
        self.torch = folder / "state.pt"
        self.dcp = folder / "dcp"
        self.safetensors = folder / "state.safetensors"
        self.meta = folder / "meta"
        self._folder = folder

    def warm(self) -> None:
        """Read every file once: ours was written past the page cache, the others through it."""
        buffer = bytearray(_READ_BYTES)
        for path in self._folder.rglob("*"):
            if path.is_file():
                with open(path, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass


class _Loads:
    """Loads into a state that lives, each followed by a look at the values.

    Args:
        saved: The state.
        files: Where from.
    """

    def __init__(self, saved: CheckpointState, files: _Files) -> None:
        self._saved, self._files = saved, files

    def ours_from_disk(self) -> Found:
        """Every byte is compared with its digest before any tensor is touched, and again where it lies."""
        return self._ours("local", with_agent=False)

    def ours_from_memory(self) -> Found:
        """The same, from the memory of the agent's writer; who saved it was killed."""
        return self._ours("memory", with_agent=True)

    def torch_load(self) -> Found:
        """Into new tensors, and then into the live ones."""
        seconds, loaded = self._timed(lambda: torch.load(self._files.torch, weights_only=True))
        self._check("torch.load", holds(loaded["model"]))
        applied_s, _ = timed(lambda: self._apply(loaded))
        self._check("torch.load", self._saved.is_right())
        return {"torch_load": seconds, "torch_load_applied": seconds + applied_s}

    def torch_mapped(self) -> Found:
        """``torch.load`` of a mapped file, and a copy into the live tensors."""
        seconds, _ = self._timed(lambda: self._apply(torch.load(self._files.torch, weights_only=True, mmap=True)))
        self._check("torch.load, mapped", self._saved.is_right())
        return {"torch_mapped": seconds}

    def dcp_load(self) -> Found:
        """Into the live tensors."""
        state = self._saved.state_dict()
        seconds, _ = self._timed(
            lambda: state_dict_loader.load(state, checkpoint_id=self._files.dcp, no_dist=True),
        )
        self._check("dcp.load", self._saved.is_right())
        return {"dcp_load": seconds}

    def safetensors(self) -> Found:
        """A mapped file, and a copy into the live tensors."""
        from safetensors.torch import load_file

        def load() -> None:
            loaded = load_file(self._files.safetensors)
            for name, tensor in self._saved.tensors().items():
                tensor.copy_(loaded[name])

        seconds, _ = self._timed(load)
        self._check("safetensors", self._saved.is_right())
        return {"safetensors": seconds}

    def meta(self) -> Found:
        """``torch_checkpointing``, into the live tensors."""
        manager = _meta_manager()
        assert manager is not None, "only measured where it has saved"
        into = self._saved.state_dict()
        seconds, loaded = self._timed(lambda: manager.load(str(self._files.meta), into))
        self._apply(loaded)
        self._check("torch-checkpointing", self._saved.is_right())
        manager.close()
        return {"meta": seconds}

    def _ours(self, tier: str, *, with_agent: bool) -> Found:
        place = read_worker()
        if not with_agent:
            place = dataclasses.replace(place, writer=None)
        self._saved.forget()
        opened_s, manager = timed(lambda: CheckpointManager(_config(self._files), env=place))
        try:
            seconds, restored = timed(lambda: manager.load_latest(self._saved.state))
        finally:
            manager.close()
        if restored is None or restored.tier != tier:
            raise SystemExit(f"nothing was loaded from {tier}: {restored}")
        self._check(tier, self._saved.is_right())
        return {tier: seconds, f"{tier}_opened": opened_s}

    def _timed(self, load: Callable[[], Any]) -> tuple[float, Any]:
        self._saved.forget()
        return timed(load)

    def _apply(self, loaded: Any) -> None:
        self._saved.model.load_state_dict(loaded["model"])
        self._saved.optimizer.load_state_dict(loaded["optim"])

    def _check(self, who: str, is_right: bool) -> None:
        if not is_right:
            raise SystemExit(f"{who}: what was loaded is not what was saved")


def main() -> None:
    parser = argparse.ArgumentParser(description="Save with all libraries and wait to be killed, or measure loads.")
    parser.add_argument("rounds", type=int, help="0: save")
    parser.add_argument("folder", type=Path)
    parser.add_argument("tensors", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' own
    saved, files = CheckpointState(args.tensors), _Files(args.folder)
    if args.rounds:
        _measure(saved, files, args.rounds)
    else:
        _save(saved, files)


def _save(saved: CheckpointState, files: _Files) -> None:
    """Save with all libraries, say so, and wait for the end of standard input or of this process."""
    from safetensors.torch import save_file

    manager = CheckpointManager(_config(files))
    manager.save(saved.state, 1).wait()
    torch.save(saved.state_dict(), files.torch)
    state_dict_saver.save(saved.state_dict(), checkpoint_id=files.dcp, no_dist=True)
    save_file(saved.tensors(), files.safetensors)
    meta = _meta_manager()
    if meta is not None:
        meta.save(str(files.meta), saved.state_dict()).result()
    os.sync()
    print(SAVED, flush=True)
    sys.stdin.read()


def _measure(saved: CheckpointState, files: _Files, rounds: int) -> None:
    loads = _Loads(saved, files)
    measures = [
        loads.ours_from_disk,
        loads.torch_load,
        loads.dcp_load,
        loads.ours_from_memory,
        loads.safetensors,
        loads.torch_mapped,
    ]
    if files.meta.exists():
        measures.append(loads.meta)
    files.warm()
    for _ in range(rounds):
        found: Found = {}
        for measure in measures:
            found |= measure()
        print(json.dumps(found), flush=True)


def _config(files: _Files) -> CheckpointConfig:
    return CheckpointConfig(local_directory=str(files.ours))


def _meta_manager() -> Any:
    """Return a manager of ``torch_checkpointing``; ``None``: it is not installed."""
    try:
        module = importlib.import_module("torch_checkpointing")
    except ImportError:
        return None
    storage = importlib.import_module("torch_checkpointing.storage.filesystem")
    buffered = storage.LocalFileSystemStorageConfig(use_direct_io=False)
    return module.CheckpointManager(module.CheckpointManager.Config(storage_config=buffered))


if __name__ == "__main__":
    main()
