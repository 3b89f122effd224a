"""A worker's end of the writer process: the agent's, or one of its own; connections, and waiting for answers."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TypeVar

import msgspec

from outlast import clock
from outlast.checkpoint import frames as f
from outlast.checkpoint.writer_process import WriterProcess
from outlast.errors import CheckpointError

__all__ = ["WriterClient"]

log = logging.getLogger(__name__)
R = TypeVar("R", bound=msgspec.Struct)
_AGAIN_S = 0.05


class WriterClient:
    """Ask a writer process.

    Args:
        address: The agent's; ``None``: start one for this process, when first asked.
        arguments: More arguments for a process of its own, for fault injection.
        owner: Whose a process of its own is, for the log; empty = the node's.
        node: Name of this node, for that log; empty = the one that the machine knows itself by.
        patience_s: Seconds to wait for another writer at the address, where the owner of the first one may be replaced.

    Thread: any; each request has a connection for itself while it runs.
    """

    def __init__(
        self,
        address: str | None,
        arguments: tuple[str, ...] = (),
        *,
        owner: str = "",
        node: str = "",
        patience_s: float = 0.0,
    ) -> None:
        self._address, self._arguments, self._patience_s = address, arguments, patience_s
        self._owner, self._node = owner, node
        self._own: WriterProcess | None = None
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def outlives_worker(self) -> bool:
        """Whether what the writer holds is there after this worker's death."""
        return self._address is not None

    @property
    def pid(self) -> int | None:
        """Process id of a writer of our own; ``None`` when there is none."""
        return self._own.pid if self._own is not None else None

    def start(self) -> None:
        """Start a writer of our own if one is needed; it dies with the calling thread.

        Raises:
            CheckpointError: The system starts no process.
        """
        with self._lock:
            if self._address is None and self._own is None and not self._closed:
                try:
                    self._own = WriterProcess(self._arguments, owner=self._owner, node=self._node)
                except OSError as error:
                    raise CheckpointError(f"no writer process can be started: {error}") from error

    def ask(
        self, request: msgspec.Struct, reply: type[R], *, timeout_s: float, fd: int | None = None
    ) -> tuple[R, int | None]:
        """Send a request and wait for its reply.

        Args:
            request: One of ``frames.Request``.
            reply: What it is answered with.
            timeout_s: Longest wait.
            fd: A descriptor that goes with the request; stays the caller's.

        Returns:
            The reply, and the descriptor that came with it, now the caller's.

        Raises:
            CheckpointError: The writer refused, died, or took too long; says which.

        Blocks: up to ``timeout_s``.
        """
        connection = self._connect(timeout_s)
        try:
            connection.settimeout(max(0.001, timeout_s))
            f.send_message(connection, request, fd)
            received = f.receive_reply(connection)
            if received is None:
                raise ConnectionError("it ended the connection")
        except TimeoutError:
            self._drop(connection)
            if self._own is not None:
                self._own.replace()
            raise CheckpointError(
                f"the checkpoint writer did not answer within {timeout_s:.3g} s; is the disk stuck?"
            ) from None
        except OSError as error:
            self._drop(connection)
            raise CheckpointError(f"the checkpoint writer is gone ({error}); another one takes its place") from None
        except BaseException:  # the answer that is still to come must not meet another request
            self._drop(connection)
            raise
        with self._lock:
            self._busy.discard(connection)
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
        answer, out = received
        if isinstance(answer, reply):
            return answer, out
        if out is not None:
            os.close(out)
        if isinstance(answer, f.WriterRefusal):
            raise CheckpointError(answer.error)
        raise CheckpointError(f"the checkpoint writer answered {type(answer).__name__} to {type(request).__name__}")

    def close(self) -> None:
        """End a writer of our own, whatever it does, and all waits. Idempotent. Blocks: up to 2 s. Thread: any."""
        with self._lock:
            self._closed = True
            for connection in self._busy:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it is gone already
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            own, self._own = self._own, None
        if own is not None:
            own.close()

    def _connect(self, timeout_s: float) -> socket.socket:
        self.start()
        with self._lock:
            if self._closed:
                raise CheckpointError("the checkpoint writer was ended")
            while self._idle:
                connection = self._idle.pop()
                if _is_alive(connection):
                    self._busy.add(connection)
                    return connection
                connection.close()
            address = self._address if self._own is None else self._own.address
        end_s = clock.now_s() + (min(self._patience_s, timeout_s) if self._own is None else 0.0)
        while True:
            with self._lock:
                if self._closed:
                    raise CheckpointError("the checkpoint writer was ended")
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._busy.add(connection)
            try:
                connection.settimeout(max(0.001, timeout_s))
                connection.connect(b"\0" + (address or "").encode())
            except OSError as error:
                self._drop(connection)
                if not isinstance(error, ConnectionRefusedError) or clock.now_s() >= end_s:
                    raise CheckpointError(f"there is no checkpoint writer ({error})") from None
            else:
                return connection
            time.sleep(_AGAIN_S)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


def _is_alive(connection: socket.socket) -> bool:
    """Whether nothing came from the other end, not even its end."""
    try:
        connection.settimeout(0.0)
        connection.recv(1, socket.MSG_PEEK)
        return False  # the end, or data that nobody asked for
    except BlockingIOError:
        return True
    except OSError:
        return False
