"""Shared memory with what is a rank's own, for the last two iterations; it outlives the rank while a neighbour has it.

Two slots take turns, each with its iteration, length and digest; a rank that dies while it writes leaves the other one.
The memory has no name in any file system: a neighbour opens it through ``/proc``, and it is gone with its last user.
"""

from __future__ import annotations

import mmap
import os
import struct

import xxhash

__all__ = ["CAPACITY_BYTES", "OwnPage"]

CAPACITY_BYTES = 256 << 10
"""What one iteration may take; memory that is not written to is not used."""
_HEAD = struct.Struct("<qQQ")
_SLOT_BYTES = CAPACITY_BYTES + 4096


class OwnPage:
    """The own things of one rank.

    Args:
        fd: Descriptor of the memory; this object owns it.
        writable: Whether this is the rank itself.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self.fd = fd
        self._map = mmap.mmap(
            fd, 2 * _SLOT_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        )

    @classmethod
    def create(cls) -> OwnPage:
        """Return a new one."""
        fd = os.memfd_create("outlast-own", os.MFD_CLOEXEC)
        os.ftruncate(fd, 2 * _SLOT_BYTES)
        page = cls(fd, writable=True)
        page.clear()
        return page

    @classmethod
    def open(cls, pid: int, fd: int) -> OwnPage:
        """Open that of a neighbour.

        Raises:
            OSError: It is gone, or may not be opened.
        """
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), writable=False)

    def write(self, iteration: int, data: bytes) -> None:
        """Keep what belongs to an iteration, in place of the older one of two.

        Args:
            iteration: Number of optimizer steps done, 0 or more.
            data: At most :data:`CAPACITY_BYTES`.
        """
        start = (iteration & 1) * _SLOT_BYTES
        self._map[start : start + _HEAD.size] = _HEAD.pack(-1, 0, 0)
        self._map[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        self._map[start : start + _HEAD.size] = _HEAD.pack(iteration, len(data), xxhash.xxh3_64_intdigest(data))

    def clear(self) -> None:
        """Forget both iterations."""
        for slot in range(2):
            self._map[slot * _SLOT_BYTES : slot * _SLOT_BYTES + _HEAD.size] = _HEAD.pack(-1, 0, 0)

    def iterations(self) -> tuple[int, ...]:
        """Return the iterations of which it holds something, in order."""
        found = (_HEAD.unpack_from(self._map, slot * _SLOT_BYTES)[0] for slot in range(2))
        return tuple(sorted(one for one in found if one >= 0 and self.read(one) is not None))

    def read(self, iteration: int) -> bytes | None:
        """Return what belongs to an iteration; ``None`` = it is not there, or not whole."""
        start = (iteration & 1) * _SLOT_BYTES
        there, length, digest = _HEAD.unpack_from(self._map, start)
        if there != iteration or length > CAPACITY_BYTES:
            return None
        data = self._map[start + _HEAD.size : start + _HEAD.size + length]
        return data if xxhash.xxh3_64_intdigest(data) == digest else None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1
