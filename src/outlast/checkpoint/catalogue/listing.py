"""What kind of directory a path or URL is, and what lies in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from outlast.checkpoint.catalogue.entries import DirectoryListing
from outlast.checkpoint.catalogue.local import find_node_folders, look_into_folders
from outlast.checkpoint.directory import SUSPECT
from outlast.checkpoint.manifest import MANIFEST
from outlast.errors import ConfigError

__all__ = ["look_into"]

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
