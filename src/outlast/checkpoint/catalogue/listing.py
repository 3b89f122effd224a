"""What kind of directory a path or URL is, what lies in it, and whether every byte of that is right."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from outlast.checkpoint import verification
from outlast.checkpoint.catalogue.entries import DirectoryListing, Generation, ListedGeneration, describe_error
from outlast.checkpoint.catalogue.local import find_node_folders, look_into_folders
from outlast.checkpoint.directory import SUSPECT
from outlast.checkpoint.manifest import MANIFEST
from outlast.errors import ConfigError

__all__ = ["Verified", "look_into", "verify"]

_STEP = re.compile(r"step-\d+(?:\..+)?")
_STORE_FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_NODE_FILE = re.compile(r"rank-\d+\.safetensors|parity-\d+\.bin")


def look_into(name: str) -> DirectoryListing:
    """List what lies in a directory.

    Args:
        name: Path of a node's folder, of a ``local_directory`` with a folder for each node, or of a global directory;
            or the URL of a global directory.

    Raises:
        ConfigError: It is none of them.
        CheckpointError: The store cannot be reached.
        OSError: It cannot be read.
    """
    path = _local_path(name)
    if path is None:
        return _look_into_store(name)
    if not path.exists():
        raise ConfigError(f"{name} does not exist; check the path")
    if not path.is_dir():
        raise ConfigError(f"{name} is not a folder; name the one that holds the generations")
    if (path / MANIFEST).is_file():
        raise ConfigError(f"{name} is one generation; name the folder that it lies in: {path.parent}")
    if path.name == SUSPECT and find_node_folders(path.parent) == [path.parent]:
        raise ConfigError(f"{name} holds saves for diagnosis; name the folder that it lies in: {path.parent}")
    if _is_store(path):
        return _look_into_store(os.fspath(path))
    return look_into_folders(path, find_node_folders(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What reading a generation showed."""

    entry: Generation
    """With what is wrong; its ``valid`` is judged by the bytes."""
    num_bytes_read: int


def verify(
    found: ListedGeneration, *, num_threads: int, on_read: Callable[[int], None] = lambda num_bytes: None
) -> Verified:
    """Compare every byte of a generation with its digest.

    Args:
        found: As listed.
        num_threads: Readers, each of which holds a piece of a file in memory (1 MiB; 8 MiB from an object store).
        on_read: Called in the readers' threads with the bytes that were just read.

    Blocks: while all of it is read. Ctrl-C ends it once each reader has read the piece that it is at.
    """
    sizes: list[int] = []

    def count(piece: memoryview, _: int) -> None:
        sizes.append(len(piece))
        on_read(len(piece))

    flaws = verification.verify(found.files, num_threads=num_threads, on_piece=count)
    problems = [
        msgspec.structs.replace(
            describe_error(flaw.error, flaw.file.name, node=flaw.file.node, rank=flaw.file.rank),
            chunk=flaw.chunk,
            tensors=flaw.contents,
        )
        for flaw in flaws
    ]
    return Verified(entry=found.judge(problems) if problems else found.entry, num_bytes_read=sum(sizes))


def _look_into_store(url: str) -> DirectoryListing:
    from outlast.checkpoint.catalogue.store import look_into_store

    return look_into_store(url)


def _local_path(name: str) -> Path | None:
    """Return what a path or ``file:`` URL names; ``None``: it is a store's URL."""
    if "://" not in name:
        return Path(os.path.abspath(name))
    parts = urlsplit(name)
    return Path(os.path.abspath(unquote(parts.path))) if parts.scheme == "file" else None


def _is_store(path: Path) -> bool:
    """Return whether a folder holds generations of the global tier: the first file that tells decides."""
    for folder in _generation_folders(path):
        names = os.listdir(folder)
        if any(_STORE_FILE.fullmatch(name) for name in names):
            return True
        if any(_NODE_FILE.fullmatch(name) for name in names):
            return False
    return False


def _generation_folders(path: Path) -> Iterator[Path]:
    for above in (path, path / SUSPECT):
        if above.is_dir():
            yield from (above / name for name in os.listdir(above) if _STEP.fullmatch(name) and (above / name).is_dir())
