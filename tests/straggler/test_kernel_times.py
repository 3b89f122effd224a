"""What counts as a kernel in what torch's profiler saw."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.profiler

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
def test_kernels_are_the_devices_own_without_collectives(
    monkeypatch: pytest.MonkeyPatch, kind: str, expected: dict[str, float]
) -> None:
    """On a device only what ran there counts, without one only operators; a collective never does."""
    monkeypatch.setattr(device_timing, "training_device", lambda local_rank=0: torch.device(kind))
    found = {one.name: seconds for one in EVENTS if (seconds := device_timing.kernel_seconds(one)) is not None}
    assert found == pytest.approx(expected)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a device."""
    monkeypatch.setattr(device_timing, "training_device", lambda local_rank=0: torch.device("cpu"))


@pytest.fixture
def running(on_cpu: None) -> Iterator[KernelTimes]:
    """Kernel times while the real profiler runs."""
    made = KernelTimes()
    made.start()
    yield made
    made.stop()


def test_the_real_profiler_gives_times_by_operator(running: KernelTimes) -> None:
    """Each operator's own times are told once, those that took most first, and not told again."""
    left = torch.ones(32, 32)
    for _ in range(4):
        left @ left
    running.stop()
    found = running.take({"aten::mm": 0.5})
    (product,) = [timing for timing in found if timing.name == "aten::mm"]
    assert (product.count, product.best_s) == (4, 0.5)
    assert 0 < product.median_s < 1
    assert [timing.total_s for timing in found] == sorted((timing.total_s for timing in found), reverse=True)
    assert running.take({}) == ()


def test_only_those_that_took_most_are_told(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    """However many kernels there are, a rank tells a bounded number of them."""
    seen = [event(f"kernel-{number}", DeviceType.CPU, float(number + 1)) for number in range(200)]
    fake = SimpleNamespace(start=lambda: None, stop=lambda: None, events=lambda: seen)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: fake)
    made = KernelTimes()
    made.start()
    made.stop()
    found = made.take({})
    assert len(found) == MAX_KERNELS
    assert found[0].name == "kernel-199"


def test_a_profiler_that_cannot_start_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When another profiler runs, kernels go untimed, with one warning; steps go on."""

    def refuse() -> None:
        raise RuntimeError("another profiler runs")

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: SimpleNamespace(start=refuse))
    made = KernelTimes()
    for _ in range(3):
        made.start()
        assert not made.is_running
        made.stop()
    assert caplog.text.count("kernels are not timed") == 1
    assert made.take({}) == ()


def test_the_steps_that_are_looked_at_are_the_same_on_all_ranks() -> None:
    """Two steps of each window, at the same place in it, and past the first steps in the first window."""
    from outlast.config import StragglerDetectionConfig

    detector = StragglerDetector(StragglerDetectionConfig(profile_kernels=True), num_warmup_steps=2)
    looked_at: list[int] = []
    for number in range(20):
        detector.begin_step(number)
        assert detector._kernels is not None
        if detector._kernels.is_running:
            looked_at.append(number)
        detector.end_step()
        if number == 9:
            detector.report()
    detector.close()
    first = 2 + 3 - 1  # from 0
    assert looked_at == [first, first + 1, 12, 13]
    assert recorder.NUM_KERNEL_STEPS == 2
