"""Timing of device work: events in its streams, and kernel times of torch's profiler.

Importing the module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from outlast import clock
from outlast.runtime.device import training_device

if TYPE_CHECKING:
    import torch
    import torch.profiler

_COLLECTIVE = (
    *("nccl", "rccl", "gloo", "c10d", "alltoall", "all_to_all", "allreduce", "all_reduce", "allgather", "all_gather"),
    *("reduce_scatter", "broadcast", "sendrecv", "barrier", "wait"),
)
"""Parts of the names of collectives and of waits for them."""


def timing_event() -> Any:
    """Return a new event that measures time in the current device's streams; needs a device."""
    return _timing_event_class()(enable_timing=True)


@cache
def _timing_event_class() -> Any:
    """Return torch's event class at a tenth of its cost on the host: torch finds the current stream in Python."""
    import torch

    own: Any = torch._C
    made_of, record = own._CudaEventBase, own._CudaEventBase.record
    current_device, current_stream = own._cuda_getDevice, own._cuda_getCurrentRawStream
    streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    class TimingEvent(torch.cuda.Event):
        query, elapsed_time = made_of.query, made_of.elapsed_time

        def record(self, stream: Any = None) -> None:
            if stream is None:
                device = current_device()
                key = device, current_stream(device)
                if (stream := streams.get(key)) is None:
                    stream = streams[key] = torch.cuda.current_stream()
            record(self, stream)

    return TimingEvent


def profiled_activities() -> list[torch.profiler.ProfilerActivity]:
    """Return the activities of torch's profiler that contain kernel times: the device's, else the CPU's."""
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CUDA if training_device().type == "cuda" else ProfilerActivity.CPU]


def kernel_seconds(event: Any) -> float | None:
    """Return the seconds of a profiler's event without its children, if it is a kernel (without a device: an operator).

    Collectives return ``None``: they take as long as their ranks wait for each other.

    Args:
        event: Of ``torch.profiler.profile(...).events()``.
    """
    name = event.name.lower()
    if any(part in name for part in _COLLECTIVE):
        return None
    if training_device().type == "cuda":
        return event.time_range.elapsed_us() / 1e6 if event.device_type.name == "CUDA" else None
    return event.self_cpu_time_total / 1e6 if event.device_type.name == "CPU" else None


def time_on_device(work: Callable[[], object], device: torch.device, *, in_stream: bool = False) -> float:
    """Return the seconds until the device has done ``work``.

    Args:
        in_stream: Wait only for the current stream, as a training step that reads its loss does.

    Blocks: until the device has done its queued work. Not for use in a training step.
    """
    import torch

    def settle() -> None:
        if device.type != "cuda":
            return
        if in_stream:
            torch.cuda.current_stream(device).synchronize()
        else:
            torch.cuda.synchronize(device)

    settle()
    begin_ns = clock.now_ns()
    work()
    settle()
    return (clock.now_ns() - begin_ns) / 1e9
