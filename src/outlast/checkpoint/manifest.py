"""The manifest of a generation: what belongs to it, and by which digests it is known."""

from __future__ import annotations

import hashlib

import msgspec

from outlast.checkpoint.seal import seal, unseal
from outlast.checkpoint.shard import num_chunks
from outlast.errors import Corrupt

__all__ = [
    "MANIFEST",
    "SCHEMA",
    "Manifest",
    "ShardEntry",
    "TensorEntry",
    "decode_manifest",
    "encode_manifest",
    "topology_digest",
]

MANIFEST = "manifest.json"
SCHEMA = 1


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """This rank's part."""
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """Where this rank's part begins in the whole, in elements of each dimension."""
    offset: int
    """In the file, in bytes."""
    num_bytes: int


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's file."""

    rank: int
    file: str
    num_bytes: int
    chunks: tuple[str, ...]
    """xxh3_64 of every 8 MiB, hexadecimal."""
    tensors: tuple[TensorEntry, ...]
    finite: bool
    """Whether no number in it is infinite or NaN."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A generation; the manifest's presence in a folder of the final name is its commit."""

    schema: int
    run: str
    topology: str
    world_size: int
    iteration: int
    attempt: str
    restored_from: int | None
    """The generation that the saving processes had loaded."""
    restored_attempt: str | None = None
    """The attempt that had written that one: with it, lineage is told from generations that were written twice."""
    nodes: tuple[str, ...] = ()
    """Name of each rank's node."""
    num_copies: tuple[int, ...] = ()
    """For each rank, verified copies on other nodes when the generation was committed; empty = not replicated."""
    parity: int = 0
    """Nodes whose shards share one parity; 0 = copies, or none."""
    shards: tuple[ShardEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def finite(self) -> bool:
        """Whether no number of any rank is infinite or NaN."""
        return all(shard.finite for shard in self.shards)


def topology_digest(world_size: int) -> str:
    """Return what ranks of another arrangement do not share."""
    return hashlib.sha256(f"ranks={world_size}".encode()).hexdigest()[:16]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's file: the manifest and its SHA-256. Equal manifests give equal bytes."""
    return seal(manifest)


def decode_manifest(data: bytes) -> tuple[Manifest, str]:
    """Read a manifest's file.

    Returns:
        The manifest and its SHA-256.

    Raises:
        Corrupt: It is not a manifest, or was changed after it was written.
        Untrusted: A later version of this package wrote it.
    """
    manifest, sha256 = unseal(data, Manifest, schema=SCHEMA)
    for rank, shard in enumerate(manifest.shards):
        if shard.rank != rank or len(shard.chunks) != num_chunks(shard.num_bytes):
            raise Corrupt(f"the manifest's entry of rank {rank} contradicts itself")
    if len(manifest.shards) != manifest.world_size:
        raise Corrupt("the manifest lacks ranks")
    return manifest, sha256
