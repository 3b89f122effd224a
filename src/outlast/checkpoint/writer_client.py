"""The writer process from outside: started, watched and replaced by its owner, and asked by a worker.

The owner, the node's agent or a worker without one, also owns the listening socket, an abstract one that leaves no file
behind. When a writer dies, whoever connects meanwhile waits in the socket's queue for the next one; what the dead one
held in memory is lost.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from outlast import clock, env
from outlast.checkpoint import protocol as f
from outlast.errors import CheckpointError
from outlast.runtime.processes import ChildProcess, describe_exit
from outlast.runtime.wire import MessageChannel

log = logging.getLogger(__name__)
R = TypeVar("R", bound=msgspec.Struct)
BACKLOG = 128
MAX_DEATHS = 5
"""Deaths within ``DEATHS_WITHIN_S`` after which no other writer is started: something else is wrong."""
DEATHS_WITHIN_S = 60.0
_NAME_FREE_S = 10.0
"""Seconds in which the writer of an owner that is gone releases its name."""
_AGAIN_S = 0.05


class WriterProcess:
    """One writer at a time, replaced when it dies.

    Args:
        address: Name of the socket, of one whose owner is gone; empty = the kernel draws one.
        owner: Whose writer this is, for its log; empty = this node's.
        node: Name of this node, for its log; empty = the one that the machine knows itself by.
        on_death: Called with a line for people when a writer died by itself. Thread: one of its own.

    Raises:
        OSError: The system gives no socket or starts no process.
    """

    def __init__(
        self,
        *,
        address: str = "",
        owner: str = "",
        node: str = "",
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._on_death = on_death
        node = node or env.node_name()
        self._names = ("--owner", owner or node, "--node", node)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._closed = False
        self._deaths: list[int] = []
        try:
            self._bind(address)
            self._socket.listen(BACKLOG)
            self._process = self._start()
        except OSError:
            self._socket.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="outlast-writer-watch", daemon=True)
        self._watcher.start()

    @property
    def address(self) -> str:
        """Name of the abstract socket, without its leading zero byte."""
        name: bytes = self._socket.getsockname()
        return name[1:].decode()

    @property
    def pid(self) -> int:
        """Process id of the writer that runs now, or ran last."""
        return self._process.pid

    def replace(self) -> None:
        """End the writer that runs, whatever it does; the next one takes its place. Thread: any."""
        with self._lock:
            if not self._closed:
                self._process.kill()

    def kill(self) -> None:
        """End the writer at once, from a signal handler: no lock is taken, and nobody is waited for."""
        self._closed = True
        self._process.kill()

    def close(self) -> None:
        """End the writer, and give up what it held and did. Idempotent. Blocks: up to 2 s. Thread: any."""
        with self._lock:
            self._closed = True
            self._process.kill()
            self._socket.close()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(2.0)
            if self._watcher.is_alive():  # killed, and within the kernel
                log.warning(
                    "checkpoint writer (pid %d) still gives memory back, or waits for a disk", self._process.pid
                )

    def _bind(self, address: str) -> None:
        end_s = clock.now_s() + _NAME_FREE_S
        while True:
            try:
                return self._socket.bind(b"\0" + address.encode() if address else "")  # the kernel draws a name
            except OSError as error:
                if error.errno != errno.EADDRINUSE or clock.now_s() >= end_s:
                    raise
            time.sleep(0.05)

    def _start(self) -> ChildProcess:
        fd = self._socket.fileno()
        arguments = (str(fd), str(os.getpid()), *self._names)
        return ChildProcess("outlast.checkpoint.writer", *arguments, fds=[fd], own_session=False)

    def _watch(self) -> None:
        """Reap the writer and start the next. Thread: the watcher's."""
        while True:
            code = self._process.wait()
            with self._lock:
                if self._closed:
                    return
                now_ns = clock.now_ns()
                self._deaths = [at_ns for at_ns in self._deaths if now_ns - at_ns < DEATHS_WITHIN_S * 1e9] + [now_ns]
                what = f"the checkpoint writer (pid {self._process.pid}) ended: {describe_exit(code)}"
                if len(self._deaths) >= MAX_DEATHS:
                    log.error("%s; %d times within %g s: no new one is started", what, MAX_DEATHS, DEATHS_WITHIN_S)
                    self._socket.close()  # whoever asks is refused at once
                    return
                try:
                    self._process = self._start()
                except OSError as error:
                    log.error("%s, and a new one cannot be started (%s)", what, error)
                    self._socket.close()
                    return
            log.warning("%s; a new one runs (pid %d), and checkpoints in memory are lost", what, self._process.pid)
            if self._on_death is not None:
                self._on_death(what)


