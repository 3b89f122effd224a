"""A link between a monitor process and the hub: whole messages over a connection that never blocks.

A message is four bytes of length and its msgpack. Who connects says :class:`~outlast.inprocess.protocol.JoinHub` first;
until then a link takes only small messages, and whatever is unreadable breaks it.

Nothing here imports torch.
"""

from __future__ import annotations

import select
import socket
import struct

from outlast import clock
from outlast.errors import OutlastError
from outlast.inprocess import protocol as m

__all__ = ["Link", "LinkBroken"]

_LENGTH = struct.Struct("<I")
_MAX_GREETING_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 24
_MAX_WAITING_BYTES = 1 << 26
_RECEIVE_BYTES = 1 << 18


class LinkBroken(OutlastError):
    """The other side is gone, or talks what nobody understands."""


class Link:
    """One connection.

    Args:
        connection: Connected, or about to be; this object owns it.
        is_trusted: Whether messages of any size are taken from the other side.
    """

    def __init__(self, connection: socket.socket, *, is_trusted: bool) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._max_bytes = _MAX_MESSAGE_BYTES if is_trusted else _MAX_GREETING_BYTES
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.heard_ns = clock.now_ns()
        """When something came last."""

    def fileno(self) -> int:
        """Return the connection's descriptor."""
        return self._socket.fileno()

    @property
    def is_waiting(self) -> bool:
        """Whether something could not be sent yet: call :meth:`flush` when the connection is writable."""
        return bool(self._outgoing)

    def trust(self) -> None:
        """Take messages of any size from now on."""
        self._max_bytes = _MAX_MESSAGE_BYTES

    def send(self, message: m.OnLink) -> None:
        """Send a message, now or as soon as the connection takes it.

        Raises:
            LinkBroken: The other side is gone, or has taken nothing for long.
        """
        self.send_encoded(m.encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that is encoded already; see :meth:`send`."""
        self._outgoing += _LENGTH.pack(len(data))
        self._outgoing += data
        self.flush()
        if len(self._outgoing) > _MAX_WAITING_BYTES:
            raise LinkBroken("the other side takes nothing")

    def flush(self) -> None:
        """Send what is waiting, as far as the connection takes it.

        Raises:
            LinkBroken: The other side is gone.
        """
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkBroken(f"sending failed: {error}") from error

    def receive(self) -> list[m.OnLink]:
        """Return the messages that have come.

        Raises:
            LinkBroken: The other side is gone, or its messages are too large or unreadable.
        """
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkBroken(f"receiving failed: {error}") from error
        if not data:
            raise LinkBroken("the other side closed the connection")
        self.heard_ns = clock.now_ns()
        self._incoming += data
        found: list[m.OnLink] = []
        at = 0
        while len(self._incoming) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, at)
            if length > self._max_bytes:
                raise LinkBroken(f"a message of {length} bytes is announced")
            if len(self._incoming) - at - _LENGTH.size < length:
                break
            start = at + _LENGTH.size
            try:
                found.append(m.decode_on_link(bytes(self._incoming[start : start + length])))
            except OutlastError as error:
                raise LinkBroken(str(error)) from error
            at = start + length
        del self._incoming[:at]
        return found

    def drain(self, timeout_s: float) -> None:
        """Send what is waiting, for a process that is about to end.

        Blocks: up to ``timeout_s``.
        """
        end_s = clock.now_s() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        try:
            while self._outgoing and (left_s := end_s - clock.now_s()) > 0:
                poll.poll(left_s * 1e3)
                self.flush()
        except LinkBroken:
            return

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._socket.close()
