"""Benchmark ``save``: what a save costs training, and when it is durable, compared with other libraries.

Three processes measure one after the other: stalls and durations, concurrent training steps, and memory. Each library's
save ends when its files are synchronised with the disk; the benchmark does so for libraries that do not.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.checkpoint_state import (
    NUM_TENSORS,
    TENSOR_BYTES,
    CheckpointState,
    Found,
    MetaCheckpointing,
    missing_peers,
    rounds_of,
    time_save,
    times,
)
from benchmarks.measuring import MeasuredRounds, Progress, describe_place, measure_rounds, median, timed
from outlast.checkpoint import CheckpointManager, SaveHandle
from outlast.config import CheckpointConfig
from outlast.simulate.benchmark_results import Bar, BenchResult

_CHUNK_BYTES = 8 << 20
_NUM_SMALL = 20_000
"""Number of tensors of 4 KiB in the state of many small ones."""
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
    """Save a state of ``num_tensors`` tensors of 16 MiB again and again.

    Raises:
        OutlastError: A measuring process failed.

    Blocks: about 20 s a round, for a state of 1 GiB.
    """
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        progress(f"{num_tensors * TENSOR_BYTES / 2**20:.0f} MiB, {describe_place(folder)}")
        how = partial(measure_rounds, progress=progress, timeout_s=_TIMEOUT_S, one_thread=False)
        saves = how(measure_saves, name, num_tensors, repeats=repeats)
        steps = how(measure_steps, name, num_tensors, repeats=repeats)
        memory = how(measure_memory, name, num_tensors, repeats=min(repeats, _MOST_MEMORY_ROUNDS))
        place = describe_place(folder)
    overlapped_ms, staging_ms = saves["overlapped"] * 1e3, saves["dcp_staging"] * 1e3
    many_ms, copy_ms = saves["many"] * 1e3, 1.25 * saves["many_copy"] * 1e3
    slowdown, dcp_slowdown = max(0.0, steps["ours_slowdown"]), steps["dcp_slowdown"]
    compared = None if dcp_slowdown <= 0 else slowdown / dcp_slowdown  # the peer may have lost nothing
    most_mib = 2 * num_tensors * TENSOR_BYTES / 2**20 + _MEMORY_BEYOND_MIB
    staging, copying = "dcp, asynchronous staging", "1.25 x a copy of the same bytes in one piece"
    growing = "dcp.async_save, thread (a step's growth)"
    return BenchResult(
        "save",
        (
            saves.ratio_bar("stall_vs_dcp_async", "ours", "dcp_async", 0.7, "dcp.async_save"),
            saves.ratio_bar("stall_vs_memcpy", "ours", "memcpy", 1.25, "warm copy, 2 threads"),
            Bar("stall_overlapped_ms", overlapped_ms, "ms", 8.0, staging, staging_ms),
            saves.ratio_bar("stall_overlapped_vs_dcp_staging", "overlapped", "dcp_staging", 0.6, staging),
            Bar("many_tensors_stall_ms", many_ms - copy_ms, "ms", 150.0, copying, copy_ms),
            Bar("slowdown_vs_dcp_thread", compared, "x", 0.5, growing, dcp_slowdown),
            saves.ratio_bar("durable_vs_dcp_save", "ours_durable", "dcp_save", 0.7, "dcp.save"),
            saves.ratio_bar("durable_vs_bare_write", "ours_durable", "bare_write", 1.3, "bare O_DIRECT + fsync"),
            memory.bar("extra_memory_mib", "ours", "MiB", most_mib, called="dcp.async_save", peer="dcp"),
        ),
        (
            f"{num_tensors} tensors of 16 MiB, {place}; each round removes what it wrote",
            *times(saves, _SECONDS),
            *_of_steps(steps),
            *missing_peers(measured="meta" in saves),
        ),
    )


def _of_steps(steps: MeasuredRounds) -> list[str]:
    """Return a line on what training loses during each library's save."""
    return [
        f"{training}, while {called} writes: steps took {steps[f'{name}_slowdown']:+.0%} for "
        f"{steps[f'{name}_meanwhile'] * 1e3:.0f} ms, {steps[f'{name}_lost'] * 1e3:.0f} ms lost in all"
        for suffix, training in (("", "training on all cores"), ("_one_core", "training on one core"))
        for name, called in ((f"ours{suffix}", "outlast"), (f"dcp{suffix}", "dcp.async_save"))
    ]


# -- stalls and durations --------------------------------------------------------------------------------------------


