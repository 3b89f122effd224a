"""What the writers of two nodes send each other: messages, the parser before all that a stranger sends, the connection.

A frame is a magic number, the body's length, and a msgpack body; a shard's bytes follow their announcement bare. No
frame is longer than :data:`MAX_BODY_BYTES`, none is decoded before its length is checked, and nothing in one can name
a path: attempts and parts consist of harmless characters.

Two writers prove to each other that they know the run's key, without sending it. Each side draws a nonce; a proof is
the HMAC-SHA256 of both nonces under the key, with a word for the side that gives it, so that none can be sent back or
used again. From the same nonces each side derives the keys under which it signs the frames of this connection. The
shards' bytes are neither signed nor encrypted: digests show whether they are right.

Timeouts are the kernel's (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): long calls that release the interpreter's lock, and each
ends when nothing has moved for so long. Nothing here imports torch.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

from outlast import clock
from outlast.checkpoint.manifest import CopyKey
from outlast.decoding import from_msgpack

__all__ = [
    "HEAD_BYTES",
    "MAX_BODY_BYTES",
    "NONCE_BYTES",
    "SLICE_BYTES",
    "TAG_BYTES",
    "Challenge",
    "Channel",
    "Chunk",
    "Data",
    "Failed",
    "FrameError",
    "Get",
    "Keep",
    "Kept",
    "Message",
    "NotAuthenticated",
    "Ping",
    "Prove",
    "Put",
    "Ready",
    "RefusedByPeer",
    "Session",
    "Welcome",
    "Working",
    "body_length",
    "decode_body",
    "draw_nonce",
    "encode_frame",
    "is_proof",
    "prove",
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


NONCE_BYTES = 32
TAG_BYTES = 16
"""Bytes of a frame's signature."""


def draw_nonce() -> bytes:
    """Return a number that nobody can guess and that never comes again."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the proof that a side knows the key.

    Args:
        key: The run's key.
        side: ``client`` or ``server``.
        server_nonce: ``NONCE_BYTES`` drawn by the server for this connection.
        client_nonce: The same by the client.
    """
    return hmac.digest(key, b"outlast replica proof " + side.encode() + server_nonce + client_nonce, "sha256")


def is_proof(proof: bytes, key: bytes, side: str, server_nonce: bytes, client_nonce: bytes) -> bool:
    """Tell whether a side's proof is right, in a time that does not depend on where it is wrong."""
    if len(server_nonce) != NONCE_BYTES or len(client_nonce) != NONCE_BYTES:
        return False
    return hmac.compare_digest(proof, prove(key, side, server_nonce, client_nonce))


@dataclass(slots=True)
class Session:
    """The signatures of one direction of a connection: each frame's depends on its number."""

    key: bytes
    count: int = 0

    @classmethod
    def derive(cls, key: bytes, side: str, server_nonce: bytes, client_nonce: bytes) -> Session:
        """Return the session of the frames that ``side`` sends."""
        text = b"outlast replica frames " + side.encode() + server_nonce + client_nonce
        return cls(hmac.digest(key, text, "sha256"))

    def sign(self, frame: bytes) -> bytes:
        """Return the signature of the next frame."""
        tag = hmac.digest(self.key, self.count.to_bytes(8, "big") + frame, "sha256")[:TAG_BYTES]
        self.count += 1
        return tag


SLICE_BYTES = 1 << 18
"""Received and digested at a time: small enough to be in the processor's cache still when it is digested."""
M = TypeVar("M")


class NotAuthenticated(Exception):
    """The other side does not know the key; says what it did instead."""


class RefusedByPeer(Exception):
    """The other side could not do what it was asked, and says why."""


