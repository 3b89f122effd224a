"""A checkpoint's manifest, and the keys of its parts. Nothing here imports torch.

A manifest's file contains the manifest and its SHA-256; the global tier's manifest
(:mod:`outlast.checkpoint.dcp.manifest`) is sealed the same way. A part is one rank's shard, or derived from it, such as
a parity: :class:`CopyKey` names it, and :class:`Holdings` is the interface between storage and transfer of parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from outlast.checkpoint.shard import DIGEST_BYTES, digest, head_of, num_chunks, pack_digests, shard_name, unpack_digests
from outlast.decoding import from_json
from outlast.errors import CheckpointError, Corrupt, Untrusted
from outlast.policy.lineage import UNKNOWN_ERA, Era, Fork

T = TypeVar("T", bound=msgspec.Struct)
MAX_SCHEMA = 2
"""Newest schema in which manifests of any tier name their run in the same field."""


class _Sealed(msgspec.Struct, frozen=True):
    manifest: msgspec.Raw
    sha256: str


class _Schema(msgspec.Struct, frozen=True):
    schema: int


class _Named(msgspec.Struct, frozen=True):
    schema: int
    run: str
    iteration: int


def seal(manifest: msgspec.Struct) -> bytes:
    """Return the file content of a manifest. Equal manifests give equal bytes."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(msgspec.Raw(body), hashlib.sha256(body).hexdigest()))


def unseal(data: bytes, kind: type[T], *, schema: int, oldest: int = 1) -> tuple[T, str]:
    """Read the file content of a manifest.

    Args:
        kind: The manifest's type, which has a field ``schema``.

    Returns:
        The manifest and its SHA-256.

    Raises:
        Corrupt: It is not a manifest, or was changed after it was written.
        Untrusted: Its schema is newer than ``schema`` or older than ``oldest``.
    """
    try:
        sealed = from_json(data, _Sealed)
        body = bytes(sealed.manifest)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise Corrupt("the manifest differs from its own SHA-256")
        found = from_json(body, _Schema).schema
        if found > schema:
            raise Untrusted(f"the manifest has schema {found}, this version reads up to {schema}; update outlast")
        if found < oldest:
            raise Untrusted(f"the manifest has schema {found}, this version reads {oldest} and newer; save again")
        return from_json(body, kind), sealed.sha256
    except msgspec.DecodeError as error:
        raise Corrupt(f"the manifest cannot be read ({error})") from error


def run_of(data: bytes, iteration: int) -> str | None:
    """Return the run that a manifest of any tier names; ``None`` = invalid, or of another iteration."""
    try:
        named, _ = unseal(data, _Named, schema=MAX_SCHEMA)
    except CheckpointError:
        return None
    return named.run if named.iteration == iteration else None


MANIFEST = "manifest.json"
SEALED = b'{"manifest":'
"""First bytes of a manifest's file, in any tier."""
SCHEMA = 2


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Integrity data of one rank's file. The table of its tensors is in its own header.

    With the tables here, a manifest would grow with ranks times tensors; so it grows by some 60 bytes per rank and 11
    bytes per 8 MiB of the state.
    """

    rank: int
    num_bytes: int
    digests: bytes
    """Concatenated xxh3_64 digests of every 8 MiB."""
    table: str
    """xxh3_64 of its header, hexadecimal, so that the header can be trusted before the rest is read."""
    finite: bool

    @classmethod
    def of(cls, rank: int, image: memoryview, chunks: Iterable[str], *, finite: bool) -> ShardEntry:
        """Return the entry of a shard with these digests of every 8 MiB. Raises: Corrupt, when it is not a shard."""
        with head_of(image) as head:
            table = digest(head)
        return cls(rank=rank, num_bytes=len(image), digests=pack_digests(chunks), table=table, finite=finite)

    @property
    def file(self) -> str:
        return shard_name(self.rank)

    @property
    def chunks(self) -> tuple[str, ...]:
        return unpack_digests(self.digests)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint; the manifest's presence in a folder of the final name is its commit."""

    schema: int
    run: str
    topology: str
    home: str = ""
    """Identifies the session's directories; another session of the same processes does not load it from memory."""
    world_size: int
    iteration: int
    attempt: str
    restored_from: int | None
    restored_attempt: str | None = None
    """Attempt that had written that checkpoint: distinguishes lineages that wrote the same iteration."""
    era: Era = UNKNOWN_ERA
    """Era of the branch that saved it; see ``policy.lineage``."""
    forks: tuple[Fork, ...] = ()
    nodes: tuple[str, ...] = ()
    num_copies: tuple[int, ...] = ()
    """For each rank, verified copies on other nodes at the commit; empty = not replicated."""
    parity: int = 0
    """Number of nodes whose shards share one parity; 0 = copies, or none."""
    shards: tuple[ShardEntry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def finite(self) -> bool:
        return all(shard.finite for shard in self.shards)


def topology_digest(world_size: int) -> str:
    return hashlib.sha256(f"ranks={world_size}".encode()).hexdigest()[:16]


def decode_manifest(data: bytes) -> tuple[Manifest, str]:
    """Return the manifest in a file's content, and its SHA-256. Raises: Corrupt, Untrusted; see :func:`unseal`."""
    manifest, sha256 = unseal(data, Manifest, schema=SCHEMA, oldest=SCHEMA)
    for rank, shard in enumerate(manifest.shards):
        if shard.rank != rank or len(shard.digests) != DIGEST_BYTES * num_chunks(shard.num_bytes):
            raise Corrupt(f"the manifest's entry of rank {rank} contradicts itself")
    if len(manifest.shards) != manifest.world_size:
        raise Corrupt("the manifest lacks ranks")
    return manifest, sha256


SHARD_PART = ""
MANIFEST_PART = "manifest"
"""The checkpoint's manifest; its rank is 0 by convention."""


class HoldingsError(Exception):
    """A part cannot be stored or returned; the text is the reason, in one line."""


class CopyKey(msgspec.Struct, frozen=True, order=True):
    iteration: int
    attempt: str
    rank: int
    """The rank whose state it is; for a parity, the rank on whose node it is stored."""
    part: str = SHARD_PART

    def __str__(self) -> str:
        return f"{self.part or 'the shard'} of rank {self.rank} of checkpoint {self.iteration} ({self.attempt})"

    @property
    def checkpoint(self) -> tuple[int, str]:
        return self.iteration, self.attempt


class Incoming(Protocol):
    fd: int
    """A file of ``num_bytes`` zeros for the bytes, which can be written at any offset and mapped."""

    def keep(self) -> None:
        """Make it durable, as far as its place is, and readable. Raises: HoldingsError."""

    def drop(self) -> None:
        """Discard it. Idempotent; does nothing after :meth:`keep`."""


class Holdings(Protocol):
    """A node's parts. Thread: any."""

    @property
    def place(self) -> str:
        """Place of parts from other nodes, for people: a folder, or the memory."""

    def receive(self, key: CopyKey, num_bytes: int) -> Incoming:
        """Make room for a part; keeping it replaces an existing one. Raises: HoldingsError, when there is no room."""

    def open(self, key: CopyKey) -> tuple[int, int] | None:
        """Return a readable descriptor, which the caller closes, and the bytes of a part; ``None`` = not here."""

    def is_unchanged(self, key: CopyKey, fd: int) -> bool:
        """Return whether a descriptor that :meth:`open` returned still contains the part.

        Memory of an old checkpoint is reused for the next save, even while it is read; earlier reads are valid.
        """
