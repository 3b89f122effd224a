"""Checks of devices: exact matrix products, memory, and the reports of NVML and the kernel log."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from outlast.health import Status, check_gpu
from outlast.health.devices import (
    EXPECTED,
    ComputeCheck,
    DeviceMemoryCheck,
    DeviceMemoryUse,
    NvmlReading,
    digest_of,
    factors,
    find_faults,
    judge_reading,
    read_memory_use,
    read_nvml,
)


def test_expected_digest_is_that_of_integer_arithmetic() -> None:
    """The expected digest of every device is that of exact integer arithmetic."""
    left, correct = factors(512, 8)
    assert (left.min(), left.max()) == (-8, 8)
    assert digest_of(left @ correct) == EXPECTED[512, 8]
    assert digest_of(left.astype(np.float32) @ correct.astype(np.float32)) == EXPECTED[512, 8]


@pytest.mark.parametrize(("size", "largest"), EXPECTED)
def test_partial_sums_are_exact(size: int, largest: int) -> None:
    """No order of summation rounds: all sums are exact in the number format."""
    left, correct = (matrix.astype(np.float32) for matrix in factors(size, largest))
    peak, total = 0.0, np.zeros((size, size), np.float32)
    for start in range(0, size, 256):
        total += left[:, start : start + 256] @ correct[start : start + 256]
        peak = max(peak, float(np.abs(total).max()))
    assert digest_of(total) == EXPECTED[size, largest]
    assert peak < (256 if largest == 1 else 2**24), "bfloat16 holds whole numbers up to 256, float32 up to 2**24"


def test_one_wrong_bit_is_detected() -> None:
    """A single flipped bit changes the digest."""
    left, correct = factors(512, 8)
    product = left @ correct
    product[511, 511] ^= 1
    assert digest_of(product) != EXPECTED[512, 8]
    assert ComputeCheck(flip=True).run().status == Status.FAILED
    assert ComputeCheck().run().status == Status.OK


def test_memory_check_detects_lost_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word of the tested memory is written and read back; wrong words are counted."""
    task = DeviceMemoryCheck(num_bytes=1 << 20)
    outcome = task.run()
    assert (outcome.status, outcome.facts["tested_bytes"]) == (Status.OK, 1 << 20)

    import torch

    original = torch.Tensor.fill_

    def corrupt(words: torch.Tensor, value: int) -> torch.Tensor:
        original(words, value)
        words[7] = 0
        return words

    monkeypatch.setattr(torch.Tensor, "fill_", corrupt)
    outcome = task.run()
    assert (outcome.status, outcome.facts["wrong_words"]) == (Status.FAILED, 2)


@pytest.mark.parametrize(
    ("reading", "finding"),
    [
        ({"ecc_uncorrected": 2}, "2 uncorrectable"),
        ({"rows_failed": True}, "replace the GPU"),
        ({"rows_pending": True}, "reset the GPU"),
        ({"retired_pages": 60}, "60 memory pages"),
        ({"links_active": 16, "links_inactive": 2}, "2 of 18 NVLinks"),
        ({"slowdowns": 0x40 | 0x80}, "thermal slowdown, power brake"),
    ],
)
def test_faults_in_an_nvml_reading_are_reported(reading: dict[str, Any], finding: str) -> None:
    """Each recorded fault is reported with its remedy."""
    (found,) = judge_reading(NvmlReading(name="H200", **reading))
    assert finding in found


def test_healthy_gpu_has_no_findings() -> None:
    """Missing counters, zero counts, unused links and a power cap are not faults."""
    assert judge_reading(NvmlReading(name="A100")) == []
    healthy = NvmlReading(name="A100", ecc_uncorrected=0, links_active=0, links_inactive=12, slowdowns=0x1 | 0x4)
    assert judge_reading(healthy) == []


class NVMLError(Exception):
    """The error type of pynvml."""