class Channel:
    """One connection, either side.

    Args:
        connection: A connected TCP socket; closed with the channel.
        timeout_s: Seconds without progress after which any call below raises ``TimeoutError``.

    Raises (all methods): ``ConnectionError``: it ended; ``TimeoutError``; ``FrameError``: what came is no frame of
    ours, or was changed on its way.

    Thread: one at a time; :meth:`abort` any.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket = connection
        self._sends: Session | None = None
        self._receives: Session | None = None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the seconds without progress."""
        self._timeout_s = timeout_s
        self._set_kernel_timeout(timeout_s)

    def _set_kernel_timeout(self, timeout_s: float) -> None:
        micros = max(1, round(timeout_s * 1e6))
        value = struct.pack("ll", micros // 1_000_000, micros % 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()

    def abort(self) -> None:
        """End what another thread is doing with it; that thread closes it. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    # -- the handshake -----------------------------------------------------------------------------------------

    def prove_to_server(self, key: bytes) -> None:
        """Authenticate as the client.

        Raises:
            NotAuthenticated: The server does not know the key, or does not take ours for it.
        """
        challenge = self._receive_plain(self._timeout_s)
        if not isinstance(challenge, Challenge) or len(challenge.nonce) != NONCE_BYTES:
            raise FrameError("it does not begin with a challenge")
        nonce = draw_nonce()
        self._send_all(encode_frame(Prove(nonce, prove(key, "client", challenge.nonce, nonce))))
        try:
            welcome = self._receive_plain(self._timeout_s)
        except ConnectionError as error:
            raise NotAuthenticated("it does not accept this run's key") from error
        if not isinstance(welcome, Welcome) or not is_proof(welcome.proof, key, "server", challenge.nonce, nonce):
            raise NotAuthenticated("it does not know this run's key")
        self._begin(key, "client", "server", challenge.nonce, nonce)

    def challenge_client(self, key: bytes | None, within_s: float) -> bool:
        """Authenticate as the server.

        Args:
            key: The run's key; ``None`` = there is none yet, nobody is let in.
            within_s: Seconds for all of it.

        Returns:
            Whether the client proved to know the key; ``False``: it left without having said anything.

        Raises:
            NotAuthenticated: It said something, but does not know the key.
        """
        nonce = draw_nonce()
        self._send_all(encode_frame(Challenge(nonce)))
        proof = self._receive_plain(within_s, may_end=True)
        if proof is None:
            return False
        if key is None:
            raise NotAuthenticated("this node was given no key yet")
        if not isinstance(proof, Prove) or not is_proof(proof.proof, key, "client", nonce, proof.nonce):
            raise NotAuthenticated("it does not know this run's key")
        self._send_all(encode_frame(Welcome(prove(key, "server", nonce, proof.nonce))))
        self._begin(key, "server", "client", nonce, proof.nonce)
        return True

    def _begin(self, key: bytes, own: str, other: str, server_nonce: bytes, client_nonce: bytes) -> None:
        self._sends = Session.derive(key, own, server_nonce, client_nonce)
        self._receives = Session.derive(key, other, server_nonce, client_nonce)
        self.set_timeout(self._timeout_s)

    def _receive_plain(self, within_s: float, *, may_end: bool = False) -> Message | None:
        """Receive an unsigned frame within a time that trickling does not extend."""
        end_s = clock.now_s() + within_s
        head = self._receive_exactly(HEAD_BYTES, end_s, may_end=may_end)
        return decode_body(self._receive_exactly(body_length(head), end_s)) if head else None

    # -- frames ------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message."""
        assert self._sends is not None, "the handshake comes first"
        frame = encode_frame(message)
        self._send_all(frame + self._sends.sign(frame))

    def receive(self) -> Message | None:
        """Wait for a message; ``None`` at the connection's end."""
        assert self._receives is not None, "the handshake comes first"
        head = self._receive_exactly(HEAD_BYTES, may_end=True)
        if not head:
            return None
        rest = self._receive_exactly(body_length(head) + TAG_BYTES)
        body, tag = rest[:-TAG_BYTES], rest[-TAG_BYTES:]
        if not hmac.compare_digest(self._receives.sign(head + body), tag):
            raise FrameError("its signature is wrong")
        return decode_body(body)

    def expect(self, kind: type[M]) -> M:
        """Wait for a message of a kind, past all :class:`Working`.

        Raises:
            RefusedByPeer: The other side could not do what it was asked.
        """
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            if message is None:
                raise ConnectionResetError("it closed the connection")
            if isinstance(message, Failed):
                raise RefusedByPeer(message.error)
            if not isinstance(message, Working):
                raise FrameError(f"it sent a {type(message).__name__} instead of a {kind.__name__}")

    # -- the bytes of shards -----------------------------------------------------------------------------------

    def send_file(self, fd: int, offset: int, num_bytes: int) -> None:
        """Send a piece of a file or memfd; the kernel takes it from there without a copy.

        Raises:
            ConnectionError: Also when the file ends too early: the other side cannot be told any more.
        """
        end = offset + num_bytes
        while offset < end:
            try:
                sent = os.sendfile(self._socket.fileno(), fd, offset, end - offset)
            except BlockingIOError:
                raise TimeoutError(f"it took nothing for {self._timeout_s:g} s") from None
            if not sent:
                raise ConnectionAbortedError(f"the part ends {end - offset} bytes too early")
            offset += sent

    def receive_chunk(self, into: memoryview) -> str:
        """Receive a chunk and return its digest; each slice is digested while it is in the cache."""
        hasher = xxhash.xxh3_64()  # as shard.digest
        for start in range(0, len(into), SLICE_BYTES):
            piece = into[start : start + SLICE_BYTES]
            self.receive_into(piece)
            hasher.update(piece)
        digest: str = hasher.hexdigest()
        return digest

    def receive_pieces(self, num_bytes: int, scratch: memoryview, write: Callable[[memoryview, int], None]) -> str:
        """Receive a chunk piece by piece and return its digest.

        Args:
            num_bytes: Of the chunk.
            scratch: ``SLICE_BYTES`` to receive into, again and again.
            write: Called with each piece and its offset in the chunk.
        """
        hasher = xxhash.xxh3_64()
        for start in range(0, num_bytes, SLICE_BYTES):
            piece = scratch[: min(SLICE_BYTES, num_bytes - start)]
            self.receive_into(piece)
            hasher.update(piece)
            write(piece, start)
        digest: str = hasher.hexdigest()
        return digest

    def receive_into(self, into: memoryview) -> None:
        """Fill a buffer."""
        filled = 0
        while filled < len(into):
            try:
                num = self._socket.recv_into(into[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError(f"nothing came for {self._timeout_s:g} s") from None
            if not num:
                raise ConnectionResetError("it ended the connection")
            filled += num

    def _send_all(self, data: bytes) -> None:
        """Send a frame. One of a few bytes: the kernel takes it whole or the other side does not read."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                raise TimeoutError(f"it took nothing for {self._timeout_s:g} s") from None

    def _receive_exactly(self, num_bytes: int, end_s: float | None = None, *, may_end: bool = False) -> bytes:
        """Receive so many bytes, by ``end_s`` if given; empty if the connection ends before the first."""
        data = b""
        while len(data) < num_bytes:
            if end_s is not None:
                left_s = end_s - clock.now_s()
                if left_s <= 0:
                    raise TimeoutError("it did not answer in time")
                self._set_kernel_timeout(left_s)
            try:
                part = self._socket.recv(num_bytes - len(data))
            except BlockingIOError:
                if end_s is not None:
                    continue
                raise TimeoutError(f"nothing came for {self._timeout_s:g} s") from None
            if not part:
                if may_end and not data:
                    return b""
                raise ConnectionResetError("it ended the connection")
            data += part
        return data
