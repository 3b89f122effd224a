"""Messages between processes of this package: framing, authentication, descriptors and bulk data on sockets.

A frame is the body's length in four bytes, the body (a tagged ``msgspec.Struct`` as MessagePack) and, if the connection
signs its frames, a signature. :class:`MessageChannel` blocks, with timeouts; :class:`BufferedChannel` never blocks, and
:class:`SelectedChannel` registers one with a selector. In a :class:`Handshake` both sides of a TCP connection prove
that they know a key; before it is over, only hellos of fixed size are read, and nothing is decoded.

A proof is the HMAC-SHA256, under the key, of both sides' nonces, the protocol's name, the server's introduction and the
proving side: it cannot be replayed, used for another protocol, or reflected. From the same nonces each side derives the
keys under which frames may be signed. Nothing is encrypted.

Rejected: one process-wide event loop (a rank's threads block in C, and a writer feeds the network from files); pickles;
TLS (keys of one run need no certificates); Python's own socket timeouts (two system calls per call; these are the
kernel's, ``SO_RCVTIMEO`` and ``SO_SNDTIMEO``). Nothing here imports torch.
"""

from __future__ import annotations

import array
import hmac
import os
import secrets
import select
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Self, TypeVar

import msgspec

from outlast import clock
from outlast.decoding import Decoder, msgpack_decoder

MAX_MESSAGE_BYTES = 1 << 24
"""Default limit of a message."""
_LENGTH = struct.Struct("<I")
_SERVER_HELLO = struct.Struct("!4sH32s")
_CLIENT_HELLO = struct.Struct("!4sH32sq32s")
_MAGIC = b"OLw1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_SIGNATURE_BYTES = 16
PACKET_BUFFER_BYTES = 1 << 20
_RECEIVE_BYTES = 1 << 18
_CLOEXEC = socket.MSG_CMSG_CLOEXEC
_MAX_WAITING_BYTES = 1 << 26
_encoder = msgspec.msgpack.Encoder()
R = TypeVar("R")
T = TypeVar("T")


class ProtocolError(ConnectionError):
    """Data is not a message of this connection; the connection is unusable."""


class AuthenticationFailed(ConnectionError):
    """The other side does not know the key, or has another version of the protocol."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return an unsigned frame, which can be sent on several connections."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected Unix sockets with large buffers."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BUFFER_BYTES)
    return pair


class FrameSigner:
    """Signatures of one direction, each over the number of its frame."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def sign(self, head: bytes | bytearray, body: bytes | bytearray | memoryview) -> bytes:
        mac = hmac.new(self._key, self._count.to_bytes(8, "big") + head, "sha256")
        mac.update(body)
        self._count += 1
        return mac.digest()[:_SIGNATURE_BYTES]


