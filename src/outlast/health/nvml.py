"""NVIDIA's management library, behind one narrow seam: read what it says of a GPU, then judge it as data.

The library (``nvidia-ml-py``) is optional. A GPU, or a driver, that does not offer some counter gives ``None`` for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

__all__ = ["Reading", "judge", "read"]

_MAX_LINKS = 18
_SLOWDOWNS = {0x8: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that mean trouble; a power cap set on purpose is none."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML says of a GPU; ``None`` = it does not say."""

    name: str
    pci_bus_id: str = ""
    ecc_uncorrected: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    retired_pages: int | None = None
    """Pages retired because of double-bit errors (before Ampere)."""
    rows_pending: bool | None = None
    """Rows wait to be remapped: the GPU must be reset."""
    rows_failed: bool | None = None
    """A row could not be remapped: the GPU must be replaced."""
    links_active: int | None = None
    links_inactive: int | None = None
    """NVLinks that are down."""
    link_errors: int | None = None
    """Recoveries of NVLinks since the driver was loaded."""
    slowdowns: int | None = None
    """Bits of the reasons for which clocks are held down now."""
    temperature_c: int | None = None
    used_bytes: int | None = None

    def to_facts(self) -> dict[str, Any]:
        """Return what is known."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


def judge(reading: Reading) -> list[str]:
    """Return what is wrong with a GPU, for people; empty = nothing."""
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


def read(uuid: str) -> Reading | str:
    """Return what NVML says of the GPU with this UUID; a text: why it says nothing."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return "NVML is not asked: nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"NVML cannot be used ({error})"
    try:
        return _read(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return f"NVML does not know {uuid} ({error})"
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, handle: Any) -> Reading:
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
    return Reading(
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
