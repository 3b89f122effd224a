"""Memory of a writer process: staged images, the memory tier, copies of other nodes' shards.

An *image* is the memory in which a rank stages its shard. A rank has two; they outlive the worker. An image is

* free, or
* staged: a save of its rank is under way, or was when that worker died, or
* kept: it is that rank's part of a prepared or committed checkpoint, and can be read.

A checkpoint is *prepared* on a node when all ranks of the job have staged it, and committed when all nodes have
prepared it. Older ones are kept until the commit: whenever ranks or a node's workers die, each node still has its parts
of the newest checkpoint that any node counts as committed. A prepared one can be read, too; the ranks load it if all of
them have it, and drop it otherwise.

The newest committed checkpoint is kept; while it lacks copies on other nodes, also the newest that has all. Copies of
other nodes' shards are stored in the node's folder, or, without a local tier, in memory, by the same rules. Nothing
here imports torch.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outlast.checkpoint.directory import Directory, part_name
from outlast.checkpoint.manifest import MANIFEST, MANIFEST_PART, CopyKey, HoldingsError, Manifest, decode_manifest
from outlast.checkpoint.protocol import InMemory
from outlast.checkpoint.shard import Digested
from outlast.decoding import open_file
from outlast.env import clean_name
from outlast.errors import CheckpointError
from outlast.runtime.files import memory_file

NUM_IMAGES = 2
"""Images of a rank: one is staged and written while the other is kept."""
MAX_IMAGES = 5
"""Images of a rank while tiers are behind: for each of the two late tiers, one being written and one that waits."""
MEMORY_RESERVE = 0.05
"""Share of the machine's memory that additional images leave free."""


@dataclass(slots=True, eq=False)
class Image:
    fd: int
    num_bytes: int
    """Capacity; the content may be shorter."""
    rank: int | None
    """The rank that stages in it; ``None`` = it came from another node."""
    key: CopyKey | None = None
    length: int = 0
    kept: bool = False
    digested: Digested | None = None
    """Its digests when it was written to the node-local tiers; ``None`` = not written since it was last taken."""
    num_uses: int = 0
    view: mmap.mmap | None = None

    @property
    def inode(self) -> int:
        return os.fstat(self.fd).st_ino

    def map(self) -> mmap.mmap:
        if self.view is None:
            self.view = mmap.mmap(self.fd, self.num_bytes, prot=mmap.PROT_READ)
        return self.view

    def close(self) -> None:
        os.close(self.fd)
        self.view = None


@dataclass(slots=True)
class _MemoryCheckpoint:
    manifest: bytes
    facts: Manifest
    is_committed: bool = False

    @property
    def is_replicated(self) -> bool:
        return not self.facts.num_copies or all(self.facts.num_copies)


