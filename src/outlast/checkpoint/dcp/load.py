"""Generations of the global tier, loaded: each rank's exact state by as many ranks as saved it, by others resharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.items import TORCH_TYPES
from outlast.checkpoint.dcp.manifest import GlobalManifest
from outlast.checkpoint.dcp.regions import Wanted, fill
from outlast.checkpoint.dcp.reshard import Resharded, load_resharded
from outlast.checkpoint.dcp.stored_rank import read_tree, tensors_of
from outlast.checkpoint.dcp.verified_file import VerifiedFiles
from outlast.errors import CheckpointError

__all__ = ["RankState", "Resharded", "load_resharded", "read_rank"]


@dataclass(frozen=True, slots=True)
class RankState:
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
) -> RankState:
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
    return RankState(tree, tensors, files.num_bytes_read)
