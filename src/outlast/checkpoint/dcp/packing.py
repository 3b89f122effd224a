"""What goes into which file of a rank, and where in it. Pure; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outlast.checkpoint.dcp.assemble import Content, Range
from outlast.checkpoint.dcp.blob import ALIGNMENT, tensor_blob
from outlast.checkpoint.dcp.manifest import Where
from outlast.checkpoint.manifest import TensorEntry

__all__ = ["FILE_BYTES", "Packing"]

FILE_BYTES = 256 << 20
"""A file that has reached it is full; several files are written at once."""


@dataclass(slots=True)
class Packing:
    """A rank's files, filled one after the other.

    Args:
        file_bytes: A file that has reached it is full.
    """

    file_bytes: int = FILE_BYTES
    files: list[list[Content]] = field(default_factory=list)
    """What each file consists of."""
    _used: int = 0

    def add_tensor(self, entry: TensorEntry) -> Where:
        """Add a tensor of the image, as ``torch.load`` reads it; return where it lies."""
        blob = tensor_blob(entry.dtype, entry.shape, entry.num_bytes)
        raw = Range(entry.offset, entry.num_bytes, entry.dtype)
        return self._add((blob.prefix, raw, blob.suffix), len(blob.prefix), entry.num_bytes)

    def add_range(self, offset: int, num_bytes: int) -> Where:
        """Add bytes of the image; return where they lie."""
        return self._add((Range(offset, num_bytes),), 0, num_bytes)

    def add_bytes(self, data: bytes) -> Where:
        """Add bytes; return where they lie."""
        return self._add((data,), 0, len(data))

    def _add(self, contents: Iterable[Content], lead: int, data_bytes: int) -> Where:
        if not self.files or self._used >= self.file_bytes:
            self.files.append([])
            self._used = 0
        if padding := -self._used % ALIGNMENT:
            self.files[-1].append(bytes(padding))
        start = self._used = self._used + padding
        for content in contents:
            self.files[-1].append(content)
            self._used += len(content) if isinstance(content, bytes) else content.num_bytes
        return Where(len(self.files) - 1, start, self._used - start, start + lead, data_bytes)
