"""What a worker and the writer process say to each other: msgpack frames and descriptors over a Unix socket.

A connection carries one request at a time. Nothing here imports torch."""

from __future__ import annotations

import os
import socket
from typing import Any, TypeAlias

import msgspec

from outlast.checkpoint.dcp.assemble import Assemble, Assembled
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica.parity import ParityMember
from outlast.checkpoint.replica.replicator import Holder, Target
from outlast.decoding import from_msgpack

__all__ = [
    "CopyFailure",
    "Discard",
    "Done",
    "Fetch",
    "Fetched",
    "GetPart",
    "GotPart",
    "InMemory",
    "KeepPart",
    "List",
    "Listed",
    "Open",
    "Opened",
    "Reply",
    "Request",
    "Serve",
    "Serving",
    "Take",
    "Taken",
    "Write",
    "WriterRefusal",
    "Written",
    "receive_reply",
    "receive_request",
    "send_message",
]


MAX_FRAME_BYTES = 1 << 28


class Take(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give me memory to stage a shard in. Reply: :class:`Taken`."""

    rank: int
    num_bytes: int
    busy: tuple[int, ...] = ()
    """Inodes of the memory that I still use."""
    may_steal: bool = False
    """The kept generation is durable elsewhere: its memory may be given."""


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Memory, whose descriptor comes along; ``num_bytes`` 0: all is in use."""

    num_bytes: int


class Write(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Digest a staged shard, whose descriptor comes along; write it and copy it. Reply: :class:`Written`."""

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


class CopyFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A target that has no right copy."""

    node: str
    error: str
    is_new: bool
    """Its first failure since it last took one."""


class Written(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A shard is digested, and durable if a file was asked for."""

    chunks: tuple[str, ...]
    finite: bool
    num_copies: int = 0
    """Targets whose own digests are the same; with parities 1 if all blocks arrived as they were sent."""
    failures: tuple[CopyFailure, ...] = ()


class KeepPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A staged part is committed. Reply: :class:`Done`."""

    key: CopyKey
    manifest: bytes | None = None
    in_memory: bool = True


class Discard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An attempt failed. Reply: :class:`Done`."""

    iteration: int
    attempt: str


class List(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What do you hold in memory? Reply: :class:`Listed`."""


class InMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A generation of which parts are held in memory."""

    manifest: bytes
    parts: tuple[CopyKey, ...]


class Listed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the writer holds in memory."""

    generations: tuple[InMemory, ...]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give me a part that you hold. Reply: :class:`Opened`."""

    key: CopyKey


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part, whose descriptor comes along; ``num_bytes`` -1: it is not here."""

    num_bytes: int


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take copies from other nodes and give them out. Reply: :class:`Serving`."""

    host: str
    """Address of the interface to listen on."""
    secret: bytes
    """What peers must prove to know."""
    folder: str | None
    """The node's folder; ``None`` = there is no local tier, copies are held in memory."""


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where the peers find this writer."""

    port: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get a part from other nodes into the memory whose descriptor comes along. Reply: :class:`Fetched`."""

    key: CopyKey
    num_bytes: int
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


Request: TypeAlias = Take | Write | KeepPart | Discard | List | Open | Serve | Fetch | GetPart | Assemble
Reply: TypeAlias = Taken | Written | Listed | Opened | Serving | Fetched | GotPart | Done | WriterRefusal | Assembled


def send_message(connection: socket.socket, message: msgspec.Struct, fd: int | None = None) -> None:
    """Send a message, with a descriptor if there is one.

    Raises:
        ConnectionError: The other end is gone.
        TimeoutError: The connection's timeout passed.
    """
    data = msgspec.msgpack.encode(message)
    head = len(data).to_bytes(4, "little")
    if fd is None:
        connection.sendall(head + data)
        return
    sent = socket.send_fds(connection, [head], [fd])
    connection.sendall(head[sent:] + data)


def receive_request(connection: socket.socket) -> tuple[Request, int | None] | None:
    """Wait for a request; see :func:`_receive`."""
    received: tuple[Request, int | None] | None = _receive(connection, Request)
    return received


def receive_reply(connection: socket.socket) -> tuple[Reply, int | None] | None:
    """Wait for a reply; see :func:`_receive`."""
    received: tuple[Reply, int | None] | None = _receive(connection, Reply)
    return received


def _receive(connection: socket.socket, kind: Any) -> Any:
    """Wait for a message; return it and its descriptor, or ``None`` at the connection's end.

    Raises:
        ConnectionError: The connection broke, or carries nothing of ours.
        TimeoutError: The connection's timeout passed.
    """
    head, fds, _, _ = socket.recv_fds(connection, 4, 1, socket.MSG_CMSG_CLOEXEC)
    if not head:
        return None
    try:
        head += _receive_exactly(connection, 4 - len(head))
        data = _receive_exactly(connection, int.from_bytes(head, "little"))
        return from_msgpack(data, kind), fds[0] if fds else None
    except BaseException as error:  # whatever ends it, the descriptors came to stay nowhere
        for fd in fds:
            os.close(fd)
        if isinstance(error, msgspec.MsgspecError):
            raise ConnectionError(f"a message is none of ours ({error})") from error
        raise


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    if num_bytes > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {num_bytes} bytes is none of ours")
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(min(1 << 20, num_bytes - len(data)))
        if not part:
            raise ConnectionError("the connection ended")
        data += part
    return bytes(data)
