"""Kernel times from the events of torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.profiler

from outlast.config import StragglerDetectionConfig
from outlast.runtime import device_timing
from outlast.straggler import StragglerDetector, recorder
from outlast.straggler.recorder import MAX_KERNELS, KernelTimes


class DeviceType(Enum):
    CPU = 0
    CUDA = 1


def event(name: str, kind: DeviceType, us: float) -> Any:
    span = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=kind, time_range=span, self_cpu_time_total=us)


EVENTS = [
    event("aten::mm", DeviceType.CPU, 5.0),
    event("ampere_sgemm_128x64", DeviceType.CUDA, 100.0),
    event("ncclDevKernel_AllReduce_Sum_f32", DeviceType.CUDA, 9000.0),
    event("gloo:all_reduce", DeviceType.CPU, 7000.0),
]


@pytest.mark.parametrize(("kind", "expected"), [("cuda", {"ampere_sgemm_128x64": 1e-4}), ("cpu", {"aten::mm": 5e-6})])
def test_collectives_do_not_count_as_kernels(
    monkeypatch: pytest.MonkeyPatch, kind: str, expected: dict[str, float]
) -> None:
    """On a device only its kernels count, without a device only operators, and collectives never."""
    monkeypatch.setattr(device_timing, "training_device", lambda local_rank=0: torch.device(kind))
    timings = {one.name: seconds for one in EVENTS if (seconds := device_timing.kernel_seconds(one)) is not None}
    assert timings == pytest.approx(expected)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a device."""
    monkeypatch.setattr(device_timing, "training_device", lambda local_rank=0: torch.device("cpu"))


@pytest.fixture
def running(on_cpu: None) -> Iterator[KernelTimes]:
    """Kernel times while the real profiler runs."""
    kernel_times = KernelTimes()
    kernel_times.start()
    yield kernel_times
    kernel_times.stop()


def test_the_profiler_times_each_operator_once(running: KernelTimes) -> None:
    """Each operator's own times are returned once, the longest first."""
    left = torch.ones(32, 32)
    for _ in range(4):
        left @ left
    running.stop()
    timings = running.take({"aten::mm": 0.5})
    (product,) = [timing for timing in timings if timing.name == "aten::mm"]
    assert (product.count, product.best_s) == (4, 0.5)
    assert 0 < product.median_s < 1
    assert [timing.total_s for timing in timings] == sorted((timing.total_s for timing in timings), reverse=True)
    assert running.take({}) == ()


def test_the_number_of_reported_kernels_is_bounded(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    """However many kernels there are, a rank reports a bounded number: the longest ones."""
    events_of_profiler = [event(f"kernel-{number}", DeviceType.CPU, float(number + 1)) for number in range(200)]
    fake = SimpleNamespace(start=lambda: None, stop=lambda: None, events=lambda: events_of_profiler)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: fake)
    kernel_times = KernelTimes()
    kernel_times.start()
    kernel_times.stop()
    timings = kernel_times.take({})
    assert len(timings) == MAX_KERNELS
    assert timings[0].name == "kernel-199"


def test_a_failed_profiler_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While another profiler runs, kernels are not timed, with one warning, and the steps continue."""

    def refuse() -> None:
        raise RuntimeError("another profiler runs")

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: SimpleNamespace(start=refuse))
    kernel_times = KernelTimes()
    for _ in range(3):
        kernel_times.start()
        assert not kernel_times.is_running
        kernel_times.stop()
    assert caplog.text.count("kernels are not timed") == 1
    assert kernel_times.take({}) == ()


def test_the_profiled_steps_are_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    """Two steps of each window are profiled, at the same place in it, and in the first window after the warm-up
    steps."""
    started: list[int] = []
    stopped: list[int] = []
    fake = SimpleNamespace(start=lambda: started.append(number), stop=lambda: stopped.append(number), events=list)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: fake)
    detector = StragglerDetector(StragglerDetectionConfig(profile_kernels=True), num_warmup_steps=2)
    for number in range(20):
        detector.begin_step(number)
        detector.end_step()
        if number == 9:
            detector.report()
    detector.close()
    first = 2 + 3 - 1  # from 0
    assert started == [first, 12]
    assert stopped == [first + 1, 13]
    assert recorder.NUM_KERNEL_STEPS == 2