def fake_nvml(**functions: Any) -> types.ModuleType:
    """Return a replacement for pynvml that supports only the given functions."""
    module = types.ModuleType("pynvml")

    def unsupported(*_: Any) -> None:
        raise NVMLError("Not Supported")

    supported = "RemappedRows NvLinkState NvLinkErrorCounter RetiredPages PciInfo TotalEccErrors "
    supported += "CurrentClocksThrottleReasons Temperature MemoryInfo"
    for name in supported.split():
        setattr(module, f"nvmlDeviceGet{name}", unsupported)
    module.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetName=lambda handle: b"H200",
        NVML_NVLINK_ERROR_DL_RECOVERY=1,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_TEMPERATURE_GPU=0,
    )
    module.__dict__.update(functions)
    return module


def test_nvml_reading_has_the_supported_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supported values are read, unsupported ones are None; the library is shut down."""
    closed: list[bool] = []
    module = fake_nvml(
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetRemappedRows=lambda handle: (1, 0, 1, 0),
        nvmlDeviceGetNvLinkState=lambda handle, link: link < 4,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, since: 3,
        nvmlDeviceGetPciInfo=lambda handle: types.SimpleNamespace(busId=b"00000000:3B:00.0"),
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", module)
    reading = read_nvml("GPU-1")
    assert isinstance(reading, NvmlReading)
    assert (reading.name, reading.pci_bus_id, reading.ecc_uncorrected) == ("H200", "00000000:3B:00.0", 3)
    assert (reading.rows_pending, reading.rows_failed, reading.retired_pages) == (True, False, None)
    assert (reading.links_active, reading.links_inactive) == (4, 14)
    assert closed == [True]


def test_memory_use_of_every_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is by UUID, in NVML's order. A GPU without a value and a lost GPU are unknown and keep their
    position."""

    def handle(index: int) -> int:
        if index == 1:
            raise NVMLError("GPU is lost")
        return index

    def memory(index: int) -> Any:
        if index == 2:
            raise NVMLError("Not Supported")
        return types.SimpleNamespace(used=5 + index)

    module = fake_nvml(
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetUUID=lambda index: f"GPU-{'dcba'[index]}".encode(),
        nvmlDeviceGetMemoryInfo=memory,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", module)
    used = read_memory_use()
    assert isinstance(used, dict)
    assert list(used.items()) == [("GPU-d", 5), ("1", None), ("GPU-b", None), ("GPU-a", 8)]
    assert DeviceMemoryUse().run().facts == {"used_bytes": used}

    def lost() -> None:
        raise NVMLError("Driver Not Loaded")

    module.__dict__.update(nvmlDeviceGetCount=lost)
    assert read_memory_use() == "NVML does not count the GPUs (Driver Not Loaded)"
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert DeviceMemoryUse().run().status == Status.SKIPPED


def test_missing_nvml_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library or driver is a reason, not a fault of the GPU."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert read_nvml("GPU-1") == "NVML is unavailable: nvidia-ml-py is not installed"

    def no_driver() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml(nvmlInit=no_driver))
    assert read_nvml("GPU-1") == "NVML cannot be used (Driver Not Loaded)"


def test_faults_in_the_kernel_log_are_found() -> None:
    """Recent hardware faults of this GPU count; old ones, those of other GPUs and application errors do not."""
    records = [
        "4,1,5000000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "4,2,5000000001,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "4,3,5000000002,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1, Graphics Exception",
        "4,4,5000000003,-;NVRM: Xid (PCI:0000:af:00): 48, pid=1, DBE",
        "4,5,1000000,-;NVRM: Xid (PCI:0000:3b:00): 95, pid=1, long ago",
        "6,6,5000000004,-;eth0: link up",
    ]
    found = find_faults(records, "00000000:3B:00.0", now_s=5010.0)
    assert found == ["XID 79 (fell off the bus) 2 times in the last hour"]


@pytest.mark.process
def test_node_without_gpus_is_reported() -> None:
    """Without GPUs the CPU is checked; a GPU requested by number is missing."""
    import torch

    if torch.accelerator.is_available():
        assert not [result for result in check_gpu() if result.has_failed]
        return
    devices, compute = check_gpu()
    assert (devices.status, compute.status) == (Status.SKIPPED, Status.OK)
    (missing,) = check_gpu(0)
    assert (missing.status, missing.reason) == (Status.FAILED, "this node has no GPU")
