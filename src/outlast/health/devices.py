"""Device health checks: presence, exact arithmetic, memory retention, and faults recorded by the driver.

torch is imported in the probe process, for accelerators only; the CPU's product uses numpy, so that a node without GPUs
is checked in a fraction of a second.

Every bit of the matrix product is known in advance. The factors are small integers, so that each product and partial
sum is exact in the format: the order of summation, blocking, fused or split reductions and TF32 change nothing, and one
digest is valid for every correct CPU and GPU. A single wrong bit changes the digest.

Recorded faults and memory use come from NVIDIA's management library, NVML (``None`` for a counter that the GPU or
driver does not support); faults also from the XIDs in the kernel log.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from outlast import env
from outlast.clock import now_s
from outlast.config.launching import HealthConfig
from outlast.health.probing import Check, CheckOutcome, CheckResult, Prober, Status, failed, ok, skipped
from outlast.runtime import device as accelerator

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")
Factors = tuple["np.ndarray[Any, np.dtype[np.int64]]", "np.ndarray[Any, np.dtype[np.int64]]"]

EXPECTED = {(512, 8): "d95868279b2af29f", (2048, 8): "e98b6ae67a7869c2", (2048, 1): "010ac15c69d5f908"}
"""Size and largest factor to the product's digest. Sums of 2048 products of -1, 0 and 1 fit bfloat16's 8 bits here."""
_Products = list[tuple[str, int, int, Any]]
"""Format, size, largest factor, product."""
WINDOW_S = 3600.0
"""Age up to which a fault counts; a node that was repaired since may join."""

_XID_LINE = re.compile(r"\d+,\d+,(?P<time_us>\d+),[^;]*;.*NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")
_BAD_XIDS = {
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP RPC timeout",
    120: "GSP error",
}
"""XIDs of hardware faults; those that an application can cause (13, 31, 43, ...) do not count."""
_MAX_LINKS = 18
_SLOWDOWNS = {0x8: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that indicate a fault; a deliberate power cap does not."""


def check_gpu(
    device: int | Sequence[int] | None = None,
    config: HealthConfig | None = None,
    *,
    node: str | None = None,
) -> tuple[CheckResult, ...]:
    """Check GPUs: reachable, exact to the bit, memory retains data, no fault recorded by the driver.

    The checks run in a separate process: this one gets no context on any GPU, and a driver that hangs or crashes is a
    failed check.

    Args:
        device: Number of a GPU, or of several; ``None`` = all. Without GPUs the CPU's arithmetic is checked.
        config: Timeouts, and the amount of memory to test.
        node: This node's name, for ``simulate_wrong_gemm``; ``None`` = the host name.

    Blocks: up to ``device_timeout`` for each check.
    """
    with Prober() as prober:
        return tuple(probe_devices(prober, config or HealthConfig(), device, node=node))


def probe_devices(
    prober: Prober, config: HealthConfig, device: int | Sequence[int] | None = None, *, node: str | None = None
) -> Iterator[CheckResult]:
    """Run the checks of :func:`check_gpu` with a prober, which stays open."""
    ask = partial(prober.ask, timeout_s=config.device_timeout)
    flip = config.simulate_wrong_gemm == (node or env.clean_name(env.hostname()))
    present = ask(DeviceCount(), "devices", "node")
    num_devices = int(present.facts.get("num_devices", 0))
    lacking = partial(CheckResult, status=Status.FAILED, took_s=present.took_s)
    if device is not None and num_devices == 0 and not present.has_failed:
        present = lacking(name="devices", target="node", reason="this node has no GPU")
    yield present
    if present.has_failed:
        return
    if num_devices == 0:
        yield ask(ComputeCheck(flip=flip), "compute", "cpu")
    num_bytes = int(config.gpu_memory_test_gib * 2**30)
    for number in range(num_devices) if device is None else [device] if isinstance(device, int) else device:
        target = f"{present.facts['kind']}:{number}"
        if not 0 <= number < num_devices:
            yield lacking(name="device", target=target, reason=f"there are {num_devices}")
            continue
        yield ask(ComputeCheck(device=number, flip=flip), "compute", target)
        if num_bytes:
            yield ask(DeviceMemoryCheck(device=number, num_bytes=num_bytes), "device memory", target)
        yield ask(DriverCheck(device=number), "driver", target)


