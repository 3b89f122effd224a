"""The manifest of a checkpoint in the global tier: all that a reader needs, and the commit. Must not import torch.

A tensor is an *item* with a name, a shape and *pieces*, each stored in a file. Data of a single rank (plain values, and
tensors that differ between ranks) is listed by rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from outlast.checkpoint.manifest import seal, unseal
from outlast.checkpoint.shard import ELEMENT_BYTES, num_chunks
from outlast.errors import Corrupt, Incomplete
from outlast.policy.lineage import UNKNOWN_ERA, Era, Fork

SCHEMA = 1
METADATA = ".metadata"
"""The index for other readers of the format."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Name in the checkpoint's folder."""
    num_bytes: int
    chunks: tuple[str, ...]
    """xxh3_64 of every 8 MiB, hexadecimal."""


class Where(msgspec.Struct, frozen=True, array_like=True, gc=False):
    file: int
    """Index into the manifest's files."""
    start: int
    """Offset of the ``torch.load`` blob."""
    num_bytes: int
    """Size of the blob."""
    data_start: int
    """Offset of the raw bytes in the file."""
    data_bytes: int


class TensorPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    offset: tuple[int, ...]
    """Start in the whole tensor, in elements of each dimension."""
    shape: tuple[int, ...]
    where: Where | None
    """``None``: the piece has no elements."""
    ranks: tuple[int, ...] = ()
    """Ranks that had the piece; empty = all that had the tensor."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor or plain value, under its ``torch.distributed.checkpoint`` name."""

    name: str
    path: tuple[str | int, ...]
    """Keys and indices that lead to the item in the state."""
    dtype: str | None
    """safetensors' name of the element type; ``None``: a plain value, as ``torch.save`` bytes."""
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


class OwnTensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Name in the rank's shard."""
    dtype: str
    shape: tuple[int, ...]
    where: Where | None
    """``None``: the tensor has no elements."""


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    tree: Where
    """Plain values and structure, as in the rank's shard."""
    tensors: tuple[OwnTensor, ...] = ()


class GlobalManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint; the presence of its manifest is the commit."""

    schema: int
    run: str
    topology: str
    world_size: int
    iteration: int
    attempt: str
    restored_from: int | None
    """Iteration of the checkpoint that the saving processes had loaded."""
    restored_attempt: str | None = None
    """Attempt of that checkpoint."""
    era: Era = UNKNOWN_ERA
    """Era of the branch that saved the checkpoint; see ``policy.lineage``."""
    forks: tuple[Fork, ...] = ()
    """The branches that this branch descends from."""
    finite: bool
    """Whether no number is infinite or NaN."""
    metadata: FileEntry | None = None
    """The index for other readers; ``None``: saved by an earlier version, digest unknown."""
    files: tuple[FileEntry, ...]
    items: tuple[Item, ...]
    ranks: tuple[RankEntry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def contents(self, file: int) -> list[tuple[str, int, int]]:
        """Return name, offset and bytes of each part of a file, in file order."""
        found = [(name, where.start, where.num_bytes) for name, where in self.places() if where.file == file]
        return sorted(found, key=lambda part: part[1])

    def places(self) -> Iterator[tuple[str, Where]]:
        for item in self.items:
            for piece in item.pieces:
                if piece.where is not None:
                    yield item.name, piece.where
        for rank, entry in enumerate(self.ranks):
            yield f"outlast/rank-{rank}/tree", entry.tree
            for own in entry.tensors:
                if own.where is not None:
                    yield f"outlast/rank-{rank}/{own.name}", own.where


def find_torn(files: Iterable[FileEntry], sizes: Mapping[str, int]) -> Iterator[tuple[FileEntry, Incomplete]]:
    """Yield the files that are missing or have the wrong size, with the error."""
    for file in files:
        size = sizes.get(file.name)
        if size is None:
            yield file, Incomplete("is missing")
        elif size != file.num_bytes:
            yield file, Incomplete(f"is {size} bytes long instead of {file.num_bytes}")


def encode_global_manifest(manifest: GlobalManifest) -> bytes:
    """Return the manifest with its SHA-256. Equal manifests give equal bytes."""
    return seal(manifest)


def decode_global_manifest(data: bytes) -> GlobalManifest:
    """Decode a manifest and check that its locations and sizes are consistent.

    Raises: Corrupt (the data is not a manifest, was changed, or is inconsistent); Untrusted (a later version of this
    package wrote it).
    """
    manifest, _ = unseal(data, GlobalManifest, schema=SCHEMA)
    _check(manifest)
    return manifest


def _check(manifest: GlobalManifest) -> None:
    metadata = manifest.metadata
    if metadata is not None and (metadata.name != METADATA or len(metadata.chunks) != num_chunks(metadata.num_bytes)):
        raise Corrupt(f"the manifest's entry of {METADATA} contradicts itself")
    for file in manifest.files:
        if len(file.chunks) != num_chunks(file.num_bytes) or "/" in file.name or file.name.startswith("."):
            raise Corrupt(f"the manifest's entry of {file.name} contradicts itself")
    if len(manifest.ranks) != manifest.world_size:
        raise Corrupt("the manifest lacks ranks")
    for name, where in manifest.places():
        end, data_end = where.start + where.num_bytes, where.data_start + where.data_bytes
        if not 0 <= where.file < len(manifest.files) or not (
            0 <= where.start <= where.data_start <= data_end <= end <= manifest.files[where.file].num_bytes
        ):
            raise Corrupt(f"the manifest's entry of {name} lies outside its file")
    for item in manifest.items:
        for piece in item.pieces:
            _check_size(item.name, item.dtype, piece.shape, piece.where)
            whole, offset = item.shape, piece.offset
            if item.dtype is not None and (
                not len(whole) == len(piece.shape) == len(offset)
                or any(o < 0 or o + s > w for o, s, w in zip(offset, piece.shape, whole, strict=True))
            ):
                raise Corrupt(f"the manifest's entry of {item.name} has a part outside the tensor")
    for entry in manifest.ranks:
        for own in entry.tensors:
            _check_size(own.name, own.dtype, own.shape, own.where)


def _check_size(name: str, dtype: str | None, shape: tuple[int, ...], where: Where | None) -> None:
    if dtype is None:
        return
    size = 0 if where is None else where.data_bytes
    if dtype not in ELEMENT_BYTES or math.prod(shape) * ELEMENT_BYTES[dtype] != size:
        raise Corrupt(f"the manifest's entry of {name} contradicts itself")
