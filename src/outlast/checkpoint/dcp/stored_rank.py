"""Where in a generation the parts of one rank's shard lie. Nothing here touches the state of the training."""

from __future__ import annotations

from outlast.checkpoint.dcp.items import named_tensors
from outlast.checkpoint.dcp.manifest import GlobalManifest, Item, TensorPiece
from outlast.checkpoint.dcp.verified_file import VerifiedFiles
from outlast.errors import Incomplete

__all__ = ["read_tree", "tensors_of"]


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
