"""The worker's end of its writer process: started, asked, replaced when it died, reaped."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading

from outlast.checkpoint.frames import Reply, Request, receive_reply, send_request
from outlast.runtime.processes import describe_exit

__all__ = ["WriterClient"]

log = logging.getLogger(__name__)


class WriterClient:
    """One writer process at a time.

    Args:
        arguments: More arguments for the process, for fault injection.
    """

    def __init__(self, arguments: tuple[str, ...] = ()) -> None:
        self.arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the writer; ``None`` when none runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start a writer unless one runs.

        Raises:
            OSError: The system starts no process.

        Thread: one that lives as long as this one is used; the writer dies with it.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._drop()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                command = [sys.executable, "-m", "outlast.checkpoint.writer", str(theirs.fileno()), str(os.getpid())]
                try:
                    self._process = subprocess.Popen(
                        [*command, *self.arguments], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                    )
                except OSError:
                    ours.close()
                    raise
            self._connection = ours

    def write(self, request: Request, fd: int, *, timeout_s: float) -> Reply:
        """Have a file written; a writer that died or takes too long is the reply's error.

        Blocks: up to ``timeout_s``.
        """
        with self._lock:
            connection = self._connection
        if connection is None:
            return Reply(error="there is no writer process")
        try:
            connection.settimeout(max(0.001, timeout_s))
            send_request(connection, request, fd)
            return receive_reply(connection)
        except TimeoutError:
            self.kill()
            return Reply(error=f"the writer process did not finish {request.path} in time; is the disk stuck?")
        except OSError as error:
            return Reply(error=f"the writer process is gone ({self._how_it_ended()}; {error})")

    def kill(self) -> None:
        """End the writer at once, whatever it does. Idempotent. Blocks: up to 1 s. Thread: any."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
            self._drop()

    def close(self) -> None:
        """Let the writer finish what it was asked, and end it. Idempotent. Blocks: up to 3 s."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._process is not None:
                try:
                    self._process.wait(2)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            self._drop()

    def _how_it_ended(self) -> str:
        with self._lock:
            if self._process is None:
                return "ended by us"
            try:
                return describe_exit(self._process.wait(1))
            except subprocess.TimeoutExpired:
                return "still there"

    def _drop(self) -> None:
        if self._connection is not None:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the writer is gone already
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(1)
            except subprocess.TimeoutExpired:  # in the kernel, writing to a disk that does not answer
                log.warning("writer process %d does not end; it is left to the system", self._process.pid)
            self._process = None
