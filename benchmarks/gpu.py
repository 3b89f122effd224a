"""Benchmark ``gpu``: the cost of saves, loads and restarts on a GPU, compared with the bandwidth of its links.

The bars are ratios to bandwidths measured in the same rounds, so that they hold on any GPU: copies between pinned
memory and the device, and within the device. The peers are DCP's ``async_save`` with pinned staging, and torchrun. A
state of 20 GB needs three times as much host memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.checkpoint_state import CheckpointState, Found, time_save
from benchmarks.measuring import MeasuredRounds, Progress, measure_rounds, median, run_rounds, timed
from benchmarks.restart import RestartTiming, kill_under_outlast, kill_under_torchrun
from outlast import InProcessRestartConfig, clock, env
from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.tiers import Restored
from outlast.checkpoint.writer_client import WriterProcess
from outlast.config import CheckpointConfig, StragglerDetectionConfig
from outlast.errors import ConfigError, OutlastError
from outlast.inprocess import Handle, Wrapper
from outlast.numerics.replica_digest import digest_tensors
from outlast.runtime.device import describe_device, training_backend, training_device, why_absent
from outlast.runtime.device_copies import copies_of
from outlast.runtime.device_timing import time_on_device
from outlast.simulate.benchmark_results import Bar, BenchResult
from outlast.straggler import StragglerDetector
from outlast.testing.ranks import free_port

NUM_TENSORS = 1192
"""Default: 20 GB."""
_STATE_TIMEOUT_S, _RESTARTS_TIMEOUT_S = 240.0, 90.0
_COPY_BYTES = 1 << 30
_NUM_COPIES = 4
_SIDE = 8192
_QUIET_STEPS = 30
_LONG_STEP_S = 1.0
"""Duration of a large model's step, for the total cost of a save."""
_NUM_LONG_STEPS = 3
_NUM_SECTIONS, _BLOCK = 3, 200
_SOFT_TIMEOUT_S, _HARD_TIMEOUT_S = 30.0, 60.0
_SECONDS = {
    "to_host": "the state's bytes from the device into pinned memory",
    "to_device": "the same from pinned memory to the device",
    "ours": "outlast: the stall of a save",
    "dcp": "dcp.async_save with pinned memory that is kept: the stall",
    "overlapped": "outlast, overlap_staging: the stall",
    "guard": "outlast, overlap_staging: the wait before optimizer.step(), if it came at once",
    "step": "a training step while nothing is copied",
    "step_meanwhile": "a training step while a save is copied",
    "load": "outlast: from memory into the live state, every byte verified",
    "digest": "a digest of all of the state",
    "ours_lost": "outlast: what a save costs training in all",
    "overlapped_lost": "outlast, overlap_staging: what a save costs training in all",
    "dcp_lost": "dcp.async_save with pinned memory that is kept: what a save costs training in all",
    "dcp_late_lost": "the same with asynchronous staging",
}


def measure(*, repeats: int, progress: Progress, num_tensors: int = NUM_TENSORS) -> BenchResult:
    """Save, load, restart and digest on the first GPU; the state has ``num_tensors`` tensors of 16 MiB.

    Raises:
        ConfigError: There is no GPU that torch can use.
        OutlastError: A measuring process failed.

    Blocks: about a minute a round, for a state of 20 GB.
    """
    if (why := why_absent("gpu")) is not None:
        raise ConfigError(f"there is nothing to measure: {why}")
    if training_device().type == "cpu":
        raise ConfigError("there is nothing to measure: torch can use no GPU here")
    try:
        writer = WriterProcess()
    except OSError as error:
        raise OutlastError(f"no writer process can be started: {error}") from error
    how = partial(measure_rounds, repeats=repeats, progress=progress, one_thread=False)
    with closing(writer), tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
        agent = {env.WRITER: writer.address}
        saves = how(measure_saves, folder, num_tensors, variables=agent, timeout_s=_STATE_TIMEOUT_S)
        late = how(measure_overlapped, folder, num_tensors, variables=agent, timeout_s=_STATE_TIMEOUT_S)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    in_process = how(measure_restarts, variables=place, timeout_s=_RESTARTS_TIMEOUT_S)
    failures: list[str] = []
    found = run_rounds(
        {
            "outlast": lambda: kill_under_outlast(1, step_until_killed),
            "torchrun": lambda: kill_under_torchrun(1, step_until_killed, failures, progress),
        },
        repeats=repeats,
        progress=progress,
    )
    notes = _notes(num_tensors, saves, late, found, failures)
    return BenchResult("gpu", bars_of(saves, late, in_process, found), notes, {"gpu": describe_device()})