class WriterClient:
    """Ask a writer process.

    Args:
        address: The agent's; ``None``: start one for this process, when first asked.
        owner: Whose a process of its own is, for the log; empty = the node's.
        node: Name of this node, for that log; empty = the one that the machine knows itself by.
        patience_s: Seconds to wait for another writer at the address, where the owner of the first one may be replaced.

    Thread: any; each request has a connection for itself while it runs.
    """

    def __init__(
        self,
        address: str | None,
        *,
        owner: str = "",
        node: str = "",
        patience_s: float = 0.0,
    ) -> None:
        self._address, self._patience_s = address, patience_s
        self._owner, self._node = owner, node
        self._own: WriterProcess | None = None
        self._idle: list[MessageChannel[f.Reply]] = []
        self._busy: set[MessageChannel[f.Reply]] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def outlives_worker(self) -> bool:
        """Whether what the writer holds outlives this worker."""
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
                    self._own = WriterProcess(owner=self._owner, node=self._node)
                except OSError as error:
                    raise CheckpointError(f"no writer process can be started: {error}") from error

    def ask(
        self, request: msgspec.Struct, reply: type[R], *, timeout_s: float, fd: int | None = None
    ) -> tuple[R, int | None]:
        """Send a request and wait for its reply.

        Args:
            request: One of ``protocol.Request``.
            reply: What it is answered with.
            timeout_s: Longest wait.
            fd: A descriptor that goes with the request; stays the caller's.

        Returns:
            The reply, and the descriptor that came with it, now the caller's.

        Raises:
            CheckpointError: The writer refused, died, or took too long; the text has the reason.

        Blocks: up to ``timeout_s``.
        """
        channel = self._connect(timeout_s)
        try:
            channel.timeout_s = max(0.001, timeout_s)
            channel.send(request, () if fd is None else (fd,))
            received = channel.receive_with_fds()
            if received is None:
                raise ConnectionError("it ended the connection")
        except TimeoutError:
            self._drop(channel)
            if self._own is not None:
                self._own.replace()
            raise CheckpointError(
                f"the checkpoint writer did not answer within {timeout_s:.3g} s; is the disk stuck?"
            ) from None
        except OSError as error:
            self._drop(channel)
            raise CheckpointError(f"the checkpoint writer is gone ({error}); another one takes its place") from None
        except BaseException:  # the answer that is still to come must not meet another request
            self._drop(channel)
            raise
        with self._lock:
            self._busy.discard(channel)
            if self._closed:
                channel.close()
            else:
                self._idle.append(channel)
        answer, fds = received
        out = fds[0] if fds else None
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
            for channel in self._busy:
                channel.abort()
            for channel in self._idle:
                channel.close()
            self._idle.clear()
            own, self._own = self._own, None
        if own is not None:
            own.close()

    def _connect(self, timeout_s: float) -> MessageChannel[f.Reply]:
        self.start()
        with self._lock:
            while self._idle and not self._closed:
                channel = self._idle.pop()
                poll = select.poll()  # select() knows no descriptors beyond 1023
                poll.register(channel, select.POLLIN)
                if not poll.poll(0):
                    self._busy.add(channel)
                    return channel
                channel.close()  # it has ended, or there is data that nobody asked for
            address = self._address if self._own is None else self._own.address
        end_s = clock.now_s() + (min(self._patience_s, timeout_s) if self._own is None else 0.0)
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(0.001, timeout_s))
                connection.connect(b"\0" + (address or "").encode())
            except OSError as error:
                connection.close()
                if self._closed or not isinstance(error, ConnectionRefusedError) or clock.now_s() >= end_s:
                    raise CheckpointError(f"there is no checkpoint writer ({error})") from None
                time.sleep(_AGAIN_S)
                continue
            channel = MessageChannel[f.Reply](connection, f.Reply, max_bytes=f.MAX_MESSAGE_BYTES)
            with self._lock:
                if not self._closed:
                    self._busy.add(channel)
                    return channel
            channel.close()
            raise CheckpointError("the checkpoint writer was ended")

    def _drop(self, channel: MessageChannel[f.Reply]) -> None:
        with self._lock:
            self._busy.discard(channel)
        channel.close()
