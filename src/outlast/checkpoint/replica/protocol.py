"""What the writers of two nodes send each other: messages, their bounds, and the bytes of shards between them.

Frames, signatures and the proof of the run's key are those of :mod:`outlast.runtime.wire`. Nothing in a message can
name a path: attempts and parts consist of harmless characters. A shard's bytes follow their announcement bare, neither
signed nor encrypted: digests show whether they are right. Nothing here imports torch.
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
"""Of a message."""
MAX_SHARD_BYTES = 1 << 46
MAX_NAME_CHARS = 200
SLICE_BYTES = 1 << 18
"""Received and digested at a time: small enough to be in the processor's cache still when it is digested."""
MAX_PLACE_CHARS = 300
"""Of the name of a folder in a message; the rest is cut."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
M = TypeVar("M")


class Ping(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Respond if you take parts. Reply: :class:`Proceed`, or :class:`Failed` while the place for parts does not
    respond."""


class Put(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take this part. Reply: :class:`Proceed`; then its bytes go over, each chunk is answered by a :class:`Chunk`, and
    the end by :class:`Kept`."""

    key: CopyKey
    num_bytes: int
    contributor: int = -1
    """Rank whose block of a shard it is, to be XORed into the part; -1: it is the part itself."""
    num_contributors: int = 0
    """Blocks that make the parity whole."""


class Get(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Give me these bytes of a part. Reply: :class:`Data`, then the bytes."""

    key: CopyKey
    offset: int
    num_bytes: int
    """At most so many."""


class Proceed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Go on."""


class Chunk(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver's digest of the next chunk."""

    digest: str


class Keep(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All digests have come: keep it. Reply: :class:`Kept`. Without this message a part is forgotten."""


class Kept(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All is received, and durable as far as its place is."""


class Working(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Still waiting for a disk."""

    place: str = ""
    """The folder that has not responded yet."""


class Data(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """So many bytes follow, of a part that has ``total``."""

    num_bytes: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """It could not be done; the reason is one line."""

    error: str


Message: TypeAlias = Ping | Put | Get | Proceed | Chunk | Keep | Kept | Working | Data | Failed


class RefusedByPeer(Exception):
    """The other side could not do what it was asked; the text is its reason."""


class ReplicaChannel(MessageChannel[Message]):
    """A connection between two writers, either side.

    Args:
        connection: A connected socket; this object owns it.
        timeout_s: Seconds without progress after which any call raises ``TimeoutError``.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        super().__init__(connection, Message, timeout_s=timeout_s, max_bytes=MAX_BODY_BYTES)

    def prove_key(self, key: bytes | None, *, is_server: bool, within_s: float) -> bool:
        """Prove to the other side that this one knows the run's key, and have it prove the same.

        Args:
            key: The run's key; ``None`` = there is none yet, nobody is accepted.
            is_server: Whether the other side opened the connection.

        Returns:
            Whether both did; ``False``: a client left without having sent anything.

        Raises:
            AuthenticationFailed: The other side does not know the key, or does not accept this one's.
        """
        return self.authenticate(Handshake(key, "replica", is_server=is_server), within_s=within_s, sign=True)

    def receive(self, *, within_s: float | None = None) -> Message | None:
        """Wait for a message, each field of which lies within its bounds; ``None`` at the connection's end."""
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
        """Wait for a message of a kind, past all :class:`Working`.

        Args:
            disk_s: Seconds that the other side may wait for a disk.

        Raises:
            RefusedByPeer: The other side could not do what it was asked.
            TimeoutError: The other side waits for a disk for longer.
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
        """Report to the other side that something could not be done; a long reason is cut."""
        self.send(Failed(str(error).replace("\n", " ")[: MAX_BODY_BYTES // 8]))

    def receive_chunk(
        self,
        num_bytes: int,
        room: memoryview,
        on_slice: Callable[[memoryview, int], None] | None = None,
    ) -> str:
        """Receive a chunk and return its digest; each slice is digested while it is in the cache.

        Args:
            room: Takes the chunk; where it is shorter, each slice in turn.
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
