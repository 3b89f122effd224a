"""Stored copies of checkpoints, which an injector finds and damages: files of a tier, and images in a writer's memory.

Only committed copies are damaged: a byte changed while a shard is staged would be saved as valid, which no check could
detect. In memory, the header of an image identifies its attempt; images of older cycles, and images from which the
global tier is still being written, are not damaged.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from outlast.chaos.plan import FaultKind, FaultTier
from outlast.chaos.sight import Sight
from outlast.decoding import parse_json
from outlast.env import clean_name
from outlast.runtime.files import memory_files

_SHARD = re.compile(r"rank-(\d+)\.safetensors")
_OF_A_RUN = re.compile(r"step-\d+(?:\.(?:tmp|aside)-.+|\.doomed)?|suspect|owner|latest|run\.json")
_MAX_HEAD_BYTES = 64 << 20
_FLIPPED = 0x10
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """One file, or image in memory, of a committed checkpoint."""

    path: str
    tier: str
    checkpoint: int
    node: str = ""
    """Empty in the global tier."""
    rank: int | None = None
    """Rank of the state; ``None`` in the global tier, where a file may contain parts of several ranks' states."""
    attempt: str = ""
    """Attempt that saved it; empty outside the memory tier."""

    def describe(self) -> str:
        whose = "" if self.rank is None else f" of rank {self.rank}"
        where = f" on {self.node}" if self.node else ""
        return f"checkpoint {self.checkpoint}{whose} in the {self.tier} tier{where}"


def find_copies(sight: Sight, tier: str, checkpoint: int | None) -> list[StoredCopy]:
    """Return the copies in a tier, in a fixed order; ``checkpoint=None``: of the newest committed checkpoint found."""
    stored = _stored(sight, tier)
    found = [one for one in _copies_in(sight, tier) if one.checkpoint in stored]
    wanted = max((one.checkpoint for one in found), default=-1) if checkpoint is None else checkpoint
    return sorted(
        (one for one in found if one.checkpoint == wanted), key=lambda one: (one.node, one.rank or 0, one.path)
    )


def _stored(sight: Sight, tier: str) -> set[int]:
    """Return the iterations of the checkpoints stored in a tier, without those just being written."""
    if tier == FaultTier.MEMORY:  # after a restart, the same iteration may be staged again
        return sight.committed_now - {checkpoint for _, checkpoint in sight.awaits_global}
    # A replica is part of what its owner commits.
    return sight.committed.get(FaultTier.LOCAL if tier == FaultTier.REPLICA else tier, set())


def _copies_in(sight: Sight, tier: str) -> Iterator[StoredCopy]:
    if tier == FaultTier.GLOBAL:
        if sight.directory is not None and "://" not in sight.directory:
            for path in files_of_steps(Path(sight.directory), "*.distcp"):
                if (iteration := _iteration_in(path)) is not None:
                    yield StoredCopy(os.fspath(path), tier, iteration)
        return
    for node in sorted(set(sight.ranks.values())):
        own = sight.own_ranks(node)
        if tier == FaultTier.MEMORY:
            if (process := sight.agents.get(node)) is not None:
                yield from _images(process.pid, node, own, f"{clean_name(sight.job)}-{sight.cycle}-")
        elif sight.local_directory is not None:
            for path in files_of_steps(node_folder(sight.local_directory, node), "rank-*.safetensors"):
                match, iteration = _SHARD.fullmatch(path.name), _iteration_in(path)
                if match and iteration is not None and (int(match[1]) in own) == (tier == FaultTier.LOCAL):
                    yield StoredCopy(os.fspath(path), tier, iteration, node, int(match[1]))


