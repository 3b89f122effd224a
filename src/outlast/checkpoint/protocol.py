"""Messages between a worker and the writer process over a Unix socket; see :mod:`outlast.runtime.wire`.

A connection carries one request at a time, and its reply. Nothing here imports torch.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from outlast.checkpoint.dcp.assemble import Assemble, Assembled
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import CopyOutcome, Holder, ParityMember, Target

MAX_MESSAGE_BYTES = 1 << 28
"""Enough for a manifest of many tensors, or the description of a file that consists of many."""


class PingWriter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Respond at once, without access to any directory. Reply: :class:`Done`."""


class Take(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Provide memory to stage a shard in. Reply: :class:`Done`, with its descriptor; without one, none is free."""

    rank: int
    num_bytes: int
    busy: tuple[int, ...] = ()
    """Inodes of the memory that the worker still uses."""
    num_behind: int = 0
    """Number of these that only tiers that are behind still need: as many may be added."""
    may_steal: bool = False
    """The kept checkpoint is durable elsewhere, so its memory may be reused."""


class Write(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Digest a staged shard, whose descriptor comes along, write it to a file if ``path`` is given, and copy it.

    Reply: :class:`Written`.
    """

    key: CopyKey
    num_bytes: int
    path: str | None
    """File to write and make durable; ``None`` = there is no local tier."""
    numbers: tuple[tuple[str, int, int], ...] = ()
    """Element type, offset and bytes of the tensors whose elements may be infinite or NaN."""
    targets: tuple[Target, ...] = ()
    holders: tuple[Holder, ...] = ()
    """Alternatively: members of the rank's parity group, each of which receives a block."""
    timeout_s: float = 10.0
    """Seconds without progress after which a target is abandoned."""
    limit_s: float = 600.0
    """Seconds after which the worker no longer waits for the reply; a write still under way then blocks the directory,
    see ``writer.Calls``."""


class Written(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    chunks: tuple[str, ...]
    finite: bool
    num_copies: int = 0
    """Targets whose own digests are the same; with parities 1 if all blocks arrived intact."""
    failures: tuple[CopyOutcome, ...] = ()


class PreparePart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks have staged their parts of a checkpoint; it may be committed from now on. Reply: :class:`Done`."""

    key: CopyKey
    manifest: bytes


class KeepPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A checkpoint is committed, or all ranks loaded it. Reply: :class:`Done`."""

    key: CopyKey
    in_memory: bool = True


class DropPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank found its part in memory to be corrupt. Reply: :class:`Done`."""

    key: CopyKey


class Discard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An attempt failed. Reply: :class:`Done`."""

    iteration: int
    attempt: str


class List(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """List the checkpoints in memory. Reply: :class:`Listed`."""


class InMemory(msgspec.Struct, frozen=True, kw_only=True):
    manifest: bytes
    parts: tuple[CopyKey, ...]


class Listed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    checkpoints: tuple[InMemory, ...]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: :class:`Done`, with the part's descriptor; without one the part is not here."""

    key: CopyKey


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Exchange copies with other nodes. Reply: :class:`Serving`."""

    host: str
    secret: bytes
    folder: str | None
    """The node's folder; ``None`` = there is no local tier, copies are kept in memory."""
    port: int = 0
    """Port at which peers know this node's writer from before, 0 = none; another one is used if it is taken."""


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    port: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get a part from other nodes into the memory whose descriptor comes along. Reply: :class:`Fetched`."""

    key: CopyKey
    num_bytes: int
    chunks: tuple[str, ...]
    """Expected digests; other bytes are not kept as the part."""
    target: Target | None = None
    members: tuple[ParityMember, ...] = ()
    """Alternatively: its parity group, from which it is rebuilt."""
    timeout_s: float = 10.0


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part arrived; the digests are those of the received bytes."""

    chunks: tuple[str, ...]


class GetPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    key: CopyKey
    target: Target
    timeout_s: float = 10.0


class GotPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    data: bytes


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Success."""


class WriterRefusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    error: str


Request: TypeAlias = (
    PingWriter
    | Take
    | Write
    | PreparePart
    | KeepPart
    | DropPart
    | Discard
    | List
    | Open
    | Serve
    | Fetch
    | GetPart
    | Assemble
)
Reply: TypeAlias = Written | Listed | Serving | Fetched | GotPart | Done | WriterRefusal | Assembled