class Vault:
    """The memory of a node. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._images: list[Image] = []
        self._checkpoints: dict[tuple[int, str], _MemoryCheckpoint] = {}
        self._folder: Directory | None = None

    # -- staging -----------------------------------------------------------------------------------------------

    def take(
        self, rank: int, num_bytes: int, busy: Collection[int], *, may_steal: bool, num_behind: int = 0
    ) -> Image | None:
        """Return an image for a rank to stage into, or ``None`` when all are in use.

        Args:
            may_steal: Whether the last kept one may be reused, because its checkpoint is durable elsewhere.
            num_behind: Number of busy ones that only late tiers still need: as many may be added, if there is memory.

        Raises:
            OSError: There is no memory.
        """
        with self._lock:
            mine = [image for image in self._images if image.rank == rank]
            usable = [image for image in mine if image.inode not in busy and not image.num_uses]
            free = [image for image in usable if not image.kept]
            if not free and len(mine) < NUM_IMAGES:
                return self._new(rank, num_bytes)
            num_slow = max(num_behind, sum(1 for image in mine if image.num_uses and image.inode not in busy))
            if not free and len(mine) < min(MAX_IMAGES, NUM_IMAGES + num_slow) and _has_memory_for(num_bytes):
                return self._new(rank, num_bytes)
            if not free:
                kept = sorted((image for image in usable if image.key is not None), key=self._worth)
                free = kept if len(kept) > 1 or may_steal else []
            if not free:
                return None
            image = max(free, key=lambda one: one.num_bytes) if not free[0].kept else free[0]
            for other in free:  # added while a tier was behind
                if other is not image and not other.kept and len(mine) > NUM_IMAGES:
                    self._remove(other)
                    mine.remove(other)
            image.digested = None
            if image.num_bytes < num_bytes:
                self._remove(image)
                return self._new(rank, num_bytes)
            self._forget(image)
            return image

    def stage(self, fd: int, key: CopyKey, length: int) -> Image:
        """Record a rank's staged part, unless it is known; return the image. Memory of an earlier writer is taken over.

        Another image of the rank with the same part becomes free: it was corrupt, and the part was fetched again.
        """
        with self._lock:
            try:
                image = self.image_of(fd)
            except HoldingsError:
                image = Image(os.dup(fd), os.fstat(fd).st_size, key.rank)
                self._images.append(image)
            if image.key == key:
                return image
            for other in self._images:
                if other is not image and other.rank is not None and other.key == key:
                    self._forget(other)
            image.key, image.length, image.kept = key, length, False
            return image

    def image_of(self, fd: int) -> Image:
        """Return the image that a descriptor refers to. Raises: HoldingsError, when the memory is not this writer's."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            for image in self._images:
                if image.inode == inode:
                    return image
        raise HoldingsError("the staged memory is not this writer's: it was replaced meanwhile")

    @contextmanager
    def reading(self, image: Image) -> Iterator[memoryview]:
        with self._lock:
            image.num_uses += 1
        try:
            with memoryview(image.map()) as whole:
                yield whole
        finally:
            with self._lock:
                image.num_uses -= 1

    # -- the memory tier ---------------------------------------------------------------------------------------

    def prepare(self, key: CopyKey, manifest: bytes) -> None:
        facts, _ = decode_manifest(manifest)
        with self._lock:
            self._checkpoints.setdefault(key.checkpoint, _MemoryCheckpoint(manifest, facts))
            for image in self._of(key.checkpoint):
                image.kept = True

    def keep(self, key: CopyKey, *, in_memory: bool) -> None:
        """Record that a checkpoint is committed, or that all ranks loaded it, and drop those that it replaces.

        Args:
            in_memory: The image remains a copy; otherwise it becomes free.
        """
        with self._lock:
            checkpoint = self._checkpoints.get(key.checkpoint)
            if checkpoint is not None and not checkpoint.is_committed:
                checkpoint.is_committed = True
                self._checkpoints[key.checkpoint] = self._checkpoints.pop(key.checkpoint)  # in the order of the commits
            for image in self._images:
                if image.key == key and in_memory:
                    image.kept = True
                elif image.key == key:
                    self._forget(image)
            self._drop_old()

    def drop(self, key: CopyKey) -> None:
        with self._lock:
            for image in list(self._images):
                if image.key == key and image.rank is not None:
                    self._forget(image)

    def discard(self, iteration: int, attempt: str) -> None:
        with self._lock:
            self._checkpoints.pop((iteration, attempt), None)
            for image in self._of((iteration, attempt)):
                if image.rank is None:
                    self._remove(image)
                else:
                    self._forget(image)

    def list(self) -> tuple[InMemory, ...]:
        with self._lock:
            return tuple(
                InMemory(manifest=checkpoint.manifest, parts=parts)
                for identity, checkpoint in self._checkpoints.items()
                if (parts := tuple(sorted(image.key for image in self._of(identity) if image.kept and image.key)))
            )

    # -- holdings: what comes from other nodes, and goes to them -----------------------------------------------

    def use_folder(self, path: str | None) -> None:
        with self._lock:
            self._folder = Directory(path) if path is not None else None

    @property
    def place(self) -> str:
        with self._lock:
            return "the memory" if self._folder is None else self._folder.url

    def receive(self, key: CopyKey, num_bytes: int) -> _IncomingFile | _IncomingMemory:
        if clean_name(key.attempt) != key.attempt:
            raise HoldingsError(f"{key.attempt!r} names no attempt")
        with self._lock:
            folder = self._folder
        try:
            if folder is not None:
                return _IncomingFile(folder.temporary(key.iteration, key.attempt) / part_name(key), num_bytes)
            image = self._make(None, num_bytes)
            return _IncomingMemory(self, image, key)
        except OSError as error:
            raise HoldingsError(f"no room for {num_bytes} bytes of rank {key.rank}: {error}") from error

    def open(self, key: CopyKey) -> tuple[int, int] | None:
        with self._lock:
            folder = self._folder
            checkpoint = self._checkpoints.get(key.checkpoint)
            if key.part == MANIFEST_PART and checkpoint is not None:
                return _in_memory(checkpoint.manifest)
            for image in self._images:
                if image.key == key and image.kept:
                    return os.dup(image.fd), image.length
        return None if folder is None else _open_file(folder, key)

    def is_unchanged(self, key: CopyKey, fd: int) -> bool:
        inode = os.fstat(fd).st_ino
        with self._lock:
            # Anything else is an immutable file, or memory that is no longer staged in.
            return all(image.key == key and image.kept for image in self._images if image.inode == inode)

    # -- within ------------------------------------------------------------------------------------------------

    def _of(self, identity: tuple[int, str]) -> Sequence[Image]:
        return [image for image in self._images if image.key is not None and image.key.checkpoint == identity]

    def _worth(self, image: Image) -> tuple[bool, bool, int]:
        assert image.key is not None
        checkpoint = self._checkpoints.get(image.key.checkpoint)
        if checkpoint is None:
            return False, False, image.key.iteration
        return checkpoint.is_committed, checkpoint.is_replicated, image.key.iteration

    def _drop_old(self) -> None:
        """Drop checkpoints that newer ones replace, in the order of their commits, and those only prepared."""
        order = [identity for identity, checkpoint in self._checkpoints.items() if checkpoint.is_committed]
        needed = set(order[-1:])
        needed.update([identity for identity in order if self._checkpoints[identity].is_replicated][-1:])
        for identity in list(self._checkpoints):
            if identity not in needed:
                self.discard(*identity)

    def _new(self, rank: int, num_bytes: int) -> Image:
        image = self._make(rank, num_bytes + (num_bytes >> 6) + (1 << 16))  # plain values may grow a little
        self._images.append(image)
        return image

    def _make(self, rank: int | None, num_bytes: int) -> Image:
        fd = memory_file("outlast-arena", can_be_sealed=True)
        try:
            os.ftruncate(fd, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except OSError:
            os.close(fd)
            raise
        return Image(fd, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, rank, length=num_bytes)

    def admit(self, image: Image, key: CopyKey) -> None:
        with self._lock:
            for other in list(self._images):
                if other.rank is None and other.key == key:
                    self._remove(other)
            image.key = key
            image.kept = key.checkpoint in self._checkpoints
            self._images.append(image)

    def _forget(self, image: Image) -> None:
        image.key, image.length, image.kept = None, 0, False

    def _remove(self, image: Image) -> None:
        self._images.remove(image)
        image.close()


class _IncomingFile:
    def __init__(self, path: Path, num_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._done = False
        self.fd = open_file(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(self.fd, num_bytes)
            if num_bytes:
                os.posix_fallocate(self.fd, 0, num_bytes)  # a full disk fails now: a mapped write would be a SIGBUS
        except OSError:
            self.drop()
            raise

    def keep(self) -> None:
        try:
            os.fsync(self.fd)
            os.rename(self._partial, self._path)
        except OSError as error:
            self.drop()
            raise HoldingsError(f"{self._path}: {error.strerror}") from error
        self._close()

    def drop(self) -> None:
        if not self._done:
            self._partial.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        self._done = True
        os.close(self.fd)


class _IncomingMemory:
    def __init__(self, vault: Vault, image: Image, key: CopyKey) -> None:
        self._vault, self._image, self._key, self._done = vault, image, key, False
        self.fd = image.fd

    def keep(self) -> None:
        self._done = True
        self._vault.admit(self._image, self._key)

    def drop(self) -> None:
        if not self._done:
            self._done = True
            self._image.close()


def _has_memory_for(num_bytes: int) -> bool:
    import psutil

    machine = psutil.virtual_memory()
    return machine.available - num_bytes > MEMORY_RESERVE * machine.total


def _in_memory(data: bytes) -> tuple[int, int]:
    fd = memory_file("outlast-manifest")
    os.pwrite(fd, data, 0)
    return fd, len(data)


def _open_file(folder: Directory, key: CopyKey) -> tuple[int, int] | None:
    try:
        manifest, _ = folder.manifest(key.iteration)
    except CheckpointError:
        return None
    if manifest.attempt != key.attempt:
        return None
    name = MANIFEST if key.part == MANIFEST_PART else part_name(key)
    try:
        fd = open_file(folder.checkpoint(key.iteration) / name)
    except OSError:
        return None
    return fd, os.fstat(fd).st_size
