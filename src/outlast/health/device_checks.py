"""What the probe process looks at on devices: that they are there, compute right, remember, and what their driver saw.

torch is imported for accelerators only; the CPU's product is numpy's, so that a node without GPUs is looked at in a
fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outlast.health.gemm import EXPECTED, digest_of, factors
from outlast.health.kernel_log import recent_faults
from outlast.health.nvml import judge, read
from outlast.health.result import Outcome, Status
from outlast.health.tasks import Compute, Devices, Driver, MemoryTest
from outlast.runtime import device as accelerator

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKS"]


def count_devices(_: Devices) -> Outcome:
    """Count the accelerators that torch can use."""
    import torch

    if not torch.accelerator.is_available():
        return Outcome(status=Status.SKIPPED, reason="no accelerator: training is on the CPU", facts={"num_devices": 0})
    number = torch.accelerator.device_count()
    kind = accelerator.training_device().type
    return Outcome(status=Status.OK, reason=f"{number} in reach", facts={"num_devices": number, "kind": kind})


def check_compute(task: Compute) -> Outcome:
    """Multiply in each number format and compare the digests with those that are right."""
    if task.device is None:
        products = _on_cpu(task.num_rounds)
    else:
        products = _on_device(accelerator.training_device(task.device), task.num_rounds)
    wrong = []
    for name, size, largest, product in products:
        found, expected = digest_of(product, flip=task.flip), EXPECTED[size, largest]
        if found != expected:
            wrong.append(f"{name}: digest {found} instead of {expected}")
    if wrong:
        return Outcome(status=Status.FAILED, reason=f"wrong matrix product: {'; '.join(wrong)}", facts={"wrong": wrong})
    formats = list(dict.fromkeys(name for name, *_ in products))
    return Outcome(status=Status.OK, reason=f"right to the bit in {', '.join(formats)}", facts={"formats": formats})


_Products = list[tuple[str, int, int, Any]]
"""Format, size, largest factor, product."""


def _on_cpu(num_rounds: int) -> _Products:
    import numpy as np

    left, right = factors(512, 8)
    found: _Products = []
    for kind in (np.float32, np.float64):
        a, b = left.astype(kind), right.astype(kind)
        found += [(kind.__name__, 512, 8, np.matmul(a, b)) for _ in range(num_rounds)]
    return found


def _on_device(device: torch.device, num_rounds: int) -> _Products:
    import torch

    found: _Products = []
    for largest, kinds in ((8, (torch.float32,)), (1, (torch.bfloat16, torch.float16))):
        left, right = (torch.from_numpy(matrix).to(device) for matrix in factors(2048, largest))
        for kind in kinds:
            a, b = left.to(kind), right.to(kind)
            for _ in range(num_rounds):
                product = (a @ b).to(torch.int32).cpu().numpy()
                found.append((str(kind).removeprefix("torch."), 2048, largest, product))
    return found


def check_memory(task: MemoryTest) -> Outcome:
    """Fill memory with patterns, and each word with a number of its own; read all of it back."""
    import torch

    device = torch.device("cpu") if task.device is None else accelerator.training_device(task.device)
    num_words = max(1, task.num_bytes // 8)
    words, shrunk = None, False
    while words is None:
        try:
            words = torch.empty(num_words, dtype=torch.int64, device=device)
        except torch.OutOfMemoryError:
            # Someone else uses it: what is left is tested.
            num_words, shrunk = num_words // 2, True
            if num_words < 1 << 17:
                return Outcome(status=Status.FAILED, reason="less than 1 MiB of its memory can be had")
    numbers = torch.arange(num_words, dtype=torch.int64, device=device)
    wrong = 0
    for pattern in (0x5555555555555555, -0x5555555555555556):
        words.fill_(pattern)
        wrong += int((words != pattern).sum())
    words.copy_(numbers).mul_(0x9E3779B97F4A7C1)
    wrong += int((words != numbers * 0x9E3779B97F4A7C1).sum())
    facts = {"tested_bytes": num_words * 8, "wrong_words": wrong, "wished_bytes": task.num_bytes}
    size = f"{num_words * 8 / 2**30:.2f} GiB"
    if wrong:
        return Outcome(status=Status.FAILED, reason=f"{wrong} words of {size} were not kept", facts=facts)
    less = " (no more was free)" if shrunk else ""
    return Outcome(status=Status.OK, reason=f"{size} written and read back{less}", facts=facts)


def check_driver(task: Driver) -> Outcome:
    """Ask the driver, through NVML, and the kernel's log for faults of the device."""
    name = accelerator.device_name("", task.device)
    if not name.startswith("gpu-"):
        return Outcome(status=Status.SKIPPED, reason="no GPU")
    reading = read(f"GPU-{name.removeprefix('gpu-')}")
    if isinstance(reading, str):
        return Outcome(status=Status.SKIPPED, reason=reading)
    faults, log_readable = recent_faults(reading.pci_bus_id)
    findings = [*judge(reading), *faults]
    facts = {**reading.to_facts(), "kernel_log_readable": log_readable}
    if findings:
        return Outcome(status=Status.FAILED, reason="; ".join(findings), facts=facts)
    return Outcome(status=Status.OK, reason=f"{reading.name}: no fault recorded", facts=facts)


CHECKS: dict[type, Callable[[Any], Outcome]] = {
    Devices: count_devices,
    Compute: check_compute,
    MemoryTest: check_memory,
    Driver: check_driver,
}
"""The function for each task."""