def has_gpus() -> bool:
    """Return whether device files of NVIDIA GPUs exist on this node, whatever the GPUs' state."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


class DeviceCount(Check, frozen=True, kw_only=True):
    """Count the accelerators that torch can use: ``facts["num_devices"]``, ``facts["kind"]``."""

    def run(self) -> CheckOutcome:
        import torch

        if not torch.accelerator.is_available():
            return skipped("no accelerator: training is on the CPU", num_devices=0)
        number = torch.accelerator.device_count()
        kind = accelerator.training_device().type
        return ok(f"{number} in reach", num_devices=number, kind=kind)


class ComputeCheck(Check, frozen=True, kw_only=True):
    """A device multiplies matrices exactly in each number format."""

    device: int | None = None
    """Number of the accelerator; ``None`` = the CPU."""
    flip: bool = False
    """Flip one bit of the product, for a test."""
    num_rounds: int = 4
    """Products of each number format."""

    def run(self) -> CheckOutcome:
        if self.device is None:
            products = _on_cpu(self.num_rounds)
        else:
            products = _on_device(accelerator.training_device(self.device), self.num_rounds)
        wrong = []
        for name, size, largest, product in products:
            found, expected = digest_of(product, flip=self.flip), EXPECTED[size, largest]
            if found != expected:
                wrong.append(f"{name}: digest {found} instead of {expected}")
        if wrong:
            return failed(f"wrong matrix product: {'; '.join(wrong)}", wrong=wrong)
        formats = list(dict.fromkeys(name for name, *_ in products))
        return ok(f"right to the bit in {', '.join(formats)}", formats=formats)


class DeviceMemoryCheck(Check, frozen=True, kw_only=True):
    """A device's memory retains what is written: patterns, and a different number in each word."""

    device: int | None = None
    num_bytes: int

    def run(self) -> CheckOutcome:
        import torch

        device = torch.device("cpu") if self.device is None else accelerator.training_device(self.device)
        num_words = max(1, self.num_bytes // 8)
        words, shrunk = None, False
        while words is None:
            try:
                words = torch.empty(num_words, dtype=torch.int64, device=device)
            except torch.OutOfMemoryError:
                # Another process uses the memory: test the rest.
                num_words, shrunk = num_words // 2, True
                if num_words < 1 << 17:
                    return failed("less than 1 MiB of its memory is free")
        numbers = torch.arange(num_words, dtype=torch.int64, device=device)
        wrong = 0
        for pattern in (0x5555555555555555, -0x5555555555555556):
            words.fill_(pattern)
            wrong += int((words != pattern).sum())
        words.copy_(numbers).mul_(0x9E3779B97F4A7C1)
        wrong += int((words != numbers * 0x9E3779B97F4A7C1).sum())
        facts = {"tested_bytes": num_words * 8, "wrong_words": wrong, "wished_bytes": self.num_bytes}
        size = f"{num_words * 8 / 2**30:.2f} GiB"
        if wrong:
            return failed(f"{wrong} words of {size} were not kept", **facts)
        less = " (no more was free)" if shrunk else ""
        return ok(f"{size} written and read back{less}", **facts)


class DriverCheck(Check, frozen=True, kw_only=True):
    """NVML and the kernel log have no recorded fault of a device."""

    device: int

    def run(self) -> CheckOutcome:
        name = accelerator.device_name("", self.device)
        if not name.startswith("gpu-"):
            return skipped("no GPU")
        reading = read_nvml(f"GPU-{name.removeprefix('gpu-')}")
        if isinstance(reading, str):
            return skipped(reading)
        faults, log_readable = _recent_faults(reading.pci_bus_id)
        findings = [*judge_reading(reading), *faults]
        facts = {**reading.to_facts(), "kernel_log_readable": log_readable}
        if findings:
            return failed("; ".join(findings), **facts)
        return ok(f"{reading.name}: no fault recorded", **facts)


class DeviceMemoryUse(Check, frozen=True, kw_only=True):
    """Memory in use on each NVIDIA GPU: ``facts["used_bytes"]``, by UUID, in NVML's order."""

    def run(self) -> CheckOutcome:
        used = read_memory_use()
        return skipped(used) if isinstance(used, str) else ok(f"{len(used)} GPUs", used_bytes=used)


def factors(size: int, largest: int) -> Factors:
    """Return two square integer matrices with values from ``-largest`` to ``largest``, always the same."""
    import numpy as np

    numbers = np.arange(2 * size * size, dtype=np.uint64)
    # A multiplicative hash, because the random numbers of libraries may change.
    mixed = (numbers ^ np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    values = ((mixed >> np.uint64(33)) % np.uint64(2 * largest + 1)).astype(np.int64) - largest
    left, right = values.reshape(2, size, size)
    return left, right


def digest_of(product: np.ndarray[Any, Any], *, flip: bool = False) -> str:
    import numpy as np

    whole = np.ascontiguousarray(product).astype(np.int32)
    if flip:
        whole[0, 0] ^= 1
    return xxhash.xxh3_64_hexdigest(whole.tobytes())


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


class NvmlReading(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's counters of a GPU; ``None`` = unknown."""

    name: str
    pci_bus_id: str = ""
    ecc_uncorrected: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    retired_pages: int | None = None
    """Pages retired because of double-bit errors (before Ampere)."""
    rows_pending: bool | None = None
    """Rows are pending to be remapped: the GPU must be reset."""
    rows_failed: bool | None = None
    """A row could not be remapped: the GPU must be replaced."""
    links_active: int | None = None
    links_inactive: int | None = None
    """NVLinks that are down."""
    link_errors: int | None = None
    """Recoveries of NVLinks since the driver was loaded."""
    slowdowns: int | None = None
    """Bits of the reasons that limit the clocks now."""
    temperature_c: int | None = None
    used_bytes: int | None = None

    def to_facts(self) -> dict[str, Any]:
        """Return the known counters."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


def judge_reading(reading: NvmlReading) -> list[str]:
    """Return a GPU's faults for people; empty = none."""
    wrong = []
    if reading.ecc_uncorrected:
        wrong.append(f"{reading.ecc_uncorrected} uncorrectable memory errors (ECC)")
    if reading.rows_failed:
        wrong.append("a memory row could not be remapped: replace the GPU")
    if reading.rows_pending:
        wrong.append("memory rows wait to be remapped: reset the GPU")
    if reading.retired_pages is not None and reading.retired_pages >= 60:
        wrong.append(f"{reading.retired_pages} memory pages retired: replace the GPU")
    if reading.links_active and reading.links_inactive:
        total = reading.links_active + reading.links_inactive
        wrong.append(f"{reading.links_inactive} of {total} NVLinks are down")
    slow = [text for bit, text in _SLOWDOWNS.items() if (reading.slowdowns or 0) & bit]
    if slow:
        wrong.append(f"clocks are held down: {', '.join(slow)}")
    return wrong


def read_nvml(uuid: str) -> NvmlReading | str:
    """Return NVML's counters of the GPU with this UUID, or a text: why there are none."""

    def read(nvml: Any) -> NvmlReading | str:
        try:
            return _read_counters(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError as error:
            return f"NVML does not know {uuid} ({error})"

    return _ask_nvml(read)


def read_memory_use() -> dict[str, int | None] | str:
    """Return the bytes in use on each GPU by UUID in NVML's order, or a text: why NVML reports nothing.

    ``None`` = not known. A GPU that does not report its UUID, because it is lost or belongs to another container, is
    listed by its number.
    """

    def read(nvml: Any) -> dict[str, int | None] | str:
        used: dict[str, int | None] = {}
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                name = str(index)
                try:
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    name = _text(nvml.nvmlDeviceGetUUID(handle))
                    used[name] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
                except nvml.NVMLError:
                    used[name] = None
        except nvml.NVMLError as error:
            return f"NVML does not count the GPUs ({error})"
        return used

    return _ask_nvml(read)


def _ask_nvml(read: Callable[[Any], T]) -> T | str:
    """Call a function with NVML's module, initialised; return its result, or a text: why NVML is unavailable."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return "NVML is unavailable: nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"NVML cannot be used ({error})"
    try:
        return read(nvml)
    finally:
        nvml.nvmlShutdown()


def _read_counters(nvml: Any, handle: Any) -> NvmlReading:
    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):
            return None  # not supported by this GPU, driver, or version of the library

    rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    links = [ask(partial(nvml.nvmlDeviceGetNvLinkState, handle, link)) for link in range(_MAX_LINKS)]
    known = [state for state in links if state is not None]
    cause = getattr(nvml, "NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR", 1)
    pages = ask(lambda: nvml.nvmlDeviceGetRetiredPages(handle, cause))
    counters = [
        ask(partial(nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, nvml.NVML_NVLINK_ERROR_DL_RECOVERY))
        for link in range(len(known))
    ]
    name = nvml.nvmlDeviceGetName(handle)
    pci = ask(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
    return NvmlReading(
        name=_text(name),
        pci_bus_id=_text(pci or ""),
        ecc_uncorrected=ask(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        retired_pages=None if pages is None else len(pages),
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        links_active=sum(bool(state) for state in known) if known else None,
        links_inactive=sum(not state for state in known) if known else None,
        link_errors=sum(number for number in counters if number is not None) if any(counters) else None,
        slowdowns=ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        temperature_c=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        used_bytes=ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def find_faults(records: Iterable[str], pci_bus_id: str, *, now_s: float) -> list[str]:
    """Return the faults of a GPU in kernel log records.

    Args:
        records: As read from ``/dev/kmsg``.
        pci_bus_id: As reported by NVML; the domain may have another number of leading zeros.
        now_s: The monotonic clock, which starts at boot like the log's.
    """
    found: dict[int, int] = {}
    for record in records:
        match = _XID_LINE.match(record)
        if match is None or _bus_place(match["bus"]) != _bus_place(pci_bus_id):
            continue
        xid = int(match["xid"])
        if xid in _BAD_XIDS and now_s - int(match["time_us"]) / 1e6 <= WINDOW_S:
            found[xid] = found.get(xid, 0) + 1
    return [f"XID {xid} ({_BAD_XIDS[xid]}) {count} times in the last hour" for xid, count in sorted(found.items())]


def _recent_faults(pci_bus_id: str) -> tuple[list[str], bool]:
    """Return a GPU's faults in the last hour, for people, and whether the log could be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return [], False
    try:
        return find_faults(_log_records(fd), pci_bus_id, now_s=now_s()), True
    except OSError:
        return [], False
    finally:
        os.close(fd)


def _bus_place(bus: str) -> tuple[int, ...]:
    """Return domain, bus and device; the function is always 0."""
    parts = [int(part, 16) for part in re.split(r"[:.]", bus) if part]
    return tuple(parts[:3])


def _log_records(fd: int) -> Iterable[str]:
    while True:
        try:
            yield os.read(fd, 8192).decode("utf-8", errors="replace")
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # records were overwritten during the read: continue with the oldest one