def bars_of(
    saves: MeasuredRounds,
    late: MeasuredRounds,
    in_process: MeasuredRounds,
    killed: dict[str, list[RestartTiming]],
) -> list[Bar]:
    ours_s, peer_s = (median(one.after_s for one in killed[name]) for name in ("outlast", "torchrun"))
    slowed = 100 * (late["step_meanwhile"] / late["step"] - 1)
    pinned = "pinned copy of as many bytes"
    return [
        saves.ratio_bar("gpu_save_stall_vs_copy", "ours", "to_host", 1.1, pinned),
        saves.ratio_bar("gpu_save_stall_vs_dcp", "ours", "dcp", 0.8, "dcp.async_save, pinned staging"),
        Bar("gpu_overlapped_stall_ms", late["overlapped"] * 1e3, "ms", 10.0),
        Bar("gpu_overlapped_slowdown_pct", slowed, "%", 5.0),
        Bar("gpu_lost_per_save_ms", late["overlapped_lost"] * 1e3, "ms", 50.0, *_best_peer(saves)),
        saves.ratio_bar("gpu_load_vs_copy", "load", "to_device", 1.3, pinned),
        Bar("gpu_restart_vs_torchrun", ours_s / peer_s, "x", 0.25, "torchrun, c10d (s)", peer_s),
        Bar("gpu_inprocess_exception_s", in_process["restarted"], "s", 0.5),
        Bar("gpu_straggler_us_per_step", late["timers_us"], "us", 20.0),
        Bar(
            "gpu_digest_vs_memory_bandwidth",
            late.ratio("within", "digest"),
            "x",
            0.5,
            "a copy within the device (s)",
            late["within"],
            is_floor=True,
        ),
    ]


def _best_peer(saves: MeasuredRounds) -> tuple[str, float]:
    """Return the way to save with DCP that costs training least in all, and its milliseconds."""
    called = {"dcp_lost": "dcp.async_save, pinned staging", "dcp_late_lost": "dcp.async_save, asynchronous staging"}
    name = min((one for one in called if one in saves), key=lambda one: saves[one])
    return called[name], saves[name] * 1e3


def _notes(
    num_tensors: int,
    saves: MeasuredRounds,
    late: MeasuredRounds,
    killed: dict[str, list[RestartTiming]],
    failures: list[str],
) -> list[str]:
    num_bytes = num_tensors << 24
    notes = [
        f"{num_bytes / 1e9:.1f} GB; to the host {num_bytes / saves['to_host'] / 1e9:.1f} GB/s, to the device "
        f"{num_bytes / saves['to_device'] / 1e9:.1f} GB/s, within it {num_bytes / late['within'] / 1e9:.0f} GB/s",
    ]
    for name, what in _SECONDS.items():
        seconds = late.median(name) if name in late else saves.median(name)
        found = "not measured: this torch cannot stage twice" if seconds is None else f"{seconds * 1e3:.1f} ms"
        notes.append(f"{what}: {found}")
    for name, some in killed.items():
        notes.append(f"SIGKILL to the next step on the GPU, {name}: {median(one.after_s for one in some):.3f} s")
    if failures:
        notes.append(f"torchrun did not recover in {len(failures)} runs, which were done again")
    return notes


