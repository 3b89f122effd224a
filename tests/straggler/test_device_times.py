"""Times on a device are taken by events, and nothing ever waits for the device."""

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
"""What waits for a device, or makes a stream wait."""


class Device:
    """A device whose stream gets to its events when it is told to; its clock is in seconds."""

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
    """A device in the place of the CPU, with everything forbidden that waits for one."""
    made = Device()
    monkeypatch.setattr(detector, "training_device", lambda local_rank=0: torch.device("cuda", 0))
    monkeypatch.setattr(detector, "timing_event", made.event)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("waits for the device")

    for owner, name in WAITS:
        monkeypatch.setattr(owner, name, forbidden)
    return made


def train(found: StragglerDetector, device: Device, num_steps: int, *, lag: int = 3) -> None:
    """Do steps whose device is some of them behind the host."""
    ends: list[float] = []
    for number in range(num_steps):
        with found.step(number):
            device.now_s += 0.001
            with found.section("forward"):
                device.now_s += 0.020
                with found.section("attention"):
                    device.now_s += 0.005
                with found.waiting():
                    device.now_s += 1.0
            with found.section("data", on_device=False):
                pass
        ends.append(device.now_s)
        if number >= lag:
            device.reached_s = ends[number - lag]


def sections(found: StragglerDetector) -> dict[str, Timing]:
    return found.report().ranks[0].by_name


def test_no_call_waits_for_the_device(device: Device) -> None:
    """Steps and reports put events into the stream and ask whether they have happened, and do nothing else with the
    device; times are read only of what has happened."""
    found = StragglerDetector(num_warmup_steps=0)
    train(found, device, 40)
    found.report()
    found.close()
    assert set(device.calls) == {"record", "query", "elapsed_time"}


def test_a_sections_time_is_that_of_the_device(device: Device) -> None:
    """The device's own time of a section, without sections within and marked waiting; what it has not finished by the
    report counts in the next window."""
    found = StragglerDetector(num_warmup_steps=0)
    train(found, device, 20, lag=3)
    first = sections(found)
    assert first["forward"].median_s == pytest.approx(0.020)
    assert first["attention"].median_s == pytest.approx(0.005)
    assert first["forward"].count == 17
    device.reached_s = device.now_s
    train(found, device, 3, lag=0)
    assert sections(found)["forward"].count == 6


def test_while_the_host_loads_data_the_device_is_idle_in_no_other_section(device: Device) -> None:
    """With on_device off a section has the time of the host's clock; what the device waits for it is not part of the
    section around it, nor of what is outside all sections."""
    found = StragglerDetector(num_warmup_steps=0)
    for number in range(4):
        with found.step(number):
            device.now_s += 0.002
            with found.section("data", on_device=False):
                device.now_s += 0.050
        device.reached_s = device.now_s
    timed = sections(found)
    assert {timing.count for timing in timed.values()} == {4}
    assert timed["data"].median_s < 0.050
    assert timed[OUTSIDE].median_s == pytest.approx(0.002)


def test_events_are_used_again(device: Device) -> None:
    """However many steps there are, there are no more events than were under way at once."""
    found = StragglerDetector(num_warmup_steps=0)
    train(found, device, 10)
    num_events = device.num_events
    train(found, device, 200)
    assert device.num_events <= num_events + 4 * 6 * 2


def test_in_a_long_window_few_steps_are_timed_on_the_device(device: Device) -> None:
    """After the window's first steps one of seven puts events into the stream; the times of the others are taken to be
    like those, so that a section's share of the step is what it is."""
    found = StragglerDetector(num_warmup_steps=0)
    train(found, device, 32, lag=0)
    num_dense = device.calls.count("record")
    train(found, device, 700, lag=0)
    per_step = num_dense // 32
    assert device.calls.count("record") == num_dense + per_step * 100
    timing = sections(found)["forward"]
    assert (timing.count, timing.median_s) == (732, pytest.approx(0.020))
    assert timing.total_s == pytest.approx(732 * 0.020)
    device.calls.clear()
    train(found, device, 3, lag=0)
    assert device.calls.count("record") == per_step * 3 + 1, "a new window begins; the end of a step opens the next"


def test_a_device_that_is_far_behind_is_not_waited_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """When too many events are under way, sections go untimed on the device."""
    monkeypatch.setattr(recorder, "MAX_PENDING", 10)
    found = StragglerDetector(num_warmup_steps=0)
    train(found, device, 50, lag=1000)
    assert device.num_events <= 2 * 13
    device.reached_s = device.now_s
    assert sections(found)["forward"].is_usable


@pytest.mark.gpu
def test_on_a_real_device_nothing_synchronises() -> None:
    """Torch itself raises when something waits for the device, and nothing does."""
    found = StragglerDetector(num_warmup_steps=0)
    left = torch.ones(512, 512, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(30):
            with found.step(number), found.section("forward"):
                left @ left
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    timing = found.report().ranks[0].by_name["forward"]
    assert timing.count >= 20
    assert 0 < timing.median_s < 0.1
    found.close()
