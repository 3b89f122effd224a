"""Times on a device are measured with events, without ever waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outlast.policy.slowness import OUTSIDE, Timing
from outlast.straggler import StragglerDetector, detector, recorder

WAITS = [
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Stream, "wait_event"),
    (torch.cuda.Stream, "wait_stream"),
    (torch.cuda.Stream, "query"),
    (torch.Tensor, "item"),
    (torch.Tensor, "cpu"),
    (torch.Tensor, "tolist"),
]
"""Calls that wait for a device or make a stream wait."""


class Device:
    """A simulated device whose stream reaches its events when a test says so; its clock is in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reached_s = 0.0
        self.calls: list[str] = []
        self.num_events = 0

    def event(self) -> Any:
        device = self
        device.num_events += 1

        class Event:
            def __init__(self) -> None:
                self.at_s = float("inf")

            def record(self) -> None:
                device.calls.append("record")
                self.at_s = device.now_s

            def query(self) -> bool:
                device.calls.append("query")
                return self.at_s <= device.reached_s

            def elapsed_time(self, end: Any) -> float:
                device.calls.append("elapsed_time")
                assert end.at_s <= device.reached_s, "asked for a time that is not there yet: that raises, or waits"
                return float(end.at_s - self.at_s) * 1e3

            def synchronize(self) -> None:
                raise AssertionError("waits for the device")

            wait = synchronize

        return Event()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A simulated device in place of the CPU; calls that wait for a device raise."""
    device_stub = Device()
    monkeypatch.setattr(detector, "training_device", lambda local_rank=0: torch.device("cuda", 0))
    monkeypatch.setattr(detector, "timing_event", device_stub.event)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("waits for the device")

    for owner, name in WAITS:
        monkeypatch.setattr(owner, name, forbidden)
    return device_stub


def train(stragglers: StragglerDetector, device: Device, num_steps: int, *, lag: int = 3) -> None:
    """Run steps whose device is ``lag`` steps behind the host."""
    ends: list[float] = []
    for number in range(num_steps):
        with stragglers.step(number):
            device.now_s += 0.001
            with stragglers.section("forward"):
                device.now_s += 0.020
                with stragglers.section("attention"):
                    device.now_s += 0.005
                with stragglers.waiting():
                    device.now_s += 1.0
            with stragglers.section("data", on_device=False):
                pass
        ends.append(device.now_s)
        if number >= lag:
            device.reached_s = ends[number - lag]


def sections(stragglers: StragglerDetector) -> dict[str, Timing]:
    return stragglers.report().ranks[0].by_name


def test_steps_and_reports_never_wait_for_the_device(device: Device) -> None:
    """Steps and reports only record and query events, and read the times of events that have happened."""
    stragglers = StragglerDetector(num_warmup_steps=0)
    train(stragglers, device, 40)
    stragglers.report()
    stragglers.close()
    assert set(device.calls) == {"record", "query", "elapsed_time"}


def test_a_section_has_the_devices_own_time(device: Device) -> None:
    """A section's time on the device excludes inner sections and waiting; entries that are unfinished at a report count
    in the next window."""
    stragglers = StragglerDetector(num_warmup_steps=0)
    train(stragglers, device, 20, lag=3)
    first = sections(stragglers)
    assert first["forward"].median_s == pytest.approx(0.020)
    assert first["attention"].median_s == pytest.approx(0.005)
    assert first["forward"].count == 17
    device.reached_s = device.now_s
    train(stragglers, device, 3, lag=0)
    assert sections(stragglers)["forward"].count == 6


def test_host_sections_do_not_count_as_device_time(device: Device) -> None:
    """A section with on_device=False has the host's time, and the device's idle time meanwhile counts in no other
    section."""
    stragglers = StragglerDetector(num_warmup_steps=0)
    for number in range(4):
        with stragglers.step(number):
            device.now_s += 0.002
            with stragglers.section("data", on_device=False):
                device.now_s += 0.050
        device.reached_s = device.now_s
    timed = sections(stragglers)
    assert {timing.count for timing in timed.values()} == {4}
    assert timed["data"].median_s < 0.050
    assert timed[OUTSIDE].median_s == pytest.approx(0.002)


def test_events_are_reused(device: Device) -> None:
    """The number of events is bounded by those in flight, not by the number of steps."""
    stragglers = StragglerDetector(num_warmup_steps=0)
    train(stragglers, device, 10)
    num_events = device.num_events
    train(stragglers, device, 200)
    assert device.num_events <= num_events + 4 * 6 * 2


def test_a_long_window_samples_steps_on_the_device(device: Device) -> None:
    """After the first steps of a window one step of seven records events; the others are assumed equal, so that a
    section keeps its share of the step."""
    stragglers = StragglerDetector(num_warmup_steps=0)
    train(stragglers, device, 32, lag=0)
    num_dense = device.calls.count("record")
    train(stragglers, device, 700, lag=0)
    per_step = num_dense // 32
    assert device.calls.count("record") == num_dense + per_step * 100
    timing = sections(stragglers)["forward"]
    assert (timing.count, timing.median_s) == (732, pytest.approx(0.020))
    assert timing.total_s == pytest.approx(732 * 0.020)
    device.calls.clear()
    train(stragglers, device, 3, lag=0)
    assert device.calls.count("record") == per_step * 3 + 1, "a new window begins; the end of a step opens the next"


def test_a_device_far_behind_goes_untimed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too many events in flight, sections are not timed on the device."""
    monkeypatch.setattr(recorder, "MAX_PENDING", 10)
    stragglers = StragglerDetector(num_warmup_steps=0)
    train(stragglers, device, 50, lag=1000)
    assert device.num_events <= 2 * 13
    device.reached_s = device.now_s
    assert sections(stragglers)["forward"].is_usable


@pytest.mark.gpu
def test_a_real_device_is_never_synchronized() -> None:
    """Torch's sync debug mode, which raises on a synchronization with the device, finds none."""
    stragglers = StragglerDetector(num_warmup_steps=0)
    left = torch.ones(512, 512, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(30):
            with stragglers.step(number), stragglers.section("forward"):
                left @ left
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    timing = stragglers.report().ranks[0].by_name["forward"]
    assert timing.count >= 20
    assert 0 < timing.median_s < 0.1
    stragglers.close()