def files_of_steps(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files of the checkpoints in a folder.

    A run may change the folder meanwhile: ``Path.glob`` would raise if a folder is removed while it is listed.
    """
    yield from map(Path, glob.iglob(f"{glob.escape(os.fspath(folder))}/step-*/{pattern}"))


def node_folder(local_directory: str, node: str) -> Path:
    return Path(local_directory) / clean_name(node)


def lose_folder(folder: Path) -> None:
    """Delete the files that a run has saved in a node's folder, as the loss of the disk would; keep all other files."""
    if folder.is_symlink() or not ((folder / "owner").is_dir() or (folder / "run.json").is_file()):
        return
    for path in folder.iterdir():
        if path.is_symlink() or not _OF_A_RUN.fullmatch(path.name):
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.suffix or not path.name.startswith("step-") or (path / "manifest.json").is_file():
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()


def _iteration_in(path: Path) -> int | None:
    number = path.parent.name.removeprefix("step-")
    return int(number) if number.isdigit() else None


def _images(agent_pid: int, node: str, own: set[int], attempts: str) -> Iterator[StoredCopy]:
    """Yield the images of given ranks and attempts in the memory of an agent's writer."""
    try:
        children = psutil.Process(agent_pid).children(recursive=True)
        writers = [one for one in children if "outlast.checkpoint.writer" in one.cmdline()]
    except psutil.Error:  # the agent has just ended
        return
    for writer in writers:
        for path in memory_files(writer.pid, "outlast-arena"):
            identity = _read_identity(path)
            if identity is not None and identity[0] in own and identity[2].startswith(attempts):
                yield StoredCopy(path, FaultTier.MEMORY, identity[1], node, identity[0], identity[2])


def _read_identity(path: str) -> tuple[int, int, str] | None:
    """Return rank, iteration and attempt from a shard's header; ``None``: it has none."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = parse_json(file.read(length)) if 2 <= length <= _MAX_HEAD_BYTES else {}
        identity = parse_json(head["__metadata__"]["outlast"])
        return int(identity["rank"]), int(identity["iteration"]), str(identity["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage_copy(kind: str, copy: StoredCopy) -> str | None:
    """Damage a copy.

    Returns:
        A description of the damage; ``None``: the copy no longer exists.

    Raises:
        OSError: The copy cannot be written.
    """
    try:
        if kind == FaultKind.DELETE_COPY and copy.tier != FaultTier.MEMORY:
            os.unlink(copy.path)
            return "file deleted"
        # A path of memory is a link in /proc; in a directory, the target of a link does not belong to the run.
        follow = 0 if copy.tier == FaultTier.MEMORY else os.O_NOFOLLOW
        fd = os.open(copy.path, os.O_RDWR | os.O_CLOEXEC | follow)
    except FileNotFoundError:  # replaced by a newer checkpoint, or its process ended
        return None
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return None
        if copy.tier == FaultTier.MEMORY and _read_identity(copy.path) != (copy.rank, copy.checkpoint, copy.attempt):
            return None  # it is being staged again
        if kind == FaultKind.TRUNCATE_COPY:
            os.ftruncate(fd, size // 2)
            return f"cut from {size} bytes to {size // 2}"
        if kind == FaultKind.DELETE_COPY:
            arguments = (ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE), ctypes.c_long(0), ctypes.c_long(size))
            if _libc.fallocate(fd, *arguments) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), copy.path)
            return f"its {size} bytes freed"
        at = _middle(fd, size)
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ _FLIPPED]), at)
        return f"byte {at} of {size} changed"
    finally:
        os.close(fd)


class Replicas:
    """The replicas of a node's shards on other nodes' disks, of all checkpoints."""

    def __init__(self, sight: Sight, node: str) -> None:
        local, others = sight.local_directory, sorted(set(sight.ranks.values()) - {node})
        self._folders = [] if local is None else [node_folder(local, other) for other in others]
        self._ranks = sight.own_ranks(node)
        self._done: set[tuple[int, int]] = set()

    def corrupt(self) -> int:
        """Change a byte in each replica that no earlier call has changed; return their number."""
        num_before = len(self._done)
        for path in (path for folder in self._folders for path in files_of_steps(folder, "rank-*.safetensors")):
            match = _SHARD.fullmatch(path.name)
            if match is None or int(match[1]) not in self._ranks:
                continue
            with contextlib.suppress(OSError):  # replaced by a newer checkpoint
                status = path.lstat()
                file = (status.st_dev, status.st_ino)
                copy = StoredCopy(os.fspath(path), FaultTier.REPLICA, _iteration_in(path) or 0)
                if file not in self._done and damage_copy(FaultKind.CORRUPT_COPY, copy) is not None:
                    self._done.add(file)
        return len(self._done) - num_before


def _middle(fd: int, size: int) -> int:
    """Return an offset in the middle of the data; a memory image may be longer than its data."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(_MAX_HEAD_BYTES, size - 8):
        return size // 2
    try:
        head = parse_json(os.pread(fd, length, 8))
        end = max(entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError):
        return size // 2
    return min(8 + length + int(end) // 2, size - 1)
