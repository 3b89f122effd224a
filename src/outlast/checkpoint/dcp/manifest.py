"""The manifest of a generation in the global tier: all that a reader needs, and the commit. Nothing here imports torch.

A tensor is an *item*: it has a name, a shape, and *pieces*, each of which lies somewhere in a file. What is one rank's
alone, its plain values and tensors that differ from the other ranks', is listed by rank.
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
"""What other readers of the format read in place of the manifest."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of data."""

    name: str
    """In the generation's folder."""
    num_bytes: int
    chunks: tuple[str, ...]
    """xxh3_64 of every 8 MiB, hexadecimal."""


class Where(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A place in a file."""

    file: int
    """Index into the manifest's files."""
    start: int
    """Where the blob begins, which ``torch.load`` reads."""
    num_bytes: int
    """Of the blob."""
    data_start: int
    """Where the raw bytes begin, in the file."""
    data_bytes: int


class TensorPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    """Where it begins in the whole, in elements of each dimension."""
    shape: tuple[int, ...]
    where: Where | None
    """``None``: it has no elements."""
    ranks: tuple[int, ...] = ()
    """Ranks whose part it was; empty = all that had the tensor."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor or a plain value, under the name that ``torch.distributed.checkpoint`` gives it."""

    name: str
    path: tuple[str | int, ...]
    """Keys and indices that lead to it in the state."""
    dtype: str | None
    """safetensors' name of the element type; ``None``: a plain value, as ``torch.save`` bytes."""
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


class OwnTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of one rank alone."""

    name: str
    """In the rank's shard."""
    dtype: str
    shape: tuple[int, ...]
    where: Where | None
    """``None``: it has no elements."""


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What is one rank's alone."""

    tree: Where
    """Its plain values and structure, as in its shard."""
    tensors: tuple[OwnTensor, ...] = ()


class GlobalManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A generation; the manifest's presence is its commit."""

    schema: int
    run: str
    topology: str
    world_size: int
    iteration: int
    attempt: str
    restored_from: int | None
    """The generation that the saving processes had loaded."""
    restored_attempt: str | None = None
    """The attempt that had written that one."""
    era: Era = UNKNOWN_ERA
    """Of the branch that saved it; see ``policy.lineage``."""
    forks: tuple[Fork, ...] = ()
    """The branches that this branch descends from."""
    finite: bool
    """Whether no number in it is infinite or NaN."""
    metadata: FileEntry | None = None
    """What other readers of the format read; ``None``: an earlier version saved it, and its digest is not known."""
    files: tuple[FileEntry, ...]
    items: tuple[Item, ...]
    ranks: tuple[RankEntry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def contents(self, file: int) -> list[tuple[str, int, int]]:
        """Return what lies in a file: name, offset and bytes of each part, in the file's order."""
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
    """Yield the files that are not there, or not as long as they should be, and what is wrong with them."""
    for file in files:
        size = sizes.get(file.name)
        if size is None:
            yield file, Incomplete("is missing")
        elif size != file.num_bytes:
            yield file, Incomplete(f"is {size} bytes long instead of {file.num_bytes}")


def encode_global_manifest(manifest: GlobalManifest) -> bytes:
    """Return the manifest's file: the manifest and its SHA-256. Equal manifests give equal bytes."""
    return seal(manifest)


def decode_global_manifest(data: bytes) -> GlobalManifest:
    """Read a manifest's file. What it says of places and sizes agrees with itself.

    Raises:
        Corrupt: It is not a manifest, was changed after it was written, or contradicts itself.
        Untrusted: A later version of this package wrote it.
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
