"""The protocol between the writers of two nodes: messages, their bounds, and the transfer of shards.

Framing, signatures and authentication are those of :mod:`outlast.runtime.wire`. No message can contain a path: attempts
and parts are restricted to safe characters. A shard's bytes are neither signed nor encrypted; digests verify them. Must
not import torch.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

from outlast import clock
from outlast.checkpoint.manifest import CopyKey
from outlast.runtime.wire import Handshake, MessageChannel, ProtocolError

MAX_BODY_BYTES = 2048
"""Largest message."""
MAX_SHARD_BYTES = 1 << 46
MAX_NAME_CHARS = 200
SLICE_BYTES = 1 << 18
"""Received and digested at a time; small enough to stay in the processor's cache."""
MAX_PLACE_CHARS = 300
"""A longer folder name is truncated."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
M = TypeVar("M")


class Ping(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Check that the receiver accepts parts. Reply: :class:`Proceed`; or :class:`Failed`: its disk does not respond."""


class Put(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Store this part. Reply: :class:`Proceed`; then the bytes follow, each chunk is acknowledged by a :class:`Chunk`,
    and the end by :class:`Kept`.
    """

    key: CopyKey
    num_bytes: int
    contributor: int = -1
    """Rank whose block of a shard is XORed into the part; -1: the part itself."""
    num_contributors: int = 0
    """Blocks that make up the parity."""


class Get(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Request bytes of a part. Reply: :class:`Data`, then the bytes."""

    key: CopyKey
    offset: int
    num_bytes: int
    """Upper bound."""


class Proceed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Request accepted."""


class Chunk(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver's digest of the next chunk."""

    digest: str


class Keep(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Store the part: all digests were received. Reply: :class:`Kept`. Without this message a part is dropped."""


class Kept(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The part is stored, and durable unless its folder is in memory."""


class Working(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver still waits for a disk."""

    place: str = ""
    """The folder that has not responded."""


class Data(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """``num_bytes`` of a part of ``total`` bytes follow."""

    num_bytes: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The request failed; the reason is one line."""

    error: str


Message: TypeAlias = Ping | Put | Get | Proceed | Chunk | Keep | Kept | Working | Data | Failed


class RefusedByPeer(Exception):
    """The peer could not carry out a request; the text is its reason."""


class ReplicaChannel(MessageChannel[Message]):
    """A connection between two writers, for either side.

    Args:
        connection: A connected socket; owned by this object.
        timeout_s: Seconds without progress after which any call raises ``TimeoutError``.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        super().__init__(connection, Message, timeout_s=timeout_s, max_bytes=MAX_BODY_BYTES)

    def prove_key(self, key: bytes | None, *, is_server: bool, within_s: float) -> bool:
        """Authenticate both sides with the run's key; ``False``: a client closed the connection without sending.

        Args:
            key: The run's key; ``None`` = not known yet, so every peer is rejected.
            is_server: Whether the peer opened the connection.

        Raises: AuthenticationFailed (one side has another key).
        """
        return self.authenticate(Handshake(key, "replica", is_server=is_server), within_s=within_s, sign=True)

    def receive(self, *, within_s: float | None = None) -> Message | None:
        """Wait for a message and check its bounds; ``None`` at the end of the connection."""
        message = super().receive(within_s=within_s)
        match message:
            case Put():
                _check_key(message.key)
                _check(0 <= message.num_bytes <= MAX_SHARD_BYTES, "num_bytes")
                _check(message.contributor >= -1, "contributor")
                is_block, num_blocks = message.contributor >= 0, message.num_contributors
                _check(0 < num_blocks <= 1 << 16 if is_block else num_blocks == 0, "num_contributors")
            case Get():
                _check_key(message.key)
                _check(0 <= message.offset <= MAX_SHARD_BYTES, "offset")
                _check(0 <= message.num_bytes <= MAX_SHARD_BYTES, "num_bytes")
            case Data():
                _check(0 <= message.num_bytes <= message.total <= MAX_SHARD_BYTES, "num_bytes")
        return message

    def expect(self, kind: type[M], *, disk_s: float = math.inf) -> M:
        """Wait for a message of a kind, skipping :class:`Working`.

        Raises: RefusedByPeer (the peer could not carry out the request); TimeoutError (the peer's disk did not respond
        for ``disk_s``).
        """
        end_s = clock.now_s() + disk_s
        while True:
            message = self.receive()
            if isinstance(message, Working) and clock.now_s() >= end_s:
                place = message.place or "its disk"
                raise TimeoutError(f"{place} has not responded for {disk_s:.3g} s on that node")
            if isinstance(message, kind):
                return message
            if message is None:
                raise ConnectionResetError("it closed the connection")
            if isinstance(message, Failed):
                raise RefusedByPeer(message.error)
            if not isinstance(message, Working):
                raise ProtocolError(f"it sent a {type(message).__name__} instead of a {kind.__name__}")

    def refuse(self, error: object) -> None:
        """Send a failure to the peer; a long reason is truncated."""
        self.send(Failed(str(error).replace("\n", " ")[: MAX_BODY_BYTES // 8]))

    def receive_chunk(
        self,
        num_bytes: int,
        room: memoryview,
        on_slice: Callable[[memoryview, int], None] | None = None,
    ) -> str:
        """Receive a chunk and return its digest; each slice is digested while it is in the cache.

        Args:
            room: Receives the chunk; if it is shorter, each slice in turn.
            on_slice: Called with each slice and its offset in the chunk.
        """
        hasher = xxhash.xxh3_64()  # as shard.digest
        for start in range(0, num_bytes, SLICE_BYTES):
            begin = start if len(room) >= num_bytes else 0
            piece = room[begin : begin + min(SLICE_BYTES, num_bytes - start)]
            self.receive_into(piece)
            hasher.update(piece)
            if on_slice is not None:
                on_slice(piece, start)
        digest: str = hasher.hexdigest()
        return digest


def _check_key(key: CopyKey) -> None:
    _check(key.iteration >= 0, "iteration")
    _check(key.rank >= 0, "rank")
    _check(len(key.attempt) <= MAX_NAME_CHARS and _NAME.fullmatch(key.attempt) is not None, "attempt")
    _check(len(key.part) <= MAX_NAME_CHARS and (not key.part or _NAME.fullmatch(key.part) is not None), "part")


def _check(is_right: bool, field: str) -> None:
    if not is_right:
        raise ProtocolError(f"its {field} is out of bounds")
