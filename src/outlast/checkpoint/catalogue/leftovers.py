"""What lies among generations on a disk and is none: attempts, and the remains of deletions."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from outlast.checkpoint.catalogue.entries import Leftover, Remains

__all__ = ["list_leftovers"]

_LEFT = re.compile(r"step-(?P<iteration>\d+)\.(?:(?P<kind>tmp|aside)-(?P<attempt>.+)|doomed)")


def list_leftovers(folder: Path, prefix: str) -> Iterator[Remains]:
    """Yield what lies in a folder and is no committed generation.

    Args:
        folder: A folder of generations.
        prefix: Its name relative to the place, with a slash; may be empty.
    """
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if (match := _LEFT.fullmatch(name)) is None:
            continue
        num_bytes, modified_ns = _measure(folder / name)
        entry = Leftover(
            name=f"{prefix}{name}",
            kind={"tmp": "attempt", "aside": "aside", None: "deletion"}[match["kind"]],  # type: ignore[arg-type]
            iteration=int(match["iteration"]),
            attempt=match["attempt"],
            num_bytes=num_bytes,
            modified_ns=modified_ns,
        )
        yield Remains(entry=entry, remove=partial(_remove_tree, folder / name))


def _measure(path: Path) -> tuple[int, int]:
    """Return the bytes below a folder, and when something in it last changed; what vanishes meanwhile is left out."""
    num_bytes, modified_ns = 0, 0
    for folder, _, names in os.walk(path):
        for one in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                status = os.lstat(one)
            except FileNotFoundError:
                continue
            modified_ns = max(modified_ns, status.st_mtime_ns)
            num_bytes += 0 if one == folder else status.st_size
    return num_bytes, modified_ns


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # the run that it belongs to was quicker
