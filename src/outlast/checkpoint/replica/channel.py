"""A connection between two writers: signed frames, and the bytes of shards between them.

Timeouts are the kernel's (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): long calls that release the interpreter's lock, and each
ends when nothing has moved for so long. Nothing here imports torch.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import xxhash

from outlast import clock
from outlast.checkpoint.replica import handshake
from outlast.checkpoint.replica.frames import (
    HEAD_BYTES,
    Challenge,
    Failed,
    FrameError,
    Message,
    Prove,
    Welcome,
    Working,
    body_length,
    decode_body,
    encode_frame,
)
from outlast.checkpoint.replica.handshake import NONCE_BYTES, TAG_BYTES, Session

__all__ = ["SLICE_BYTES", "Channel", "NotAuthenticated", "RefusedByPeer"]

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
        nonce = handshake.draw_nonce()
        self._send_all(encode_frame(Prove(nonce, handshake.prove(key, "client", challenge.nonce, nonce))))
        try:
            welcome = self._receive_plain(self._timeout_s)
        except ConnectionError as error:
            raise NotAuthenticated("it does not accept this run's key") from error
        if not isinstance(welcome, Welcome) or not handshake.is_proof(
            welcome.proof, key, "server", challenge.nonce, nonce
        ):
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
        nonce = handshake.draw_nonce()
        self._send_all(encode_frame(Challenge(nonce)))
        prove = self._receive_plain(within_s, may_end=True)
        if prove is None:
            return False
        if key is None:
            raise NotAuthenticated("this node was given no key yet")
        if not isinstance(prove, Prove) or not handshake.is_proof(prove.proof, key, "client", nonce, prove.nonce):
            raise NotAuthenticated("it does not know this run's key")
        self._send_all(encode_frame(Welcome(handshake.prove(key, "server", nonce, prove.nonce))))
        self._begin(key, "server", "client", nonce, prove.nonce)
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
