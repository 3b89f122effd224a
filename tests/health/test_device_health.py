"""Checks of devices: products known to the bit, memory, what NVML and the kernel's log say."""

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


def test_the_product_is_what_whole_numbers_give() -> None:
    """The digest that every device must reach is that of arithmetic without rounding, on another path."""
    left, right = factors(512, 8)
    assert (left.min(), left.max()) == (-8, 8)
    assert digest_of(left @ right) == EXPECTED[512, 8]
    assert digest_of(left.astype(np.float32) @ right.astype(np.float32)) == EXPECTED[512, 8]


@pytest.mark.parametrize(("size", "largest"), EXPECTED)
def test_each_partial_sum_is_exact(size: int, largest: int) -> None:
    """No order of summation can round: sums stay below what the number formats hold exactly."""
    left, right = (matrix.astype(np.float32) for matrix in factors(size, largest))
    peak, total = 0.0, np.zeros((size, size), np.float32)
    for start in range(0, size, 256):
        total += left[:, start : start + 256] @ right[start : start + 256]
        peak = max(peak, float(np.abs(total).max()))
    assert digest_of(total) == EXPECTED[size, largest]
    assert peak < (256 if largest == 1 else 2**24), "bfloat16 holds whole numbers up to 256, float32 up to 2**24"


def test_one_wrong_bit_is_seen() -> None:
    """A single flipped bit gives another digest."""
    left, right = factors(512, 8)
    product = left @ right
    product[511, 511] ^= 1
    assert digest_of(product) != EXPECTED[512, 8]
    assert ComputeCheck(flip=True).run().status == Status.FAILED
    assert ComputeCheck().run().status == Status.OK


def test_memory_keeps_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word of the tested memory is written and read back; one that is not kept is counted."""
    task = DeviceMemoryCheck(num_bytes=1 << 20)
    outcome = task.run()
    assert (outcome.status, outcome.facts["tested_bytes"]) == (Status.OK, 1 << 20)

    import torch

    real = torch.Tensor.fill_

    def forget(words: torch.Tensor, value: int) -> torch.Tensor:
        real(words, value)
        words[7] = 0
        return words

    monkeypatch.setattr(torch.Tensor, "fill_", forget)
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
def test_what_nvml_says_is_judged(reading: dict[str, Any], finding: str) -> None:
    """Each recorded fault is named with its remedy; a GPU that says nothing, or that idles or is capped, has none."""
    (found,) = judge_reading(NvmlReading(name="H200", **reading))
    assert finding in found


def test_sound_gpu_has_no_findings() -> None:
    """No counter, zero counts, unused links and a power cap are no faults."""
    assert judge_reading(NvmlReading(name="A100")) == []
    sound = NvmlReading(name="A100", ecc_uncorrected=0, links_active=0, links_inactive=12, slowdowns=0x1 | 0x4)
    assert judge_reading(sound) == []


class NVMLError(Exception):
    """As the library's."""


def fake_nvml(**answers: Any) -> types.ModuleType:
    """Return a stand-in for the library that supports the given questions and no others."""
    module = types.ModuleType("pynvml")

    def unsupported(*_: Any) -> None:
        raise NVMLError("Not Supported")

    questions = "RemappedRows NvLinkState NvLinkErrorCounter RetiredPages PciInfo TotalEccErrors "
    questions += "CurrentClocksThrottleReasons Temperature MemoryInfo"
    for name in questions.split():
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
    module.__dict__.update(answers)
    return module


def test_reading_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU offers is read, what it does not offer is None; the library is let go of."""
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


def test_memory_in_use_is_read_of_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By UUID, in NVML's order. A GPU that does not give it, and one that is lost, are unknown and keep their place."""

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


def test_without_nvml_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library or driver is a reason, not a failure of the GPU."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert read_nvml("GPU-1") == "NVML is unavailable: nvidia-ml-py is not installed"

    def no_driver() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake_nvml(nvmlInit=no_driver))
    assert read_nvml("GPU-1") == "NVML cannot be used (Driver Not Loaded)"


def test_faults_in_the_kernels_log() -> None:
    """Recent faults of this GPU's hardware count; old ones, other GPUs' and an application's own do not."""
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
def test_a_node_without_gpus_is_said_to_have_none() -> None:
    """All GPUs of a node without any: its CPU is checked; one that was asked for by number is missing."""
    import torch

    if torch.accelerator.is_available():
        assert not [result for result in check_gpu() if result.has_failed]
        return
    devices, compute = check_gpu()
    assert (devices.status, compute.status) == (Status.SKIPPED, Status.OK)
    (missing,) = check_gpu(0)
    assert (missing.status, missing.reason) == (Status.FAILED, "this node has no GPU")
