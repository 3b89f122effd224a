"""Whether this node's accelerators are fit to train."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from outlast import env
from outlast.config.launching import HealthConfig
from outlast.health import tasks as t
from outlast.health.prober import Prober
from outlast.health.result import CheckResult, Status

__all__ = ["check_gpu", "has_gpus"]


def check_gpu(
    device: int | Sequence[int] | None = None,
    config: HealthConfig | None = None,
    *,
    node: str | None = None,
    prober: Prober | None = None,
) -> tuple[CheckResult, ...]:
    """Look at GPUs: in reach, right to the bit, memory that keeps what is written, no fault known to the driver.

    All of it happens in a process of its own: this one gets no context on any GPU, and a driver that hangs or crashes
    is answered for.

    Args:
        device: Number of a GPU, or of several; ``None`` = all. Where there is none, the CPU's arithmetic is checked.
        config: How long it may take, how much memory is tested.
        node: This node's name, for ``simulate_wrong_gemm``; the host's without it.
        prober: What has the checks made, and stays open; one of its own without it.

    Blocks: up to ``device_timeout`` for each check.
    """
    config = config or HealthConfig()
    timeout_s = config.device_timeout
    flip = config.simulate_wrong_gemm == (node or env.clean_name(env.hostname()))
    with contextlib.nullcontext(prober) if prober is not None else Prober() as asking:
        present = asking.ask(t.Devices(), "devices", "node", timeout_s=timeout_s)
        num_devices = int(present.facts.get("num_devices", 0))
        if present.has_failed or (device is not None and num_devices == 0):
            return (_lacking(present, "this node has no GPU"),)
        if num_devices == 0:
            return present, asking.ask(t.Compute(flip=flip), "compute", "cpu", timeout_s=timeout_s)
        kind = str(present.facts["kind"])
        wanted = range(num_devices) if device is None else [device] if isinstance(device, int) else list(device)
        results = [present]
        for number in wanted:
            target = f"{kind}:{number}"
            if not 0 <= number < num_devices:
                results.append(_lacking(present, f"there are {num_devices}", name="device", target=target))
                continue
            results.append(asking.ask(t.Compute(device=number, flip=flip), "compute", target, timeout_s=timeout_s))
            num_bytes = int(config.gpu_memory_test_gib * 2**30)
            if num_bytes:
                test = t.MemoryTest(device=number, num_bytes=num_bytes)
                results.append(asking.ask(test, "device memory", target, timeout_s=timeout_s))
            results.append(asking.ask(t.Driver(device=number), "driver", target, timeout_s=timeout_s))
        return tuple(results)


def has_gpus() -> bool:
    """Return whether the driver offers GPUs on this node; costs nothing, and says nothing about their state."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _lacking(present: CheckResult, why: str, *, name: str = "devices", target: str = "node") -> CheckResult:
    if present.has_failed:
        return present
    return CheckResult(name=name, target=target, status=Status.FAILED, reason=why, took_s=present.took_s)