# -- saves and loads ---------------------------------------------------------------------------------------------------


class _Nowhere(FileSystemWriter):
    """Discards DCP's writes: only the stall is measured."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        written: Any = torch.futures.Future()
        written.set_result([])
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Write nothing, either."""


def _pinned_stagers() -> tuple[Any, Any]:
    """Return two stagers of DCP that reuse pinned memory: the first copies before it returns, the second afterwards.

    Returns:
        The second is ``None`` with a torch whose ``DefaultStager`` fails at its second use.
    """

    def options(*, is_late: bool) -> StagingOptions:
        return StagingOptions(
            use_pinned_memory=True, use_shared_memory=False, use_async_staging=is_late, use_non_blocking_copy=True
        )

    try:
        with closing(DefaultStager(options(is_late=False))) as tried:
            for _ in range(2):
                tried.stage(torch.nn.Linear(1, 1, device=training_device()).state_dict())
    except KeyError:
        return BlockingAsyncStager(cache_staged_state_dict=True), None
    return DefaultStager(options(is_late=False)), DefaultStager(options(is_late=True))


def measure_saves(num_rounds: str, folder: str, num_tensors: str) -> Iterator[Found]:
    """Yield seconds of saves that copy before they return, of DCP's saves, and of loads from memory.

    Saves go to the memory tier only, as the speed of a disk does not depend on the GPU.
    """
    device = training_device()
    saved, config = CheckpointState(int(num_tensors), device), CheckpointConfig(local_directory=f"{folder}/saves")
    manager, iteration = CheckpointManager(config), 0
    stager, late_stager = _pinned_stagers()

    def begin_ours() -> Any:
        nonlocal iteration
        iteration += 1
        return manager.save(saved.state, iteration, tiers=["memory"])

    def begin_dcp(stager: Any) -> Any:
        writer: Any = _Nowhere(f"{folder}/dcp")
        return async_save(saved.state_dict(), storage_writer=writer, async_stager=stager, no_dist=True)

    costs = _SaveCosts(device)
    for _ in range(int(num_rounds)):
        for _ in range(2):  # each of the two buffers is pinned at its first use
            begin_ours().wait()
        found = _measure_links(device, saved.num_bytes)
        found["ours"] = time_save(begin_ours, lambda handle: handle.wait())[0]
        found["dcp"] = time_save(lambda: begin_dcp(stager), lambda written: written.result())[0]
        costs.begin_round()
        found["ours_lost"] = costs.measure(begin_ours, lambda handle: handle.done)
        found["dcp_lost"] = costs.measure(lambda: begin_dcp(stager), lambda written: written.done())
        if late_stager is not None:
            found["dcp_late_lost"] = costs.measure(
                lambda: begin_dcp(late_stager),
                lambda written: written.upload_completion.done(),
                update=lambda written: written.staging_completion.result(),
            )
        manager.close()
        saved.forget()
        manager = CheckpointManager(config)
        found["load"], restored = _load(manager, saved.state, device)
        if restored is None or restored.tier != "memory" or not saved.is_right():
            raise SystemExit(f"what was loaded is not what was saved: {restored}")
        yield found
    for one in filter(None, (stager, late_stager, manager)):
        one.close()


