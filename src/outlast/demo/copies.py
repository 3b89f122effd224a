"""The copies: where the nodes' local folders hold ranks of other nodes, and how the demo damages them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

__all__ = ["Spoiler", "find_copies"]

_SHARD = re.compile(r"rank-(\d+)\.safetensors")


def find_copies(folder: Path, own: Collection[int]) -> list[Path]:
    """Return the shards of other nodes' ranks in a node's folder, of all generations.

    Args:
        folder: The node's folder in the local tier; may be missing.
        own: The ranks of the node itself.
    """
    shards = ((path, _SHARD.fullmatch(path.name)) for path in sorted(folder.glob("step-*/rank-*.safetensors")))
    return [path for path, match in shards if match is not None and int(match[1]) not in own]


class Spoiler:
    """Flip one byte in the middle of each file that it is shown, once."""

    def __init__(self) -> None:
        self._done: set[tuple[int, int]] = set()

    def spoil(self, path: Path) -> bool:
        """Flip a byte; return whether it was this call that did: not when done before, or the file is gone or empty."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # its generation has just been replaced by a newer one, or committed
            return False
        try:
            status = os.fstat(fd)
            if status.st_size == 0 or (status.st_dev, status.st_ino) in self._done:
                return False
            self._done.add((status.st_dev, status.st_ino))
            (byte,) = os.pread(fd, 1, status.st_size // 2)
            os.pwrite(fd, bytes([byte ^ 0x10]), status.st_size // 2)
            return True
        finally:
            os.close(fd)