class Handshake:
    """One side's part in the proof of a shared key, without input or output.

    Send :attr:`outgoing`; then receive exactly :attr:`num_wanted` bytes, pass them to :meth:`feed` and send its result,
    until :attr:`is_over`.

    Args:
        key: The shared key; ``None``: this side has none yet, and refuses every peer.
        is_server: The other side opened the connection.
        client_id: A number that the client states and proves, such as its rank.
        introduction: Public bytes that the server sends first, of a length that the protocol fixes; on the client's
            side as many zeros.
        on_introduction: Called on the client's side with the server's introduction; returns the key, or raises.
    """

    def __init__(
        self,
        key: bytes | None,
        protocol: str,
        *,
        is_server: bool,
        client_id: int = 0,
        version: int = 1,
        introduction: bytes = b"",
        on_introduction: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._key, self._protocol, self._version = key, protocol.encode(), version
        self._is_server = is_server
        self._introduction, self._on_introduction = introduction, on_introduction
        self._own_nonce = secrets.token_bytes(_NONCE_BYTES)
        self._nonces = b""
        self.client_id = client_id
        """On the server's side: the number that the client proved, once the handshake is over."""
        self.outgoing = _SERVER_HELLO.pack(_MAGIC, version, self._own_nonce) + introduction if is_server else b""
        """Bytes to send first."""
        self.num_wanted = _CLIENT_HELLO.size if is_server else _SERVER_HELLO.size + len(introduction)
        """Bytes to receive next; 0: none."""

    @property
    def is_over(self) -> bool:
        """Whether both sides have proved that they know the key."""
        return not self.num_wanted

    @property
    def is_introduced(self) -> bool:
        """Whether this is the client's side, and the server's introduction was accepted."""
        return not self._is_server and bool(self._nonces)

    def feed(self, data: bytes) -> bytes:
        """Process the other side's next :attr:`num_wanted` bytes; return the bytes to send.

        Raises:
            ProtocolError: The hello is invalid.
            AuthenticationFailed: The other side does not know the key.
        """
        assert len(data) == self.num_wanted
        if self._nonces:  # the client has the server's nonce: this is the server's proof
            return self._end(data, "server")
        form = _CLIENT_HELLO if self._is_server else _SERVER_HELLO
        magic, version, nonce, *proved = form.unpack_from(data)
        if magic != _MAGIC:
            raise ProtocolError(f"the other side begins with {magic!r} instead of {_MAGIC!r}")
        if version != self._version:
            raise AuthenticationFailed(
                f"the other side speaks version {version} of the protocol, this side {self._version}; install the same "
                "outlast on all nodes"
            )
        if self._is_server:
            self._nonces = self._own_nonce + nonce
            self.client_id, proof = proved
            return self._end(proof, "client") + self._prove("server")
        self._introduction = data[form.size :]
        if self._on_introduction is not None:
            self._key = self._on_introduction(self._introduction)
        self._nonces = nonce + self._own_nonce
        self.num_wanted = _PROOF_BYTES
        return _CLIENT_HELLO.pack(_MAGIC, self._version, self._own_nonce, self.client_id, self._prove("client"))

    def signing_keys(self) -> tuple[bytes, bytes]:
        """Return the keys for this side's signatures and for those of the other side."""
        assert self.is_over
        client, server = self._derive("client frames"), self._derive("server frames")
        return (server, client) if self._is_server else (client, server)

    def _end(self, proof: bytes, side: str) -> bytes:
        if not hmac.compare_digest(proof, self._prove(side)):
            raise AuthenticationFailed("the other side does not know this run's key")
        self.num_wanted = 0
        return b""

    def _prove(self, side: str) -> bytes:
        return self._derive(f"{side} proof", self.client_id.to_bytes(8, "big", signed=True))

    def _derive(self, what: str, more: bytes = b"") -> bytes:
        if self._key is None:
            raise AuthenticationFailed("this node has no key yet")
        text = b"outlast %s v%d %s " % (self._protocol, self._version, what.encode())
        return hmac.digest(self._key, text + self._nonces + self._introduction + more, "sha256")


class MessageChannel(Generic[R]):
    """A blocking connection, either side.

    Args:
        connection: A connected stream or ``SOCK_SEQPACKET`` socket; this object owns it.
        receives: Union of the messages to receive.
        timeout_s: Seconds without progress after which any call below raises ``TimeoutError``; ``None``: never.
        max_bytes: Limit of a message, in both directions.

    Raises (all methods): ``OSError``: the connection ended (``ConnectionError``), there was no progress for too long
    (``TimeoutError``), or the data is not a message of this connection or was changed (:class:`ProtocolError`).

    Thread: one that sends and one that receives; :meth:`abort` any. Where messages are packets, any may send.
    """

    def __init__(
        self,
        connection: socket.socket,
        receives: Any,
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._is_packets = connection.type == socket.SOCK_SEQPACKET
        self._decoder = msgpack_decoder(receives)
        self._max_bytes = max_bytes
        self.signer: FrameSigner | None = None
        self.checker: FrameSigner | None = None
        self._armed: dict[int, float | None] = {}
        self.timeout_s = timeout_s
        """Seconds without progress; may be changed between calls."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor, which is readable when :meth:`receive` has a message."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """End the calls of another thread on this connection; that thread closes it. Idempotent. Blocks: never."""
        with suppress(OSError):  # already ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def authenticate(self, handshake: Handshake, *, within_s: float, sign: bool = False) -> bool:
        """Perform a handshake before the first message.

        Args:
            sign: Sign all frames from now on; the same on both sides.

        Returns:
            ``False``: a client closed the connection without sending anything.

        Raises: AuthenticationFailed: The other side does not know the key, or rejected ours.
        """
        end_s = clock.now_s() + within_s
        is_first, was_sent = True, bool(handshake.outgoing)
        if was_sent:
            self._send([handshake.outgoing], end_s)
        while not handshake.is_over:
            data = bytearray(handshake.num_wanted)
            try:
                if not self._fill(memoryview(data), end_s, may_end=is_first and was_sent):
                    return False
            except ConnectionError as error:
                if is_first:
                    raise
                raise AuthenticationFailed("the other side rejected this run's key") from error
            is_first = False
            answer = handshake.feed(bytes(data))
            if answer:
                self._send([answer], end_s)
        if sign:
            own, other = handshake.signing_keys()
            self.signer, self.checker = FrameSigner(own), FrameSigner(other)
        return True

    # -- messages ----------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct, fds: Sequence[int] = (), *, within_s: float | None = None) -> None:
        """Send a message.

        Args:
            fds: Descriptors to send with it, on a Unix socket; they stay the caller's.
            within_s: Seconds for the whole message, instead of those without progress.
        """
        body = _encoder.encode(message)
        if len(body) > self._max_bytes:
            raise ProtocolError(f"a message of {len(body)} bytes is larger than the limit of {self._max_bytes}")
        head = _LENGTH.pack(len(body))
        parts = [head, body] if self.signer is None else [head, body, self.signer.sign(head, body)]
        self._send(parts, _end_s(within_s), fds)

    def receive(self, *, within_s: float | None = None) -> R | None:
        """Wait for a message; return ``None`` at the end of the connection.

        Args:
            within_s: Seconds for the whole message, instead of those without progress.
        """
        received = self.receive_with_fds(0, within_s=within_s)
        return None if received is None else received[0]

    def receive_with_fds(self, max_fds: int = 1, *, within_s: float | None = None) -> tuple[R, list[int]] | None:
        """Wait for a message and its descriptors, which the caller owns; ``None``: the connection ended."""
        end_s = _end_s(within_s)
        fds: list[int] = []
        try:
            more = self._max_bytes + _SIGNATURE_BYTES if self._is_packets else 0
            data = bytearray(self._receive_part(_LENGTH.size + more, end_s, max_fds, fds))
            if not data:
                return None
            if not self._is_packets:
                self._extend(data, _LENGTH.size, end_s)
            head = data[: _LENGTH.size]
            length = int.from_bytes(head, "little")
            if length > self._max_bytes:
                raise ProtocolError(f"a message of {length} bytes is announced; the limit is {self._max_bytes}")
            size = _LENGTH.size + length + (0 if self.checker is None else _SIGNATURE_BYTES)
            if not self._is_packets:
                self._extend(data, size, end_s)
            elif len(data) != size:
                raise ProtocolError(f"a packet of {len(data)} bytes announces a message of {length}")
            rest = memoryview(data)[_LENGTH.size :]
            body, signature = rest[:length], rest[length:]
            if self.checker is not None and not hmac.compare_digest(self.checker.sign(head, body), signature):
                raise ProtocolError("the signature of a message is wrong")
            return _decode(self._decoder, body), fds
        except BaseException:  # the descriptors must not leak
            for fd in fds:
                os.close(fd)
            raise

    # -- bulk data ---------------------------------------------------------------------------------------------

    def send_file(self, fd: int, offset: int, num_bytes: int) -> None:
        """Send a part of a file or memfd as raw bytes, without copying it.

        Raises:
            ConnectionAbortedError: The file ends too early. The other side waits for the rest: close the connection.
        """
        end = offset + num_bytes
        while offset < end:
            sendfile = partial(os.sendfile, self._socket.fileno(), fd, offset, end - offset)
            num = self._wait(socket.SO_SNDTIMEO, None, sendfile)
            if not num:
                raise ConnectionAbortedError(f"the file ends {end - offset} bytes too early")
            offset += num

    def receive_into(self, into: memoryview) -> None:
        self._fill(into, None)

    # -- the socket --------------------------------------------------------------------------------------------

    def _extend(self, data: bytearray, size: int, end_s: float | None) -> None:
        """Receive until ``data`` has this size."""
        filled = len(data)
        data += bytes(size - filled)
        self._fill(memoryview(data)[filled:], end_s)

    def _receive_part(self, num_bytes: int, end_s: float | None, max_fds: int, fds: list[int]) -> bytes:
        if not max_fds:
            return self._wait(socket.SO_RCVTIMEO, end_s, partial(self._socket.recv, num_bytes))
        # Not socket.recv_fds: it ignores the flag (Python 3.11), and children would inherit the descriptors.
        receive = partial(self._socket.recvmsg, num_bytes, socket.CMSG_SPACE(4 * max_fds), _CLOEXEC)
        data, control, _, _ = self._wait(socket.SO_RCVTIMEO, end_s, receive)
        for level, kind, content in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += array.array("i", content[: len(content) // 4 * 4])
        return data

    def _fill(self, into: memoryview, end_s: float | None, *, may_end: bool = False) -> bool:
        """Fill a buffer; return ``False`` if ``may_end`` and the connection ends before the first byte."""
        filled = 0
        while filled < len(into):
            receive = partial(self._socket.recv_into, into[filled:], 0, socket.MSG_WAITALL)
            num = self._wait(socket.SO_RCVTIMEO, end_s, receive)
            if not num:
                if may_end and not filled:
                    return False
                raise ConnectionResetError("the other side ended the connection")
            filled += num
        return True

    def _send(
        self, parts: Sequence[bytes | bytearray | memoryview], end_s: float | None, fds: Sequence[int] = ()
    ) -> None:
        num_bytes = sum(map(len, parts))
        if not num_bytes:
            return
        send = partial(socket.send_fds, self._socket, list(parts), fds) if fds else partial(self._socket.sendmsg, parts)
        num = self._wait(socket.SO_SNDTIMEO, end_s, send)
        if num < num_bytes:  # rare: the socket's buffer is full
            rest = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
            while num < num_bytes:
                num += self._wait(socket.SO_SNDTIMEO, end_s, partial(self._socket.send, rest[num:]))

    def _wait(self, option: int, end_s: float | None, call: Callable[[], T]) -> T:
        """Return the result of a socket call, which the kernel ends at the deadline or without progress."""
        while True:
            timeout_s = self.timeout_s if end_s is None else _left_s(end_s)
            if self._armed.get(option, -1.0) != timeout_s:
                micros = 0 if timeout_s is None else max(1, round(timeout_s * 1e6))
                self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(micros, 1_000_000)))
                self._armed[option] = timeout_s
            try:
                return call()
            except BlockingIOError:
                if end_s is None:
                    what = "nothing came" if option == socket.SO_RCVTIMEO else "the other side accepted nothing"
                    raise TimeoutError(f"{what} for {self.timeout_s:g} s") from None


class MessageReader(Generic[R]):
    """Split a stream into messages.

    Args:
        receives: Union of the messages to receive.
        max_bytes: Limit of a message; may be changed at any time.
    """

    def __init__(self, receives: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder = msgpack_decoder(receives)
        self._incoming = bytearray()
        self.max_bytes = max_bytes

    def feed(self, data: bytes) -> list[R]:
        """Process the next bytes of the stream; return the complete messages.

        Raises: ProtocolError: A message is too large, or unreadable.
        """
        self._incoming += data
        found: list[R] = []
        at = 0
        while len(self._incoming) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, at)
            if length > self.max_bytes:
                raise ProtocolError(f"a message of {length} bytes is announced; the limit is {self.max_bytes}")
            start = at + _LENGTH.size
            if len(self._incoming) - start < length:
                break
            found.append(_decode(self._decoder, bytes(self._incoming[start : start + length])))
            at = start + length
        del self._incoming[:at]
        return found


class BufferedChannel(MessageReader[R]):
    """A connection that never blocks, for a selector.

    Args:
        connection: Connected, or about to be; this object owns it.
        receives: Union of the messages to receive.
        handshake: This side's part; until it is over, outgoing messages are held back and nothing is decoded. ``None``:
            no authentication.
        max_bytes: Limit of a message, in both directions; may be changed at any time.

    Raises (all methods): ``OSError``: the other side is gone, has accepted nothing for long, or does not know the key
    (:class:`AuthenticationFailed`), or the data is not a message of this connection (:class:`ProtocolError`).

    Thread: one.
    """

    def __init__(
        self,
        connection: socket.socket,
        receives: Any,
        *,
        handshake: Handshake | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        super().__init__(receives, max_bytes=max_bytes)
        self._handshake = handshake
        self._greeting = bytearray()
        self._outgoing = bytearray(handshake.outgoing if handshake is not None else b"")
        self._held = bytearray()
        self.received_ns = clock.now_ns()
        """When data last arrived."""
        with suppress(OSError):  # the next call raises it again
            self.flush()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_authenticated(self) -> bool:
        """Whether the handshake, if any, is over."""
        return self._handshake is None or self._handshake.is_over

    @property
    def client_id(self) -> int:
        """The number that the client proved in the handshake."""
        assert self._handshake is not None
        return self._handshake.client_id

    @property
    def is_waiting(self) -> bool:
        """Whether data is queued: call :meth:`flush` when the connection is writable."""
        return bool(self._outgoing)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, now or as soon as the connection accepts it."""
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        if not self.is_authenticated:
            self._held += frame
            return
        self._outgoing += frame
        self.flush()
        if len(self._outgoing) > _MAX_WAITING_BYTES:
            raise ConnectionAbortedError(f"the other side leaves {len(self._outgoing)} bytes unread")

    def flush(self) -> None:
        """Send queued data, as far as the connection accepts it."""
        with suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]

    def receive(self) -> list[R]:
        """Return the messages that have arrived; call it when the connection is readable."""
        try:
            if not self.is_authenticated:
                return self._greet()
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self.received_ns = clock.now_ns()
        return self.feed(data)

    def _greet(self) -> list[R]:
        """Receive the next part of the handshake, and no byte beyond it."""
        assert self._handshake is not None
        data = self._socket.recv(self._handshake.num_wanted - len(self._greeting))
        if not data:
            raise ConnectionResetError("the other side closed the connection before it proved the key")
        self._greeting += data
        if len(self._greeting) == self._handshake.num_wanted:
            self._outgoing += self._handshake.feed(bytes(self._greeting))
            self._greeting.clear()
            if self._handshake.is_over:
                self.received_ns = clock.now_ns()
                self._outgoing += self._held
                self._held.clear()
            self.flush()
        return []

    def drain(self, timeout_s: float) -> None:
        """Send queued data before the process exits, ignoring errors. Blocks: up to ``timeout_s``."""
        end_s = clock.now_s() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        with suppress(OSError):
            while self._outgoing and (left_s := end_s - clock.now_s()) > 0:
                poll.poll(left_s * 1e3)
                self.flush()

    def close(self) -> None:
        self._socket.close()

    def detach(self) -> socket.socket:
        """Return the connection right after the handshake, for another use; this object no longer owns it."""
        assert not self._outgoing, "a handshake's last bytes always fit into the socket's buffer"
        return socket.socket(fileno=self._socket.detach())


class SelectedChannel(Generic[R]):
    """A channel in a process's event loop: received messages are delivered, and queued data is sent.

    Args:
        selector: The loop's selector, whose data are callables that get the events.
        on_messages: Gets received messages; may be replaced.
        on_broken: Gets the error that broke the channel, from the loop or from :meth:`send`; may be replaced.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        channel: BufferedChannel[R],
        on_messages: Callable[[SelectedChannel[R], list[R]], None],
        on_broken: Callable[[SelectedChannel[R], OSError], None],
    ) -> None:
        self._selector, self.channel = selector, channel
        self.on_messages, self.on_broken = on_messages, on_broken
        self._events = selectors.EVENT_READ
        selector.register(channel, self._events, self._on_event)

    def send(self, message: msgspec.Struct) -> None:
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        try:
            self.channel.send_frame(frame)
        except OSError as error:
            self.on_broken(self, error)
        else:
            self._watch()

    def release(self) -> BufferedChannel[R]:
        """Remove the channel from the loop and return it; the caller owns it."""
        self._events = 0
        self._selector.unregister(self.channel)
        return self.channel

    def close(self) -> None:
        if self._events:
            self.release().close()

    def _on_event(self, _: int) -> None:
        if not self._events:
            return  # closed by an event before this one
        try:
            self.channel.flush()
            came = self.channel.receive()
            self._watch()
        except OSError as error:
            self.on_broken(self, error)
        else:
            if came:
                self.on_messages(self, came)

    def _watch(self) -> None:
        """Select for reading and, while data is queued, for writing."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.channel.is_waiting else 0)
        if wanted != self._events:
            self._events = wanted
            self._selector.modify(self.channel, wanted, self._on_event)


def _decode(decoder: Decoder[Any], body: bytes | memoryview) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a message is unreadable ({error})") from error


def _end_s(within_s: float | None) -> float | None:
    return None if within_s is None else clock.now_s() + within_s


def _left_s(end_s: float) -> float:
    left_s = end_s - clock.now_s()
    if left_s <= 0:
        raise TimeoutError("the peer did not respond in time")
    return left_s
