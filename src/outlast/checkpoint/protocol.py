"""What a worker and the writer process send each other over a Unix socket; see :mod:`outlast.runtime.wire`.

A connection carries one request at a time, and its reply. Nothing here imports torch.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from outlast.checkpoint.dcp.assemble import Assemble, Assembled
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.client import CopyOutcome, Holder, ParityMember, Target

MAX_MESSAGE_BYTES = 1 << 28
"""A manifest of many tensors, or the description of a file that consists of many."""


class PingWriter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Respond at once, without a look at any directory or at what is held. Reply: :class:`Done`."""


class Take(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Provide memory to stage a shard in. Reply: :class:`Done`, with its descriptor; without one all is in use, or
    there is no memory for more."""

    rank: int
    num_bytes: int
    busy: tuple[int, ...] = ()
    """Inodes of the memory that the worker still uses."""
    num_behind: int = 0
    """How many of these only tiers that are behind still need: as many may be added."""
    may_steal: bool = False
    """The kept generation is durable elsewhere: its memory may be given."""


class Write(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Digest a staged shard, whose descriptor comes along, or write it to a file, and copy it.

    Reply: :class:`Written`.
    """

    key: CopyKey
    num_bytes: int
    path: str | None
    """File to write and make durable; ``None`` = there is no local tier."""
    numbers: tuple[tuple[str, int, int], ...] = ()
    """Element type, offset and bytes of the tensors whose elements may be infinite or NaN."""
    targets: tuple[Target, ...] = ()
    """Writers of other nodes that take a copy."""
    holders: tuple[Holder, ...] = ()
    """Or: members of the rank's parity group, each of which takes a block."""
    timeout_s: float = 10.0
    """Seconds without progress after which a target is given up."""
    limit_s: float = 600.0
    """Seconds after which the worker no longer waits for the reply; what is then still under way blocks the place, see
    ``writer.Calls``."""


class Written(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A shard is digested, and durable if a file was asked for."""

    chunks: tuple[str, ...]
    finite: bool
    num_copies: int = 0
    """Targets whose own digests are the same; with parities 1 if all blocks arrived as they were sent."""
    failures: tuple[CopyOutcome, ...] = ()
    """Each with its error."""


class PreparePart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All ranks have staged their parts of a generation; it may be committed from now on. Reply: :class:`Done`."""

    key: CopyKey
    manifest: bytes


class KeepPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A generation is committed, or all ranks resume from it. Reply: :class:`Done`."""

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
    """List what is held in memory. Reply: :class:`Listed`."""


class InMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A generation of which parts are held in memory."""

    manifest: bytes
    parts: tuple[CopyKey, ...]


class Listed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the writer holds in memory."""

    generations: tuple[InMemory, ...]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Open a part that is held. Reply: :class:`Done`, with its descriptor; without one it is not here."""

    key: CopyKey


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take copies from other nodes and give them out. Reply: :class:`Serving`."""

    host: str
    """Address of the interface to listen on."""
    secret: bytes
    """What peers must prove to know."""
    folder: str | None
    """The node's folder; ``None`` = there is no local tier, copies are held in memory."""
    port: int = 0
    """Port at which peers know this node's writer from before; 0 = they know none. Another one is used if another
    process has it."""


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where the peers find this writer."""

    port: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get a part from other nodes into the memory whose descriptor comes along. Reply: :class:`Fetched`."""

    key: CopyKey
    num_bytes: int
    chunks: tuple[str, ...]
    """Digests of the part: what arrives with others is not held as it."""
    target: Target | None = None
    """Who holds it."""
    members: tuple[ParityMember, ...] = ()
    """Or: its parity group, from which it is rebuilt."""
    timeout_s: float = 10.0


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part arrived; its digests are those of what arrived."""

    chunks: tuple[str, ...]


class GetPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get a small part from another node. Reply: :class:`GotPart`."""

    key: CopyKey
    target: Target
    timeout_s: float = 10.0


class GotPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A small part."""

    data: bytes


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It is done."""


class WriterRefusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It could not be done; the reason is one line."""

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
