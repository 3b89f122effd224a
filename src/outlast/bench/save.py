"""``outlast bench save``: what a save costs training, and when it is durable, beside other libraries.

Three processes measure one after the other: stalls and durations, training steps meanwhile, and memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from outlast import clock
from outlast.bench.checkpoint_state import (
    NUM_TENSORS,
    TENSOR_BYTES,
    CheckpointState,
    Found,
    compared,
    missing_peers,
    rounds_of,
    times,
)
from outlast.bench.measuring import MeasuredRounds, Progress, describe_place, measure_in_process, median, timed
from outlast.bench.result import Bar, BenchResult
from outlast.bench.save_peers import Dcp, Floors, MetaCheckpointing, save_safetensors, save_torch
from outlast.checkpoint import CheckpointManager
from outlast.config import CheckpointConfig

__all__ = ["measure", "measure_memory", "measure_saves", "measure_steps"]

_NUM_SMALL = 20_000
"""Tensors of 4 KiB of the state of many small ones."""
_TIMEOUT_S = 900.0
_MOST_MEMORY_ROUNDS = 2
_MEMORY_BEYOND_MIB = 64.0
_MEMORY_INTERVAL_S = 0.02
_MEMORY_SAVES = 4
_SIDE, _LAYERS, _QUIET_STEPS = 256, 6, 60
_SECONDS = {
    "memcpy": "a copy by two threads into warm memory",
    "ours": "outlast: the stall of a save",
    "ours_durable": "outlast: until it is committed and durable",
    "overlapped": "outlast, overlap_staging: the stall",
    "many": f"outlast: the stall of a save of {_NUM_SMALL:,} tensors of 4 KiB",
    "many_copy": "a copy of the same bytes in one piece",
    "overlapped_guard": "outlast, overlap_staging: the wait before optimizer.step(), if it came at once",
    "dcp_async": "dcp.async_save, as it is: the stall",
    "dcp_async_durable": "dcp.async_save, as it is: until it is written",
    "dcp_reused_stager": "dcp.async_save with a stager that is kept: the stall",
    "dcp_staging": "dcp.async_save with asynchronous staging: the stall",
    "dcp_staging_guard": "dcp.async_save with asynchronous staging: the wait for its staging",
    "bare_write": "bare O_DIRECT writes by two threads, and fsync",
    "dcp_save": "dcp.save",
    "torch_save": "torch.save, and fsync",
    "safetensors": "safetensors' save_file, and fsync",
    "meta": "torch-checkpointing: the stall",
    "meta_guard": "torch-checkpointing: the wait for its lock, if it came at once",
    "meta_total": "torch-checkpointing: until it is written (no fsync)",
}


def measure(*, repeats: int, progress: Progress, num_tensors: int = NUM_TENSORS) -> BenchResult:
    """Save a state again and again.

    Args:
        repeats: Rounds that count.
        progress: Is called with a line for every round.
        num_tensors: Size of the state, in tensors of 16 MiB.

    Raises:
        OutlastError: A process that measures failed.

    Blocks: about 20 s a round, for a state of 1 GiB.
    """
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        progress(f"{num_tensors * TENSOR_BYTES / 2**20:.0f} MiB, {describe_place(folder)}")
        size = (name, num_tensors)
        saves = measure_in_process(measure_saves, *size, repeats=repeats, progress=progress, timeout_s=_TIMEOUT_S)
        steps = measure_in_process(measure_steps, *size, repeats=repeats, progress=progress, timeout_s=_TIMEOUT_S)
        few = min(repeats, _MOST_MEMORY_ROUNDS)
        memory = measure_in_process(measure_memory, *size, repeats=few, progress=progress, timeout_s=_TIMEOUT_S)
        place = describe_place(folder)
    return BenchResult(
        bench="save",
        bars=(
            compared(saves, "stall_vs_dcp_async", "ours", "dcp_async", 0.7, "dcp.async_save"),
            compared(saves, "stall_vs_memcpy", "ours", "memcpy", 1.25, "warm copy, 2 threads"),
            Bar(
                name="stall_overlapped_ms",
                value=_milliseconds(saves, "overlapped"),
                unit="ms",
                bar=8.0,
                peer="dcp, asynchronous staging",
                peer_value=_milliseconds(saves, "dcp_staging"),
            ),
            compared(
                saves, "stall_overlapped_vs_dcp_staging", "overlapped", "dcp_staging", 0.6, "dcp, asynchronous staging"
            ),
            Bar(
                name="many_tensors_stall_ms",
                value=_many(saves),
                unit="ms",
                bar=150.0,
                peer="1.25 x a copy of the same bytes in one piece",
                peer_value=_milliseconds(saves, "many_copy", 1.25),
            ),
            Bar(
                name="slowdown_vs_dcp_thread",
                value=_ratio_of_medians(steps, "ours_slowdown", "dcp_slowdown"),
                unit="x",
                bar=0.5,
                peer="dcp.async_save, thread (a step's growth)",
                peer_value=steps.median("dcp_slowdown"),
            ),
            compared(saves, "durable_vs_dcp_save", "ours_durable", "dcp_save", 0.7, "dcp.save"),
            compared(saves, "durable_vs_bare_write", "ours_durable", "bare_write", 1.3, "bare O_DIRECT + fsync"),
            Bar(
                name="extra_memory_mib",
                value=memory.median("ours"),
                unit="MiB",
                bar=2 * num_tensors * TENSOR_BYTES / 2**20 + _MEMORY_BEYOND_MIB,
                peer="dcp.async_save",
                peer_value=memory.median("dcp"),
            ),
        ),
        notes=(
            f"{num_tensors} tensors of 16 MiB, {place}; each round removes what it wrote",
            *times(saves, _SECONDS),
            *_of_steps(steps),
            *missing_peers(measured="meta" in saves),
        ),
    )


def _ratio_of_medians(rounds: MeasuredRounds, ours: str, peer: str) -> float | None:
    """Return the ratio of two medians; ``None``: the peer lost nothing to compare with."""
    our_value, peer_value = rounds.median(ours), rounds.median(peer)
    if our_value is None or peer_value is None or peer_value <= 0:
        return None
    return max(0.0, our_value) / peer_value


def _milliseconds(rounds: MeasuredRounds, name: str, factor: float = 1.0) -> float | None:
    seconds = rounds.median(name)
    return None if seconds is None else seconds * factor * 1e3


def _many(rounds: MeasuredRounds) -> float | None:
    """Return the milliseconds that a save of many small tensors takes beyond 1.25 times the copy of their bytes."""
    stall_ms, copy_ms = _milliseconds(rounds, "many"), _milliseconds(rounds, "many_copy", 1.25)
    return None if stall_ms is None or copy_ms is None else stall_ms - copy_ms


def _of_steps(steps: MeasuredRounds) -> list[str]:
    lines = []
    for suffix, training in (("", "training on all cores"), ("_one_core", "training on one core")):
        for name, called in (("ours", "outlast"), ("dcp", "dcp.async_save")):
            lost_s = steps.median(f"{name}{suffix}_lost")
            slowdown = steps.median(f"{name}{suffix}_slowdown")
            meanwhile_s = steps.median(f"{name}{suffix}_meanwhile")
            if lost_s is not None and slowdown is not None and meanwhile_s is not None:
                lines.append(
                    f"{training}, while {called} writes: steps took {slowdown:+.0%} for {meanwhile_s * 1e3:.0f} ms, "
                    f"{lost_s * 1e3:.0f} ms lost in all"
                )
    return lines


# -- stalls and durations --------------------------------------------------------------------------------------------


def measure_saves(num_rounds: str, name: str, num_tensors: str) -> Iterator[Found]:
    """Yield seconds by name. Every save has ended, and what it wrote is removed, before the next measure begins."""
    warnings.simplefilter("ignore")  # the peers' own
    saved, folder = CheckpointState(int(num_tensors)), Path(name)
    ours = _Ours(folder / "ours", saved.state, overlap=False)
    late = _Ours(folder / "late", saved.state, overlap=True)
    small = {f"layers.{number // 10}.part_{number % 10}": torch.randn(1024) for number in range(_NUM_SMALL)}
    many = _Ours(folder / "many", {"tensors": small}, overlap=False)
    source = torch.cat(list(small.values())).numpy()
    target = source.copy()
    floors, dcp = Floors(saved, folder), Dcp(saved, folder / "dcp")
    meta = MetaCheckpointing.find(saved, folder / "meta")

    def save_ours() -> Found:
        stall_s, _, durable_s = ours.save()
        return {"ours": stall_s, "ours_durable": durable_s}

    def save_late() -> Found:
        stall_s, guard_s, _ = late.save()
        return {"overlapped": stall_s, "overlapped_guard": guard_s}

    def save_many() -> Found:
        copy_s, _ = timed(lambda: np.copyto(target, source))
        return {"many": many.save()[0], "many_copy": copy_s}

    measures: list[Callable[[], Found]] = [
        save_ours,
        lambda: {"memcpy": floors.copy()},
        dcp.save_in_thread,
        dcp.save_with_stager,
        save_late,
        save_many,
        dcp.save_staging_beside,
        lambda: {"bare_write": floors.write()},
        dcp.save,
        lambda: {"torch_save": save_torch(saved, folder / "state.pt")},
        lambda: {"safetensors": save_safetensors(saved, folder / "state.safetensors")},
        *([] if meta is None else [meta.save]),
    ]
    yield from rounds_of(measures, int(num_rounds))
    for closing in (ours, late, many, floors, dcp, meta):
        if closing is not None:
            closing.close()


class _Ours:
    """Saves of a manager with a local tier; it removes nothing itself, as the peers do not."""

    def __init__(self, folder: Path, state: dict[str, Any], *, overlap: bool) -> None:
        config = CheckpointConfig(local_directory=str(folder), local_most_recent_k=-1, overlap_staging=overlap)
        self._manager = CheckpointManager(config)
        self._folder, self._state, self._iteration = folder, state, 0
        for _ in range(2):  # each of the two buffers once: fresh pages cost several times the copy
            self.save()

    def save(self) -> tuple[float, float, float]:
        """Return the seconds of the stall, of the wait for the rest of the copy, and until the save was durable."""
        self._iteration += 1
        begin_ns = clock.now_ns()
        stall_s, handle = timed(lambda: self._manager.save(self._state, self._iteration))
        guard_s, _ = timed(self._manager.finish_staging)
        handle.wait()
        durable_s = (clock.now_ns() - begin_ns) / 1e9
        for old in self._folder.glob("*/step-*"):
            shutil.rmtree(old)
        return stall_s, guard_s, durable_s

    def close(self) -> None:
        self._manager.close()


# -- training meanwhile ----------------------------------------------------------------------------------------------


def measure_steps(num_rounds: str, name: str, num_tensors: str) -> Iterator[Found]:
    """Yield what training loses while a save is written.

    Training that keeps every core busy is the one that the bar is about; beside one that leaves cores free, whoever
    writes in a thread or a process of its own costs it little.
    """
    warnings.simplefilter("ignore")  # the peer's own
    saved, training, folder = CheckpointState(int(num_tensors)), _SteppedTraining(), Path(name, "ours")
    manager = CheckpointManager(CheckpointConfig(local_directory=str(folder), local_most_recent_k=-1))
    dcp = Dcp(saved, Path(name, "dcp"))
    iterations = iter(range(1, 2 * int(num_rounds) + 3))

    for _ in range(2):  # each of the two buffers once
        manager.save(saved.state, next(iterations)).wait()

    def beside_ours() -> list[float]:
        handle = manager.save(saved.state, next(iterations))
        found = training.beside(lambda: handle.done)
        handle.wait()
        for old in folder.glob("*/step-*"):
            shutil.rmtree(old)
        return found

    def beside_dcp() -> list[float]:
        written = dcp.begin_save()
        found = training.beside(written.done)
        written.result()
        dcp.remove()
        return found

    for _ in range(int(num_rounds)):
        found: Found = {}
        for suffix, num_threads in (("", len(os.sched_getaffinity(0))), ("_one_core", 1)):
            torch.set_num_threads(num_threads)
            found |= _compare(training, beside_ours, f"ours{suffix}")
            found |= _compare(training, beside_dcp, f"dcp{suffix}")
        yield found
    manager.close()


def _compare(training: _SteppedTraining, beside: Callable[[], list[float]], name: str) -> Found:
    """Train quietly, beside a save, and quietly again.

    Returns:
        ``lost``: seconds that the steps beside the save took longer than quiet ones, in all; ``slowdown``: the same of
        one step, as a ratio to a quiet one; ``meanwhile``: seconds of the steps beside the save.
    """
    quiet = training.quiet()
    busy = beside()
    step_s = median(quiet + training.quiet())
    lost_s = sum(busy) - len(busy) * step_s
    return {
        f"{name}_lost": lost_s,
        f"{name}_slowdown": lost_s / (len(busy) * step_s),
        f"{name}_meanwhile": sum(busy),
    }


class _SteppedTraining:
    """Steps of a small model: forward, backward, optimizer."""

    def __init__(self) -> None:
        layers = [layer for _ in range(_LAYERS) for layer in (torch.nn.Linear(_SIDE, _SIDE), torch.nn.ReLU())]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._input = torch.randn(_SIDE, _SIDE)

    def quiet(self) -> list[float]:
        """Return the seconds of steps while nothing is saved."""
        return [timed(self._step)[0] for _ in range(_QUIET_STEPS)]

    def beside(self, is_done: Callable[[], bool]) -> list[float]:
        """Train until a save is done; return the seconds of the steps meanwhile, the one that sees its end included."""
        busy = [timed(self._step)[0]]
        while not is_done():
            busy.append(timed(self._step)[0])
        return busy

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._input).square().mean().backward()
        self._optimizer.step()


# -- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(num_rounds: str, name: str, num_tensors: str) -> Iterator[Found]:
    """Yield the most memory that saves take, in MiB by name.

    What counts is anonymous and shared memory of this process and all below it, beyond what they had before; code and
    other files do not.
    """
    warnings.simplefilter("ignore")  # the peer's own
    saved, folder = CheckpointState(int(num_tensors)), Path(name, "ours")

    def save_ours() -> None:
        """Save again and again, the next as soon as there is a buffer for it."""
        manager = CheckpointManager(CheckpointConfig(local_directory=str(folder)))
        for iteration in range(1, _MEMORY_SAVES + 1):
            manager.save(saved.state, iteration)
        manager.wait()
        manager.close()
        shutil.rmtree(folder)

    def save_dcp() -> None:
        dcp.begin_save().result()
        dcp.remove()

    dcp = Dcp(saved, Path(name, "dcp"))
    for _ in range(int(num_rounds)):
        yield {"ours": _peak_extra_mib(save_ours), "dcp": _peak_extra_mib(save_dcp)}


def _peak_extra_mib(save: Callable[[], None]) -> float:
    """Return the most memory that was in use during ``save`` beyond what was before, in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier round has freed is to be counted again when it is used again
    before = peak = _used_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_MEMORY_INTERVAL_S):
            peak = max(peak, _used_bytes())

    watcher = threading.Thread(target=watch, name="outlast-bench-memory")
    watcher.start()
    try:
        save()
    finally:
        done.set()
        watcher.join()
    return (peak - before) / 2**20


def _used_bytes() -> int:
    """Return the bytes in use by this process and all below it, what is shared counted once."""
    this = psutil.Process()
    own = shared = 0
    for process in (this, *this.children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue  # it has ended meanwhile
        fields = dict(line.split(":", 1) for line in text.splitlines())
        own += _bytes_of(fields, "RssAnon")
        shared = max(shared, _bytes_of(fields, "RssShmem"))  # whoever maps most of it maps all of it
    return own + shared


def _bytes_of(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0]) * 1024