def measure_saves(num_rounds: str, name: str, num_tensors: str) -> Iterator[Found]:
    """Yield seconds by name. Every save has ended, and its files are removed, before the next measure begins."""
    warnings.simplefilter("ignore")  # the peers' warnings
    saved, folder = CheckpointState(int(num_tensors)), Path(name)
    ours = _Ours(folder / "ours", saved.state, overlap=False)
    late = _Ours(folder / "late", saved.state, overlap=True)
    small = {f"layers.{number // 10}.part_{number % 10}": torch.randn(1024) for number in range(_NUM_SMALL)}
    many = _Ours(folder / "many", {"tensors": small}, overlap=False)
    source = torch.cat(list(small.values())).numpy()
    target = source.copy()
    floors, dcp = Floors(saved, folder), Dcp(saved, folder / "dcp")
    stager, late_stager = _stager(beside=False), _stager(beside=True)
    meta = MetaCheckpointing.find(saved, folder / "meta")

    def save_many() -> Found:
        copy_s, _ = timed(lambda: np.copyto(target, source))
        return {"many": many.save()[0], "many_copy": copy_s}

    def save_safetensors(path: Path) -> None:
        from safetensors.torch import save_file

        save_file(saved.tensors(), path)

    measures: list[Callable[[], Found]] = [
        lambda: _named(ours.save(), "ours", total="ours_durable"),
        lambda: {"memcpy": floors.copy()},
        lambda: _named(dcp.save_async(), "dcp_async", total="dcp_async_durable"),
        lambda: _named(dcp.save_async(stager), "dcp_reused_stager"),
        lambda: _named(late.save(), "overlapped", guard="overlapped_guard"),
        save_many,
        lambda: _named(dcp.save_async(late_stager, is_late=True), "dcp_staging", guard="dcp_staging_guard"),
        lambda: {"bare_write": floors.write()},
        lambda: {"dcp_save": dcp.save()},
        lambda: {"torch_save": _save_file(folder / "state.pt", lambda path: torch.save(saved.state_dict(), path))},
        lambda: {"safetensors": _save_file(folder / "state.safetensors", save_safetensors)},
        *([] if meta is None else [meta.save]),
    ]
    yield from rounds_of(measures, int(num_rounds))
    for closing in (ours, late, many, floors, stager, late_stager, meta):
        if closing is not None:
            closing.close()


def _named(seconds: tuple[float, float, float], stall: str, *, guard: str = "", total: str = "") -> Found:
    """Return the reported results of :func:`time_save` by name."""
    return {name: value for name, value in zip((stall, guard, total), seconds, strict=True) if name}


class _Ours:
    """Saves of a manager with a local tier that keeps all checkpoints, as the peers do."""

    def __init__(self, folder: Path, state: dict[str, Any], *, overlap: bool = False) -> None:
        config = CheckpointConfig(local_directory=str(folder), local_most_recent_k=-1, overlap_staging=overlap)
        self._manager = CheckpointManager(config)
        self._folder, self._state, self._iteration = folder, state, 0
        self._overlaps = overlap
        for _ in range(2):  # each of the two buffers once: fresh pages cost several times the copy
            self.save()

    def begin_save(self) -> SaveHandle:
        """Begin the next save, after an optimizer step that changes nothing, as there are no gradients."""
        self._iteration += 1
        if self._overlaps:
            self._state["optim"].step()
        return self._manager.save(self._state, self._iteration)

    def save(self) -> tuple[float, float, float]:
        """Return the seconds of the stall, of the wait for the rest of the copy, and until the save was durable."""
        seconds = time_save(
            self.begin_save, lambda handle: handle.wait(), guard=lambda _: self._manager.finish_staging()
        )
        self.remove()
        return seconds

    def remove(self) -> None:
        for old in self._folder.glob("*/step-*"):
            shutil.rmtree(old)

    def close(self) -> None:
        self._manager.close()


class Dcp:
    """``torch.distributed.checkpoint``; ``folder`` is removed after every save."""

    def __init__(self, saved: CheckpointState, folder: Path) -> None:
        self._saved, self._folder = saved, folder

    def save(self) -> float:
        seconds, _ = timed(lambda: save(self._saved.state_dict(), checkpoint_id=self._folder, no_dist=True))
        self.remove()
        return seconds

    def save_async(self, stager: DefaultStager | None = None, *, is_late: bool = False) -> tuple[float, float, float]:
        """Return the seconds of the stall, of the wait for the staging, and until the save was written.

        Args:
            stager: Stages into reused memory; ``None``: into memory that is allocated for each save.
            is_late: The stager's copy continues after the return.
        """
        seconds = time_save(
            lambda: self.begin_save(**({} if stager is None else {"async_stager": stager})),
            finish=lambda written: (written.upload_completion if is_late else written).result(),
            guard=(lambda written: written.staging_completion.result()) if is_late else None,
        )
        self.remove()
        return seconds

    def begin_save(self, **options: Any) -> Any:
        """Begin a save, by default written in a thread; return its future."""
        return async_save(self._saved.state_dict(), checkpoint_id=self._folder, no_dist=True, **options)

    def remove(self) -> None:
        shutil.rmtree(self._folder)