def measure_overlapped(num_rounds: str, folder: str, num_tensors: str) -> Iterator[Found]:
    """Yield seconds of saves that are copied during training, and of what monitors a device."""
    device = training_device()
    saved, training = CheckpointState(int(num_tensors), device), _DeviceSteps(device)
    manager = CheckpointManager(CheckpointConfig(local_directory=f"{folder}/saves", overlap_staging=True))
    iteration = 0 if (restored := manager.load_latest(saved.state)) is None else restored.iteration

    def begin_save() -> Any:
        nonlocal iteration
        iteration += 1
        return manager.save(saved.state, iteration, tiers=["memory"])

    def step() -> None:
        saved.optimizer.step()  # without gradients nothing changes
        _settle(device)

    for _ in range(2):
        begin_save().wait()
    costs = _SaveCosts(device)
    for _ in range(int(num_rounds)):
        found = _measure_links(device, saved.num_bytes)
        step()
        stall_s, guard_s, _ = time_save(begin_save, lambda handle: handle.wait(), guard=lambda _: step())
        found |= {"overlapped": stall_s, "guard": guard_s}
        quiet = training.run(_QUIET_STEPS)
        handle = begin_save()
        busy = training.run_for(found["to_host"])
        handle.wait()
        quiet += training.run(_QUIET_STEPS)
        found |= {"step": median(quiet), "step_meanwhile": median(busy)}
        found["digest"] = time_on_device(partial(digest_tensors, list(saved.tensors().values())), device)
        found["timers_us"] = _measure_timers()
        step()
        costs.begin_round()
        found["overlapped_lost"] = costs.measure(
            begin_save, lambda handle: handle.done, update=lambda _: saved.optimizer.step()
        )
        yield found
    manager.close()


def _load(manager: CheckpointManager, state: dict[str, Any], device: torch.device) -> tuple[float, Restored | None]:
    """Return the seconds of a load until the device has all of it, and the result."""
    begin_ns = clock.now_ns()
    restored = manager.load_latest(state)
    _settle(device)
    return (clock.now_ns() - begin_ns) / 1e9, restored


def _settle(device: torch.device) -> None:
    time_on_device(lambda: None, device)


def _measure_links(device: torch.device, num_bytes: int) -> Found:
    """Return the seconds to copy so many bytes from and to pinned memory, and within the device."""
    copies = copies_of(device)
    assert copies is not None
    pinned = copies.pinned(_COPY_BYTES)
    here, there = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def seconds(work: Callable[[], object]) -> float:
        def often() -> None:
            for _ in range(_NUM_COPIES):
                work()

        return time_on_device(often, device) / _NUM_COPIES / _COPY_BYTES * num_bytes

    return {
        "to_host": seconds(lambda: pinned.copy_(here, non_blocking=True)),
        "to_device": seconds(lambda: here.copy_(pinned, non_blocking=True)),
        "within": seconds(lambda: there.copy_(here)) / 2,  # each byte is read and written
    }


