"""Reads from the global tier: regions of tensors, a rank's exact state, and the requests of ``dcp.load``.

Threads read regions from the stored pieces and verify each chunk. ``read_rank`` needs the world size of the save; other
world sizes load with :mod:`outlast.checkpoint.dcp.reshard`. Live training state is never modified here.
``torch.distributed.checkpoint`` can load through :class:`VerifiedReader`, without unpickling unverified data::

    dcp.load(state, storage_reader=VerifiedReader("s3://bucket/run/step-100"))
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.items import TORCH_TYPES, make_metadata, named_tensors
from outlast.checkpoint.dcp.manifest import GlobalManifest, Item, TensorPiece, Where
from outlast.checkpoint.verification import VerifiedFile, VerifiedFiles
from outlast.errors import CheckpointError, Incomplete, Untrusted
from outlast.runtime.storage_calls import in_threads

__all__ = ["VerifiedReader"]


NUM_LOCAL, NUM_REMOTE = 2, 8
"""Threads: two saturate a disk; a network mostly waits."""


def _read_in_order(files: VerifiedFiles, jobs: Iterable[tuple[Where, Callable[[VerifiedFile], None]]]) -> None:
    """Run jobs on the files that they read from, each file's jobs by offset, several files at once.

    Raises: Exception (the first job's error, in file order). Blocks: until all jobs are done; after a failure, until
    the running ones are.
    """
    by_file: dict[int, list[tuple[int, Callable[[VerifiedFile], None]]]] = {}
    for where, job in jobs:
        by_file.setdefault(where.file, []).append((where.start, job))

    def read(index: int) -> None:
        file = files.open(index)
        for _, job in sorted(by_file[index], key=itemgetter(0)):
            job(file)

    num_threads = NUM_REMOTE if files.directory.is_remote else NUM_LOCAL
    files.bounded(lambda: in_threads(read, sorted(by_file), num_threads=num_threads, name="outlast-global"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A region of a tensor and its destination."""

    item: Item
    offset: tuple[int, ...]
    into: torch.Tensor
    """A contiguous CPU tensor of the region's shape and the item's type."""


def fill(files: VerifiedFiles, wanted: Iterable[Wanted]) -> None:
    """Read regions of tensors across all stored pieces.

    Raises: CheckpointError (a chunk differs from its digest, a file is torn or missing, or a region is not stored).
    Blocks: until everything is read.
    """
    jobs: list[tuple[Where, Callable[[VerifiedFile], None]]] = []
    for one in wanted:
        have = 0
        for piece in one.item.pieces:
            if piece.where is not None and (overlap := _overlap(one, piece)) is not None:
                offset, into = overlap
                have += into.numel()
                region = partial(read_region, item=one.item, piece=piece, offset=offset, lengths=tuple(into.shape))
                jobs.append((piece.where, partial(region, into=into)))
        if have != one.into.numel():
            raise Incomplete(f"item {one.item.name!r}: {have} of {one.into.numel()} elements are stored")
    _read_in_order(files, jobs)


def read_region(
    file: VerifiedFile,
    item: Item,
    piece: TensorPiece,
    offset: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    into: torch.Tensor,
) -> None:
    """Read a region of a piece into a tensor of the same shape, on any device and of any castable type.

    Raises: CheckpointError (a chunk differs from its digest, or the file is torn or missing).
    """
    if not into.numel():
        return
    assert item.dtype is not None
    assert piece.where is not None
    dtype = TORCH_TYPES[item.dtype]
    # Only the requested rows are read.
    rows, first = (lengths[0], offset[0]) if lengths else (1, 0)
    row = math.prod(piece.shape[1:])
    start = piece.where.data_start + first * row * dtype.itemsize
    is_plain = into.device.type == "cpu" and into.dtype == dtype and into.is_contiguous()
    if is_plain and lengths[1:] == piece.shape[1:]:
        file.read_into(start, bytes_of(into))
        return
    source = torch.empty((rows, *piece.shape[1:]) if lengths else (), dtype=dtype)
    file.read_into(start, bytes_of(source))
    for dim in range(1, len(lengths)):
        source = source.narrow(dim, offset[dim], lengths[dim])
    into.copy_(source)


def _overlap(wanted: Wanted, piece: TensorPiece) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """Return the region's start in a piece and the part of the destination that the piece fills."""
    into, offset = wanted.into, []
    for dim, (begin, length, stored, extent) in enumerate(
        zip(wanted.offset, wanted.into.shape, piece.offset, piece.shape, strict=True)
    ):
        first, last = max(begin, stored), min(begin + length, stored + extent)
        if first >= last:
            return None
        into = into.narrow(dim, first - begin, last - first)
        offset.append(first - stored)
    return tuple(offset), into


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tree(files: VerifiedFiles, rank: int) -> bytes:
    """Read a rank's plain values and structure. Raises: CheckpointError."""
    where = files.manifest.ranks[rank].tree
    return files.bounded(lambda: files.open(where.file).read(where.start, where.num_bytes))


def tensors_of(manifest: GlobalManifest, rank: int, tree: bytes) -> dict[str, Item]:
    """Return a rank's tensors by their names in its shard, each with the one piece that was the rank's.

    Raises: Incomplete (a tensor is not in the checkpoint).
    """
    items = {item.name: item for item in manifest.items}
    own = {tensor.name: tensor for tensor in manifest.ranks[rank].tensors}
    found = {}
    for name, shared_name in named_tensors(tree).items():
        if name in own:
            mine = own[name]
            piece = TensorPiece((0,) * len(mine.shape), mine.shape, mine.where)
            found[name] = Item(name=name, path=(), dtype=mine.dtype, shape=mine.shape, pieces=(piece,))
            continue
        item = items.get(shared_name)
        pieces = [piece for piece in item.pieces if not piece.ranks or rank in piece.ranks] if item else []
        if item is None or len(pieces) != 1:
            raise Incomplete(f"item {shared_name!r} lacks the part of rank {rank}")
        found[name] = Item(name=item.name, path=item.path, dtype=item.dtype, shape=item.shape, pieces=(pieces[0],))
    return found


@dataclass(frozen=True, slots=True)
class StoredRankState:
    tree: bytes
    """Plain values and structure, for ``state.decode``."""
    tensors: dict[str, torch.Tensor]
    num_bytes_read: int


def read_rank(
    files: VerifiedFiles, rank: int, *, accept: Callable[[bytes], None] = lambda tree: None
) -> StoredRankState:
    """Read the exact state of a rank, including its random numbers.

    Args:
        accept: Called with the plain values and structure; may raise before tensors are read.

    Raises: CheckpointError (a byte differs from its digest or is missing; names file, items and chunk). Blocks: until
    everything is read into new memory.
    """
    tree = read_tree(files, rank)
    accept(tree)
    tensors: dict[str, torch.Tensor] = {}
    wanted = []
    for name, item in tensors_of(files.manifest, rank, tree).items():
        assert item.dtype is not None
        (piece,) = item.pieces
        tensors[name] = torch.empty(piece.shape, dtype=TORCH_TYPES[item.dtype])
        wanted.append(Wanted(item, piece.offset, tensors[name]))
    fill(files, wanted)
    return StoredRankState(tree, tensors, files.num_bytes_read)


class VerifiedReader(StorageReader):
    """Read one checkpoint of the global tier and compare every byte with its digest.

    The manifest replaces ``.metadata``. Plain values are loaded with ``weights_only=True`` before the planner receives
    them, so only numbers, strings, containers and tensors are ever unpickled.

    Args:
        url: The checkpoint: a path, or any URL that fsspec supports, ending in ``step-<n>``.
        manifest: The checkpoint's manifest, if it was read before.

    Raises:
        CheckpointError: The checkpoint does not exist, or its manifest cannot be trusted.

    Thread: one.
    """

    def __init__(self, url: str | os.PathLike[str], *, manifest: GlobalManifest | None = None) -> None:
        super().__init__()
        self._manifest = manifest
        self.reset(url)

    @property
    def num_bytes_read(self) -> int:
        """Bytes read from the directory so far."""
        return self._files.num_bytes_read

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint."""
        if checkpoint_id is None:
            return
        parent, slash, folder = os.fspath(checkpoint_id).rstrip("/").rpartition("/")
        if parent.endswith(":/"):
            parent += "/"  # memory://step-7
        directory = GlobalDirectory.open(parent or slash or ".")
        number = folder.removeprefix("step-")
        if not number.isdecimal():
            raise CheckpointError(f"{checkpoint_id} does not end in step-<n>; give the directory of one checkpoint")
        if self._manifest is None or self._manifest.iteration != int(number):
            self._manifest = directory.manifest(int(number))
        self._files = VerifiedFiles(directory, self._manifest, folder)
        self._pieces = {
            (item.name, tuple(piece.offset)): (item, piece) for item in self._manifest.items for piece in item.pieces
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the URL can be a checkpoint."""
        return os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2].startswith("step-")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as the format's metadata."""
        self._files.warn_of_metadata()
        return make_metadata(self._files.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan.

        Raises:
            CheckpointError: A chunk differs from its digest, or a file is torn or missing.

        Blocks: until everything is read.
        """

        def read(file: VerifiedFile, request: ReadItem, item: Item, piece: TensorPiece, where: Where) -> None:
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, io.BytesIO(_checked_value(file, where, item.name)))
            else:
                target = planner.resolve_tensor(request).detach()
                region = tuple(request.storage_offsets), tuple(request.lengths)
                read_region(file, item, piece, *region, into=target)
                planner.commit_tensor(request, target)

        jobs: list[tuple[Where, Callable[[VerifiedFile], None]]] = []
        for request in plan.items:
            index = request.storage_index
            item, piece = self._pieces[index.fqn, tuple(index.offset or ())]
            if (where := piece.where) is not None:
                jobs.append((where, partial(read, request=request, item=item, piece=piece, where=where)))
        with torch.serialization.safe_globals(_of_arrays()):
            _read_in_order(self._files, jobs)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _checked_value(file: VerifiedFile, where: Where, name: str) -> bytes:
    """Return a plain value's bytes after checking that unpickling them is harmless."""
    data = file.read(where.start, where.num_bytes)
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # unpickling may raise anything
        raise Untrusted(f"item {name!r} holds what must not be unpickled ({str(error).splitlines()[0]})") from error
    return data


def _of_arrays() -> list[Any]:
    """Return the numpy types that ``weights_only`` must allow for arrays and numbers."""
    kinds = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
    array = np.zeros(1)
    return [array.__reduce__()[0], array[0].__reduce__()[0], np.ndarray, np.dtype, *kinds]
