"""A reader for ``torch.distributed.checkpoint.load`` that verifies what it returns, and unpickles nothing.

dcp.load(state, storage_reader=VerifiedReader("s3://bucket/run/step-100"))
"""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.items import make_metadata
from outlast.checkpoint.dcp.load import in_threads, read_region
from outlast.checkpoint.dcp.manifest import GlobalManifest, Item, TensorPiece, Where
from outlast.checkpoint.verification import VerifiedFile, VerifiedFiles
from outlast.errors import CheckpointError, Untrusted

__all__ = ["VerifiedReader"]


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
        parent, _, folder = os.fspath(checkpoint_id).rstrip("/").rpartition("/")
        directory = GlobalDirectory.open(parent or ("." if folder else "/"))
        number = folder.removeprefix("step-")
        if not number.isdecimal():
            raise CheckpointError(f"{checkpoint_id} does not end in step-<n>; name the folder of one generation")
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
        by_file: dict[int, list[tuple[Where, ReadItem, Item, TensorPiece]]] = {}
        for request in plan.items:
            index = request.storage_index
            item, piece = self._pieces[index.fqn, tuple(index.offset or ())]
            if piece.where is not None:
                by_file.setdefault(piece.where.file, []).append((piece.where, request, item, piece))

        def read_file(index: int) -> None:
            file = self._files.open(index)
            for where, request, item, piece in sorted(by_file[index], key=lambda one: one[0].start):
                if request.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(request, io.BytesIO(_checked_value(file, where, item.name)))
                else:
                    target = planner.resolve_tensor(request).detach()
                    region = tuple(request.storage_offsets), tuple(request.lengths)
                    read_region(file, item, piece, *region, into=target)
                    planner.commit_tensor(request, target)

        with torch.serialization.safe_globals(_of_arrays()):
            in_threads(read_file, sorted(by_file), is_remote=self._files.directory.is_remote)
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
