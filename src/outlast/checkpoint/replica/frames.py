"""What nodes say to each other about replicas, and the parser that stands before everything a stranger sends.

A frame is a magic number, the body's length, and a msgpack body; a shard's bytes follow their announcement bare. No
frame is longer than :data:`MAX_BODY_BYTES`, none is decoded before its length is checked, and nothing in one can name
a path: attempts and parts consist of harmless characters. Nothing here imports torch.
"""

from __future__ import annotations

import re
import struct
from typing import TypeAlias

import msgspec

from outlast.checkpoint.manifest import CopyKey
from outlast.decoding import from_msgpack

__all__ = [
    "HEAD_BYTES",
    "MAX_BODY_BYTES",
    "Challenge",
    "Chunk",
    "Data",
    "Failed",
    "FrameError",
    "Get",
    "Keep",
    "Kept",
    "Message",
    "Ping",
    "Prove",
    "Put",
    "Ready",
    "Welcome",
    "Working",
    "body_length",
    "decode_body",
    "encode_frame",
]

MAGIC = b"OLr1"
_HEAD = struct.Struct("!4sI")
HEAD_BYTES = _HEAD.size
MAX_BODY_BYTES = 2048
MAX_SHARD_BYTES = 1 << 46
MAX_NAME_CHARS = 200
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class FrameError(Exception):
    """Bytes that are no frame of ours; says why in one line."""


class Challenge(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Server's first word: prove that you know the key, for this nonce."""

    nonce: bytes


class Prove(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The client's proof, and its own nonce."""

    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server's proof."""

    proof: bytes


class Ping(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Do you answer? Reply: :class:`Ready`."""


class Put(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take this part. Reply: :class:`Ready`; then its bytes go over, each chunk is answered by a :class:`Chunk`, and
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


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Go on."""


class Chunk(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver's digest of the next chunk."""

    digest: str


class Keep(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """I have all your digests: keep it. Reply: :class:`Kept`. Without this word a part is forgotten."""


class Kept(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All is received, and durable as far as its place is."""


class Working(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Still at it: a disk takes its time."""


class Data(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """So many bytes follow, of a part that has ``total``."""

    num_bytes: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """It could not be done; the reason is one line."""

    error: str


Message: TypeAlias = (
    Challenge | Prove | Welcome | Ping | Put | Get | Ready | Chunk | Keep | Kept | Working | Data | Failed
)


def encode_frame(message: Message) -> bytes:
    """Return a message's frame. Errors too long for a frame are cut.

    Raises:
        FrameError: A name in it is longer than frames can be.
    """
    if isinstance(message, Failed):
        message = Failed(message.error.replace("\n", " ")[: MAX_BODY_BYTES // 8])
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise FrameError(f"a message of {len(body)} bytes does not fit into a frame of {MAX_BODY_BYTES}")
    return _HEAD.pack(MAGIC, len(body)) + body


def body_length(head: bytes) -> int:
    """Return the bytes that follow a frame's head.

    Args:
        head: Exactly ``HEAD_BYTES``.

    Raises:
        FrameError: It is no head of ours, or announces too much.
    """
    magic, length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise FrameError(f"it begins with {head[:4]!r} instead of {MAGIC!r}")
    if not 0 < length <= MAX_BODY_BYTES:
        raise FrameError(f"it announces {length} bytes; frames have 1 to {MAX_BODY_BYTES}")
    return int(length)


def decode_body(body: bytes) -> Message:
    """Take a frame's body apart; every field of the message lies within its bounds.

    Raises:
        FrameError: It is no message, or one that must not be obeyed.
    """
    try:
        message: Message = from_msgpack(body, Message)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"it holds no message ({error})") from error
    if isinstance(message, Put | Get):
        _check_key(message.key)
    if isinstance(message, Put):
        _check(0 <= message.num_bytes <= MAX_SHARD_BYTES, "num_bytes")
        is_block = message.contributor >= 0
        _check(message.contributor >= -1, "contributor")
        _check(0 < message.num_contributors <= 1 << 16 if is_block else message.num_contributors == 0, "contributors")
    if isinstance(message, Get):
        _check(0 <= message.offset <= MAX_SHARD_BYTES, "offset")
        _check(0 <= message.num_bytes <= MAX_SHARD_BYTES, "num_bytes")
    if isinstance(message, Data):
        _check(0 <= message.num_bytes <= message.total <= MAX_SHARD_BYTES, "num_bytes")
    return message


def _check_key(key: CopyKey) -> None:
    _check(key.iteration >= 0, "iteration")
    _check(key.rank >= 0, "rank")
    _check(len(key.attempt) <= MAX_NAME_CHARS and _NAME.fullmatch(key.attempt) is not None, "attempt")
    _check(len(key.part) <= MAX_NAME_CHARS and (not key.part or _NAME.fullmatch(key.part) is not None), "part")


def _check(is_right: bool, field: str) -> None:
    if not is_right:
        raise FrameError(f"its {field} is out of bounds")
