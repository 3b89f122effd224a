"""The checks that a probe process can be asked for, as data. Nothing here imports torch."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "Clock",
    "Command",
    "Compute",
    "Devices",
    "Disk",
    "Driver",
    "Memory",
    "MemoryTest",
    "Network",
    "OpenFiles",
    "SharedMemory",
    "Store",
    "Task",
]


class _Task(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One check."""


class Disk(_Task, frozen=True, kw_only=True):
    """A folder, or where it will be made, takes data, keeps it, and has room."""

    path: str
    min_free_bytes: int


class Store(_Task, frozen=True, kw_only=True):
    """An object store takes a file, keeps it, and deletes it."""

    url: str


class SharedMemory(_Task, frozen=True, kw_only=True):
    """``/dev/shm`` is there, can be written, and has the room that the script needs."""

    min_free_bytes: int
    """0 = the script needs none that anybody told of; then it is only looked at."""
    path: str = "/dev/shm"


class Memory(_Task, frozen=True, kw_only=True):
    """The node, or this container, has memory left."""

    min_free_bytes: int


class OpenFiles(_Task, frozen=True, kw_only=True):
    """A process may have enough descriptors."""

    min_open_files: int


class Clock(_Task, frozen=True, kw_only=True):
    """This node's clock agrees with that of a folder's file server."""

    path: str
    max_skew_s: float


class Network(_Task, frozen=True, kw_only=True):
    """Interfaces are up; without names: any but the loopback."""

    interfaces: tuple[str, ...] = ()


class Command(_Task, frozen=True, kw_only=True):
    """A command of the user's ends with exit code 0."""

    command: str


class Devices(_Task, frozen=True, kw_only=True):
    """Count the accelerators: ``facts["num_devices"]``, ``facts["kind"]``."""


class Compute(_Task, frozen=True, kw_only=True):
    """A device computes a matrix product of which every bit is known beforehand."""

    device: int | None = None
    """Number of the accelerator; ``None`` = the CPU."""
    flip: bool = False
    """Change one bit of the product."""
    num_rounds: int = 4
    """Products of each number format."""


class MemoryTest(_Task, frozen=True, kw_only=True):
    """A device's memory keeps what is written to it."""

    device: int | None = None
    num_bytes: int


class Driver(_Task, frozen=True, kw_only=True):
    """The driver has recorded no fault of a device."""

    device: int


Task: TypeAlias = (
    Disk
    | Store
    | SharedMemory
    | Memory
    | OpenFiles
    | Clock
    | Network
    | Command
    | Devices
    | Compute
    | MemoryTest
    | Driver
)