class _DeviceSteps:
    """Steps that keep a device busy: matrix products bound by arithmetic, and sums bound by memory.

    Args:
        device: The device.
        length_s: Approximate seconds of a step; 0: as short as possible.
    """

    def __init__(self, device: torch.device, length_s: float = 0.0) -> None:
        self._device, self._num_parts = device, 1
        self._matrix = torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)
        self._vector = torch.ones(_COPY_BYTES // 4, device=device)
        self.run(3)
        if length_s:
            self._num_parts = max(1, round(length_s / median(self.run(_QUIET_STEPS))))

    def run(self, number: int, update: Callable[[], object] = lambda: None) -> list[float]:
        """Return the seconds of each of ``number`` steps that end with ``update``; copies in other streams continue."""

        def step() -> None:
            self._compute()
            update()

        return [time_on_device(step, self._device, in_stream=True) for _ in range(number)]

    def run_for(self, seconds: float) -> list[float]:
        """Return the seconds of the steps that fit into a time, at least of one."""
        end_s, found = clock.now_s() + seconds, self.run(1)
        while clock.now_s() < end_s:
            found += self.run(1)
        return found

    def _compute(self) -> None:
        for _ in range(self._num_parts):
            for _ in range(4):
                torch.mm(self._matrix, self._matrix)
            self._vector.mul_(1.0)


class _SaveCosts:
    """Measure the total time that one save costs training, with steps of realistic length."""

    def __init__(self, device: torch.device) -> None:
        self._steps = _DeviceSteps(device, _LONG_STEP_S)
        self._quiet_s = 0.0

    def begin_round(self) -> None:
        self._quiet_s = median(self._steps.run(_NUM_LONG_STEPS))

    def measure(
        self,
        begin: Callable[[], Any],
        is_done: Callable[[Any], bool],
        update: Callable[[Any], object] = lambda _: None,
    ) -> float:
        """Return the seconds by which steps took longer: the stall, slower steps, and waits before the update.

        Args:
            begin: Begins a save.
            is_done: Whether the save has ended; steps are counted until then.
            update: Ends each step: waits until the state may be changed.
        """
        begin_ns, number = clock.now_ns(), 0
        saving = begin()
        while number < _NUM_LONG_STEPS or not is_done(saving):
            self._steps.run(1, partial(update, saving))
            number += 1
        return (clock.now_ns() - begin_ns) / 1e9 - number * self._quiet_s


def _measure_timers() -> float:
    """Return the microseconds that timing a step of three sections on the device costs."""
    config = StragglerDetectionConfig(num_gpu_perf_scores_to_print=0, enable_logging=False, check_machine=False)
    with closing(StragglerDetector(config, num_warmup_steps=0)) as detector:
        sections = [detector.section(str(number)) for number in range(_NUM_SECTIONS)]

        def steps() -> None:
            for number in range(_BLOCK):
                detector.begin_step(number)
                for section in sections:
                    with section:
                        pass
                detector.end_step()

        def bare() -> None:
            for _ in range(_BLOCK):
                for _ in sections:
                    pass

        steps()  # creates the events
        return (median(timed(steps)[0] for _ in range(5)) - median(timed(bare)[0] for _ in range(5))) * 1e6 / _BLOCK


# -- restarts ----------------------------------------------------------------------------------------------------------


def measure_restarts(num_rounds: str) -> Iterator[Found]:
    """Yield the seconds from an exception until the function, restarted in process, has reduced on the device."""
    found, raised_ns, device = list[float](), 0, training_device()

    def function(handle: Handle) -> None:
        nonlocal raised_ns
        dist.init_process_group(training_backend())
        tensor = torch.ones(1 << 20, device=device)
        dist.all_reduce(tensor)
        assert tensor[0].item() == 1.0
        if raised_ns:
            found.append((clock.now_ns() - raised_ns) / 1e9)
        if handle.iteration < int(num_rounds):
            raised_ns = clock.now_ns()
            raise RuntimeError("the benchmark's own fault")
        dist.destroy_process_group()

    function.__annotations__["handle"] = Handle
    config = InProcessRestartConfig(
        max_no_progress_restarts=int(num_rounds) + 1, soft_timeout=_SOFT_TIMEOUT_S, hard_timeout=_HARD_TIMEOUT_S
    )
    Wrapper(config)(function)()
    yield from ({"restarted": seconds} for seconds in found)


def step_until_killed(begun_ns: int, folder: str) -> None:
    """Run a rank of plain torch that trains on its device, without names of this module, as its source is copied.

    The rank marks the end of its first step; in cycle 0 it then trains until it is killed.
    """
    import time

    import torch

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    weights = torch.randn(1024, 1024, device=device, requires_grad=True)
    ready_ns = time.monotonic_ns()
    optimizer = torch.optim.SGD([weights], lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        loss = (weights @ weights).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    step()
    stepped_ns = time.monotonic_ns()

    from benchmarks.measuring import MarkWriter  # after the measured part
    from outlast.env import read_worker

    worker = read_worker()
    MarkWriter(folder)(
        "worker", worker.global_rank, worker.cycle, begun_ns=begun_ns, joined_ns=ready_ns, reduced_ns=stepped_ns
    )
    end_ns = time.monotonic_ns() + int(90e9)
    while worker.cycle == 0 and time.monotonic_ns() < end_ns:
        step()
