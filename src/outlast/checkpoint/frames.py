"""What a worker and its writer process say to each other: msgspec frames over a socket pair."""

from __future__ import annotations

import socket

import msgspec

__all__ = ["Reply", "Request", "receive_exactly", "receive_reply", "receive_request", "send_reply", "send_request"]

MAX_FRAME_BYTES = 1 << 28


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Write an arena, whose descriptor comes along, into a file, and make it durable."""

    path: str
    num_bytes: int
    numbers: tuple[tuple[str, int, int], ...] = ()
    """Element type, offset and bytes of the tensors whose elements may be infinite or NaN."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended."""

    chunks: tuple[str, ...] = ()
    finite: bool = True
    error: str | None = None


def send_request(connection: socket.socket, request: Request, fd: int) -> None:
    """Send a request with its arena."""
    data = msgspec.msgpack.encode(request)
    socket.send_fds(connection, [len(data).to_bytes(4, "little")], [fd])
    connection.sendall(data)


def receive_request(connection: socket.socket) -> tuple[Request, int] | None:
    """Wait for a request; return it and the arena's descriptor, or ``None`` at the connection's end."""
    length, fds, _, _ = socket.recv_fds(connection, 4, 1)
    if not length:
        return None
    length += receive_exactly(connection, 4 - len(length))
    data = receive_exactly(connection, int.from_bytes(length, "little"))
    return msgspec.msgpack.decode(data, type=Request), fds[0]


def send_reply(connection: socket.socket, reply: Reply) -> None:
    """Send a reply."""
    data = msgspec.msgpack.encode(reply)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive_reply(connection: socket.socket) -> Reply:
    """Wait for a reply.

    Raises:
        ConnectionError: The other end is gone.
        TimeoutError: The connection's timeout passed.
    """
    length = int.from_bytes(receive_exactly(connection, 4), "little")
    return msgspec.msgpack.decode(receive_exactly(connection, length), type=Reply)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive that many bytes.

    Raises:
        ConnectionError: The other end is gone.
    """
    if num_bytes > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {num_bytes} bytes is none of ours")
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(min(1 << 20, num_bytes - len(data)))
        if not part:
            raise ConnectionError("the connection ended")
        data += part
    return bytes(data)
