"""What is read of the global tier: regions of tensors, each rank's exact state, and what ``dcp.load`` asks for.

Regions are read from wherever their pieces lie, by as many threads as a place keeps busy, and each chunk is verified.
A rank's exact state is read by as many ranks as saved it; see :mod:`outlast.checkpoint.dcp.reshard` for others.
Nothing here touches the state of the training. ``torch.distributed.checkpoint`` itself reads what is verified, and
unpickles nothing, with a :class:`VerifiedReader`::

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
"""A disk is busy with two; a network waits most of the time."""


def _read_in_order(files: VerifiedFiles, jobs: Iterable[tuple[Where, Callable[[VerifiedFile], None]]]) -> None:
    """Do jobs with the files that they read from: each file's in the order of their places, several files at once.

    Raises:
        Exception: The first error of a job, in the files' order.

    Blocks: until all are done, or those that run when one fails.
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
    """A region of a tensor, and what takes it."""

    item: Item
    offset: tuple[int, ...]
    into: torch.Tensor
    """A contiguous CPU tensor of the region's shape and the item's type."""


def fill(files: VerifiedFiles, wanted: Iterable[Wanted]) -> None:
    """Read regions of tensors, whatever pieces they are stored in.

    Raises:
        CheckpointError: A chunk differs from its digest, a file is torn or missing, or no piece has what is wanted.

    Blocks: until everything is read, several files at once.
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
    """Read a region of a piece.

    Args:
        into: What takes it: of the same shape, on any device, of any type that it can be cast to.

    Raises:
        CheckpointError: A chunk differs from its digest, or the file is torn or missing.
    """
    if not into.numel():
        return
    assert item.dtype is not None
    assert piece.where is not None
    dtype = TORCH_TYPES[item.dtype]
    # Rows that are not asked for are not read.
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
    """Return where in a piece the wanted region begins, and what takes the part of it that lies there."""
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
    """Return a rank's tensors, by their names in its shard; each with the one piece that was the rank's.

    Raises:
        Incomplete: The generation lacks one.
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
    """One rank's state, as it was saved."""

    tree: bytes
    """Its plain values and structure, for ``state.decode``."""
    tensors: dict[str, torch.Tensor]
    num_bytes_read: int


def read_rank(
    files: VerifiedFiles, rank: int, *, accept: Callable[[bytes], None] = lambda tree: None
) -> StoredRankState:
    """Read the state that a rank had saved, random numbers and whatever else is its own included.

    Args:
        accept: Is given the plain values and structure, and may raise before the tensors are read.

    Raises:
        CheckpointError: A byte differs from its digest, or is not there; names file, items and chunk.

    Blocks: until everything is read into new memory.
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
    """Read one generation of the global tier, each byte compared with its digest.

    The manifest is read in place of ``.metadata``. Plain values are tried with ``weights_only=True`` before a planner
    gets to see them, so that nothing but numbers, texts, containers and tensors is ever unpickled.

    Args:
        url: Of the generation: a path, or any URL that fsspec knows, that ends in ``step-<n>``.
        manifest: Of the generation, where it was read already.

    Raises:
        CheckpointError: There is no such generation, or its manifest cannot be trusted.

    Thread: one.
    """

    def __init__(self, url: str | os.PathLike[str], *, manifest: GlobalManifest | None = None) -> None:
        super().__init__()
        self._manifest = manifest
        self.reset(url)

    @property
    def num_bytes_read(self) -> int:
        """Bytes that came from the place so far."""
        return self._files.num_bytes_read

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another generation."""
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
        """Return whether a generation could be meant."""
        return os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2].startswith("step-")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as the format's metadata."""
        self._files.warn_of_metadata()
        return make_metadata(self._files.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for.

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
    """Return a plain value's bytes, which unpickle to nothing that could do anything."""
    data = file.read(where.start, where.num_bytes)
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # unpickling may raise anything
        raise Untrusted(f"item {name!r} holds what must not be unpickled ({str(error).splitlines()[0]})") from error
    return data


def _of_arrays() -> list[Any]:
    """Return what torch has to know to unpickle arrays and numbers of numpy."""
    kinds = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
    array = np.zeros(1)
    return [array.__reduce__()[0], array[0].__reduce__()[0], np.ndarray, np.dtype, *kinds]
