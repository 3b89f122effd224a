"""The memory in which a part lands: a file or memfd, mapped.

Mapping a page costs about as much as receiving it does. A thread maps the pages ahead of what is being received,
many at a time; where it is late, or the system does not know how, the receiving call maps them itself.
Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

__all__ = ["Landing"]

_MADV_POPULATE_READ = 22  # for shared memory as good as POPULATE_WRITE and cheaper; Linux 5.14
STRIDE_BYTES = 4 << 20


class Landing:
    """A mapped file.

    Args:
        fd: File or memfd; not closed.
        num_bytes: To map, at least 1.

    Raises:
        OSError, ValueError: It cannot be mapped, or is shorter.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._mapped = mmap.mmap(fd, num_bytes)
        self.view = memoryview(self._mapped)
        """Its bytes. A receiving call that finds no memory for a page fails with ``EFAULT``, without a signal."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._map_pages, name="outlast-map", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop mapping ahead. The memory goes with the last view of it. Blocks: for some milliseconds."""
        self._stopping.set()
        self._thread.join()

    def _map_pages(self) -> None:
        """Thread: its own."""
        madvise = ctypes.CDLL(None).madvise  # releases the interpreter's lock, which mmap.madvise does not
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        for offset in range(0, self._num_bytes, STRIDE_BYTES):
            size = min(STRIDE_BYTES, self._num_bytes - offset)
            if self._stopping.is_set() or madvise(start + offset, size, _MADV_POPULATE_READ) != 0:
                return
