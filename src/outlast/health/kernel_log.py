"""XIDs: what the NVIDIA driver wrote into the kernel's log about a GPU's faults."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from outlast.clock import now_s

__all__ = ["find_faults", "recent_faults"]

WINDOW_S = 3600.0
"""How far back a fault still counts; a node that was repaired since is given its chance."""

_LINE = re.compile(r"\d+,\d+,(?P<time_us>\d+),[^;]*;.*NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d+)")
_BAD = {
    48: "double-bit memory error",
    62: "internal micro-controller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
}
"""XIDs of the hardware; those that an application can cause (13, 31, 43, ...) say nothing about the node."""


def recent_faults(pci_bus_id: str) -> tuple[list[str], bool]:
    """Return a GPU's faults in the last hour, for people, and whether the log could be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return [], False
    try:
        return find_faults(_records(fd), pci_bus_id, now_s=now_s()), True
    except OSError:
        return [], False
    finally:
        os.close(fd)


def find_faults(records: Iterable[str], pci_bus_id: str, *, now_s: float) -> list[str]:
    """Return what the log's records say of a GPU.

    Args:
        records: As ``/dev/kmsg`` gives them.
        pci_bus_id: As NVML gives it; the domain may have other numbers of zeros.
        now_s: The monotonic clock, which begins with the machine as the log's does.
    """
    found: dict[int, int] = {}
    for record in records:
        match = _LINE.match(record)
        if match is None or _place(match["bus"]) != _place(pci_bus_id):
            continue
        xid = int(match["xid"])
        if xid in _BAD and now_s - int(match["time_us"]) / 1e6 <= WINDOW_S:
            found[xid] = found.get(xid, 0) + 1
    return [f"XID {xid} ({_BAD[xid]}) {count} times in the last hour" for xid, count in sorted(found.items())]


def _place(bus: str) -> tuple[int, ...]:
    """Return domain, bus and device; the function is always 0."""
    parts = [int(part, 16) for part in re.split(r"[:.]", bus) if part]
    return tuple(parts[:3])


def _records(fd: int) -> Iterable[str]:
    while True:
        try:
            yield os.read(fd, 8192).decode("utf-8", errors="replace")
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # records were overwritten while we read: go on with the oldest left
