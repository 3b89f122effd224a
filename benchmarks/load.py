"""Benchmark ``load``: from a committed checkpoint to live tensors, every byte verified, compared with other loaders.

One process saves the state with all libraries and is killed; its staged state stays in a writer process, as under an
agent. Another process then loads, in turns.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks.checkpoint_state import (
    NUM_TENSORS,
    TENSOR_BYTES,
    CheckpointState,
    Found,
    MetaCheckpointing,
    holds,
    missing_peers,
    rounds_of,
    times,
)
from benchmarks.measuring import Progress, describe_place, measure_rounds, timed, worker_ranks
from outlast import env
from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.manager import open_manager
from outlast.checkpoint.writer_client import WriterProcess
from outlast.config import CheckpointConfig
from outlast.errors import DeadlineExceeded, OutlastError
from outlast.simulate.benchmark_results import BenchResult

_SAVED = "saved with all libraries"
_TIMEOUT_S = 600.0
_READ_BYTES = 8 << 20
_SECONDS = {
    "local": "outlast, local tier, into the live state, every byte verified",
    "local_opened": "  opening its manager before",
    "memory": "outlast, from the writer's memory after SIGKILL of the worker, the same",
    "memory_opened": "  opening its manager before",
    "torch_load": "torch.load, into new tensors",
    "torch_load_applied": "torch.load and load_state_dict()",
    "torch_mapped": "torch.load of a mapped file and load_state_dict()",
    "dcp_load": "dcp.load, into the live state",
    "safetensors": "safetensors' load_file and a copy into the live state",
    "meta": "torch-checkpointing, into the live state",
}


def measure(*, repeats: int, progress: Progress, num_tensors: int = NUM_TENSORS) -> BenchResult:
    """Load a state of ``num_tensors`` tensors of 16 MiB again and again.

    Raises:
        OutlastError: A process failed, or loaded other values than were saved.

    Blocks: about 5 s a round, for a state of 1 GiB.
    """
    try:
        writer = WriterProcess()
    except OSError as error:
        raise OutlastError(f"no writer process can be started: {error}") from error
    with closing(writer), tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        place, agent = describe_place(Path(name)), {env.WRITER: writer.address}
        progress(f"{num_tensors * TENSOR_BYTES / 2**20:.0f} MiB, {place}; all are read from the page cache")
        _save_and_kill(name, num_tensors, agent)
        progress("saved by all libraries; the process that did is killed")
        rounds = measure_rounds(
            *(measure_loads, name, num_tensors),
            repeats=repeats,
            progress=progress,
            timeout_s=_TIMEOUT_S,
            one_thread=False,
            variables=agent,
        )
    return BenchResult(
        "load",
        (
            rounds.ratio_bar("load_verified_vs_torch_load", "local", "torch_load", 0.5, "torch.load"),
            rounds.ratio_bar("load_verified_vs_dcp_load", "local", "dcp_load", 0.6, "dcp.load"),
            rounds.ratio_bar("load_memory_vs_torch_load", "memory", "torch_load", 0.5, "torch.load"),
        ),
        (
            f"{num_tensors} tensors of 16 MiB, {place}, all in the page cache; the values are compared after each load",
            *times(rounds, _SECONDS),
            *missing_peers(measured="meta" in rounds),
        ),
    )


def _save_and_kill(folder: str, num_tensors: int, variables: dict[str, str]) -> None:
    """Run a process that saves with all libraries, and kill it once everything is durable."""
    with worker_ranks(save_and_wait, folder, num_tensors, variables=variables, stdin=True) as saver:
        try:
            saver.next_line(0, _TIMEOUT_S, containing=_SAVED)
        except DeadlineExceeded as error:
            raise OutlastError(f"the process that saves failed, or was too slow: {error}") from error


def save_and_wait(folder: str, num_tensors: str) -> None:
    """Save with all libraries, report it, and wait for the end of standard input or of this process."""
    from safetensors.torch import save_file

    warnings.simplefilter("ignore")  # the peers' warnings
    saved, files = CheckpointState(int(num_tensors)), _SavedFiles(Path(folder))
    manager = CheckpointManager(files.ours)
    manager.save(saved.state, 1).wait()
    torch.save(saved.state_dict(), files.torch)
    state_dict_saver.save(saved.state_dict(), checkpoint_id=files.dcp, no_dist=True)
    save_file(saved.tensors(), files.safetensors)
    if (meta := MetaCheckpointing.find(saved, files.meta)) is not None:
        meta.save_only()
    os.sync()
    print(_SAVED, flush=True)
    sys.stdin.read()


def measure_loads(num_rounds: str, folder: str, num_tensors: str) -> Iterator[Found]:
    """Yield seconds by name.

    Every measure begins with tensors of other values in warm memory, and ends with a check of all values. All files are
    in the page cache.
    """
    from safetensors.torch import load_file

    warnings.simplefilter("ignore")  # the peers' warnings
    saved, files = CheckpointState(int(num_tensors)), _SavedFiles(Path(folder))
    state = saved.state_dict()  # of the live tensors, which stay the same
    meta = MetaCheckpointing.find(saved, files.meta) if files.meta.exists() else None

    def torch_load() -> Found:
        saved.forget()
        seconds, loaded = timed(lambda: torch.load(files.torch, weights_only=True))
        _check("torch.load", holds(loaded["model"]))
        applied_s, _ = timed(lambda: saved.load_state_dict(loaded))
        _check("torch.load", saved.is_right())
        return {"torch_load": seconds, "torch_load_applied": seconds + applied_s}

    def load_mapped() -> None:
        saved.load_state_dict(torch.load(files.torch, weights_only=True, mmap=True))

    def load_dcp() -> None:
        state_dict_loader.load(state, checkpoint_id=files.dcp, no_dist=True)

    def load_safetensors() -> None:
        loaded = load_file(files.safetensors)
        for name, tensor in saved.tensors().items():
            tensor.copy_(loaded[name])

    def load_meta(meta: MetaCheckpointing) -> Found:
        saved.forget()
        seconds, loaded = timed(lambda: meta.load(state))
        saved.load_state_dict(loaded)
        _check("meta", saved.is_right())
        return {"meta": seconds}

    def into_live(name: str, load: Callable[[], object]) -> Found:
        saved.forget()
        seconds, _ = timed(load)
        _check(name, saved.is_right())
        return {name: seconds}

    files.warm()
    measures: list[Callable[[], Found]] = [
        lambda: _load_ours(saved, files, "local"),
        torch_load,
        lambda: into_live("dcp_load", load_dcp),
        lambda: _load_ours(saved, files, "memory"),
        lambda: into_live("safetensors", load_safetensors),
        lambda: into_live("torch_mapped", load_mapped),
        *([] if meta is None else [partial(load_meta, meta)]),
    ]
    yield from rounds_of(measures, int(num_rounds))
    if meta is not None:
        meta.close()


class _SavedFiles:
    """The files of each library."""

    def __init__(self, folder: Path) -> None:
        self.ours = CheckpointConfig(local_directory=str(folder / "ours"))
        self.torch = folder / "state.pt"
        self.dcp = folder / "dcp"
        self.safetensors = folder / "state.safetensors"
        self.meta = folder / "meta"
        self._folder = folder

    def warm(self) -> None:
        """Read every file once: outlast wrote past the page cache, the others through it."""
        buffer = bytearray(_READ_BYTES)
        for path in self._folder.rglob("*"):
            if path.is_file():
                with open(path, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass


def _load_ours(saved: CheckpointState, files: _SavedFiles, tier: str) -> Found:
    """Load from the local tier, or from the memory of the agent's writer after the worker was killed.

    Every byte is compared with its digest before any tensor changes, and again in the tensor.
    """
    place = env.read_worker()
    if tier == "local":
        place = dataclasses.replace(place, writer=None)
    saved.forget()
    opened_s, manager = timed(lambda: open_manager(files.ours, env=place))
    with closing(manager):
        seconds, restored = timed(lambda: manager.load_latest(saved.state))
    if restored is None or restored.tier != tier:
        raise SystemExit(f"nothing was loaded from {tier}: {restored}")
    _check(tier, saved.is_right())
    return {tier: seconds, f"{tier}_opened": opened_s}


def _check(who: str, is_right: bool) -> None:
    if not is_right:
        raise SystemExit(f"{who}: what was loaded is not what was saved")