def _stager(*, beside: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=beside, use_non_blocking_copy=False
        )
    )


def _save_file(path: Path, save: Callable[[Path], object]) -> float:
    """Return the seconds of a save into one file and an fsync."""

    def save_durably() -> None:
        save(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    seconds, _ = timed(save_durably)
    path.unlink()
    return seconds


class Floors:
    """Copy and write with two threads, from and into warm memory, as many bytes as the state has."""

    def __init__(self, saved: CheckpointState, folder: Path) -> None:
        self._path = folder / "bare"
        self._memory = mmap.mmap(-1, saved.num_bytes)
        self._target = np.frombuffer(self._memory, dtype=np.uint8)
        self._sources = [tensor.numpy().reshape(-1).view(np.uint8) for tensor in saved.tensors().values()]
        self._other = ThreadPoolExecutor(1)
        self.copy()

    def copy(self) -> float:
        def half(first: int) -> None:
            for number in range(first, len(self._sources), 2):
                start = number * TENSOR_BYTES
                np.copyto(self._target[start : start + TENSOR_BYTES], self._sources[number])

        return timed(lambda: self._twice(half))[0]

    def write(self) -> float:
        """Return the seconds of direct writes and an fsync."""
        seconds, _ = timed(self._write)
        self._path.unlink()
        return seconds

    def close(self) -> None:
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


# -- training meanwhile ----------------------------------------------------------------------------------------------


def measure_steps(num_rounds: str, name: str, num_tensors: str) -> Iterator[Found]:
    """Yield what training loses while a save is written.

    The bar is about training that keeps every core busy; if cores are free, a library that writes in a thread or
    process costs little.
    """
    warnings.simplefilter("ignore")  # the peer's warnings
    saved, training = CheckpointState(int(num_tensors)), _SteppedTraining()
    ours, dcp = _Ours(Path(name, "ours"), saved.state), Dcp(saved, Path(name, "dcp"))

    def beside_ours() -> list[float]:
        handle = ours.begin_save()
        found = training.beside(lambda: handle.done)
        handle.wait()
        ours.remove()
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
    ours.close()


def _compare(training: _SteppedTraining, beside: Callable[[], list[float]], name: str) -> Found:
    """Train quietly, during a save, and quietly again.

    Returns:
        ``lost``: seconds that the steps during the save took longer than quiet ones, in all; ``slowdown``: the same for
        one step, as a ratio to a quiet one; ``meanwhile``: seconds of the steps during the save.
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
    def __init__(self) -> None:
        layers = [layer for _ in range(_LAYERS) for layer in (torch.nn.Linear(_SIDE, _SIDE), torch.nn.ReLU())]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._input = torch.randn(_SIDE, _SIDE)

    def quiet(self) -> list[float]:
        return [timed(self._step)[0] for _ in range(_QUIET_STEPS)]

    def beside(self, is_done: Callable[[], bool]) -> list[float]:
        """Train until a save is done; return the seconds of the steps, including the one that detects its end."""
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
    """Yield the peak memory of saves, in MiB by name.

    Counted is anonymous and shared memory of this process and its descendants beyond what they had before.
    """
    warnings.simplefilter("ignore")  # the peer's warnings
    saved, folder = CheckpointState(int(num_tensors)), Path(name, "ours")

    def save_ours() -> None:
        """Save repeatedly, each as soon as a buffer is free."""
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
    """Return the peak of the memory in use during ``save`` beyond that before, in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed by an earlier round must count again when used again
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
    """Return the memory in use by this process and its descendants, with shared memory counted once."""
    this = psutil.Process()
    own = shared = 0
    for process in (this, *this.children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue  # it has ended
        fields = dict(line.split(":", 1) for line in text.splitlines())
        own += _bytes_of(fields, "RssAnon")
        shared = max(shared, _bytes_of(fields, "RssShmem"))  # the process that maps most of it maps all of it
    return own + shared


def _bytes_of(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0 kB").split()[0]) * 1024
