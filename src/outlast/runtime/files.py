"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["fsync_folder", "write_atomically"]


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by ``data``: readers see the old one or the new one, also after a crash.

    Raises:
        OSError: The disk is full, or the folder is not writable; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
