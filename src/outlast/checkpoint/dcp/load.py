"""Generations of the global tier, loaded by as many ranks as saved them: each rank's exact state.

Nothing here touches the state of the training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.items import TORCH_TYPES, named_tensors
from outlast.checkpoint.dcp.manifest import GlobalManifest, Item, TensorPiece
from outlast.checkpoint.dcp.regions import Wanted, fill
from outlast.checkpoint.dcp.verified_file import VerifiedFiles
from outlast.errors import CheckpointError, Incomplete

__all__ = ["StoredRankState", "read_rank", "read_tree", "tensors_of"]


def read_tree(files: VerifiedFiles, rank: int) -> bytes:
    """Read a rank's plain values and structure. Raises: CheckpointError."""
    where = files.manifest.ranks[rank].tree
    return files.open(where.file).read(where.start, where.num_bytes)


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

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor by its name in the rank's shard."""
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing")
        return self.tensors[name]


def read_rank(
    directory: GlobalDirectory,
    generation: int,
    manifest: GlobalManifest,
    rank: int,
    *,
    accept: Callable[[bytes], None] = lambda tree: None,
) -> StoredRankState:
    """Read the state that a rank had saved, random numbers and whatever else is its own included.

    Args:
        directory: The global tier.
        generation: Iteration of the generation.
        manifest: Of the generation.
        rank: Below its world size.
        accept: Is given the plain values and structure, and may raise before the tensors are read.

    Raises:
        CheckpointError: A byte differs from its digest, or is not there; names file, items and chunk.

    Blocks: until everything is read into new memory.
    """
    files = VerifiedFiles(directory, manifest, directory.folder(generation))
    tree = read_tree(files, rank)
    accept(tree)
    tensors: dict[str, torch.Tensor] = {}
    wanted = []
    for name, item in tensors_of(manifest, rank, tree).items():
        assert item.dtype is not None
        (piece,) = item.pieces
        tensors[name] = torch.empty(piece.shape, dtype=TORCH_TYPES[item.dtype])
        wanted.append(Wanted(item, piece.offset, tensors[name]))
    fill(files, wanted)
    return StoredRankState(tree, tensors, files.num_bytes_read)
